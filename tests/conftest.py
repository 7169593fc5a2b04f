"""Fixtures of all tests: pools of ranks by device and world size, and what was skipped and why."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Read once when the libraries are loaded, here and in the ranks: one thread a process.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

pytest.register_assert_rewrite("tests.common")

from tests.common import limits, sampling  # noqa: E402
from tests.common.ahead import Ahead  # noqa: E402
from tests.common.pool import Pool, Pools  # noqa: E402
from tests.common.worlds import NEEDS_GPU, World, cpu_worlds, cuda_worlds, gpu_count  # noqa: E402

TWO_RANKS = World("cpu", 2)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: full cross-products; left out unless -m full")
    config.addinivalue_line("markers", "worlds(*sizes): world sizes that a test wants")
    config.addinivalue_line("markers", "ahead(work=f): work that is done while other tests run")
    config.addinivalue_line("markers", "own_gpu: every rank needs a GPU of its own")
    config.addinivalue_line("markers", "alone: not beside other tests on a GPU")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the full cross-products, too")
    parser.addoption("--quick", action="store_true", help="run what `make check` runs, alone")


def _is_full(config: pytest.Config) -> bool:
    return bool(config.getoption("--full") or "full" in config.getoption("markexpr", ""))


@pytest.hookimpl(tryfirst=True)  # before -m takes its choice
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if _devices_of(item.path) == ("cuda",):
            item.add_marker(pytest.mark.cuda)
    quick = config.getoption("--quick")
    full = _is_full(config)
    kept = [
        item
        for item in items
        if (full or not item.get_closest_marker("full")) and (not quick or _is_quick(item))
    ]
    if left_out := [item for item in items if item not in set(kept)]:
        items[:] = kept
        config.hook.pytest_deselected(items=left_out)


# The files of `make check`: of those with ranks, the tests with two on the CPU.
QUICK = (
    "cpu/test_readme.py",
    "suites/checked_mode.py",
    "suites/compiled.py",
    "suites/failure.py",
    "suites/forms.py",
    "suites/norm_numerics.py",
    "suites/numerics.py",
)


def _is_quick(item: pytest.Item) -> bool:
    parameters = getattr(item, "callspec", None)
    pool = parameters.params.get("pool", TWO_RANKS) if parameters else TWO_RANKS
    return pool == TWO_RANKS and "/".join(item.path.parts[-2:]) in QUICK


def _devices_of(path: Path) -> tuple[str, ...]:
    """What the tests of a file run on: the suites on both."""
    return {"suites": ("cpu", "cuda"), "cuda": ("cuda",)}.get(path.parent.name, ("cpu",))


def _marked(value: Any, device: str, lacking: str = "") -> Any:
    marks = [pytest.mark.cuda] if device == "cuda" else []
    marks += [pytest.mark.skip(reason=lacking)] if lacking else []
    return pytest.param(value, id=str(value), marks=marks)


def _worlds(device: str, mark: pytest.Mark | None, own_gpu: bool, full: bool) -> list[Any]:
    """The worlds of a device that a test wants; without a GPU, one that is skipped."""
    sizes = tuple(mark.args) if mark else None
    worlds = cpu_worlds(sizes, full) if device == "cpu" else cuda_worlds(sizes)
    each = f"{NEEDS_GPU} for each rank"
    found = [_marked(world, device, each if own_gpu and world.shared else "") for world in worlds]
    return found or [_marked(device, device, NEEDS_GPU)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Gives `pool` one value for each world, by the test's folder and its `worlds` mark; or, where
    a test asks for that alone, `device` one for each device."""
    devices = _devices_of(metafunc.definition.path)
    if "pool" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("worlds")
        own = metafunc.definition.get_closest_marker("own_gpu") is not None
        full = _is_full(metafunc.config)
        values = [value for device in devices for value in _worlds(device, mark, own, full)]
        metafunc.parametrize("pool", values, indirect=True, scope="session")
    elif "device" in metafunc.fixturenames:
        gpus = gpu_count()
        values = [_marked(d, d, "" if d == "cpu" or gpus else NEEDS_GPU) for d in devices]
        metafunc.parametrize("device", values)


BACKGROUND = pytest.StashKey[Ahead]()


def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.stash[BACKGROUND] = Ahead()
    if not session.config.option.collectonly:
        session.config.stash[BACKGROUND].begin(session.items)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if BACKGROUND in session.config.stash:
        session.config.stash[BACKGROUND].end()
    if hasattr(session.config, "workeroutput"):  # of pytest-xdist, whose controller prints
        session.config.workeroutput["sampled"] = sampling.counts()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A process of pytest-xdist has ended."""
    sampling.add(getattr(node, "workeroutput", {}).get("sampled", {}))


@pytest.fixture
def ahead(request: pytest.FixtureRequest) -> Any:
    """What the work of the test's mark `ahead` has come to."""
    return request.config.stash[BACKGROUND].result(request.node)


@pytest.fixture(scope="session", autouse=True)
def heart() -> None:
    """Tells how late this machine is, see limits.py."""
    limits.HEART.start()


@pytest.fixture(autouse=True)
def pace() -> None:
    """What a test measured does not concern the next one."""
    limits.forget_pace()


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """Every pool of this run; they end with it."""
    made = Pools()
    yield made
    made.close()


@pytest.fixture(scope="session")
def pool(pools: Pools, request: pytest.FixtureRequest) -> Pool:
    """The pool of the world that the test is parametrized by."""
    world: World = request.param
    return pools.get(world)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says what was sampled, and what did not run for want of a GPU."""
    sampled = sampling.summary()
    if sampled:
        terminalreporter.section("sampled: calls made of those that there are")
    for line in sampled:
        terminalreporter.line(line)
    reports = terminalreporter.stats.get("skipped", [])
    lacking = [report for report in reports if NEEDS_GPU in str(report.longrepr)]
    if not lacking:
        return
    by_file: dict[str, int] = {}
    for report in lacking:
        name = report.nodeid.split("::")[0]
        by_file[name] = by_file.get(name, 0) + 1
    terminalreporter.section(f"skipped for want of a GPU: {len(lacking)}")
    for name, count in sorted(by_file.items()):
        terminalreporter.line(f"{name}: {count}")
