"""Fuzz over the whole family: random calls of every op on one communicator. See fuzz.py for
COLLX_FUZZ_SEED and COLLX_FUZZ_CALLS."""

from __future__ import annotations

import random

import pytest

from ..check import assert_none
from ..family_cases import OPS, Call, random_call
from ..family_check import run_call
from ..pool import Pool
from ..rank import Rank
from .fuzz import run_seed, seed_and_count

LARGEST = 30_000  # elements of the larger tensors
LARGEST_SMALL = 2000  # where the payload is the smallest
CALLS = {1: 200, 2: 900, 3: 400, 4: 300, 8: 100, 16: 30}
CALLS_SHARED = {1: 60, 2: 30, 3: 24, 4: 20, 8: 10}

KINDS = ("plain", "checked", "small")


def fuzz_calls(seed: int, count: int, world: int, largest: int = LARGEST) -> list[Call]:
    """The calls of a seed."""
    choose = random.Random(seed)
    return [random_call(choose, largest, world) for _ in range(count)]


def _fuzz(rank: Rank, seed: int, count: int, kind: str, largest: int) -> list[str]:
    options = {"check": kind == "checked", "payload_bytes": 1 << 20}
    if kind == "small":
        options["payload_bytes"] = rank.smallest_payload()
    communicator = rank.communicator(f"family-{kind}", **options)
    calls = fuzz_calls(seed, count, rank.size, largest)
    return run_seed(rank, communicator, seed, calls, run_call)


@pytest.mark.parametrize("kind", KINDS)
def test_random_calls_of_all_ops_on_one_communicator(pool: Pool, kind: str) -> None:
    """Hazards 4 and 14: any sequence of ops, roots, axes, splits, sizes, dtypes, algorithms and
    forms, with and without the check of calls, and where nearly every call runs in chunks."""
    seed, count = seed_and_count((CALLS_SHARED if pool.shared else CALLS)[pool.size])
    largest = LARGEST_SMALL if kind == "small" else LARGEST
    assert_none(pool.run(_fuzz, seed, count, kind, largest))


def test_random_calls_cover_every_op_with_all_that_it_has() -> None:
    """The control of the fuzz: every op in every algorithm, dtype and form; every value of what
    several ops have in common."""
    calls = fuzz_calls(1, 20_000, 4)

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


def test_the_same_seed_makes_the_same_calls_on_every_rank() -> None:
    assert fuzz_calls(11, 50, 3) == fuzz_calls(11, 50, 3)
    assert fuzz_calls(11, 50, 3) != fuzz_calls(12, 50, 3)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_many_more_random_calls_of_all_ops(pool: Pool, kind: str) -> None:
    """Ten seeds and larger tensors."""
    for seed in range(10):
        count = 60 if pool.shared else 1200 // pool.size
        largest = 2 * (LARGEST_SMALL if kind == "small" else LARGEST)
        assert_none(pool.run(_fuzz, seed, count, kind, largest))
