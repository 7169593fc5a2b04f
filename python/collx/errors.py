"""What collx raises besides ValueError, TypeError and NotImplementedError for refused arguments.

All of it is a CollectiveError, hence a torch.distributed.DistError and a RuntimeError.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

__all__ = [
    "CollectiveError",
    "CollectiveMismatch",
    "CollectiveOverlap",
    "CollectiveTimeout",
    "CommunicatorPoisoned",
    "InitError",
]


class CollectiveError(dist.DistError):
    """A collective failed, or could not be tried. The base of all of collx's errors.

    The fields say what the message does. They are None where nothing is known.

    Attributes:
        communicator: its name.
        phase: where in the call the rank was: "check", "start_barrier", "arrival", "stage_barrier",
            "gather", "end_barrier", "release", "counts", "fallback", or "vote" where the ranks met
            through the process group's store.
        rank: the rank that gave up, or that saw what was wrong.
        peer: the rank that it waited for, or whose call differs.
        sequence: how many calls `rank` had completed on the communicator before.
        expected, seen: the words compared: an epoch, a fingerprint, or a number of rows.
        call: the call of `rank`: a dict of "op", "dtype", "reduce_op", "root" and "axis" (-1 for
            none), "algorithm", "runs" (what carries that out), "max_blocks", "shape" (eight
            dimensions at most) and "numel".
        peer_call: the call of `peer`, where the two differ.
    """

    def __init__(
        self,
        message: str,
        communicator: str | None = None,
        record: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        known = record or {}
        self.communicator = communicator
        self.phase: str | None = known.get("phase")
        self.rank: int | None = _if_known(known.get("rank"))
        self.peer: int | None = _if_known(known.get("peer"))
        self.sequence: int | None = known.get("sequence")
        self.expected: int | None = known.get("expected")
        self.seen: int | None = known.get("seen")
        self.call: dict[str, Any] | None = known.get("call")
        self.peer_call: dict[str, Any] | None = known.get("peer_call")

    @property
    def op(self) -> str | None:
        """Name of the operator that `rank` called."""
        return None if self.call is None else self.call["op"]


class CollectiveTimeout(CollectiveError, TimeoutError):
    """A rank did not come in time. `peer` is the rank at the end of the chain of those that waited
    for each other."""


class CollectiveMismatch(CollectiveError):
    """Ranks made calls that do not fit together; or splits that the device alone knew do not fit
    the tensors: then `expected` and `seen` are numbers of rows. Raised by `collx.empty` and
    `collx.register`, it leaves the communicator usable."""


class CollectiveOverlap(CollectiveError):
    """Two calls used one communicator at once, in no order."""


class CommunicatorPoisoned(CollectiveError):
    """The communicator refuses work: a call on it has failed, of which the fields tell, or it has
    been destroyed."""


class InitError(CollectiveError):
    """A collective step of `collx.init`, `collx.empty` or `collx.register` failed on some rank.

    Attributes:
        step: the step.
        failures: cause by rank, of the ranks on which it failed.
    """

    def __init__(
        self,
        message: str,
        communicator: str | None = None,
        step: str | None = None,
        failures: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(message, communicator)
        self.step = step
        self.failures = dict(failures or {})


def _if_known(rank: int | None) -> int | None:
    return None if rank is None or rank < 0 else rank
