"""What is measured: an implementation prepares a call for a case."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from collxbench.job import Case, Job


class Kind(Enum):
    OURS = "ours"
    PEER = "peer"
    FLOOR = "floor"  # a bound to look at; no collective, so no peer


def _nothing_else() -> bool:
    return True


def _nothing_to_do() -> None:
    return


@dataclass(frozen=True)
class Call:
    """One call, ready to be made over and over.

    `run` on an in-place implementation takes its own last result, so results are checked right
    after `load`."""

    run: Callable[[], object]
    load: Callable[[], None]  # writes the input
    result: Callable[[], Tensor]
    algorithm: str = ""
    in_place: bool = False
    eager: str = ""  # why no CUDA graph can hold it, if none can
    besides: Callable[[], bool] = _nothing_else  # whether its other outputs are right
    captured: Callable[[], None] = _nothing_to_do  # between a capture and its first replay

    @classmethod
    def of(
        cls,
        case: Case,
        run: Callable[[], object],
        x: Tensor,
        y: Tensor,
        *,
        algorithm: str = "",
        eager: str = "",
        besides: Callable[[], bool] = _nothing_else,
        captured: Callable[[], None] = _nothing_to_do,
    ) -> Call:
        """`run` reads `x` and writes `y`, which are one tensor where it works in place."""
        in_place = y is x
        return cls(
            run, lambda: case.load(x), lambda: y, algorithm, in_place, eager, besides, captured
        )


class Implementation(ABC):
    name: str  # in the JSON file
    kind = Kind.PEER
    form = ""  # of its calls, where the host's part of them is timed
    remark = ""  # what the reader of its times has to know, once it was prepared
    ops: Collection[str] | None = None  # the operators that it has; None: all

    @property
    def label(self) -> str:
        """Heads its column of the table."""
        return self.name

    def wanted(self, case: Case) -> bool:
        """Whether the case is one that it is meant for."""
        return True

    def unfit(self, case: Case) -> str | None:
        """Why it does not take part in the case, in words; the same on every rank."""
        return None

    @abstractmethod
    def prepare(self, case: Case) -> Call:
        """Raises what the library raises where it is not available."""

    def other_forms(self, case: Case) -> dict[str, Callable[[], object]]:
        """Calls for the same result in other forms, by their names."""
        return {}

    def close(self, job: Job) -> None:
        """Gives back what it holds across cases."""
        return
