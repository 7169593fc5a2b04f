"""Samples calls if there are too many to make all of them. The summary of a test run reports how
many calls each suite omitted, by world."""

from __future__ import annotations

import itertools
import math
import os
import random
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from zlib import crc32

T = TypeVar("T")
Fields = dict[str, Any]
Factors = dict[str, Sequence[Any]]
Allowed = Callable[[Fields], bool]
Place = tuple[int, int]  # a factor and one of its values

_made: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))


def counts() -> dict[str, dict[str, list[int]]]:
    """Returns the numbers of sampled calls and of all calls, by suite and world."""
    return {suite: dict(worlds) for suite, worlds in _made.items()}


def add(other: dict[str, dict[str, list[int]]]) -> None:
    """Adds the counts of another process."""
    for suite, worlds in other.items():
        for world, (made, of) in worlds.items():
            _count(suite, world, made, of)


def _count(suite: str, world: str, made: int, of: int) -> None:
    counted = _made[suite][world]
    counted[0] += made
    counted[1] += of


def note(made: int, of: int) -> None:
    """Records that the running test makes `made` of `of` calls."""
    test = os.environ["PYTEST_CURRENT_TEST"]
    suite = test.split("::")[0].rpartition("/")[2].removesuffix(".py")
    world = re.search(r"[\[-]((?:cpu|cuda)\w*)", test)
    _count(suite, world.group(1) if world else "all", made, of)


def sampled(calls: Sequence[T], count: int) -> list[T]:
    """Samples at most `count` of the calls, one from each of `count` consecutive sections, so that
    the sample covers the whole range. The sample differs between tests, but is reproducible."""
    count = min(count, len(calls))
    note(count, len(calls))
    choose = random.Random(crc32(os.environ["PYTEST_CURRENT_TEST"].split(" ")[0].encode()))
    borders = [number * len(calls) // count for number in range(count)] + [len(calls)]
    return [calls[choose.randrange(*stretch)] for stretch in itertools.pairwise(borders)]


def every(calls: Sequence[T], step: int, first: int = 0) -> list[T]:
    """Returns every `step`-th call, starting with `first`, and at least one."""
    chosen = list(calls[first % max(1, min(step, len(calls))) :: step])
    note(len(chosen), len(calls))
    return chosen


def each(name: str, values: Sequence[Any]) -> list[Fields]:
    """Returns a dimension for `spread`: one field and its values."""
    return [{name: value} for value in values]


def spread(count: int, seed: int, *dimensions: Sequence[Fields]) -> list[Fields]:
    """Returns at most `count` combinations of the dimensions: all, or a sample in which the values
    of each dimension occur equally often."""
    if math.prod(map(len, dimensions)) <= count:
        columns = list(zip(*itertools.product(*dimensions), strict=True))
    else:
        choose = random.Random(seed)
        columns = []
        for values in dimensions:
            column = list(values) * (count // len(values))
            column += choose.sample(list(values), count % len(values))
            choose.shuffle(column)
            columns.append(tuple(column))
    return [
        {name: value for fields in combination for name, value in fields.items()}
        for combination in zip(*columns, strict=True)
    ]


def pairs(factors: Factors, allowed: Allowed = lambda fields: True) -> list[Fields]:
    """Returns combinations that cover every pair of values of two factors that `allowed` accepts.
    `allowed` is called with pairs. The result is deterministic."""
    names = list(factors)

    def may(a: Place, b: Place) -> bool:
        return allowed(
            {names[a[0]]: factors[names[a[0]]][a[1]], names[b[0]]: factors[names[b[0]]][b[1]]}
        )

    places = [[(f, v) for v in range(len(factors[name]))] for f, name in enumerate(names)]
    # Ordered: the order of a set would differ between processes.
    left = {
        (a, b): None
        for first, second in itertools.combinations(places, 2)
        for a, b in itertools.product(first, second)
        if may(a, b)
    }
    found: list[Fields] = []

    def completed(chosen: list[Place], f: int) -> list[Place] | None:
        """Completes `chosen` with a value of each factor from `f` on. Returns None if no choice is
        allowed."""
        if f == len(names):
            return chosen
        if any(place[0] == f for place in chosen):
            return completed(chosen, f + 1)
        fine = [c for c in places[f] if all(may(*_pair(c, o)) for o in chosen)]
        turn = len(found) % max(1, len(fine))  # equally good choices alternate
        fine = fine[turn:] + fine[:turn]
        fine.sort(key=lambda c: -sum(_pair(c, o) in left for o in chosen))
        tried = (completed([*chosen, c], f + 1) for c in fine)
        return next((all_of_them for all_of_them in tried if all_of_them), None)

    while left:
        pair = next(iter(left))
        chosen = completed(list(pair), 0)
        if chosen is None:
            del left[pair]
            continue
        for one, other in itertools.product(chosen, chosen):
            left.pop((one, other), None)
        found.append({names[f]: factors[names[f]][v] for f, v in sorted(chosen)})
    return found


def _pair(a: Place, b: Place) -> tuple[Place, Place]:
    return (a, b) if a < b else (b, a)


def summary() -> list[str]:
    """Returns a line for each suite that did not make all calls."""
    lines = []
    for suite, worlds in sorted(_made.items()):
        parts = [f"{w} {made} of {of}" for w, (made, of) in worlds.items() if made < of]
        lines += [f"{suite}: {', '.join(parts)}"] if parts else []
    return lines
