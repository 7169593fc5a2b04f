"""Finds the fastest choice for each case, and derives the entries of the table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch

from collx._tune.cases import BUILT_IN, Case, Choice, call_of, candidates, explained, tensors_of
from collx._tune.timing import batch_of, maximum, microseconds
from collx._tuning import Entry
from collx.communicator import Communicator

_CLOSE = 1.05  # choices within this factor of the fastest are measured again
_GAIN = 1.03  # another choice must be faster than the built-in choice by more than this factor


@dataclass(frozen=True)
class Found:
    """The result for a case. `choice` is BUILT_IN, with equal times, unless another choice was
    faster in a separate measurement."""

    case: Case
    built_in: str
    built_in_us: float
    choice: Choice
    us: float


def search(case: Case, communicator: Communicator, seconds: float) -> Found:
    """Measures the choices for a case. Collective; the result is the same on all ranks."""
    x, y = tensors_of(case, communicator)
    made: dict[Choice, Callable[[], float]] = {}
    given = _same_bits(case, communicator, x, y, candidates(case, communicator))

    def measured(choices: Sequence[Choice]) -> dict[Choice, float]:
        for choice in choices:
            if choice not in made:
                call = call_of(case, choice, communicator, x, y)
                made[choice] = batch_of(call, communicator.device, seconds)
        times = microseconds([made[choice] for choice in choices])
        return dict(zip(choices, times, strict=True))

    times = measured(given)
    close = [choice for choice in given if times[choice] <= _CLOSE * min(times.values())]
    if len(close) > 1:
        times.update(measured(close))
    best = min(close, key=lambda choice: times[choice])
    if best != BUILT_IN:
        times = measured([BUILT_IN, best])
        if times[BUILT_IN] <= _GAIN * times[best]:
            best = BUILT_IN
    built_in = explained(case, BUILT_IN, communicator).algorithm
    return Found(case, built_in, times[BUILT_IN], best, times[best])


def _same_bits(
    case: Case,
    communicator: Communicator,
    x: torch.Tensor,
    y: torch.Tensor,
    choices: Sequence[Choice],
) -> list[Choice]:
    """Returns the choices whose result has the same bits as the built-in choice on all ranks."""

    def result(choice: Choice) -> torch.Tensor:
        y.zero_()
        communicator.synchronize()
        maximum([0])  # peers may store into symmetric outputs
        call_of(case, choice, communicator, x, y)()
        communicator.synchronize()
        return y.view(torch.uint8).clone()

    expected = result(BUILT_IN)
    differs = [float(not torch.equal(result(choice), expected)) for choice in choices]
    return [
        choice for choice, any_rank in zip(choices, maximum(differs), strict=True) if not any_rank
    ]


def entries(found: Sequence[Found]) -> list[Entry]:
    """Returns the entries. Neighboring sizes with the same choice form an entry. The border between
    two sizes is their geometric mean."""

    def group(one: Found) -> tuple[str, str, bool]:
        return one.case.op, one.case.dtype_name or "", one.case.symmetric

    return [
        entry
        for _, cases in groupby(sorted(found, key=group), key=group)
        for entry in _entries_of(sorted(cases, key=lambda one: one.case.nbytes))
    ]


def _entries_of(found: Sequence[Found]) -> Iterator[Entry]:
    sizes = [one.case.nbytes for one in found]
    borders = [math.isqrt(a * b) for a, b in pairwise(sizes)]
    starts, ends = [sizes[0], *(border + 1 for border in borders)], [*borders, sizes[-1]]
    for choice, run in groupby(range(len(found)), key=lambda i: found[i].choice):
        places = list(run)
        if choice == BUILT_IN:
            continue
        case = found[places[0]].case
        yield Entry(
            op=case.op,
            dtype=case.dtype_name,
            symmetric=case.symmetric,
            from_bytes=starts[places[0]],
            to_bytes=ends[places[-1]],
            algorithm=choice.algorithm,
            max_blocks=choice.max_blocks,
        )
