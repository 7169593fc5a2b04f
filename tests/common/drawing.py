"""Draws random calls with hypothesis in the test process, so that all ranks get the same calls.

COLLX_FUZZ_SEED=n changes the seed, and COLLX_FUZZ_CALLS=n the number of calls. A failing example is
shrunk to the fewest and simplest failing calls, except in CI, which reports the first one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import hypothesis
from hypothesis import strategies

from . import collectives
from .calls import Call
from .operators import random_call
from .worlds import seed_from_environment

T = TypeVar("T")

MOST_IN_A_SEQUENCE = 20


def for_all(strategy: strategies.SearchStrategy[T], count: int, check: Callable[[T], None]) -> None:
    """Calls `check` with `count` examples, or with the number that the environment sets."""
    seed, count = seed_from_environment(), int(os.environ.get("COLLX_FUZZ_CALLS", count))
    shrink = [] if os.environ.get("CI") else [hypothesis.Phase.shrink]
    print(f"COLLX_FUZZ_SEED={seed} COLLX_FUZZ_CALLS={count}")

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate, *shrink],
        print_blob=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(strategy)
    def each(example: T) -> None:
        check(example)

    each()


@strategies.composite
def calls(draw: Any, world: int, largest: int, ops: tuple[str, ...] | None = None) -> Call:
    """Draws a call of any operator, or of one of the collectives `ops`."""
    choose = draw(strategies.randoms(use_true_random=False))
    if ops is not None:
        return collectives.random_call(choose, largest, world, ops)
    return random_call(choose, largest, world)


@strategies.composite
def sequences(
    draw: Any, world: int, largest: int, ops: tuple[str, ...] | None = None
) -> list[Call]:
    """Draws a sequence of up to MOST_IN_A_SEQUENCE calls."""
    count = draw(strategies.integers(1, MOST_IN_A_SEQUENCE))
    return [draw(calls(world, largest, ops)) for _ in range(count)]
