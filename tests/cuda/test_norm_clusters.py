"""Fused normalizations as on GPUs without clusters of blocks: `COLLX_NO_CLUSTERS=1`, which may be
set for a run of all their tests. This file tests the sizes that would use clusters."""

from __future__ import annotations

import itertools
import os

import pytest
import torch

from tests.common.norms import DTYPES, NAMES, Call, algorithms_of
from tests.common.pool import Pool
from tests.common.rank import Rank
from tests.common.replay import check_calls

pytestmark = pytest.mark.alone  # clusters of blocks

KEY = "no-clusters"
WIDE = (600, 8192, 20000)  # more columns than a warp, a block and a cluster process


def _grids(rank: Rank) -> list[tuple[int, int]]:
    """Returns blocks and threads for one wide row, first if only the last rank has no clusters, and
    then if all ranks use what their devices have."""
    before = os.environ.pop("COLLX_NO_CLUSTERS", None)
    try:
        free = rank.new_communicator("clusters")
        if rank.rank == rank.size - 1:
            os.environ["COLLX_NO_CLUSTERS"] = "1"
        bound = rank.communicator(KEY)
    finally:
        os.environ.pop("COLLX_NO_CLUSTERS", None)
        if before is not None:
            os.environ["COLLX_NO_CLUSTERS"] = before
    found = []
    for communicator in (bound, free):
        plan = communicator.explain("allreduce_rmsnorm", (1, 8192), torch.bfloat16)
        found.append((plan.blocks, plan.threads))
    free.destroy()
    return found


@pytest.mark.worlds(2)
def test_one_device_without_clusters_is_enough(pool: Pool) -> None:
    """Hazard 5: eight blocks process a row of 8192 on current GPUs, but one block does on all ranks
    if any rank has no clusters."""
    for bound, free in pool.run(_grids):
        assert bound == (1, 512)
        assert free == (8, 128) or torch.cuda.get_device_capability()[0] < 9


@pytest.mark.worlds(2, 3, 4)
@pytest.mark.parametrize("op", NAMES)
def test_rows_of_many_blocks_give_the_same_bits_without_clusters(pool: Pool, op: str) -> None:
    calls = [
        Call(op, dtype, rows, cols, style="random", algorithm=algorithm, seed=11).legal()
        for (dtype, cols), rows in itertools.product(zip(DTYPES, WIDE, strict=True), (1, 7))
        for algorithm in algorithms_of(op)
    ]
    pool.run(_grids)  # creates the communicator
    check_calls(pool, calls[:: 9 if pool.takes_turns else 1], KEY)
