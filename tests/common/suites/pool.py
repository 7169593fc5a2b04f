"""The pool of ranks itself: every rank runs a job, and failures show every rank's traceback."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from ..pool import Pool, PoolError, on_ranks
from ..rank import Rank

pytestmark = pytest.mark.alone  # ranks are killed


def _sum_of_ranks(rank: Rank) -> float:
    value = torch.full((3,), float(rank.rank))
    dist.all_reduce(value)
    return float(value[2])


def _raise_on(rank: Rank, which: int) -> None:
    if rank.rank == which:
        raise KeyError("the promised failure")


def _die_on(rank: Rank, which: int) -> None:
    if rank.rank == which:
        os.kill(os.getpid(), signal.SIGKILL)


def _hang_on(rank: Rank, which: int) -> None:
    if rank.rank == which:
        time.sleep(3600)


def _assert_on(rank: Rank, which: int) -> None:
    found = 41 + rank.rank
    assert found != 41 + which


@on_ranks
def _found_on_one(rank: Rank) -> str:
    return "wrong" * rank.rank


@on_ranks
def _skipped_on_one(rank: Rank) -> None:
    if rank.rank == 0:
        pytest.skip("not here")


def test_a_job_runs_on_every_rank_and_the_processes_stay(pool: Pool) -> None:
    pids = pool.run(_pid)
    assert len(set(pids)) == pool.size
    assert pool.run(_sum_of_ranks) == [sum(range(pool.size))] * pool.size
    assert pool.run(_pid) == pids


def _pid(rank: Rank) -> int:
    return os.getpid()


@pytest.mark.worlds(2)
def test_a_raising_rank_is_shown_with_its_traceback(pool: Pool) -> None:
    with pytest.raises(PoolError, match="the promised failure") as caught:
        pool.run(_raise_on, 1)
    assert "without an error" in caught.value.failures[0]
    assert pool.run(_sum_of_ranks) == [1.0, 1.0]


@pytest.mark.worlds(2)
def test_a_dead_rank_is_noticed_at_once(pool: Pool) -> None:
    started = time.monotonic()
    with pytest.raises(PoolError, match="exit code -9"):
        pool.run(_die_on, 0)
    assert time.monotonic() - started < 60
    assert pool.run(_sum_of_ranks) == [1.0, 1.0]


@pytest.mark.worlds(2)
def test_a_hung_rank_says_where_it_hangs(pool: Pool) -> None:
    with pytest.raises(PoolError, match="_hang_on"):
        pool.run(_hang_on, 1, deadline=2.0)
    assert pool.run(_sum_of_ranks) == [1.0, 1.0]


@pytest.mark.worlds(2)
def test_a_failed_assertion_shows_the_values_of_its_rank(pool: Pool) -> None:
    with pytest.raises(PoolError, match=r"found += 42"):
        pool.run(_assert_on, 1)


@pytest.mark.worlds(2)
def test_what_a_job_finds_on_one_rank_fails_its_test(pool: Pool) -> None:
    """A test may not be skipped on some ranks only."""
    with pytest.raises(AssertionError, match="rank 1: wrong"):
        _found_on_one(pool)
    with pytest.raises(AssertionError, match=r"rank 0: .*not here"):
        _skipped_on_one(pool)
