"""Streams: one communicator on several, several communicators at once, and unordered replays."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import collx
from collx._bootstrap import symmetric
from tests.common.attempt import Attempt, allreduce, attempt, finish, ones
from tests.common.limits import assert_in_time
from tests.common.pool import Pool, on_ranks
from tests.common.rank import Rank
from tests.common.suites.skew import delay

TIMEOUT = 5.0


@pytest.mark.worlds(1, 2, 4)
@on_ranks
def test_one_communicator_follows_from_stream_to_stream(rank: Rank) -> list[int]:
    """Hazard 1: the communicator orders its calls, although the program does not order streams."""
    rounds = 12 if rank.world.takes_turns else 200
    communicator = rank.communicator()
    streams = [torch.cuda.Stream() for _ in range(3)]
    kept = []
    for number in range(rounds):
        stream = streams[number % 3]
        source = ones(rank, 1 + number * 977 % 9000).mul_(number + 1)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            if number % rank.size == rank.rank:
                delay(rank, 1.0)
            result = allreduce(communicator, source)
            kept.append((result, source, (number + 1) * rank.size))
    finish(communicator)
    return [int((result != want).sum()) for result, _, want in kept if bool((result != want).any())]


def _overwritten_memory(kind: str, number: int, times: int, answers: Any) -> None:
    """Counts how often new memory loses the first write of a stream other than the default one."""
    device = torch.device(kind, 0)
    torch.cuda.set_device(device)
    count = 0
    with torch.cuda.stream(torch.cuda.Stream(device)):
        for _ in range(times):
            memory = symmetric.allocate((1 << 20,), torch.uint8, device).fill_(number)
            torch.cuda.synchronize(device)
            count += int((memory != number).any())
    answers.put(count)


def test_new_memory_is_clear_before_anyone_writes_to_it(device: str) -> None:
    """Hazard 10: processes take turns on a GPU, so their streams do not run in the usual order."""
    context = torch.multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    processes = [
        context.Process(target=_overwritten_memory, args=(device, number, 2000, answers))
        for number in (1, 2, 3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    assert [answers.get() for _ in processes] == [0, 0, 0]


@pytest.mark.alone  # two kernels at once need much of a GPU
@pytest.mark.worlds(2, 4)
@on_ranks
def test_two_communicators_on_two_streams_in_opposite_order(rank: Rank) -> None:
    """Hazard 1: each has its own flags and blocks, so ranks may start them in any order."""
    rounds = 5 if rank.world.takes_turns else 200
    options = {"max_blocks": 16}
    pair = [rank.new_communicator(name, **options) for name in ("left", "right")]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    source = ones(rank, 50_000)
    torch.cuda.synchronize()
    wrong = torch.zeros((), dtype=torch.int64, device=rank.device)
    for number in range(rounds):
        # Even ranks start with one communicator, odd ranks with the other.
        results = {}
        for which in (0, 1) if rank.rank % 2 == 0 else (1, 0):
            with torch.cuda.stream(streams[which]):
                if number % 5 == rank.rank:
                    delay(rank, 0.5)
                results[which] = allreduce(pair[which], source, ("auto", "twoshot_pull")[which])
        for which, result in results.items():
            torch.cuda.current_stream().wait_stream(streams[which])
            result.record_stream(torch.cuda.current_stream())
            wrong.add_((result != rank.size).sum())
    for communicator in pair:
        finish(communicator)
    answer = int(wrong)
    for communicator in pair:
        communicator.destroy()
    assert answer == 0


def _large_calls(rank: Rank) -> dict[str, Callable[[Any], Any]]:
    """Calls of 8 MiB, each of which uses as many blocks as a communicator may have. Every element
    of their results is the world size."""
    flat = torch.ones(4 << 20, dtype=torch.bfloat16, device=rank.device)
    many = torch.full_like(flat[: flat.numel() // rank.size], rank.size)
    rows, weight = flat.view(512, 8192), torch.full_like(flat[:8192], rank.size)
    return {
        "slots": lambda c: collx.allreduce(flat, group=c, algorithm="twoshot_push"),
        "rows": lambda c: collx.allreduce_rmsnorm(
            rows, weight, 0.0, group=c, algorithm="oneshot_push"
        ),
        "lanes": lambda c: collx.allreduce(flat, group=c, algorithm="twoshot_lanes"),
        "reduced lanes": lambda c: collx.reducescatter(flat, group=c, algorithm="lanes"),
        "copied lanes": lambda c: collx.allgather(many, group=c, algorithm="lanes"),
    }


@pytest.mark.alone  # two kernels at once need all of a GPU
@pytest.mark.worlds(2)
@pytest.mark.parametrize("first", ["slots", "rows", "lanes", "reduced lanes", "copied lanes"])
@on_ranks
def test_two_communicators_share_the_multiprocessors(rank: Rank, first: str) -> list[str]:
    """Hazard 1: half of the blocks of one kernel fit next to half of those of any other kernel."""
    if rank.world.takes_turns:
        pytest.skip("ranks that take turns at a GPU have it alone")
    pair = [rank.new_communicator(name, timeout=TIMEOUT) for name in ("left", "right")]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    calls = _large_calls(rank)
    wrong = []
    for second in calls:
        for name, communicator in zip((first, second), pair, strict=True):
            calls[name](communicator)
        rank.synchronize()
        for _ in range(3):
            rank.barrier()
            results = []
            for which in (0, 1) if rank.rank % 2 == 0 else (1, 0):
                with torch.cuda.stream(streams[which]):
                    results.append(calls[(first, second)[which]](pair[which]))
                time.sleep(0.004)  # its blocks are resident, and wait for the other rank's blocks
            for communicator in pair:
                finish(communicator)
            torch.cuda.synchronize()
            if any(bool((result != rank.size).any()) for result in results):
                wrong.append(second)
    for communicator in pair:
        communicator.destroy()
    return wrong


def _captured(communicator: Any, source: torch.Tensor) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            allreduce(communicator, source, "oneshot_push")
    return graph


def _unordered(rank: Rank) -> Attempt:
    communicator = rank.new_communicator("unordered", timeout=TIMEOUT)
    sources = [ones(rank, 500), ones(rank, 500)]
    graphs = [_captured(communicator, source) for source in sources]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    rank.synchronize()
    rank.barrier()
    for graph, stream in zip(graphs, streams, strict=True):
        with torch.cuda.stream(stream):
            if rank.rank == 0:
                delay(rank, 100.0)  # meanwhile, two kernels of each other rank wait at once
            graph.replay()
    found = attempt(lambda: finish(communicator))
    rank.barrier()
    found = found if found.error else attempt(communicator.raise_if_failed)
    communicator.destroy()
    return found


@pytest.mark.worlds(2)
def test_replays_that_nobody_ordered_are_named(pool: Pool) -> None:
    """Hazard 1: two graphs on two streams use the same tile at once. An error, and never a hang."""
    for found in pool.run(_unordered):
        assert found.error == "CollectiveOverlap", found
        assert_in_time(found, TIMEOUT)


@pytest.mark.worlds(2)
@on_ranks
def test_replays_that_are_ordered_are_no_overlap(rank: Rank) -> None:
    """The control of the test above: the same graphs and streams, ordered."""
    communicator = rank.new_communicator("ordered", timeout=TIMEOUT)
    sources = [ones(rank, 500), ones(rank, 500)]
    graphs = [_captured(communicator, source) for source in sources]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    rank.synchronize()
    for number in range(6):
        streams[number % 2].wait_stream(streams[1 - number % 2])
        with torch.cuda.stream(streams[number % 2]):
            if rank.rank == 0:
                delay(rank, 5.0)
            graphs[number % 2].replay()
    finish(communicator)
    communicator.destroy()


@pytest.mark.worlds(1)
@on_ranks
def test_early_release_needs_a_communicator_that_is_alone(rank: Rank) -> None:
    """Dependents of a spinning kernel could occupy the place of another communicator's blocks."""
    first = rank.only_communicator("level-1", pdl="early")
    alone = first.explain("allreduce", 10).pdl
    second = rank.new_communicator("level-2", pdl="early")
    together = first.explain("allreduce", 10).pdl
    second.destroy()
    again = first.explain("allreduce", 10).pdl
    rank.drop("level-1")
    assert (alone, together, again) == ("early", "end", "early")
