"""Failures inside captured CUDA graphs: a named error on every rank in time, for any number of
calls."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch

from tests.common.attempt import (
    Attempt,
    allreduce,
    assert_raised,
    attempt,
    call_until_failure,
    finish,
    ones,
    works,
)
from tests.common.collectives import OPS
from tests.common.failures import assert_lost_rank_is_named
from tests.common.limits import assert_in_time, timeout_now
from tests.common.pool import Pool, some_stand_for_all
from tests.common.rank import Rank

pytestmark = pytest.mark.alone  # ranks are killed

CALLS = 50  # calls in a graph; a failure must not wait for the timeout in each of them
ALGORITHMS = tuple(name for name in OPS["allreduce"].algorithms if name != "fallback")


def _captured(rank: Rank, communicator: Any, algorithm: str, numel: int = 1000) -> Any:
    if algorithm == "pull_push":
        source, out = communicator.empty((numel,)).fill_(1), communicator.empty((numel,))
    else:
        source, out = ones(rank, numel), torch.empty(numel, device=rank.device)
    calls = 3 if rank.world.shared else CALLS
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            torch.ops.collx.allreduce.out(source, "sum", communicator.name, algorithm, 0, out=out)
    return graph, (source, out)


def _replay_and_finish(communicator: Any, graph: torch.cuda.CUDAGraph) -> None:
    graph.replay()
    finish(communicator)


def _absent(rank: Rank, algorithm: str, timeout: float) -> dict[str, Attempt]:
    communicator = rank.new_communicator("graph-absent", call_timeout=timeout)
    graph, _tensors = _captured(rank, communicator, algorithm)
    _replay_and_finish(communicator, graph)
    rank.barrier()
    found = {}
    if rank.rank != rank.size - 1:
        found["replay"] = attempt(lambda: _replay_and_finish(communicator, graph))
    rank.barrier()  # the others have given up by now
    if rank.rank == rank.size - 1:
        found["replay"] = attempt(communicator.raise_if_failed)
    # Replaying calls of a poisoned communicator ends at once, with the same error.
    found["again"] = attempt(lambda: _replay_and_finish(communicator, graph))
    found["eager"] = attempt(lambda: allreduce(communicator, ones(rank)))
    found["destroy"] = attempt(communicator.destroy)
    rank.barrier()
    with rank.new_communicator("graph-absent") as fresh:
        assert works(rank, fresh)
    return found


@pytest.mark.worlds(2, 4)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_rank_that_never_replays_is_named_in_time(pool: Pool, algorithm: str) -> None:
    """Hazard 8 in a graph: the context stays usable, and every later call refuses at once."""
    some_stand_for_all(pool, pool.size == 2 or algorithm == "oneshot_push")
    absent = pool.size - 1
    timeout = timeout_now(pool)
    for rank, found in enumerate(pool.run(_absent, algorithm, timeout)):
        assert_raised(found["replay"], "CollectiveTimeout", f"rank {absent}", "allreduce")
        assert_in_time(found["replay"], 0.0 if rank == absent else timeout)
        assert found["again"].error == "CollectiveTimeout", found
        assert_in_time(found["again"])
        assert found["eager"].error in ("CommunicatorPoisoned", "CollectiveTimeout"), found
        assert found["destroy"].error == "", found
        assert_in_time(found["destroy"])


def _replay_until_failure(rank: Rank, timeout: float) -> Attempt:
    communicator = rank.communicator("graph-killed", call_timeout=timeout)
    graph, _tensors = _captured(rank, communicator, "oneshot_push")
    return call_until_failure(rank, lambda: _replay_and_finish(communicator, graph))


@pytest.mark.worlds(2)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_rank_lost_between_replays_is_named_in_time(pool: Pool, number: signal.Signals) -> None:
    """A rank is killed or stopped while the others replay."""
    assert_lost_rank_is_named(pool, number, _replay_until_failure)


def _mismatch(rank: Rank, timeout: float) -> Attempt:
    communicator = rank.new_communicator("graph-differs", call_timeout=timeout, check=True)
    numel = 500 if rank.rank == 0 else 600
    graph, _tensors = _captured(rank, communicator, "oneshot_push", numel)
    rank.synchronize()
    rank.barrier()
    found = attempt(lambda: _replay_and_finish(communicator, graph))
    rank.barrier()
    found = found if found.error else attempt(communicator.raise_if_failed)
    communicator.destroy()
    return found


@pytest.mark.worlds(2, 4)
def test_checked_mode_works_in_graphs(pool: Pool) -> None:
    """One rank has another shape: every rank names both calls."""
    timeout = timeout_now(pool)
    for found in pool.run(_mismatch, timeout):
        assert_raised(found, "CollectiveMismatch", "500", "600")
        assert_in_time(found, timeout)
