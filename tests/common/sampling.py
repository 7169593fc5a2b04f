"""Samples of calls that are too many to be made, counted: the summary of a run says what each suite
left out, by world."""

from __future__ import annotations

import os
import random
import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar
from zlib import crc32

T = TypeVar("T")

_made: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))


def counts() -> dict[str, dict[str, list[int]]]:
    """By suite and world: how many calls were made, and of how many."""
    return {suite: dict(worlds) for suite, worlds in _made.items()}


def add(other: dict[str, dict[str, list[int]]]) -> None:
    """What another process has counted."""
    for suite, worlds in other.items():
        for world, (made, of) in worlds.items():
            _count(suite, world, made, of)


def _count(suite: str, world: str, made: int, of: int) -> None:
    counted = _made[suite][world]
    counted[0] += made
    counted[1] += of


def note(made: int, of: int) -> None:
    """The running test makes so many of the calls that there are."""
    test = os.environ["PYTEST_CURRENT_TEST"]
    suite = test.split("::")[0].rpartition("/")[2].removesuffix(".py")
    world = re.search(r"[\[-]((?:cpu|cuda)\w*)", test)
    _count(suite, world.group(1) if world else "all", made, of)


def sampled(calls: Sequence[T], count: int) -> list[T]:
    """At most `count` of the calls: one of each stretch of them, so that what lies far apart in
    their order all occurs. Other ones in every test, and always the same in one."""
    count = min(count, len(calls))
    note(count, len(calls))
    choose = random.Random(crc32(os.environ["PYTEST_CURRENT_TEST"].split(" ")[0].encode()))
    borders = [number * len(calls) // count for number in range(count)] + [len(calls)]
    return [calls[choose.randrange(*stretch)] for stretch in pairwise(borders)]


def every(calls: Sequence[T], step: int, first: int = 0) -> list[T]:
    """One in `step` of the calls, from the first, at least one."""
    chosen = list(calls[first % max(1, min(step, len(calls))) :: step])
    note(len(chosen), len(calls))
    return chosen


def summary() -> list[str]:
    """A line for each suite that made fewer calls than there are."""
    lines = []
    for suite, worlds in sorted(_made.items()):
        parts = [f"{w} {made} of {of}" for w, (made, of) in worlds.items() if made < of]
        lines += [f"{suite}: {', '.join(parts)}"] if parts else []
    return lines
