"""The base class of measured implementations. An implementation prepares a call for a case."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection

from torch import Tensor

from collx._bench.call import Call, Kind
from collx._bench.job import Case, Job
from collx._bench.op import Share

PART_INSIDE = ("allgather", "reducescatter")  # in place, a rank's part is a view of the full tensor


def ends_inside(case: Case, whole: Tensor) -> tuple[Tensor, Tensor]:
    """Returns input and output of an operator of PART_INSIDE, in one tensor."""
    part = case.part_of(whole)
    return (part, whole) if case.op.takes is Share.PART else (whole, part)


class Implementation(ABC):
    name: str  # in the JSON file
    kind = Kind.PEER
    form = ""  # the form of its calls, for host times
    remark = ""  # a remark about its times, set by `prepare`
    ops: Collection[str] | None = None  # the supported operators; None: all

    @property
    def label(self) -> str:
        """The header of its column in the table."""
        return self.name

    def wanted(self, case: Case) -> bool:
        """Whether to measure the implementation in this case."""
        return True

    def unfit(self, case: Case) -> str | None:
        """Returns why the implementation does not support the case, None if it does. The result is
        the same on every rank."""
        return None

    @abstractmethod
    def prepare(self, case: Case) -> Call:
        """Prepares a call. Raises the error of the library if it is not available."""

    def in_place(self, case: Case) -> Callable[[], Call] | None:
        """Returns a function that prepares an in-place call, None if there is none besides that of
        `prepare`. The result is the same on every rank."""
        return None

    def other_forms(self, case: Case) -> dict[str, Callable[[], object]]:
        """Returns calls with the same result in other forms, by the names of the forms."""
        return {}

    def close(self, job: Job) -> None:
        """Releases the resources that are kept across cases."""
        return
