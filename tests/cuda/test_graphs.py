"""CUDA graphs: capture after eager calls, thousands of replays, dependent launch at every level."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.common.attempt import Attempt, allreduce, attempt, finish, ones
from tests.common.pool import Pool
from tests.common.rank import Rank
from tests.common.suites.skew import delay

PDL_LEVELS = ("off", "end", "early")
CALLS = (
    (256, "auto", torch.float32, 0),
    (100_000, "twoshot_push", torch.float32, 3),
    (33, "oneshot_push", torch.bfloat16, 1),
    (4097, "oneshot_pull", torch.float32, 0),
    (5000, "twoshot_push", torch.int32, 0),
    (20_001, "twoshot_pull", torch.float32, 2),
    (150_001, "twoshot_lanes", torch.bfloat16, 0),
    (60_000, "twoshot_lanes", torch.int32, 3),
)


class Counting:
    """Calls whose right result follows from a counter in device memory, so that every single one
    is checked on the device: rank r contributes counter + r."""

    def __init__(self, rank: Rank, communicator: Any) -> None:
        self.communicator = communicator
        self.world = rank.size
        self.rank = rank.rank
        self.counter = torch.zeros((), dtype=torch.int64, device=rank.device)
        self.wrong = torch.zeros((), dtype=torch.int64, device=rank.device)

    def step(self, calls: Sequence[tuple[int, str, torch.dtype, int]]) -> None:
        """Advances the counter and makes the calls."""
        # Modulo 50: sums of eight ranks stay exact in bfloat16.
        self.counter.copy_((self.counter + 1) % 17)
        expected = self.counter * self.world + self.world * (self.world - 1) // 2
        for numel, algorithm, dtype, max_blocks in calls:
            source = (self.counter + self.rank).to(dtype).expand(numel).contiguous()
            result = allreduce(self.communicator, source, algorithm, "sum", max_blocks)
            self.wrong.add_((result != expected.to(dtype)).sum())


def _replays(rank: Rank, replays: int, between: int, level: str, calls: int) -> int:
    communicator = rank.only_communicator("graphs")
    counting = Counting(rank, communicator)
    with communicator.set_pdl(level):
        assert communicator.explain("allreduce", 300).pdl == level
        other = torch.cuda.Stream()
        other.wait_stream(torch.cuda.current_stream())  # the counters are zeroed there
        with torch.cuda.stream(other):
            counting.step(CALLS[:calls])
        torch.cuda.current_stream().wait_stream(other)
        rank.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            counting.step(CALLS[:calls])
        for number in range(replays):
            graph.replay()
            if number % between == between - 1:
                size = 1 + number * 7919 % 30_000
                counting.step([(size, "auto", torch.float32, number % 3)])
        finish(communicator)
    return int(counting.wrong)


@pytest.mark.parametrize("level", PDL_LEVELS)
def test_every_replay_is_right_with_eager_calls_between(pool: Pool, level: str) -> None:
    """Hazards 2, 3 and 4: epochs and slots live in device memory. 10,000 replays, 200 where ranks
    share a GPU, of calls of several sizes, with eager calls of other sizes between them."""
    if pool.takes_turns:
        whole = level == "early" and pool.size == 2
        replays, between, calls = (200, 20, 2) if whole else (12, 4, 4)
    else:
        replays, between, calls = (10_000, 40, len(CALLS))
    wrong = pool.run(_replays, replays, between, level, calls)
    assert wrong == [0] * pool.size


def _capture_first(rank: Rank) -> bool:
    with rank.new_communicator("captured-first") as communicator:
        source, graph = ones(rank), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = allreduce(communicator, source)
        for number in range(1, 4):
            source.fill_(number)
            graph.replay()
            finish(communicator)
            if not bool((result == number * rank.size).all()):
                return False
        return True


@pytest.mark.worlds(1, 2)
def test_the_first_call_of_all_may_be_captured(pool: Pool) -> None:
    """Hazard 9: init has loaded every kernel, nothing is compiled or loaded in a capture."""
    assert all(pool.run(_capture_first))


def _two_graphs(rank: Rank) -> int:
    communicator = rank.communicator()
    counting = Counting(rank, communicator)
    graphs = []
    for calls in (CALLS[:2], CALLS[2:5]):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            counting.step(calls)
        graphs.append(graph)
    for number in range(40):
        graphs[number * number % 3 % 2].replay()
    finish(communicator)
    return int(counting.wrong)


@pytest.mark.worlds(2, 4)
def test_graphs_of_different_shapes_alternate(pool: Pool) -> None:
    """Hazard 4: the layout of flags and slots does not depend on shapes."""
    assert pool.run(_two_graphs) == [0] * pool.size


def _chain(rank: Rank, level: str, rounds: int) -> list[int]:
    communicator = rank.only_communicator("graphs")
    wrong = []
    with communicator.set_pdl(level):
        assert communicator.explain("allreduce", 300).pdl == level
        source = torch.zeros(70_000, device=rank.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            # Each call reads what the call before it wrote, and they alternate in size.
            first = allreduce(communicator, source, "twoshot_push")
            second = allreduce(communicator, first[:300], "oneshot_push")
            third = allreduce(communicator, second, "oneshot_pull")
            fourth = allreduce(communicator, first, "twoshot_pull")
        for number in range(1, rounds + 1):
            if rank.rank == number % rank.size:
                delay(rank, 2.0)
            # The producer is slow: it has only just been started when the graph is.
            delay(rank, 0.5)
            source.fill_(number)
            graph.replay()
            source.fill_(float("nan"))
            base = float(number * rank.size)
            results = (first, base), (second, base * rank.size), (fourth, base * rank.size)
            for result, want in (*results, (third, base * rank.size**2)):
                wrong.append((result != want).sum())
    finish(communicator)
    return [int(count) for count in wrong if int(count)]


@pytest.mark.worlds(1, 2, 3, 4)
@pytest.mark.parametrize("level", PDL_LEVELS)
def test_a_dependent_call_waits_for_a_slow_producer(pool: Pool, level: str) -> None:
    """Hazard 13: no load of upstream data and no store to protocol memory before the wait."""
    rounds = 5 if pool.takes_turns else 200
    assert pool.run(_chain, level, rounds) == [[]] * pool.size


def _fallback_captured(rank: Rank) -> tuple[Attempt, bool]:
    communicator = rank.communicator()
    source = ones(rank)
    graph = torch.cuda.CUDAGraph()
    found = Attempt("", "", 0.0)
    with torch.cuda.graph(graph):
        found = attempt(lambda: allreduce(communicator, source, "fallback"))
        result = allreduce(communicator, source)
    graph.replay()
    finish(communicator)
    return found, bool((result == rank.size).all())


@pytest.mark.worlds(2)
def test_the_fallback_is_refused_in_a_capture(pool: Pool) -> None:
    """It waits on the host; the capture and the communicator go on."""
    for found, fine in pool.run(_fallback_captured):
        assert found.error == "NotImplementedError", found
        assert "fallback" in found.message
        assert "capture" in found.message
        assert fine


def _meeting_captured(rank: Rank) -> tuple[list[Attempt], bool]:
    import collx

    communicator = rank.only_communicator("graphs")
    source, group = ones(rank), rank.fresh_group()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls = (
            lambda: communicator.empty(8),
            lambda: communicator.register(source),
            lambda: collx.init(group, device=rank.device),
        )
        found = [attempt(call) for call in calls]
        result = allreduce(communicator, source)
    graph.replay()
    finish(communicator)
    return found, bool((result == rank.size).all())


@pytest.mark.worlds(2)
def test_what_meets_the_other_ranks_is_refused_in_a_capture(pool: Pool) -> None:
    """The capture and the communicator go on."""
    for found, fine in pool.run(_meeting_captured):
        assert [one.error for one in found] == ["NotImplementedError"] * 3, found
        for one, call in zip(found, ("empty", "register", "init"), strict=True):
            assert call in one.message
            assert "before the capture" in one.message
        assert fine
