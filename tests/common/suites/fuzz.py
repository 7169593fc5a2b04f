"""Fuzz: random calls on one communicator, the same on every rank, from a seed that is told.

COLLX_FUZZ_SEED=n repeats a run; COLLX_FUZZ_CALLS=n makes it longer.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from .. import family_cases, norm_cases, norm_samples
from ..check import assert_none
from ..family_cases import OPS, dtypes_and_ops
from ..family_check import run_call
from ..norm_check import run_norm
from ..pool import Pool
from ..rank import Rank
from ..worlds import seed_from_environment

Call = family_cases.Call | norm_cases.Call

KINDS = ("plain", "checked", "small")
REDUCTION, ALL = ("allreduce",), tuple(OPS)

# Elements of the larger tensors; where the payload is the smallest, fewer.
LARGEST = {REDUCTION: 60_000, ALL: 30_000}
LARGEST_SMALL = 2000
CALLS = {
    REDUCTION: {1: 300, 2: 800, 3: 400, 4: 400, 5: 200, 6: 160, 7: 140, 8: 120, 16: 40},
    ALL: {1: 150, 2: 500, 3: 250, 4: 160, 5: 120, 6: 80, 7: 70, 8: 60, 16: 20},
}
CALLS_SHARED = {
    REDUCTION: {1: 60, 2: 40, 3: 30, 4: 24, 5: 20, 6: 16, 7: 14, 8: 12},
    ALL: {1: 60, 2: 30, 3: 24, 4: 20, 5: 16, 6: 14, 7: 12, 8: 10},
}

# Every world up to eight: kernels are compiled for 2, 4 and 8 ranks, and for any other number.
WORLDS = pytest.mark.worlds(*CALLS[ALL])


def fuzz_calls(
    seed: int, count: int, world: int, largest: int, ops: Sequence[str] = ALL
) -> list[Call]:
    """The calls of a seed. Where all ops are wanted, one in five is a fused normalization."""
    choose = random.Random(seed)
    norms = 0.2 if tuple(ops) == ALL else 0.0
    return [
        norm_samples.random_call(choose, largest)
        if choose.random() < norms
        else family_cases.random_call(choose, largest, world, ops)
        for _ in range(count)
    ]


def _fuzz(
    rank: Rank, seed: int, count: int, kind: str, largest: int, ops: Sequence[str]
) -> list[str]:
    """Makes the calls of a seed, with pauses that differ from rank to rank."""
    options = {"check": kind == "checked", "payload_bytes": 1 << 20}
    if kind == "small":
        options["payload_bytes"] = rank.smallest_payload()
    communicator = rank.communicator(f"fuzz-{kind}", **options)
    calls = fuzz_calls(seed, count, rank.size, largest, ops)
    return make_calls(rank, communicator, seed, calls, lambda ms: time.sleep(ms / 1000))


def make_calls(
    rank: Rank,
    communicator: Any,
    seed: int,
    calls: Sequence[Call],
    pause: Callable[[float], None],
) -> list[str]:
    """Makes the calls of a seed. Before some of them a rank pauses, for milliseconds."""
    pauses = random.Random(seed * 31 + rank.rank)
    found = []
    for number, call in enumerate(calls):
        if pauses.random() < 0.05:
            pause(3.0 * pauses.random())
        if isinstance(call, norm_cases.Call):
            wrong = run_norm(rank, communicator, call)
        else:
            wrong = run_call(rank, communicator, call)
        if wrong:
            found.append(f"COLLX_FUZZ_SEED={seed}, call {number}: {call}: {wrong}")
    communicator.raise_if_failed()
    return found[:5]


def seed_and_count(usual: int) -> tuple[int, int]:
    """Those that the environment asks for, or the usual ones. Prints them."""
    seed = seed_from_environment()
    count = int(os.environ.get("COLLX_FUZZ_CALLS", usual))
    print(f"COLLX_FUZZ_SEED={seed} COLLX_FUZZ_CALLS={count}")
    return seed, count


def _check(pool: Pool, kind: str, ops: Sequence[str]) -> None:
    """What the environment asks for, or so many calls of the usual seed; printed."""
    usual = (CALLS_SHARED if pool.takes_turns else CALLS)[tuple(ops)][pool.size]
    seed, count = seed_and_count(usual)
    largest = LARGEST_SMALL if kind == "small" else LARGEST[tuple(ops)]
    assert_none(pool.run(_fuzz, seed, count, kind, largest, ops))


@WORLDS
@pytest.mark.parametrize("kind", ["plain", "checked"])
def test_random_calls_on_one_communicator(pool: Pool, kind: str) -> None:
    """Hazards 4 and 14: all-reduces of any sequence of sizes, dtypes, ops, algorithms, layouts and
    forms."""
    _check(pool, kind, REDUCTION)


@WORLDS
@pytest.mark.parametrize("kind", KINDS)
def test_random_calls_of_all_ops_on_one_communicator(pool: Pool, kind: str) -> None:
    """Hazards 4 and 14: any sequence of ops, fused normalizations among them, roots, axes, splits,
    sizes, dtypes, algorithms and forms, with and without the check of calls, and where nearly every
    call runs in chunks."""
    _check(pool, kind, ALL)


def test_the_seed_is_really_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the fuzz: another seed makes other calls, the same seed the same."""
    monkeypatch.setenv("COLLX_FUZZ_SEED", "11")
    assert seed_from_environment() == 11
    assert fuzz_calls(11, 50, 3, 1000) == fuzz_calls(11, 50, 3, 1000)
    assert fuzz_calls(11, 50, 3, 1000) != fuzz_calls(12, 50, 3, 1000)
    monkeypatch.delenv("COLLX_FUZZ_SEED")
    assert seed_from_environment() != 11


