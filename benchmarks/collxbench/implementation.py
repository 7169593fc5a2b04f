"""What is measured: an implementation prepares a call for a case."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from torch import Tensor

from collxbench.job import Case, Job


class Kind(Enum):
    OURS = "ours"
    PEER = "peer"
    FLOOR = "floor"  # a bound to look at; no all-reduce, so no peer


@dataclass(frozen=True)
class Call:
    """One call, ready to be made over and over.

    `run` on an in-place implementation reduces its own last result again, so results are checked
    right after `load`."""

    run: Callable[[], object]
    load: Callable[[], None]  # writes the input
    result: Callable[[], Tensor]
    algorithm: str = ""
    in_place: bool = False


class Implementation(ABC):
    name: str  # in the JSON file
    kind = Kind.PEER
    exact = False  # whether its bits must be the reference's

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

    def close(self, job: Job) -> None:
        """Gives back what it holds across cases."""
        return
