"""The watchdog: which calls it logs, which ranks it names, and when its thread exists."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import collx

from ..attempt import attempt, finish, in_a_child, ones, works
from ..limits import timeout_now
from ..pool import Pool, on_ranks, some_stand_for_all
from ..rank import Rank
from .lifecycle import exit_codes
from .voting import instead_of_step

TIMEOUT = 3.0  # seconds, on an idle machine
ALGORITHMS = (
    "oneshot_push",
    "twoshot_push",
    "oneshot_pull",
    "twoshot_pull",
    "twoshot_lanes",
    "fallback",
)
LATE, SOON = 0.6, 0.1  # fractions of the timeout by which a rank is late
LINE = re.compile(
    r"\[W.*\] collx(?P<op>\.\w+)?: the call has not completed after (?P<seconds>[\d.]+) s "
    r"\(timeout (?P<timeout>[\d.]+) s\); missing: (?P<missing>.*) \(communicator "
    r'"test-(?P<name>[\w-]+)", sequence number (?P<number>\d+), this is rank (?P<rank>\d+)\)'
)
Lines = list[dict[str, Any]]


@pytest.fixture
def timeout(pool: Pool) -> float:
    """Returns a longer timeout, a third of which is long, too."""
    return timeout_now(pool, TIMEOUT)


@contextmanager
def _logged() -> Iterator[Lines]:
    """Yields the lines logged within the block; they are available after the block."""
    lines: Lines = []
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            text = file.read().decode()
    os.write(2, text.encode())
    lines += [match.groupdict() for match in LINE.finditer(text)]


def _threads() -> int:
    """Returns the number of watchdog threads."""
    found = 0
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has ended
            found += (task / "comm").read_text().strip() == "collx_watchdog"
    return found


def _threads_after(expected: int, seconds: float = 5.0) -> int:
    """Returns the number of watchdog threads as soon as it is the expected one, or after the given
    time. A thread that does not watch any more is listed until it has ended."""
    until = time.monotonic() + seconds
    while (found := _threads()) != expected and time.monotonic() < until:
        time.sleep(0.01)
    return found


def _ends() -> bool:
    """Returns whether the thread ends."""
    return _threads_after(0) == 0


def _late(
    rank: Rank, communicator: Any, call: Callable[[], object], late: float
) -> tuple[Lines, float]:
    """Makes a call for which the last rank is late. Returns the logged lines and the duration of
    the call."""
    assert works(rank, communicator)
    rank.barrier()
    with _logged() as lines:
        if rank.rank == rank.size - 1:
            time.sleep(late)
        started = time.monotonic()
        call()
        finish(communicator)
        seconds = time.monotonic() - started
        rank.barrier()
    return lines, seconds


def _assert_named(
    lines: Lines, rank: Rank, timeout: float, op: str | None = ".allreduce", missing: str = ""
) -> None:
    """Fails unless the last rank, which waits for no other, has logged nothing, and each other rank
    one line, which names the last one."""
    if rank.rank == rank.size - 1:
        assert not lines
        return
    (line,) = lines
    missing = missing or f"rank {rank.size - 1}"
    assert (int(line["rank"]), line["missing"], line["op"]) == (rank.rank, missing, op), line
    assert float(line["timeout"]) == pytest.approx(timeout, rel=1e-3)
    assert timeout / 3 <= float(line["seconds"]) < timeout, line


def _calls(rank: Rank, communicator: Any) -> dict[str, Callable[[], object]]:
    x = ones(rank)
    return {
        "synchronous": lambda: collx.allreduce(x, group=communicator),
        "posted": lambda: collx.post(collx.allreduce, x, group=communicator).wait(),
    }


def _watched(rank: Rank, name: str, timeout: float) -> Any:
    return rank.new_communicator(f"watched-{name}", call_timeout=timeout, watchdog=True)


@pytest.mark.alone
@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize("how", ["synchronous", "posted"])
@on_ranks
def test_a_late_rank_is_named_once(rank: Rank, how: str, timeout: float) -> None:
    with _watched(rank, "late", timeout) as communicator:
        lines, _ = _late(rank, communicator, _calls(rank, communicator)[how], LATE * timeout)
    _assert_named(lines, rank, timeout)
    assert all(line["name"] == "watched-late" for line in lines)


@pytest.mark.alone
@pytest.mark.worlds(2)
@on_ranks
def test_the_watchdog_follows_a_timeout_that_changes(rank: Rank, timeout: float) -> None:
    name = "watched-changed"
    with rank.new_communicator(name, timeout=1000 * timeout, watchdog=True) as communicator:
        communicator.set_timeout(timeout)
        call = _calls(rank, communicator)["posted"]
        lines, _ = _late(rank, communicator, call, LATE * timeout)
    _assert_named(lines, rank, timeout)


@pytest.mark.alone
@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize("how", ["synchronous", "posted"])
@on_ranks
def test_a_call_that_completes_within_a_third_is_not_logged(
    rank: Rank, how: str, timeout: float
) -> None:
    with _watched(rank, "late", timeout) as communicator:
        lines, seconds = _late(rank, communicator, _calls(rank, communicator)[how], SOON * timeout)
    assert not lines or seconds > timeout / 3


def _allreduce(x: torch.Tensor, algorithm: str, communicator: Any) -> Any:
    return collx.post(collx.allreduce, x, group=communicator, algorithm=algorithm, max_blocks=4)


@pytest.mark.alone
@pytest.mark.worlds(2)
@on_ranks
def test_every_kind_of_call_is_seen_to_wait_and_one_thread_serves_all(
    rank: Rank, timeout: float
) -> None:
    """Calls of all algorithms and kinds wait at the same time, each on its own communicator."""
    if rank.world.shared:
        pytest.skip("calls of a dozen communicators do not run at once where ranks share a GPU")
    late = rank.size - 1
    calls: dict[str, Callable[[Any], Any]] = {
        "broadcast": lambda c: collx.post(collx.broadcast, ones(rank), late, c),
        "allgather": lambda c: collx.post(collx.allgather, ones(rank), c),
        "alltoallv": lambda c: collx.post(
            collx.alltoallv, ones(rank, 4 * rank.size), [4] * rank.size, [4] * rank.size, c
        ),
        "barrier": lambda c: collx.post(collx.barrier, c),
    }
    for name in ALGORITHMS:
        x = ones(rank, 1 << 20 if "lanes" in name else 1000)
        calls[name] = partial(_allreduce, x, name)
    # The fallback blocks the host: it runs last, and not on GPUs, where it would delay other calls.
    order = sorted(calls, key=lambda name: name == "fallback")
    if rank.device.type == "cuda":
        order.remove("fallback")
    options: dict[str, Any] = {"timeout": timeout, "watchdog": True, "payload_bytes": 4 << 20}
    communicators = {name: rank.new_communicator(f"watched-{name}", **options) for name in order}
    rank.barrier()
    with _logged() as lines:
        if rank.rank == late:
            time.sleep(LATE * timeout)
        handles = [calls[name](communicators[name]) for name in order]
        for name, handle in zip(order, handles, strict=True):
            handle.wait()
            finish(communicators[name])
        rank.barrier()
    assert _threads() == 1, "one serves all communicators"
    for communicator in communicators.values():
        communicator.destroy()
    assert _ends()
    for name in order:
        of_this = [line for line in lines if line["name"] == f"watched-{name}"]
        op = ".allreduce" if name in ALGORITHMS else f".{name}"
        _assert_named(of_this, rank, timeout, op)


@pytest.mark.alone
@pytest.mark.worlds(2)
@on_ranks
def test_calls_behind_one_that_waits_are_not_logged(rank: Rank, timeout: float) -> None:
    with _watched(rank, "behind", timeout) as communicator:
        x = ones(rank)

        def call() -> None:
            posted = [
                collx.post(collx.allgather, x, communicator),
                collx.post(collx.allreduce, x, group=communicator),
            ]
            collx.allreduce(x, group=communicator)
            for handle in posted:
                handle.wait()

        lines, _ = _late(rank, communicator, call, LATE * timeout)
    _assert_named(lines, rank, timeout, ".allgather")


@pytest.mark.alone
@pytest.mark.worlds(2)
@on_ranks
def test_without_regions_the_call_alone_is_known(rank: Rank, timeout: float) -> None:
    with instead_of_step("machine", lambda setup, run: str(rank.rank)):
        communicator = _watched(rank, "group", timeout)
    assert communicator.fallback_reason
    with communicator:
        call = _calls(rank, communicator)["posted"]
        lines, _ = _late(rank, communicator, call, LATE * timeout)
    _assert_named(lines, rank, timeout, missing="unknown to the process group")


@pytest.mark.worlds(2)
@on_ranks
def test_the_thread_is_there_as_long_as_a_communicator_asks_for_it(rank: Rank) -> None:
    found: list[int | bool] = []
    with rank.new_communicator("watched-off") as communicator:
        assert works(rank, communicator)
        found.append(_threads())
    for _ in range(5):
        with rank.new_communicator("watched-on", call_timeout=2.0, watchdog=True) as communicator:
            for _ in range(50):
                assert works(rank, communicator)
            found.append(_threads_after(1))
    found.append(_ends())
    assert found == [0, 1, 1, 1, 1, 1, True]


@pytest.mark.alone
@pytest.mark.worlds(2)
@on_ranks
def test_the_log_comes_before_the_time_out_and_destroy_after_it(rank: Rank, timeout: float) -> None:
    """Destroys a communicator after a timeout that the watchdog has announced."""
    options: dict[str, Any] = {"timeout": timeout / 3, "watchdog": True}
    communicator = rank.new_communicator("watched-end", rank.fresh_group(), **options)
    with _logged() as lines:
        if rank.rank == 0:
            handle = collx.post(collx.allreduce, ones(rank), group=communicator)
            found = attempt(lambda: (handle.wait(), communicator.synchronize()))
            assert found.error == "CollectiveTimeout", found
        rank.barrier()
        communicator.destroy()
        assert _ends()
    assert [line["missing"] for line in lines] == ["rank 1"] * (rank.rank == 0)


@pytest.mark.alone
@pytest.mark.worlds(2)
@on_ranks
def test_a_forked_child_has_no_watchdog_and_its_parent_goes_on(rank: Rank, timeout: float) -> None:
    if rank.device.type == "cuda":
        pytest.skip("CUDA cannot be used in a forked child")
    with _watched(rank, "fork", timeout) as communicator:
        assert _threads() == 1

        def look() -> None:
            assert _threads() == 0
            communicator.destroy()
            assert _threads() == 0

        children = [in_a_child(look) for _ in range(5)]
        call = _calls(rank, communicator)["synchronous"]
        lines, _ = _late(rank, communicator, call, LATE * timeout)
    assert children == [": "] * 5
    _assert_named(lines, rank, timeout)


ENDING = """
import time
watched = collx.init(device=comm.device, name="test-watched", timeout=3.0, watchdog=True)
dist.barrier()
h = collx.post(collx.barrier, watched) if rank == 0 and device == "cpu" else None
time.sleep({seconds})
"""


@pytest.mark.worlds(2)
@pytest.mark.parametrize("seconds", [0.0, 2.0])
def test_the_interpreter_exits_while_the_watchdog_runs(pool: Pool, seconds: float) -> None:
    some_stand_for_all(pool, seconds == 0.0)
    ranks = exit_codes(pool.world.device, ENDING.format(seconds=seconds))
    for code, output in ranks:
        assert code == 0, output
        for word in ("terminate called", "Segmentation", "Traceback", "Fatal", "did not end"):
            assert word not in output, output
    if seconds > 0 and pool.world.device == "cpu":
        assert LINE.search(ranks[0][1]), ranks[0][1]


@pytest.mark.alone
@pytest.mark.worlds(2)
@on_ranks
def test_a_call_of_a_replayed_graph_is_logged_without_its_name(rank: Rank, timeout: float) -> None:
    if rank.device.type != "cuda":
        pytest.skip("CUDA graphs")
    with _watched(rank, "graph", timeout) as communicator:
        x = ones(rank)
        collx.allreduce(x, group=communicator)
        rank.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = collx.allreduce(x, group=communicator)
            # The watchdog reads the regions meanwhile; this must not invalidate the capture.
            time.sleep(timeout / 4)
        rank.barrier()
        lines, _ = _late(rank, communicator, graph.replay, LATE * timeout)
        assert bool((y == rank.size).all())
    _assert_named(lines, rank, timeout, None)
