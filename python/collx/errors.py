"""The errors of collx, besides ValueError, TypeError and NotImplementedError for invalid arguments.

All of them derive from CollectiveError, which is a torch.distributed.DistError and a RuntimeError.
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
    """A collective failed, or could not be started. The base class of all errors of collx.

    The fields hold the content of the message. A field is None if its value is not known.

    Attributes:
        communicator: the name of the communicator.
        phase: the phase of the call in which the rank was: "check", "start_barrier", "arrival",
            "stage_barrier", "gather", "end_barrier", "release", "counts", "fallback", "allocation"
            (of `allocate_tensor` of the backend), or "vote" if the ranks communicated through the
            store of the process group.
        rank: the rank that gave up, or that detected the error.
        peer: the rank that `rank` waited for, or whose call differs.
        sequence: the number of calls that `rank` had completed on the communicator before.
        expected, seen: the words that were compared: epochs, fingerprints or numbers of rows.
        call: the call of `rank`: a dict of "op", "dtype", "reduce_op", "root" and "axis" (-1 for
            none), "algorithm", "executed_by" (the algorithm that executes it), "max_blocks",
            "shape" (at most eight dimensions) and "numel".
        peer_call: the call of `peer`, if the calls differ.
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
        self.phase = _phase_of(known)
        self.rank: int | None = _if_known(known.get("rank"))
        self.peer: int | None = _if_known(known.get("peer"))
        self.sequence: int | None = known.get("sequence")
        self.expected: int | None = known.get("expected")
        self.seen: int | None = known.get("seen")
        self.call: dict[str, Any] | None = known.get("call")
        self.peer_call: dict[str, Any] | None = known.get("peer_call")

    @property
    def op(self) -> str | None:
        """The name of the operator that `rank` called."""
        return None if self.call is None else self.call["op"]


class CollectiveTimeout(CollectiveError, TimeoutError):
    """A rank did not make its call in time. `peer` is the missing rank: the last one in the chain
    of ranks that waited for each other."""


class CollectiveMismatch(CollectiveError):
    """The ranks made calls that do not match, or splits on the device do not fit the tensors. In
    the second case `expected` and `seen` are numbers of rows. After a mismatch in `collx.empty` or
    `collx.register`, the communicator remains usable."""


class CollectiveOverlap(CollectiveError):
    """Two calls used one communicator at the same time, without an order between them."""


class CommunicatorPoisoned(CollectiveError):
    """The communicator does not accept calls, since an earlier call failed or since it was
    destroyed. The fields describe the earlier failure."""


class InitError(CollectiveError):
    """A collective step of `collx.init`, `collx.empty`, `collx.register` or `collx.warm_up` failed
    on a rank.

    Attributes:
        step: the step.
        failures: the cause by rank, for the ranks on which the step failed.
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


def _phase_of(record: Mapping[str, Any]) -> str | None:
    """C++ records "none" for a failure outside of a phase. A timeout there is that of a vote."""
    phase: str | None = record.get("phase")
    if phase != "none":
        return phase
    return "vote" if record.get("failure") == "timeout" else None


def _if_known(rank: int | None) -> int | None:
    return None if rank is None or rank < 0 else rank
