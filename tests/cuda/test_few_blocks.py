"""Calls with at most 16 blocks: the same bits as with all blocks, and ranks that fail."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

import collx
from tests.common.attempt import Attempt, call_until_failure, finish, ones
from tests.common.failures import assert_lost_rank_is_named
from tests.common.pool import Pool, on_ranks
from tests.common.rank import Rank
from tests.common.suites.skew import delay

BLOCKS = (1, 2, 4, 8, 16)
Calls = dict[str, Callable[[int], torch.Tensor]]


def calls_of(rank: Rank, communicator: Any, numel: int, dtype: torch.dtype, offset: int) -> Calls:
    """Returns calls through lanes by operator. `numel`: elements of a message. `offset`: elements
    by which tensors are misaligned."""
    world = rank.size
    generator = torch.Generator(device=rank.device).manual_seed(rank.rank)
    values = torch.randn(numel * world + offset, device=rank.device, generator=generator) * 50
    whole = values.to(dtype)[offset:]
    one, root = whole[:numel], world - 1
    splits = [[numel // 2 + 3 * (a + b) for b in range(world)] for a in range(world)]
    sent = splits[rank.rank]
    given: Any = {"group": communicator, "algorithm": "lanes"}
    shot: Any = {"group": communicator, "algorithm": "twoshot_lanes"}
    return {
        "allreduce": lambda b: collx.allreduce(whole, max_blocks=b, **shot),
        "allreduce, max": lambda b: collx.allreduce(whole, "max", max_blocks=b, **shot),
        "reducescatter": lambda b: collx.reducescatter(whole, max_blocks=b, **given),
        "allgather": lambda b: collx.allgather(one, max_blocks=b, **given),
        "broadcast": lambda b: collx.broadcast(one, root, max_blocks=b, **given),
        "gather": lambda b: collx.gather(one, root, max_blocks=b, **given),
        "scatter": lambda b: collx.scatter(whole, root, max_blocks=b, **given),
        "reduce": lambda b: collx.reduce(one, "sum", root, max_blocks=b, **given),
        "alltoall": lambda b: collx.alltoall(whole, max_blocks=b, **given),
        "alltoall, in place": lambda b: collx.alltoall_(whole.clone(), max_blocks=b, **given),
        "alltoallv": lambda b: collx.alltoallv(
            whole[: sum(sent)], sent, sent, max_blocks=b, **given
        ),
    }


@pytest.mark.alone  # a share of a GPU does not hold 16 blocks that copy in bulk
@pytest.mark.worlds(2, 4)
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(
    ("numel", "dtype", "offset"),
    [
        (40, "bfloat16", 0),
        (3 << 16, "bfloat16", 0),  # whole vectors
        (100_003, "float32", 0),  # a tail
        (70_001, "uint8", 1),  # misaligned
        (1 << 20, "float64", 0),
    ],
)
@on_ranks(deadline=120.0)
def test_few_blocks_give_the_bits_of_all_blocks(
    rank: Rank, numel: int, dtype: str, offset: int, graphs: bool
) -> list[str]:
    communicator = rank.communicator("few-blocks")
    wrong = []
    for op, call in calls_of(rank, communicator, numel, getattr(torch, dtype), offset).items():
        wanted = call(0)
        finish(communicator)
        for blocks in BLOCKS:
            if blocks % 4 == rank.rank % 4:
                delay(rank, 1.0)
            if graphs:
                graph: Any = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    found = call(blocks)
                for _ in range(3):
                    graph.replay()
            else:
                found = call(blocks)
            finish(communicator)
            if not torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)):
                wrong.append(f"{op} of {numel} {dtype} with {blocks} blocks")
    return wrong


@pytest.mark.alone  # as above
@pytest.mark.worlds(2, 4)
@on_ranks
def test_one_rank_may_copy_in_bulk_and_another_one_by_threads(rank: Rank) -> list[str]:
    communicator = rank.communicator("few-blocks")
    numel, wrong = 1 << 18, []
    for other in range(rank.size):
        values = torch.arange(numel + 1, device=rank.device, dtype=torch.float32)
        source = values[1:] if rank.rank == other else values[:-1] + 1
        for blocks in BLOCKS:
            found = collx.allreduce(
                source, group=communicator, algorithm="twoshot_lanes", max_blocks=blocks
            )
            if not torch.equal(found, rank.size * values[1:]):
                wrong.append(f"rank {other}, {blocks} blocks")
    return wrong


def _until_failure(rank: Rank, timeout: float, blocks: int, op: str) -> Attempt:
    communicator = rank.communicator("few-fail", group=rank.fresh_group(), call_timeout=timeout)
    source = ones(rank, (1 if rank.world.shared else 16) << 20)

    def once() -> None:
        if op == "allreduce":
            collx.allreduce(
                source, group=communicator, algorithm="twoshot_lanes", max_blocks=blocks
            )
        else:
            collx.allgather(source, communicator, algorithm="lanes", max_blocks=blocks)
        finish(communicator)

    return call_until_failure(rank, once)


@pytest.mark.alone  # ranks are killed
@pytest.mark.worlds(2, 4)
@pytest.mark.parametrize(("blocks", "op"), [(8, "allreduce"), (16, "allgather")])
def test_the_failure_of_a_rank_in_a_call_with_few_blocks_is_named(
    pool: Pool, blocks: int, op: str
) -> None:
    given = (signal.SIGKILL, _until_failure, blocks, op)
    assert_lost_rank_is_named(pool, *given, words=rf"lane \d+, of {op}")
