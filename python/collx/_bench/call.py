"""A prepared call for measurement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from torch import Tensor


class Kind(Enum):
    OURS = "ours"
    PEER = "peer"
    FLOOR = "floor"  # a bound for comparison, not a collective


def _nothing_else() -> int:
    return 0


def _nothing_to_do() -> None:
    return


class Loads(Protocol):
    """An object that writes an input, such as Case in job.py."""

    def load(self, into: Tensor) -> None: ...


@dataclass(frozen=True)
class Call:
    """A call that can be repeated.

    In an in-place implementation, the input of `run` is its previous result, so results are only
    checked directly after `load`."""

    run: Callable[[], object]
    load: Callable[[], None]  # writes the input
    result: Callable[[], Tensor]
    algorithm: str = ""
    in_place: bool = False  # it writes into its input
    eager: str = ""  # why a CUDA graph cannot contain the call; empty if it can
    besides: Callable[[], int] = _nothing_else  # number of wrong elements of other outputs
    captured: Callable[[], None] = _nothing_to_do  # called between capture and first replay

    @classmethod
    def of(
        cls,
        case: Loads,
        run: Callable[[], object],
        x: Tensor,
        y: Tensor,
        *,
        algorithm: str = "",
        eager: str = "",
        in_place: bool = False,
        besides: Callable[[], int] = _nothing_else,
        captured: Callable[[], None] = _nothing_to_do,
    ) -> Call:
        """Creates a call that reads `x` and writes `y`. It works in place if both are the same
        tensor, or if one is a part of the other, which `in_place` indicates."""
        return cls(
            run,
            lambda: case.load(x),
            lambda: y,
            algorithm,
            in_place or y is x,
            eager,
            besides,
            captured,
        )
