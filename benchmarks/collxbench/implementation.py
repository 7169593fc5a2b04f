"""What is measured: an implementation prepares a call for a case."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection

from torch import Tensor

from collxbench.call import Call, Kind
from collxbench.job import Case, Job
from collxbench.op import Share

PART_INSIDE = ("allgather", "reducescatter")  # in place, a rank's part lies where it belongs


def ends_inside(case: Case, whole: Tensor) -> tuple[Tensor, Tensor]:
    """Input and output of those, in one tensor."""
    part = case.part_of(whole)
    return (part, whole) if case.op.takes is Share.PART else (whole, part)


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

    def in_place(self, case: Case) -> Callable[[], Call] | None:
        """Prepares a call in place; None where there is none, or none but that of `prepare`. The
        same on every rank."""
        return None

    def other_forms(self, case: Case) -> dict[str, Callable[[], object]]:
        """Calls for the same result in other forms, by their names."""
        return {}

    def close(self, job: Job) -> None:
        """Gives back what it holds across cases."""
        return
