"""Splits that only the device knows, in the fallback: all ranks refuse invalid splits of one
rank."""

from __future__ import annotations

import pytest
import torch

from ..attempt import Attempt, assert_raised, attempt, finish
from ..pool import on_ranks
from ..rank import Rank

ENOUGH = 20.0  # a timeout that no call should reach
ROWS = 12

# The last rank's splits for ranks 0, 1 and 2, and words of the error. All others send 4 to each.
WRONG: dict[str, tuple[list[int], str]] = {
    "negative": ([-4, 4, 4], "input_splits of rank 2"),
    "negative in sum": ([4, 4, -20], "input_splits of rank 2"),
    "sum is right": ([20, -4, -4], "input_splits of rank 2"),
    "the least": ([-(1 << 63), 4, 4], "input_splits of rank 2"),
    "wraps": ([1 << 62, 1 << 62, 1 << 62], "input_splits of rank 2"),
    "too many": ([4, 4, 5], "input_splits of rank 2"),
    "too many for a peer": ([8, 2, 2], "rank 0 was sent 16 rows, but its capacity is 12"),
}


def _split_wrongly(rank: Rank, given: list[int], capacity: int) -> Attempt:
    communicator = rank.new_communicator("splits", rank.fresh_group(), timeout=ENOUGH)
    mine = given if rank.rank == rank.size - 1 else [4] * rank.size
    splits = torch.tensor(mine, device=rank.device)
    tensor = torch.full((ROWS, 5), float(rank.rank), device=rank.device)
    out = torch.full((capacity + 2, 5), -7.0, device=rank.device)

    def run() -> None:
        torch.ops.collx.alltoallv.device_splits_out(
            tensor,
            splits,
            capacity,
            communicator.name,
            "fallback",
            out=out[1:-1],
            output_splits=torch.empty_like(splits),
        )
        finish(communicator)

    rank.barrier()
    found = attempt(run)
    rank.barrier()
    assert (out.cpu()[[0, -1]] == -7).all(), "written past the end"
    communicator.destroy()
    return found


@pytest.mark.worlds(3)
@pytest.mark.parametrize("what", sorted(WRONG))
@on_ranks
def test_splits_of_a_peer_are_not_believed(rank: Rank, what: str) -> None:
    """No rank uses invalid counts, and no rank waits for the rank that gave them."""
    given, words = WRONG[what]
    found = _split_wrongly(rank, given, ROWS)
    assert_raised(found, "CollectiveMismatch", words)
    assert found.seconds < ENOUGH / 2, found


@pytest.mark.worlds(3)
@on_ranks
def test_splits_that_fit_are_accepted(rank: Rank) -> None:
    """The negative control."""
    found = _split_wrongly(rank, [4, 0, 3], ROWS)
    assert found.error == "", found
