"""Failures: every rank that depends on the failed one raises a named error within timeout + 1 s,
and no rank hangs. limits.py defines a second on a busy machine."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from ..attempt import Attempt, attempt, call_until_failure, works
from ..calls import run_call
from ..collectives import NAMES as COLLECTIVES
from ..collectives import OPS, ROOTED
from ..failures import ROOT, assert_lost_rank_is_named, assert_named, repeated, small_call
from ..limits import AT_ONCE, SLACK, assert_in_time, pace, timeout_now
from ..norms import scatters
from ..operators import is_norm, kernels, name_in_errors
from ..pool import Pool, on_ranks, some_stand_for_all
from ..rank import Rank
from ..regions import mark_failed

pytestmark = pytest.mark.alone  # ranks are killed, and errors must be raised in time

SHM = "/dev/shm"

NEW = tuple(op for op in COLLECTIVES if op != "allreduce")
PUSHES_AND_PULLS = tuple(way for _, way in kernels("allreduce") if way != "auto")

# Operator, algorithm, and whether the root or else the last rank is missing.
Missing = tuple[str, str, bool]
BY_AUTO: list[Missing] = [
    *((op, "auto", False) for op in (*NEW, "barrier")),
    *((op, "auto", True) for op in ROOTED),
    *(
        (op, way, False)
        for op, way in kernels(
            "allreduce_residual_layernorm",
            "allreduce_residual_rmsnorm_fp8",
            "reducescatter_residual_rmsnorm_fp8",
        )
    ),
]
BY_NAME: list[Missing] = [
    *((op, way, False) for op, way in kernels(*NEW) if way not in ("auto", "staged")),
    ("broadcast", "twostage", True),
    ("broadcast", "pipelined", True),
]


def depends(op: str, rank: int, absent: int) -> bool:
    """Returns whether a rank cannot finish a call without the absent one. A rank that only sends
    may be able to."""
    if op in ("broadcast", "scatter"):
        return absent == ROOT
    if op in ("reduce", "gather"):
        return rank == ROOT
    return True


def _one_never_comes(
    rank: Rank, op: str, algorithm: str, absent: int, timeout: float
) -> dict[str, Attempt]:
    group = rank.fresh_group()
    if algorithm == "fallback":  # the group's first collective connects the ranks: up to a second
        mine = torch.ones(1, device=rank.device)
        dist.all_gather([torch.empty_like(mine) for _ in range(rank.size)], mine, group)
        rank.synchronize()
    communicator = rank.new_communicator("missing", group, call_timeout=timeout)
    right = small_call(op, rank.size, algorithm=algorithm)
    call = repeated(rank, communicator, right)
    barrier = repeated(rank, communicator, small_call("barrier", rank.size))
    call()
    rank.barrier()
    found = {}
    if rank.rank != absent:
        found["call"] = attempt(call)
        found["barrier"] = attempt(barrier)
    rank.barrier()  # the others have given up by now
    if rank.rank == absent:
        found["check"] = attempt(communicator.raise_if_failed)
    found["next"] = attempt(call)
    found["destroy"] = attempt(communicator.destroy)
    rank.arenas.pop(communicator.name, None)
    rank.barrier()
    # A failure inside gloo has closed that group's connections.
    group = rank.fresh_group() if algorithm == "fallback" else communicator.group
    with rank.new_communicator("missing", group) as fresh:
        assert works(rank, fresh)
        again = replace(right, seed=2)  # type: ignore[call-arg]
        assert run_call(rank, fresh, again) == ""
        rank.arenas.pop(fresh.name, None)
    return found


def _assert_missing_is_named(
    pool: Pool, op: str, algorithm: str, root_is_absent: bool = False
) -> None:
    absent = ROOT if root_is_absent else pool.size - 1
    timeout = timeout_now(pool)
    # A peer that only sends may notice first, in the barrier that follows.
    present = [rank for rank in range(pool.size) if rank != absent]
    all_depend = all(depends(op, rank, absent) for rank in present)
    for rank, found in enumerate(pool.run(_one_never_comes, op, algorithm, absent, timeout)):
        assert found["next"].error == "CommunicatorPoisoned", found
        assert_in_time(found["next"], slack=AT_ONCE)
        assert found["destroy"].error == ""
        assert_in_time(found["destroy"], slack=AT_ONCE)
        if rank == absent:
            first = found["check"]
            assert_in_time(first)
        else:
            call, barrier = found["call"], found["barrier"]
            assert call.error or not depends(op, rank, absent), found
            first, second = (call, barrier) if call.error else (barrier, call)
            assert_in_time(first, timeout)
            assert_in_time(second, slack=AT_ONCE)
            least = 0.9 if all_depend else 0.8
            assert call.seconds + barrier.seconds > timeout * least, found
        # The error may also be raised by the barrier, where a rank that only sends waits.
        assert_named(first, "CollectiveTimeout", f"rank {absent} ")
        assert name_in_errors(op) in first.message or (
            not all_depend and "barrier" in first.message
        )


@pytest.mark.worlds(3)
@pytest.mark.parametrize(("op", "algorithm", "root_is_absent"), BY_AUTO)
def test_a_missing_rank_is_named_by_all_that_depend_on_it(
    pool: Pool, op: str, algorithm: str, root_is_absent: bool
) -> None:
    """Hazard 8: the error names the operator and the missing rank, in time. A rank that only sends
    learns of it in the barrier that follows. The poisoned communicator refuses further work and is
    destroyed locally; a new one on the same group works."""
    standing = op in ("broadcast", "gather", "alltoallv") or (is_norm(op) and algorithm == "auto")
    some_stand_for_all(pool, standing)
    _assert_missing_is_named(pool, op, algorithm, root_is_absent)


@pytest.mark.worlds(2)
@pytest.mark.parametrize(("op", "algorithm", "root_is_absent"), BY_NAME)
def test_a_missing_rank_is_named_in_every_algorithm(
    pool: Pool, op: str, algorithm: str, root_is_absent: bool
) -> None:
    """The same for the algorithms that "auto" may not choose."""
    some_stand_for_all(pool, algorithm == "pipelined")
    _assert_missing_is_named(pool, op, algorithm, root_is_absent)


@pytest.mark.worlds(4)
@pytest.mark.parametrize("root_is_absent", [False, True])
def test_a_missing_rank_is_named_by_ranks_that_pass_on_chunks(
    pool: Pool, root_is_absent: bool
) -> None:
    _assert_missing_is_named(pool, "broadcast", "lanes", root_is_absent)


@pytest.mark.worlds(2, 3, 4)
@pytest.mark.parametrize("algorithm", OPS["allreduce"].algorithms)
def test_a_missing_rank_is_named_in_every_allreduce(pool: Pool, algorithm: str) -> None:
    """The same for every algorithm of allreduce and all world sizes."""
    some_stand_for_all(pool, pool.size == 2 or algorithm in ("oneshot_push", "twoshot_pull"))
    _assert_missing_is_named(pool, "allreduce", algorithm)


def test_a_scattering_norm_is_among_those_that_fail() -> None:
    assert any(is_norm(op) and scatters(op) for op, _, _ in BY_AUTO)


@pytest.mark.worlds(2)
def test_an_error_that_comes_late_is_noticed(pool: Pool) -> None:
    """The control of all limits: a communicator with a longer timeout than the test assumes."""
    some_stand_for_all(pool, False)
    timeout = timeout_now(pool)
    longer = timeout + 4 * SLACK * pace()
    found, _ = pool.run(_one_never_comes, "allreduce", "oneshot_push", 1, longer)
    with pytest.raises(AssertionError, match="too late"):
        assert_in_time(found["call"], timeout)


def _call_until_failure(rank: Rank, timeout: float, algorithm: str) -> Attempt:
    communicator = rank.communicator("killed", group=rank.fresh_group(), call_timeout=timeout)
    call = small_call("allreduce", rank.size, algorithm=algorithm)
    return call_until_failure(rank, repeated(rank, communicator, call))


def _left_in_shm() -> set[str]:
    return set(os.listdir(SHM)) if os.path.isdir(SHM) else set()


@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize("algorithm", PUSHES_AND_PULLS)
def test_survivors_of_a_killed_rank_raise_and_nothing_stays_behind(
    pool: Pool, algorithm: str
) -> None:
    """Hazard 22: SIGKILL at any moment leaves nothing in /dev/shm."""
    some_stand_for_all(pool, algorithm == "oneshot_push" and pool.size == 2)
    pool.kill()
    before = _left_in_shm()
    assert_lost_rank_is_named(pool, signal.SIGKILL, _call_until_failure, algorithm)
    assert not [name for name in _left_in_shm() - before if "collx" in name or "symm" in name]


@pytest.mark.worlds(2, 3)
def test_a_stopped_rank_is_named_and_learns_of_it_when_it_goes_on(pool: Pool) -> None:
    """SIGSTOP: the others raise in time; the stopped rank raises as soon as it resumes."""
    given = (signal.SIGSTOP, _call_until_failure, "twoshot_push")
    assert_lost_rank_is_named(pool, *given, resumed=("CollectiveTimeout",))
    pool.run(Rank.drop, "killed")


# Push and pull algorithms of allreduce, and other operators.
LATE = [(op, way) for op, way in kernels("allreduce") if way.startswith(("oneshot", "twoshot"))]
LATE += [
    ("broadcast", "pipelined"),
    ("alltoall", "staged"),
    ("allreduce_residual_rmsnorm_fp8", "auto"),
]


@pytest.mark.worlds(2, 4)
@on_ranks
def test_a_slow_rank_is_no_failure(rank: Rank, timeout: float) -> None:
    """The negative control of the timeouts: the others wait for a rank that is late but in time."""
    with rank.new_communicator("late", call_timeout=3 * timeout) as communicator:
        for op, algorithm in LATE:
            call = repeated(rank, communicator, small_call(op, rank.size, algorithm=algorithm))
            if rank.rank == 0:
                time.sleep(timeout / 4)
            call()


def _leave_poisoned(rank: Rank, timeout: float) -> tuple[Attempt, Attempt]:
    communicator = rank.new_communicator("leave", rank.fresh_group(), call_timeout=timeout)
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


@pytest.mark.worlds(2)
@on_ranks
def test_a_query_that_waits_for_notes_keeps_the_regions(rank: Rank, timeout: float) -> None:
    """The notes of the other ranks are in the region, which the end of the communicator frees."""
    communicator = rank.new_communicator("asked", rank.fresh_group(), call_timeout=timeout)
    asked: list[Attempt] = []
    query = threading.Thread(target=lambda: asked.append(attempt(communicator.raise_if_failed)))
    if rank.rank == 0:
        mark_failed(communicator, by=1)
        query.start()
        time.sleep(timeout / 20)
    communicator._leave()
    if rank.rank == 0:
        query.join()
        assert asked[0].error in ("CollectiveTimeout", "CommunicatorPoisoned"), asked
