"""Failure in the ops of the family: a named error on every rank that depends on the missing one,
within timeout + 1 s; and calls that differ between ranks, named on all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ..attempt import Attempt, attempt, finish, works
from ..family_cases import NEW, OPS, ROOTED, WITH_AXIS, Call, Fields, legal, ways
from ..family_check import Prepared, run_call
from ..limits import AT_ONCE, assert_in_time, timeout_now
from ..pool import Pool, some_stand_for_all
from ..rank import Rank

pytestmark = pytest.mark.alone  # errors have to come in time

ENOUGH = 10.0  # a timeout that nothing should wait for
ROOT = 0

# Whether the root is missing, or else the last rank.
ABSENT = [*((op, False) for op in (*NEW, "barrier")), *((op, True) for op in ROOTED)]
BY_NAME = [
    *((op, way, False) for op, way in ways() if way not in ("auto", "staged", "fallback")),
    ("broadcast", "twostage", True),
    ("broadcast", "pipelined", True),
]


def depends(op: str, rank: int, absent: int) -> bool:
    """Whether a rank cannot end a call without the absent one. A rank that only sends may."""
    if op in ("broadcast", "scatter"):
        return absent == ROOT
    if op in ("reduce", "gather"):
        return rank == ROOT
    return True


def _barrier(communicator: Any) -> None:
    torch.ops.collx.barrier(communicator.name)
    finish(communicator)


class _Repeated:
    """A call that is made several times, on the same tensors."""

    def __init__(self, rank: Rank, communicator: Any, op: str, algorithm: str) -> None:
        self._communicator = communicator
        call = legal(Call(op, shape=(300,), algorithm=algorithm, root=ROOT, style="random"))
        self._prepared = None if op == "barrier" else Prepared(rank, communicator, call)

    def __call__(self) -> None:
        if self._prepared is None:
            torch.ops.collx.barrier(self._communicator.name)
        else:
            self._prepared.make()
        finish(self._communicator)


def _one_never_comes(
    rank: Rank, op: str, algorithm: str, absent: int, timeout: float
) -> dict[str, Attempt]:
    communicator = rank.new_communicator("missing", rank.fresh_group(), timeout=timeout)
    call = _Repeated(rank, communicator, op, algorithm)
    call()
    rank.synchronize()
    rank.barrier()
    found = {}
    if rank.rank != absent:
        found["call"] = attempt(call)
        found["barrier"] = attempt(lambda: _barrier(communicator))
    rank.barrier()
    if rank.rank == absent:
        found["check"] = attempt(communicator.raise_if_failed)
    found["next"] = attempt(call)
    found["destroy"] = attempt(communicator.destroy)
    rank.arenas.pop(communicator.name, None)
    rank.barrier()
    with rank.new_communicator("missing", communicator.group) as fresh:
        assert works(rank, fresh)
        assert run_call(rank, fresh, Call(op, shape=(40,))) == ""
    return found


def _assert_named(pool: Pool, op: str, algorithm: str, root_is_absent: bool) -> None:
    absent = ROOT if root_is_absent else pool.size - 1
    timeout = timeout_now(pool)
    for rank, found in enumerate(pool.run(_one_never_comes, op, algorithm, absent, timeout)):
        assert found["next"].error in ("CommunicatorPoisoned", "CollectiveTimeout"), found
        assert_in_time(found["next"], slack=AT_ONCE)
        assert found["destroy"].error == ""
        assert_in_time(found["destroy"], slack=AT_ONCE)
        if rank == absent:
            assert found["check"].error == "CollectiveTimeout", found
            continue
        call, barrier = found["call"], found["barrier"]
        if depends(op, rank, absent):
            assert call.error == "CollectiveTimeout", found
        first = call if call.error else barrier
        assert first.error == "CollectiveTimeout", found
        assert "RuntimeError" in first.bases
        # Also in the barrier that follows, where whoever only sends may wait for the root.
        assert f"for rank {absent} " in first.message, found
        # A peer that only sends may have noticed first, in the barrier.
        assert (OPS[op].packet or op) in first.message or "barrier" in first.message
        assert_in_time(first, timeout)
        assert_in_time(barrier if call.error else call, slack=AT_ONCE)
        assert call.seconds + barrier.seconds > timeout * 0.8, found


@pytest.mark.worlds(3)
@pytest.mark.parametrize(("op", "root_is_absent"), ABSENT)
def test_a_missing_rank_is_named_by_all_that_depend_on_it(
    pool: Pool, op: str, root_is_absent: bool
) -> None:
    """Hazard 8: in time, with op and missing rank; a rank that only sends learns of it in the
    barrier that follows. The communicator refuses further work, and a new one works."""
    some_stand_for_all(pool, op in ("broadcast", "gather", "alltoallv"))
    _assert_named(pool, op, "auto", root_is_absent)


@pytest.mark.worlds(2)
@pytest.mark.parametrize(("op", "algorithm", "root_is_absent"), BY_NAME)
def test_a_missing_rank_is_named_in_every_algorithm(
    pool: Pool, op: str, algorithm: str, root_is_absent: bool
) -> None:
    """The same in what "auto" need not choose."""
    some_stand_for_all(pool, algorithm == "pipelined")
    _assert_named(pool, op, algorithm, root_is_absent)


# What the last rank does differently: for which ops, the calls of the others and of the last, and
# words of the message.
_SQUARE: Fields = {"shape": (12, 12), "style": "random"}
DIFFERENT: dict[str, tuple[tuple[str, ...], Fields, Fields, tuple[str, ...]]] = {
    "root": (ROOTED, {"root": 0}, {"root": 1}, ("root 0", "root 1")),
    "axis": (WITH_AXIS, {"axis": 0}, {"axis": 1}, ("axis 0", "axis 1")),
    "shape": (NEW, {"shape": (12, 7)}, {"shape": (12, 9)}, (", 7]", ", 9]")),
    "dtype": (NEW, {"dtype": "float32"}, {"dtype": "int32"}, ("float32", "int32")),
    "reduce op": (
        ("reducescatter", "reduce"),
        {"reduce_op": "sum"},
        {"reduce_op": "max"},
        ("sum", "max"),
    ),
    "max_blocks": (NEW, {"max_blocks": 1}, {"max_blocks": 2}, ("max_blocks=1", "max_blocks=2")),
    "algorithm": (
        ("broadcast",),
        {"algorithm": "onestage"},
        {"algorithm": "twostage"},
        ("onestage", "twostage"),
    ),
    "op": (NEW, {}, {"op": "allreduce"}, ("allreduce",)),
    "barrier": (NEW, {}, {"op": "barrier"}, ("barrier",)),
}


def _other_call(rank: Rank, what: str, ops: tuple[str, ...]) -> dict[str, Attempt]:
    _, usual, other, _ = DIFFERENT[what]
    answers = {}
    for op in ops:
        communicator = rank.new_communicator(
            "differs", rank.fresh_group(), timeout=ENOUGH, check=True
        )
        mine = {**_SQUARE, **(other if rank.rank == rank.size - 1 else usual)}
        call = replace(Call(op, form="functional"), **mine)
        prepared = None if call.op == "barrier" else Prepared(rank, communicator, call)

        def run() -> None:
            if prepared is None:  # noqa: B023
                torch.ops.collx.barrier(communicator.name)  # noqa: B023
            else:
                prepared.make()  # noqa: B023
            finish(communicator)  # noqa: B023

        rank.barrier()
        found = attempt(run)
        rank.barrier()
        # A rank may have left the call before the others noticed.
        answers[op] = found if found.error else attempt(communicator.raise_if_failed)
        communicator.destroy()
    return answers


@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize("what", sorted(DIFFERENT))
def test_checked_mode_names_what_differs_in_calls_of_the_family(pool: Pool, what: str) -> None:
    """Hazards 5 and 14: every rank raises, and both calls are shown."""
    some_stand_for_all(pool, pool.size == 2 and what in ("root", "op"))
    ops, _, _, words = DIFFERENT[what]
    if pool.takes_turns or pool.size > 2:
        ops = ops[:2]
    elif pool.world.device == "cuda":  # an init a call
        ops = ops[::3]
    for answers in pool.run(_other_call, what, ops):
        for op, found in answers.items():
            assert found.error == "CollectiveMismatch", (op, found)
            assert_in_time(found, ENOUGH, slack=0.0)
            for word in (OPS[op].packet or op, *words):
                assert word in found.message, (op, word, found.message)


def _checked_and_alike(rank: Rank, op: str) -> list[str]:
    communicator = rank.communicator("family-alike", check=True)
    own: list[Fields] = [
        {},
        {"symmetric": "both"},
        {"symmetric": "both", "form": "part" if "part" in OPS[op].forms else "out"},
        # A rank that gets one row or none has a contiguous output, the others have not.
        {"symmetric": "both", "layout": "spread", "output_layout": "spread"},
    ]
    usual = Call(op, "int32", (1, 3), uneven=True)
    calls = [
        legal(replace(usual, algorithm=way, splits=splits, **fields))
        for way in ("auto", *OPS[op].algorithms)
        for splits in ("uneven", "one_receives", "zeros")
        for fields in own
    ]
    found = [f"{call}: {wrong}" for call in calls if (wrong := run_call(rank, communicator, call))]
    communicator.raise_if_failed()
    return found


@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize("op", NEW)
def test_checked_mode_passes_what_belongs_to_one_call(pool: Pool, op: str) -> None:
    """The negative control: parts, splits, places in symmetric memory and strides may be each
    rank's own where no peer goes there."""
    some_stand_for_all(pool, pool.size == 2 and op in ("allgather", "alltoallv"))
    assert pool.run(_checked_and_alike, op) == [[]] * pool.size
