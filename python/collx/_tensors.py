"""Symmetric tensors: allocation and registration, both collective.

Each takes two votes: whether all ranks ask for the same and have the memory for it, and whether all
have mapped it. Whatever one rank refuses or fails at is a failure in a vote, never a reason not to
take part: it would be a vote behind its peers for good (hazard 30).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from collx import _symmetric
from collx._vote import LEFT, VoteError
from collx.errors import CollectiveMismatch, CollectiveTimeout, InitError

if TYPE_CHECKING:
    from collx.communicator import Communicator

__all__ = ["empty", "register"]


def empty(
    communicator: Communicator,
    size: tuple[int | Sequence[int], ...],
    dtype: torch.dtype | None,
    device: torch.device | str | int | None = None,
) -> torch.Tensor:
    """See collx.empty."""
    made: list[torch.Tensor] = []

    def allocate() -> dict[str, Any]:
        _check_device(communicator, device)
        shape = _shape(size)
        made.append(_allocate(communicator, shape, _dtype(dtype)))
        return {"shape": list(shape), **_identity(communicator, made[0])}

    _agree(communicator, "empty", allocate)
    return _share(communicator, "empty", made[0])


def register(communicator: Communicator, tensor: torch.Tensor) -> torch.Tensor:
    """See collx.register."""

    def identify() -> dict[str, Any]:
        _check_tensor(communicator, tensor)
        return _identity(communicator, tensor)

    _agree(communicator, "register", identify)
    return _share(communicator, "register", tensor)


def _allocate(
    communicator: Communicator, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    # Of an empty tensor no byte is ever read, and PyTorch allocates no empty block.
    if 0 in shape or communicator.fallback_reason is not None:
        return torch.empty(shape, dtype=dtype, device=communicator.device)
    return _symmetric.allocate(shape, dtype, communicator.device)


def _identity(communicator: Communicator, tensor: torch.Tensor) -> dict[str, Any]:
    """What must be equal on all ranks, so that they mean the same allocation (hazard 16)."""
    return {
        "id": communicator._allocations + 1,
        "bytes": tensor.untyped_storage().nbytes(),
        "dtype": str(tensor.dtype),
    }


def _share(communicator: Communicator, what: str, tensor: torch.Tensor) -> torch.Tensor:
    """Maps the peers' memory, and registers it."""
    nbytes = tensor.untyped_storage().nbytes()
    if communicator.fallback_reason is not None or nbytes == 0:
        return tensor  # no peer reads it directly, so nothing is to be known of it
    pointers: list[int] = []

    def meet() -> dict[str, Any]:
        rendezvous = communicator._setup.rendezvous
        assert rendezvous is not None
        mapped, offset = rendezvous.exchange(tensor)
        pointers.extend(mapped)
        # A difference means that ranks would read other bytes than the peers wrote.
        return {"offset": offset}

    _agree(communicator, f"{what}: rendezvous", meet)
    communicator._allocations += 1
    communicator._native.register(tensor, pointers, nbytes, communicator._allocations)
    return tensor


def _agree(communicator: Communicator, what: str, run: Callable[[], Any]) -> None:
    """Takes a step of which the same must come on every rank. All ranks raise if it does not."""
    _require_usable(communicator)
    try:
        values = communicator._setup.ballot.take(what, run)
    except VoteError as verdict:
        failure, own = _failure(communicator, what, verdict), verdict.__cause__
        raise failure from (None if failure is own else own)
    if any(other != values[0] for other in values):
        each = ", ".join(f"rank {rank}: {other}" for rank, other in enumerate(values))
        raise CollectiveMismatch(f"collx.{what} on {communicator.name!r}: ranks differ ({each})")


def _require_usable(communicator: Communicator) -> None:
    try:
        communicator._native.check()
    except RuntimeError:
        if not communicator.destroyed:
            communicator._setup.ballot.cast(f"{LEFT}: it is poisoned")  # so that no peer waits
        raise


def _failure(communicator: Communicator, what: str, verdict: VoteError) -> Exception:
    """What a vote that did not pass is raised as: the same class on every rank."""
    message = f"collx.{what} on {communicator.name!r}: {verdict}"
    gone = verdict.absent + verdict.left
    if gone or verdict.store_failed:
        # A rank may never make the call that its peers have given up: nothing would fit any more.
        ranks = range(communicator.world_size)
        waiting = next((rank for rank in ranks if rank not in gone), communicator.rank)
        communicator._native.report_absent(waiting, gone[0] if gone else -1)
        return CollectiveTimeout(message)
    if verdict.apart:
        return CollectiveMismatch(message)
    own = verdict.__cause__
    if verdict.everywhere and isinstance(own, (TypeError, ValueError)):
        return own
    return InitError(message)


def _check_device(communicator: Communicator, device: torch.device | str | int | None) -> None:
    if device is None:
        return
    asked, own = torch.device(device), communicator.device
    if asked.type != own.type or asked.index not in (None, own.index):
        raise ValueError(f"empty: device {asked}, but the communicator is on {own}")


def _dtype(dtype: object) -> torch.dtype:
    if dtype is None:
        return torch.get_default_dtype()
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"empty: dtype is a {type(dtype).__name__}, not a torch.dtype")
    return dtype


def _check_tensor(communicator: Communicator, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"register: tensor is a {type(tensor).__name__}, not a torch.Tensor")
    if tensor.layout != torch.strided:
        raise TypeError(f"register: tensor has layout {tensor.layout}; only strided tensors")
    if tensor.device != communicator.device:
        raise ValueError(
            f"register: tensor is on {tensor.device}, the communicator on {communicator.device}"
        )
    if tensor.untyped_storage().nbytes() == 0:
        raise ValueError("register: tensor has no storage")


def _shape(size: tuple[int | Sequence[int], ...]) -> tuple[int, ...]:
    flat: list[int] = []
    for item in size:
        flat.extend([item] if isinstance(item, int) else item)
    if any(not isinstance(n, int) for n in flat):
        raise TypeError(f"empty: size {size!r} is not made of integers")
    if any(n < 0 for n in flat):
        raise ValueError(f"empty: size {tuple(flat)} has a negative dimension")
    return tuple(flat)
