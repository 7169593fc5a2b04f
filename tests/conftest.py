"""Fixtures of all tests: pools of ranks by device and world size. Also reports skipped tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Libraries read these when they are loaded, here and in the ranks. Each process has one thread and
# no compiler processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

pytest.register_assert_rewrite("tests.common")

from tests.common import limits, sampling  # noqa: E402
from tests.common.ahead import Ahead  # noqa: E402
from tests.common.pool import Pool, Pools  # noqa: E402
from tests.common.worlds import NEEDS_GPU, World, cpu_worlds, cuda_worlds, gpu_count  # noqa: E402

TWO_RANKS = World("cpu", 2)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: full cross-products; left out unless -m full")
    config.addinivalue_line("markers", "worlds(*sizes): world sizes of a test")
    config.addinivalue_line("markers", "ahead(work=f): work that runs beside earlier tests")
    config.addinivalue_line("markers", "own_gpu: every rank needs its own GPU")
    config.addinivalue_line("markers", "alone: not beside other tests on a GPU")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the full cross-products")
    parser.addoption("--quick", action="store_true", help="run only the tests of `make check`")


def _is_full(config: pytest.Config) -> bool:
    return bool(config.getoption("--full") or "full" in config.getoption("markexpr", ""))


@pytest.hookimpl(tryfirst=True)  # before -m selects tests
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


# The files of `make check`. Tests with ranks only run with two CPU ranks.
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
    """Returns the device types that the tests of a file run on."""
    return {"suites": ("cpu", "cuda"), "cuda": ("cuda",)}.get(path.parent.name, ("cpu",))


def _marked(value: Any, device: str, lacking: str = "") -> Any:
    marks = [pytest.mark.cuda] if device == "cuda" else []
    marks += [pytest.mark.skip(reason=lacking)] if lacking else []
    return pytest.param(value, id=str(value), marks=marks)


def _worlds(device: str, mark: pytest.Mark | None, own_gpu: bool, full: bool) -> list[Any]:
    """Returns the worlds of a device that a test requests. Without a GPU, returns a skipped one."""
    sizes = tuple(mark.args) if mark else None
    worlds = cpu_worlds(sizes, full) if device == "cpu" else cuda_worlds(sizes)
    each = f"{NEEDS_GPU} for each rank"
    found = [_marked(world, device, each if own_gpu and world.shared else "") for world in worlds]
    return found or [_marked(device, device, NEEDS_GPU)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrizes `pool` by the worlds of the test's folder and `worlds` mark. A test that only
    uses `device` is parametrized by the devices."""
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
    # A worker of pytest-xdist also collects the tests that another worker will run.
    worker = hasattr(session.config, "workerinput")
    if not session.config.option.collectonly and not worker:
        session.config.stash[BACKGROUND].begin(session.items)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if BACKGROUND in session.config.stash:
        session.config.stash[BACKGROUND].end()
    if hasattr(session.config, "workeroutput"):  # a worker of pytest-xdist; the controller prints
        session.config.workeroutput["sampled"] = sampling.counts()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Collects the counts of a pytest-xdist worker that has exited."""
    sampling.add(getattr(node, "workeroutput", {}).get("sampled", {}))


@pytest.fixture
def ahead(request: pytest.FixtureRequest) -> Any:
    """Returns the result of the work in the test's mark `ahead`."""
    return request.config.stash[BACKGROUND].result(request.node)


@pytest.fixture(scope="session", autouse=True)
def heart() -> None:
    """Starts to measure the delays of this machine, see limits.py."""
    limits.HEART.start()


@pytest.fixture(autouse=True)
def pace() -> None:
    """Discards the measurements of the previous test."""
    limits.forget_pace()


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """Yields the pools of this run, and closes them at its end."""
    made = Pools()
    yield made
    made.close()


@pytest.fixture(scope="session")
def pool(pools: Pools, request: pytest.FixtureRequest) -> Pool:
    """Returns the pool of the world that parametrizes the test."""
    world: World = request.param
    return pools.get(world)


@pytest.fixture
def timeout(pool: Pool) -> float:
    """Returns a timeout that the ranks of the pool only exceed if the test delays them."""
    return limits.timeout_now(pool)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Reports what was sampled, and the tests that were skipped because they need a GPU."""
    sampled = sampling.summary()
    if sampled:
        terminalreporter.section("sampled: calls that ran, of all that exist")
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
    terminalreporter.section(f"skipped without a GPU: {len(lacking)}")
    for name, count in sorted(by_file.items()):
        terminalreporter.line(f"{name}: {count}")
