"""Copies by copy engines: what "auto" selects alongside other work, and a rank lost in a call.

The suites of all algorithms test numerics, forms, skew, graphs and missing ranks."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

import collx.backend
from tests.common.attempt import Attempt, call_until_failure, finish, ones
from tests.common.failures import assert_lost_rank_is_named
from tests.common.pool import Pool, on_ranks
from tests.common.rank import Rank

Made = Callable[[Rank], AbstractContextManager[collx.Communicator]]

LARGE = 32 << 20  # bytes per rank: the copies take most of the time of a call


def _of_init(rank: Rank) -> collx.Communicator:
    return rank.new_communicator("copy-engine-selected", overlap=True)


@contextmanager
def _of_backend(rank: Rank) -> Iterator[collx.Communicator]:
    options = collx.backend.Options(overlap=True)
    group = dist.new_group(backend="collx", pg_options=options)
    dist.all_reduce(ones(rank), group=group)  # creates the communicator
    yield collx.get(group)
    dist.destroy_process_group(group)


@pytest.mark.worlds(2, 4)
@pytest.mark.parametrize("made", [_of_init, _of_backend])
@on_ranks
def test_auto_takes_copy_engines_where_multiprocessors_are_left_alone(
    rank: Rank, made: Made
) -> None:
    ways: dict[str, dict[str, Any]] = {
        "symmetric": {"output_symmetric": True},
        "ordinary": {},
        "small": {"output_symmetric": True, "shape": 1000},
    }
    found = {}
    with made(rank) as communicator:
        for op in ("allgather", "broadcast", "gather", "scatter", "alltoall", "reducescatter"):
            for way, given in ways.items():
                explained = communicator.explain(op, **{"shape": (1 << 20,), **given})
                found[f"{op}, {way}"] = (explained.algorithm, explained.blocks)
    for what, (algorithm, blocks) in found.items():
        expected = what.endswith("symmetric") and not what.startswith("reducescatter")
        assert (algorithm == "copy_engine") == expected, (what, algorithm)
        assert blocks <= 16, (what, blocks)


@pytest.mark.worlds(2, 4)
@on_ranks
def test_results_beside_products(rank: Rank) -> list[str]:
    """Overlaps several posted calls with matrix products that fill the device."""
    communicator = rank.communicator("copy-engine-product")
    n = 1 << 20
    outs = [communicator.empty(n * rank.size, dtype=torch.int32) for _ in range(3)]
    a = torch.randn(2048, 2048, device=rank.device)
    found = []
    for i in range(30):
        out = outs[i % len(outs)]
        x = torch.full((n,), i * rank.size + rank.rank, dtype=torch.int32, device=rank.device)
        handle = collx.post(collx.allgather, x, communicator, out=out, algorithm="copy_engine")
        for _ in range(3):
            a = torch.tanh(a @ a)
        handle.wait()
        wanted = torch.arange(rank.size, device=rank.device) + i * rank.size
        found.append((out.view(rank.size, n) != wanted[:, None]).sum())
    finish(communicator)
    return [f"call {i}: {int(wrong)} wrong" for i, wrong in enumerate(found) if wrong]


@pytest.mark.worlds(2, 4)
@on_ranks
def test_posted_calls_do_not_wait_for_a_barrier_outside_or_inside_a_capture(rank: Rank) -> None:
    """Posts in a capture after an eager call by copy engines, and outside after a captured one."""
    communicator = rank.communicator("copy-engine-captured")
    x, out = ones(rank), communicator.empty(1000 * rank.size)

    def gather() -> None:
        collx.allgather(x, communicator, out=out, algorithm="copy_engine")

    def post() -> torch.Tensor:
        handle = collx.post(collx.allreduce, x, group=communicator)
        return handle.wait()

    posting, gathering = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    gather()
    with torch.cuda.graph(posting):
        total = post()
    with torch.cuda.graph(gathering):
        gather()
    assert bool((post() == rank.size).all())
    out.zero_()
    posting.replay()
    gathering.replay()
    finish(communicator)
    assert bool((total == rank.size).all())
    assert bool((out == 1).all())


@pytest.mark.worlds(2, 4)
@on_ranks
def test_eager_calls_may_run_during_a_capture(rank: Rank) -> None:
    """They are on another stream, between captured calls of the same communicator."""
    communicator = rank.communicator("copy-engine-captured")
    graph, other = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    inputs = {"captured": ones(rank), "eager": ones(rank) * 2}
    gathered = {way: communicator.empty(1000 * rank.size) for way in inputs}
    totals = {way: torch.empty_like(x) for way, x in inputs.items()}

    def call(way: str) -> None:
        x = inputs[way]
        collx.allgather(x, communicator, out=gathered[way], algorithm="copy_engine")
        collx.post(collx.allreduce, x, group=communicator, out=totals[way]).wait()

    def found(way: str) -> tuple[float, float, float, float]:
        parts = (gathered[way].aminmax(), totals[way].aminmax())
        low, high, least, most = (float(value) for part in parts for value in part)
        return low, high, least, most

    rank.synchronize()
    with torch.cuda.stream(other):
        call("eager")
    other.synchronize()
    for way in inputs:
        gathered[way].zero_()
    rank.synchronize()
    rank.barrier()
    with torch.cuda.graph(graph):
        call("captured")
        with torch.cuda.stream(other):
            call("eager")
        call("captured")
    other.synchronize()
    assert found("eager") == (2, 2, 2 * rank.size, 2 * rank.size)
    graph.replay()
    finish(communicator)
    assert found("captured") == (1, 1, rank.size, rank.size)


def _gather_until_failure(rank: Rank, timeout: float) -> Attempt:
    communicator = rank.communicator("copy-engine-killed", call_timeout=timeout)
    x = torch.zeros(LARGE, dtype=torch.uint8, device=rank.device)
    out = communicator.empty(LARGE * rank.size, dtype=torch.uint8)

    def call() -> None:
        for _ in range(20):
            collx.allgather(x, communicator, out=out, algorithm="copy_engine")
        finish(communicator)

    return call_until_failure(rank, call)


@pytest.mark.alone  # ranks are killed
@pytest.mark.worlds(2, 4)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_rank_lost_within_a_call_is_named_in_time(pool: Pool, number: signal.Signals) -> None:
    """The copies take nearly all of the time, so the rank is lost between the two barriers."""
    assert_lost_rank_is_named(pool, number, _gather_until_failure)
