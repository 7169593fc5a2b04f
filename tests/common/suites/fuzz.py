"""Fuzz: random calls on one communicator, the same on every rank, from a seed that is told.

COLLX_FUZZ_SEED=n repeats a run; COLLX_FUZZ_CALLS=n makes it longer.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from ..cases import ALGORITHMS, Case, random_case
from ..check import assert_none, run_case
from ..pool import Pool
from ..rank import Rank
from ..worlds import seed_from_environment

LARGEST = 60_000  # elements
CALLS = {1: 500, 2: 1500, 3: 800, 4: 800, 8: 250, 16: 80}
CALLS_SHARED = {1: 60, 2: 40, 3: 30, 4: 24, 8: 12}


def fuzz_cases(seed: int, count: int, largest: int = LARGEST) -> list[Case]:
    """The calls of a seed."""
    choose = random.Random(seed)
    return [random_case(choose, largest, ("auto", *ALGORITHMS)) for _ in range(count)]


def run_seed(
    rank: Rank, communicator: Any, seed: int, cases: Iterable[Any], run: Callable[..., str]
) -> list[str]:
    """Runs the cases of a seed, with pauses that differ from rank to rank."""
    pauses = random.Random(seed * 31 + rank.rank)
    found = []
    for number, case in enumerate(cases):
        if pauses.random() < 0.05:
            time.sleep(pauses.random() * 0.003)
        wrong = run(rank, communicator, case)
        if wrong:
            found.append(f"COLLX_FUZZ_SEED={seed}, call {number}: {case}: {wrong}")
    communicator.check()
    return found[:5]


def seed_and_count(count: int) -> tuple[int, int]:
    """What the environment asks for, or `count` calls of the usual seed; printed."""
    seed = seed_from_environment()
    count = int(os.environ.get("COLLX_FUZZ_CALLS", count))
    print(f"COLLX_FUZZ_SEED={seed} COLLX_FUZZ_CALLS={count}")
    return seed, count


def _fuzz(rank: Rank, seed: int, count: int, largest: int, check: bool) -> list[str]:
    communicator = rank.communicator(
        "fuzz-check" if check else "fuzz", check=check, payload_bytes=1 << 20
    )
    return run_seed(rank, communicator, seed, fuzz_cases(seed, count, largest), run_case)


@pytest.mark.parametrize("check", [False, True], ids=["plain", "checked"])
def test_random_calls_on_one_communicator(pool: Pool, check: bool) -> None:
    """Hazards 4 and 14: any sequence of sizes, dtypes, ops, algorithms, layouts and forms."""
    seed, count = seed_and_count((CALLS_SHARED if pool.shared else CALLS)[pool.size])
    assert_none(pool.run(_fuzz, seed, count, LARGEST, check))


def test_the_seed_is_really_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the fuzz: another seed makes other calls, the same seed the same."""
    monkeypatch.setenv("COLLX_FUZZ_SEED", "11")
    assert seed_from_environment() == 11
    assert fuzz_cases(11, 50) == fuzz_cases(11, 50)
    assert fuzz_cases(11, 50) != fuzz_cases(12, 50)
    monkeypatch.delenv("COLLX_FUZZ_SEED")
    assert seed_from_environment() != 11


def test_random_calls_cover_what_there_is() -> None:
    """The control of the fuzz: every algorithm, dtype, op, form and symmetry occurs."""
    cases = fuzz_cases(1, 2000)
    for attribute, count in (
        ("algorithm", 7),
        ("dtype", 8),
        ("reduce_op", 5),
        ("form", 3),
        ("symmetric", 4),
        ("layout", 3),
        ("max_blocks", 6),
        ("style", 4),
    ):
        assert len({getattr(case, attribute) for case in cases}) == count, attribute
    assert {0, 1} <= {case.numel for case in cases}
    assert max(case.numel for case in cases) > LARGEST // 2


@pytest.mark.full
def test_many_more_random_calls(pool: Pool) -> None:
    """Ten seeds and larger tensors."""
    for seed in range(10):
        count = 100 if pool.shared else 1500 // pool.size
        assert_none(pool.run(_fuzz, seed, count, 5 * LARGEST, False))
