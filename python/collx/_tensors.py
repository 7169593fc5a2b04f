"""Symmetric tensors: allocation and registration, both collective and voted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from collx import _symmetric
from collx._vote import VoteError
from collx.errors import CollectiveMismatch, InitError

if TYPE_CHECKING:
    from collx.communicator import Communicator

__all__ = ["empty", "register"]


def empty(
    communicator: Communicator,
    size: tuple[int | Sequence[int], ...],
    dtype: torch.dtype | None,
) -> torch.Tensor:
    """See collx.empty."""
    shape = _shape(size)
    dtype = torch.get_default_dtype() if dtype is None else dtype
    communicator._native.check()
    _agree(communicator, "empty", {"shape": list(shape), "dtype": str(dtype)})
    if 0 in shape:  # no byte of it is ever read, and PyTorch allocates no empty block
        return torch.empty(shape, dtype=dtype, device=communicator.device)
    tensor, error = None, None
    try:
        if communicator.fallback_reason is not None:
            tensor = torch.empty(shape, dtype=dtype, device=communicator.device)
        else:
            tensor = _symmetric.allocate(shape, dtype, communicator.device)
    except Exception as reason:
        error = f"{type(reason).__name__}: {reason}"
    _vote(communicator, "empty: allocation", error)
    assert tensor is not None
    return _exchange(communicator, "empty", tensor)


def register(communicator: Communicator, tensor: torch.Tensor) -> torch.Tensor:
    """See collx.register."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"register: tensor is a {type(tensor).__name__}, not a torch.Tensor")
    if tensor.layout != torch.strided:
        raise TypeError(f"register: tensor has layout {tensor.layout}; only strided tensors")
    if tensor.device != communicator.device:
        raise ValueError(
            f"register: tensor is on {tensor.device}, the communicator on {communicator.device}"
        )
    communicator._native.check()
    if tensor.untyped_storage().nbytes() == 0:
        raise ValueError("register: tensor has no storage")
    return _exchange(communicator, "register", tensor)


def _exchange(communicator: Communicator, what: str, tensor: torch.Tensor) -> torch.Tensor:
    """Agrees that all ranks mean the same allocation (hazard 16), and registers it."""
    if communicator.fallback_reason is not None:
        return tensor  # no peer reads it directly, so nothing is to be known of it
    storage = tensor.untyped_storage()
    key = communicator._allocations + 1
    mine = {"id": key, "bytes": storage.nbytes(), "dtype": str(tensor.dtype)}
    _agree(communicator, what, mine)

    rendezvous = communicator._setup.rendezvous
    assert rendezvous is not None
    pointers: list[int] = []
    error, offset, started = None, 0, time.monotonic()
    try:
        pointers, offset = rendezvous.exchange(tensor)
    except Exception as reason:
        error = f"{type(reason).__name__}: {reason}"
    _vote(communicator, f"{what}: rendezvous", error, time.monotonic() - started)
    # A difference means that ranks would read other bytes than the peers wrote.
    _agree(communicator, what, {"offset": offset})
    communicator._allocations = key
    communicator._native.register(tensor, pointers, storage.nbytes(), key)
    return tensor


def _agree(communicator: Communicator, what: str, value: dict[str, object]) -> None:
    try:
        values = communicator._setup.ballot.vote(what, value)
    except VoteError as reason:
        raise CollectiveMismatch(f"collx.{what} on {communicator.name!r}: {reason}") from None
    if any(other != values[0] for other in values):
        each = ", ".join(f"rank {rank}: {other}" for rank, other in enumerate(values))
        raise CollectiveMismatch(f"collx.{what} on {communicator.name!r}: ranks differ ({each})")


def _vote(communicator: Communicator, what: str, error: str | None, spent: float = 0.0) -> None:
    try:
        communicator._setup.ballot.vote(what, error=error, spent=spent)
    except VoteError as reason:
        raise InitError(f"collx.{what} on {communicator.name!r} failed: {reason}") from None


def _shape(size: tuple[int | Sequence[int], ...]) -> tuple[int, ...]:
    flat: list[int] = []
    for item in size:
        flat.extend([item] if isinstance(item, int) else item)
    if any(not isinstance(n, int) for n in flat):
        raise TypeError(f"empty: size {size!r} is not made of integers")
    if any(n < 0 for n in flat):
        raise ValueError(f"empty: size {tuple(flat)} has a negative dimension")
    return tuple(flat)
