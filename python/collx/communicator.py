"""Communicators: what `collx.init` returns."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from collx import _registry, _tensors
from collx._explain import Explanation, describe, last_axis
from collx._init import Setup
from collx._vote import LEFT, VoteError
from collx.errors import CollectiveMismatch, CollectiveTimeout, CommunicatorPoisoned

__all__ = ["PDL_LEVELS", "Communicator"]

PDL_LEVELS = ("off", "end", "early")


class Communicator:
    """One rank's end of a communicator. Made by `collx.init`, found by operators by `name`.

    Use it in one thread at a time. It lives until `destroy`, or as a context manager until the
    end of the block: dropping the object frees nothing, and never waits for a peer.
    """

    def __init__(self, setup: Setup) -> None:
        """For `collx.init` alone: takes over what the steps of init have built."""
        assert setup.communicator is not None
        given = setup.arguments
        self._setup = setup
        self._native = setup.communicator
        self._wanted_pdl = given.pdl
        self._process = os.getpid()
        self._allocations = 0
        self.name = given.name
        self.rank = given.rank
        self.world_size = given.world_size
        self.device = given.device
        self.timeout = given.timeout
        self.group: dist.ProcessGroup = setup.group
        self.fallback_reason = setup.fallback_reason
        """Why this communicator goes through the process group; None when it does not."""
        _registry.add(self)
        _settle_pdl(self.device)

    @property
    def blocks(self) -> int:
        """Thread blocks of 512 that a call may use at once; agreed at init, then fixed."""
        return self._native.blocks

    @property
    def poisoned(self) -> bool:
        """Whether a call has failed. A poisoned communicator refuses work."""
        return self._native.poisoned

    @property
    def destroyed(self) -> bool:
        """Whether `destroy` has been called."""
        return self._native.destroyed

    def check(self) -> None:
        """Raises what has failed on this communicator, if anything has. Never waits.

        Raises:
            CollectiveTimeout, CollectiveMismatch, CollectiveOverlap: the recorded failure.
            CommunicatorPoisoned: it has been destroyed.
        """
        self._native.check()

    def synchronize(self) -> None:
        """Waits for all work on the device, then does as `check`."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.check()

    def empty(self, *size: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """`collx.empty` on this communicator and its device."""
        return _tensors.empty(self, size, dtype)

    def register(self, tensor: torch.Tensor) -> torch.Tensor:
        """`collx.register` on this communicator."""
        return _tensors.register(self, tensor)

    def explain(
        self,
        op: str = "allreduce",
        shape: int | Sequence[int] = 1,
        dtype: torch.dtype = torch.float32,
        *,
        input_symmetric: bool = False,
        output_symmetric: bool = False,
        algorithm: str = "auto",
        max_blocks: int = 0,
        rounding: str = "fp32",
        scale_mode: str = "row",
        group_size: int = 128,
        keep_norm: bool = False,
    ) -> Explanation:
        """How a call would be carried out, and where the bytes of this rank's region go.

        Args:
            op: name of the operator.
            shape: of the full tensor; its last axis makes the rows of what is normalised.
            dtype: of the tensor.
            input_symmetric, output_symmetric: whether they are registered symmetric tensors.
            algorithm, max_blocks: as given to the operator.
            rounding, scale_mode, group_size, keep_norm: likewise, to one that normalises; the
                others refuse them.

        Returns:
            A mapping that prints as a table. Sizes are in bytes.
        """
        numel = shape if isinstance(shape, int) else math.prod(shape)
        call = self._native.explain(
            op,
            numel,
            last_axis(shape),
            dtype,
            input_symmetric,
            output_symmetric,
            algorithm,
            max_blocks,
            rounding,
            scale_mode,
            group_size,
            keep_norm,
        )
        return describe(self, op, numel, dtype, call, self._setup.layout)

    @contextmanager
    def pdl(self, level: str) -> Iterator[None]:
        """Sets the level of dependent launch within the block: "off", "end" or "early".

        While the device has a second communicator, "early" acts as "end"."""
        if level not in PDL_LEVELS:
            raise ValueError(f"pdl: {level!r} is none of {', '.join(PDL_LEVELS)}")
        before = self._wanted_pdl
        self._wanted_pdl = level
        _settle_pdl(self.device)
        try:
            yield
        finally:
            self._wanted_pdl = before
            _settle_pdl(self.device)

    def destroy(self) -> None:
        """Frees the communicator's memory once no rank uses it any more. Twice is harmless.

        Collective. On a poisoned communicator, and in a forked child, it is local and returns at
        once.

        Raises:
            CollectiveTimeout: some rank, or the store, did not answer within the timeout.
            CollectiveMismatch: some rank was at another collective call.
                Memory and name are free in both cases.
        """
        if self.destroyed:
            return
        if os.getpid() != self._process:
            self._abandon()
            return
        if self.device.type == "cuda" and not self.poisoned:
            self._drain()
        if self.poisoned:
            self._leave_alone("it is poisoned")
            return
        try:
            self._setup.ballot.vote("destroy")
        except VoteError as verdict:
            message = f"destroy of {self.name!r}: {verdict}"
            if verdict.absent or verdict.store_failed:
                raise CollectiveTimeout(message) from None
            if len(verdict.left) < len(verdict.failures):
                self._setup.ballot.cast(f"{LEFT}: destroyed")  # peers that go on need not wait
                raise CollectiveMismatch(message) from None
        finally:
            self._setup.leave()
            self._release()

    def _drain(self) -> None:
        try:
            torch.cuda.synchronize(self.device)
        except Exception as reason:  # the device is lost; peers need not wait to learn it
            self._leave_alone(type(reason).__name__)
            raise

    def _leave_alone(self, why: str) -> None:
        """Frees this rank's memory without waiting for the peers, who may never come. What they
        have mapped stays valid."""
        self._setup.ballot.cast(f"{LEFT}: {why}")
        self._release()

    def _release(self) -> None:
        _registry.remove(self)
        self._setup.release()
        _settle_pdl(self.device)

    def _abandon(self) -> None:
        """Leaves without freeing what devices or peers may still use."""
        _registry.remove(self)
        self._native.destroy()

    def __enter__(self) -> Communicator:
        if self.destroyed:
            raise CommunicatorPoisoned(f"communicator {self.name!r} has been destroyed")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None or self.destroyed or os.getpid() != self._process:
            self.destroy()
            return
        # Waiting would hide the error from the user for the length of the timeout.
        self._leave_alone(kind.__name__)

    def __repr__(self) -> str:
        state = "destroyed" if self.destroyed else "poisoned" if self.poisoned else "ready"
        way = "" if self.fallback_reason is None else ", fallback only"
        return (
            f"<collx.Communicator {self.name!r}: rank {self.rank} of {self.world_size} "
            f"on {self.device}, {state}{way}>"
        )

    def __reduce__(self) -> Any:
        raise TypeError("a communicator belongs to its process and cannot be pickled")


def _settle_pdl(device: torch.device) -> None:
    """Two communicators on one device can block each other across ranks when dependents of a
    spinning kernel may take its place, so "early" needs a communicator that is alone."""
    sharing = _registry.sharing(device)
    for communicator in sharing:
        wanted = communicator._wanted_pdl
        communicator._native.pdl = "end" if wanted == "early" and len(sharing) > 1 else wanted