def test_random_calls_cover_every_op_with_all_that_it_has() -> None:
    """The control of the fuzz: every op in every algorithm, dtype and form; every value of what
    several ops have in common."""
    drawn = fuzz_calls(1, 25_000, 4, LARGEST[ALL])
    calls = [call for call in drawn if isinstance(call, family_cases.Call)]

    def reached(op: str, name: str) -> set[object]:
        return {getattr(call, name) for call in calls if op in ("", call.op)}

    assert reached("", "op") == set(OPS)
    for op in OPS.values():
        if op.name == "barrier":
            continue
        assert reached(op.name, "algorithm") == {"auto", *op.algorithms}
        assert reached(op.name, "dtype") == set(op.dtypes)
        assert reached(op.name, "form") == set(op.forms)
        assert reached(op.name, "root") == {0, 1, 2, 3}
        assert len(reached(op.name, "symmetric")) == 4
        shapes = [call.shape for call in calls if call.op == op.name]
        assert set(range(op.least_dims, 4)) == {len(shape) for shape in shapes}
        assert any(0 in shape for shape in shapes)
    for name, count in (("style", 5), ("splits", 8), ("max_blocks", 6), ("reduce_op", 5)):
        assert len(reached("", name)) == count, name
    assert reached("allgather", "uneven") == {False, True}
    assert {-3, -2, -1, 0, 1, 2} <= reached("reducescatter", "axis")
    assert reached("alltoallv_device", "spare") == {0, 1, 3, 40}


def test_random_calls_cover_every_fused_normalization() -> None:
    """The same of the calls among them that are fused normalizations."""
    drawn = fuzz_calls(1, 25_000, 4, LARGEST[ALL])
    calls = [call for call in drawn if isinstance(call, norm_cases.Call)]
    for op in norm_cases.OPS:
        mine = [call for call in calls if call.op == op]
        assert {call.algorithm for call in mine} == set(norm_cases.algorithms_of(op))
        assert {call.form for call in mine} == set(norm_samples.forms_of(op))
        assert {call.rounding for call in mine} == set(norm_cases.ROUNDINGS)
        assert {call.dtype for call in mine} == set(norm_cases.DTYPES)
        assert {call.cols for call in mine} == set(norm_cases.COLS)
        modes = {call.scale_mode for call in mine}
        assert modes == ({"row", "group", "tensor"} if norm_cases.quantizes(op) else {"row"})
        assert {0, 1, 2, 3, 4} <= {call.rows for call in mine}
    assert max(call.rows * call.cols for call in calls) > LARGEST[ALL] // 2


def test_random_all_reduces_cover_what_there_is() -> None:
    """The same of the calls that are all of one op: every reduce op on every dtype that has it."""
    drawn = fuzz_calls(1, 2000, 4, LARGEST[REDUCTION], REDUCTION)
    calls = [call for call in drawn if isinstance(call, family_cases.Call)]
    assert {call.op for call in calls} == {"allreduce"}
    algorithms = 1 + len(OPS["allreduce"].algorithms)  # and "auto"
    for name, count in (("algorithm", algorithms), ("form", 7), ("symmetric", 4), ("layout", 3)):
        assert len({getattr(call, name) for call in calls}) == count, name
    reached = {(call.dtype, call.reduce_op) for call in calls}
    wanted = {(fields["dtype"], fields["reduce_op"]) for fields in dtypes_and_ops("allreduce")}
    assert reached == wanted
    assert max(math.prod(call.shape) for call in calls) > LARGEST[REDUCTION] // 2


@pytest.mark.full
@WORLDS
@pytest.mark.parametrize(
    ("ops", "kind"),
    [(REDUCTION, "plain"), *((ALL, kind) for kind in KINDS)],
    ids=["allreduce", *KINDS],
)
def test_many_more_random_calls(pool: Pool, ops: Sequence[str], kind: str) -> None:
    """Ten seeds and larger tensors."""
    for seed in range(10):
        count = 60 if pool.takes_turns else (1500 if ops == REDUCTION else 1200) // pool.size
        largest = LARGEST_SMALL if kind == "small" else LARGEST[tuple(ops)]
        assert_none(pool.run(_fuzz, seed, count, kind, 2 * largest, ops))
