"""A call that is ready to be measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from torch import Tensor


class Kind(Enum):
    OURS = "ours"
    PEER = "peer"
    FLOOR = "floor"  # a bound to look at; no collective, so no peer


def _nothing_else() -> int:
    return 0


def _nothing_to_do() -> None:
    return


class Loads(Protocol):
    """Writes an input: job.py's Case does."""

    def load(self, into: Tensor) -> None: ...


@dataclass(frozen=True)
class Call:
    """One call, ready to be made over and over.

    `run` on an in-place implementation takes its own last result, so results are checked right
    after `load`."""

    run: Callable[[], object]
    load: Callable[[], None]  # writes the input
    result: Callable[[], Tensor]
    algorithm: str = ""
    in_place: bool = False  # it writes into its input
    eager: str = ""  # why no CUDA graph can hold it, if none can
    besides: Callable[[], int] = _nothing_else  # wrong elements of its other outputs
    captured: Callable[[], None] = _nothing_to_do  # between a capture and its first replay

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
        """`run` reads `x` and writes `y`. It works in place where they are one tensor, or where
        `in_place` says that one is a part of the other."""
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
