"""The memory of a communicator: its region, and symmetric tensors, whose creation is collective.

A symmetric tensor takes two votes. The first checks that all ranks request the same tensor and have
the memory for it, the second that all ranks have mapped it. A rank that refuses or fails casts a
failure. It never skips a vote, because its later votes would then not match those of its peers
(hazard 30).
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from collx._bootstrap import symmetric
from collx._bootstrap.store import Ballot, VoteError
from collx._extension import extension
from collx.errors import CollectiveError, CollectiveMismatch, CollectiveTimeout, InitError

__all__ = ["SymmetricMemory"]


class SymmetricMemory:
    """The memory that the ranks of a communicator share, and the votes that extend it.

    `rendezvous` and `region` are None if the communicator uses the process group."""

    def __init__(
        self,
        native: extension.Communicator,
        device: torch.device,
        ballot: Ballot,
        rendezvous: symmetric.Rendezvous | None,
        region: torch.Tensor | None,
    ) -> None:
        self._native = native
        self._device = device
        self.ballot = ballot
        self._rendezvous = rendezvous
        self._region = region
        self._direct = region is not None
        self._allocations = 0

    def empty(
        self,
        size: tuple[int | Sequence[int], ...],
        dtype: torch.dtype | None,
        device: torch.device | str | int | None = None,
    ) -> torch.Tensor:
        """Implements collx.empty."""
        return self._new(lambda: (_shape(size), _dtype(dtype)), device)

    def empty_like(self, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        """Implements collx.empty_like."""

        def form() -> tuple[tuple[int, ...], torch.dtype]:
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(
                    f"empty_like: tensor: got a {type(tensor).__name__}; accepted: a Tensor"
                )
            return tuple(tensor.shape), _dtype(tensor.dtype if dtype is None else dtype)

        return self._new(form)

    def _new(
        self,
        form: Callable[[], tuple[tuple[int, ...], torch.dtype]],
        device: torch.device | str | int | None = None,
    ) -> torch.Tensor:
        """Returns a tensor with the shape and dtype that `form` returns. `form` raises if the
        arguments are invalid."""
        made: list[torch.Tensor] = []

        def allocate() -> dict[str, Any]:
            symmetric.refuse_in_capture("empty", self._device)
            self._check_device(device)
            shape, dtype = form()
            made.append(self._allocate(shape, dtype))
            return {"shape": list(shape), **self._identity(made[0])}

        self.agree("empty", allocate)
        return self._share("empty", made[0])

    def register(self, tensor: torch.Tensor) -> torch.Tensor:
        """Implements collx.register."""

        def identify() -> dict[str, Any]:
            symmetric.refuse_in_capture("register", self._device)
            self._check_tensor(tensor)
            return self._identity(tensor)

        self.agree("register", identify)
        return self._share("register", tensor)

    def share_words(self, nbytes: int, **agreed: int) -> tuple[torch.Tensor, list[int]]:
        """Returns zeroed host memory that all ranks map, and the addresses at which this process
        maps the memory of each rank. `agreed`: other values that must be equal on all ranks."""
        words: list[torch.Tensor] = []
        mapped: list[symmetric.Mapped] = []

        def allocate() -> dict[str, int]:
            symmetric.refuse_in_capture("allocate_tensor", self._device)
            words.append(symmetric.allocate((nbytes,), torch.uint8, torch.device("cpu")).zero_())
            return agreed

        def meet() -> None:
            assert self._rendezvous is not None
            mapped.append(self._rendezvous.exchange(words[0]))

        self.agree("allocate_tensor", allocate)
        self.agree("allocate_tensor: rendezvous", meet)
        return words[0], mapped[0].pointers

    def set_timeout(self, seconds: float) -> None:
        """Sets the maximum duration of votes and rendezvous that begin after this call."""
        self.ballot.timeout = seconds
        if self._rendezvous is not None:
            self._rendezvous.set_timeout(seconds)

    def leave(self) -> None:
        """Removes this rank's keys from the store. Must follow the last vote, whatever its
        result."""
        if self._rendezvous is not None and not self.ballot.broken:
            self._rendezvous.forget()
        self.ballot.leave()

    def release(self) -> None:
        """Frees everything. Local; mappings of the peers remain valid."""
        self._native.destroy()
        if self._rendezvous is not None:
            self._rendezvous.close()
        self._rendezvous = self._region = None

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if math.prod(shape) * dtype.itemsize > sys.maxsize:  # PyTorch does not check for this
            raise ValueError(
                f"empty: size: got {shape} with {dtype}; accepted: at most 2**63 - 1 bytes"
            )
        # An empty tensor has no bytes to share, and PyTorch allocates no empty blocks.
        if 0 in shape or not self._direct:
            return torch.empty(shape, dtype=dtype, device=self._device)
        return symmetric.allocate(shape, dtype, self._device)

    def _identity(self, tensor: torch.Tensor) -> dict[str, Any]:
        """Returns the values that must be equal on all ranks, to ensure that they refer to the
        same allocation (hazard 16)."""
        return {
            "id": self._allocations + 1,
            "bytes": tensor.untyped_storage().nbytes(),
            "dtype": str(tensor.dtype),
        }

    def _share(self, what: str, tensor: torch.Tensor) -> torch.Tensor:
        """Maps the memory of the peers and registers it."""
        nbytes = tensor.untyped_storage().nbytes()
        if not self._direct or nbytes == 0:
            return tensor  # no peer accesses it directly
        mapped: list[symmetric.Mapped] = []

        def meet() -> dict[str, Any]:
            assert self._rendezvous is not None
            mapped.append(self._rendezvous.exchange(tensor))
            # If these differ, ranks would read other bytes than the peers wrote, or use different
            # algorithms.
            return {"offset": mapped[0].offset, "multicast": mapped[0].multicast != 0}

        self.agree(f"{what}: rendezvous", meet)
        self._allocations += 1
        pointers, _, multicast = mapped[0]
        # No vote follows, so this must not fail on one rank alone. In particular, it accepts a
        # communicator that a peer has poisoned in the meantime: the next call raises.
        self._native.register(tensor, pointers, nbytes, self._allocations, multicast)
        return tensor

    def agree(self, what: str, run: Callable[[], Any]) -> None:
        """Takes a step that must return the same value on every rank. Otherwise all ranks
        raise."""
        self._require_usable(what)
        try:
            values = self.ballot.take(what, run)
        except VoteError as verdict:
            failure, own = self._failure(what, verdict), verdict.__cause__
            raise failure from (None if failure is own else own)
        if any(other != values[0] for other in values):
            each = ", ".join(f"rank {rank}: {other}" for rank, other in enumerate(values))
            raise CollectiveMismatch(
                f"collx.{what} on {self._native.name!r}: the ranks differ ({each})",
                self._native.name,
            )

    def _require_usable(self, what: str) -> None:
        self._native.refuse_if_forked(what)
        try:
            self._native.check()
        except RuntimeError:
            if not self._native.destroyed:
                self.ballot.cast_left("it is poisoned")  # so that no peer waits
            raise

    def _failure(self, what: str, verdict: VoteError) -> Exception:
        """Returns the exception for a failed vote. It has the same class on every rank."""
        name = self._native.name
        message = f"collx.{what} on {name!r}: {verdict}"
        if verdict.left:
            # A rank leaves when it raises a failure that its communicator has recorded. If this
            # rank also has a record of the failure, it raises the same error.
            try:
                self._native.check()
            except CollectiveError as recorded:
                return recorded
        gone = verdict.absent + verdict.left
        if gone or verdict.store_failed:
            # The missing rank may never make this call, and later votes would then not match.
            ranks = range(self._native.world_size)
            waiting = next((rank for rank in ranks if rank not in gone), self._native.rank)
            absent = gone[0] if gone else -1
            self._native.report_absent(waiting, absent)
            return CollectiveTimeout(
                message, name, {"phase": "vote", "rank": waiting, "peer": absent}
            )
        if verdict.apart:
            return CollectiveMismatch(message, name, {"phase": "vote"})
        own = verdict.__cause__
        if verdict.everywhere and isinstance(own, (TypeError, ValueError, NotImplementedError)):
            return own
        return InitError(message, name, what, verdict.failures)

    def _check_device(self, device: torch.device | str | int | None) -> None:
        if device is None:
            return
        asked, own = torch.device(device), self._device
        if asked.type != own.type or asked.index not in (None, own.index):
            raise ValueError(f"empty: device: got {asked}; accepted: the communicator's, {own}")

    def _check_tensor(self, tensor: object) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"register: tensor: got a {type(tensor).__name__}; accepted: a Tensor")
        if tensor.layout != torch.strided:
            raise TypeError(
                f"register: tensor: got layout {tensor.layout}; accepted: torch.strided"
            )
        if tensor.device != self._device:
            raise ValueError(
                f"register: tensor: got a tensor on {tensor.device}; accepted: the communicator's "
                f"device, {self._device}"
            )
        if tensor.untyped_storage().nbytes() == 0:
            raise ValueError(
                "register: tensor: got a tensor without elements; accepted: one with a storage"
            )


def _dtype(dtype: object) -> torch.dtype:
    if dtype is None:
        return torch.get_default_dtype()
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"empty: dtype: got a {type(dtype).__name__}; accepted: a torch.dtype")
    # Such a tensor would have no quantizer, and PyTorch crashes when it reads one.
    if torch.empty(0, dtype=dtype, device="cpu").is_quantized:
        raise TypeError(f"empty: dtype: got {dtype}; accepted: any dtype that is not quantized")
    return dtype


def _shape(size: tuple[int | Sequence[int], ...]) -> tuple[int, ...]:
    try:
        flat = tuple(
            operator.index(n)
            for item in size
            for n in (item if isinstance(item, Iterable) else (item,))
        )
    except TypeError:
        raise TypeError(f"empty: size: got {size!r}; accepted: integers") from None
    if any(n < 0 for n in flat):
        raise ValueError(f"empty: size: got {flat}; accepted: dimensions of 0 or more")
    return flat
