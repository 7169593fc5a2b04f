"""Failure: a named error on every rank within timeout + 1 s, and no hang. See limits.py for what a
second is on a busy machine."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ..attempt import Attempt, allreduce, attempt, call_until_failure, finish, ones, works
from ..family_cases import OPS
from ..limits import AT_ONCE, SLACK, assert_in_time, pace, timeout_now
from ..pool import Pool, some_stand_for_all
from ..rank import Rank

pytestmark = pytest.mark.alone  # ranks are killed

ALGORITHMS = OPS["allreduce"].algorithms
PUSHES_AND_PULLS = tuple(name for name in ALGORITHMS if name != "fallback")
SHM = "/dev/shm"


def _tensors(rank: Rank, communicator: Any, algorithm: str) -> tuple[torch.Tensor, torch.Tensor]:
    if algorithm == "pull_push":
        shape = (1000,)
        return communicator.empty(shape).fill_(1), communicator.empty(shape)
    return ones(rank), torch.empty(1000, device=rank.device)


def _call_and_finish(
    communicator: Any, source: torch.Tensor, out: torch.Tensor, algorithm: str
) -> None:
    torch.ops.collx.allreduce.out(source, "sum", communicator.name, algorithm, 0, out=out)
    finish(communicator)


def _assert_named(result: Attempt, error: str, *words: str) -> None:
    assert result.error == error, result
    assert "RuntimeError" in result.bases
    for word in words:
        assert word in result.message, (word, result.message)


def _one_never_comes(rank: Rank, algorithm: str, absent: int, timeout: float) -> dict[str, Attempt]:
    group = rank.fresh_group()
    if algorithm == "fallback":  # the group's first collective connects the ranks: up to a second
        mine = torch.ones(1, device=rank.device)
        dist.all_gather([torch.empty_like(mine) for _ in range(rank.size)], mine, group)
        rank.synchronize()
    communicator = rank.new_communicator("absent", group, timeout=timeout)
    source, out = _tensors(rank, communicator, algorithm)
    _call_and_finish(communicator, source, out, algorithm)
    rank.barrier()
    found = {}
    if rank.rank != absent:
        found["call"] = attempt(lambda: _call_and_finish(communicator, source, out, algorithm))
    rank.barrier()  # the others have given up
    if rank.rank == absent:
        found["call"] = attempt(communicator.raise_if_failed)
    found["next"] = attempt(lambda: _call_and_finish(communicator, source, out, algorithm))
    found["destroy"] = attempt(communicator.destroy)
    rank.barrier()
    # What failed in gloo itself has closed that group's connections.
    group = rank.fresh_group() if algorithm == "fallback" else communicator.group
    with rank.new_communicator("absent", group) as fresh:
        assert works(rank, fresh)
    return found


@pytest.mark.worlds(2, 3, 4)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_rank_that_never_comes_is_named_on_every_rank(pool: Pool, algorithm: str) -> None:
    """Hazard 8: the error names op and missing rank, in time; the poisoned communicator refuses
    further work and is destroyed locally; a new one on the same group works."""
    some_stand_for_all(pool, pool.size == 2 or algorithm in ("oneshot_push", "twoshot_pull"))
    absent = pool.size - 1
    timeout = timeout_now(pool)
    for rank, found in enumerate(pool.run(_one_never_comes, algorithm, absent, timeout)):
        _assert_named(found["call"], "CollectiveTimeout", "allreduce", f"rank {absent}")
        assert_in_time(found["call"], 0.0 if rank == absent else timeout)
        if rank != absent:
            assert found["call"].seconds >= timeout * 0.9, found
        assert found["next"].error in ("CommunicatorPoisoned", "CollectiveTimeout")
        assert_in_time(found["next"], slack=AT_ONCE)
        assert found["destroy"].error == ""
        assert_in_time(found["destroy"], slack=AT_ONCE)


@pytest.mark.worlds(2)
def test_an_error_that_comes_late_is_noticed(pool: Pool) -> None:
    """The control of all limits: a communicator that waits for longer than the test believes."""
    some_stand_for_all(pool, False)
    timeout = timeout_now(pool)
    found, _ = pool.run(_one_never_comes, "oneshot_push", 1, timeout + 4 * SLACK * pace())
    with pytest.raises(AssertionError, match="too late"):
        assert_in_time(found["call"], timeout)


def _call_until_failure(rank: Rank, algorithm: str, timeout: float) -> Attempt:
    communicator = rank.communicator("killed", group=rank.fresh_group(), timeout=timeout)
    source, out = _tensors(rank, communicator, algorithm)
    return call_until_failure(rank, lambda: _call_and_finish(communicator, source, out, algorithm))


def _left_in_shm() -> set[str]:
    return set(os.listdir(SHM)) if os.path.isdir(SHM) else set()


@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize("algorithm", PUSHES_AND_PULLS)
def test_survivors_of_a_killed_rank_raise_and_nothing_stays_behind(
    pool: Pool, algorithm: str
) -> None:
    """Hazard 22: SIGKILL at any moment; nothing is left in /dev/shm."""
    some_stand_for_all(pool, algorithm == "oneshot_push" and pool.size == 2)
    pool.kill()  # no word of another test is left in the store
    before = _left_in_shm()
    victim = pool.size - 1
    timeout = timeout_now(pool)
    pool.submit(_call_until_failure, algorithm, timeout)
    pool.wait_for("calling")
    pool.signal(victim, signal.SIGKILL)
    survivors = [rank for rank in range(pool.size) if rank != victim]
    for result in pool.collect(survivors):
        _assert_named(result, "CollectiveTimeout", f"rank {victim}")
        assert_in_time(result, timeout)
    pool.kill()
    assert not [name for name in _left_in_shm() - before if "collx" in name or "symm" in name]


@pytest.mark.worlds(2, 3)
def test_a_stopped_rank_is_named_and_learns_of_it_when_it_goes_on(pool: Pool) -> None:
    """SIGSTOP: the others raise in time; the stopped rank raises as soon as it runs again."""
    victim = pool.size - 1
    pool.kill()  # no word of another test is left in the store
    timeout = timeout_now(pool)
    pool.submit(_call_until_failure, "twoshot_push", timeout)
    pool.wait_for("calling")
    pool.signal(victim, signal.SIGSTOP)
    others = [rank for rank in range(pool.size) if rank != victim]
    try:
        for result in pool.collect(others):
            _assert_named(result, "CollectiveTimeout", f"rank {victim}")
            assert_in_time(result, timeout)
    finally:
        pool.signal(victim, signal.SIGCONT)
    (stopped,) = pool.collect([victim])
    assert stopped.error in ("CollectiveTimeout", "CommunicatorPoisoned")
    pool.run(Rank.drop, "killed")


def _other_call(rank: Rank, what: str, algorithm: str, timeout: float) -> Attempt:
    communicator = rank.new_communicator("differs", rank.fresh_group(), timeout=timeout, check=True)
    assert works(rank, communicator, algorithm)
    rank.barrier()  # from here on a rank may hear of a peer's failure at any time
    odd = rank.rank == rank.size - 1
    numel = 500 if odd and what == "shape" else 600
    dtype = torch.int32 if odd and what == "dtype" else torch.float32
    reduce_op = "max" if odd and what == "reduce_op" else "sum"
    chosen = "twoshot_pull" if odd and what == "algorithm" else algorithm
    blocks = 1 if odd and what == "max_blocks" else 2
    tensor = ones(rank, numel, dtype)

    def call() -> None:
        allreduce(communicator, tensor, chosen, reduce_op, blocks)
        finish(communicator)

    found = attempt(call)
    if not found.error:  # a rank that left the call before the others noticed
        rank.barrier()
        found = attempt(communicator.raise_if_failed)
    else:
        rank.barrier()
    communicator.destroy()
    return found


@pytest.mark.worlds(2, 3, 4)
@pytest.mark.parametrize("what", ["shape", "dtype", "reduce_op", "algorithm", "max_blocks"])
def test_checked_mode_names_both_sides_of_a_mismatch(pool: Pool, what: str) -> None:
    """Checked mode: one rank makes another call; every rank raises and both calls are shown."""
    timeout = timeout_now(pool)
    shown = {
        "shape": ("500", "600"),
        "dtype": ("int32", "float32"),
        "reduce_op": ("max", "sum"),
        "algorithm": ("twoshot_pull", "oneshot_push"),
        "max_blocks": ("max_blocks=1", "max_blocks=2"),
    }[what]
    for result in pool.run(_other_call, what, "oneshot_push", timeout):
        _assert_named(result, "CollectiveMismatch", "allreduce", *shown)
        assert_in_time(result, timeout)


@pytest.mark.worlds(2, 3)
def test_checked_mode_covers_the_fallback(pool: Pool) -> None:
    """Checked mode: the fingerprint stands at one place, the same for every algorithm."""
    for result in pool.run(_other_call, "shape", "fallback", timeout_now(pool)):
        _assert_named(result, "CollectiveMismatch", "500", "600")


def _symmetric_on_one_rank(rank: Rank, timeout: float) -> Attempt:
    communicator = rank.new_communicator(
        "one-sided", rank.fresh_group(), timeout=timeout, check=True
    )
    symmetric = communicator.empty((1000,)).fill_(1)
    out = communicator.empty((1000,))
    source = symmetric if rank.rank == 0 else ones(rank)
    found = attempt(lambda: _call_and_finish(communicator, source, out, "oneshot_pull"))
    rank.barrier()
    found = found if found.error else attempt(communicator.raise_if_failed)
    communicator.destroy()
    return found


@pytest.mark.worlds(2)
def test_a_tensor_symmetric_on_one_rank_only_is_a_mismatch(pool: Pool) -> None:
    """Hazards 5 and 16: that an argument is symmetric must agree on all ranks."""
    for result in pool.run(_symmetric_on_one_rank, timeout_now(pool)):
        _assert_named(result, "CollectiveMismatch", "symmetric")


def _late_but_in_time(rank: Rank, late: int, timeout: float) -> bool:
    communicator = rank.new_communicator("late", timeout=timeout)
    for algorithm in ("oneshot_push", "twoshot_push", "oneshot_pull", "twoshot_pull"):
        if rank.rank == late:
            time.sleep(timeout / 12)
        allreduce(communicator, ones(rank), algorithm)
        finish(communicator)
    communicator.destroy()
    return True


@pytest.mark.worlds(2, 4)
def test_a_slow_rank_is_no_failure(pool: Pool) -> None:
    """The negative control of the timeouts: a rank that comes late, but in time, is waited for."""
    assert all(pool.run(_late_but_in_time, 0, timeout_now(pool, 3.0)))


def _leave_poisoned(rank: Rank, timeout: float) -> tuple[Attempt, Attempt]:
    communicator = rank.new_communicator("leave", rank.fresh_group(), timeout=timeout)
    with ExitStack() as stack:
        stack.enter_context(communicator)
        rank.barrier()
        found = Attempt("", "", 0.0)
        if rank.rank != 0:
            found = attempt(lambda: works(rank, communicator, "oneshot_push"))
            assert communicator.poisoned
        rank.barrier()
        return found, attempt(stack.close)


@pytest.mark.worlds(2, 3)
def test_with_leaves_a_poisoned_communicator_at_once(pool: Pool) -> None:
    """Destroying a poisoned communicator is local, also at the end of `with`."""
    for rank, (found, left) in enumerate(pool.run(_leave_poisoned, timeout_now(pool))):
        assert found.error == ("CollectiveTimeout" if rank else "")
        assert left.error == ""
        assert_in_time(left, slack=AT_ONCE)
