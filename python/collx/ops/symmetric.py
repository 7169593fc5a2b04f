"""Symmetric tensors: peers read and write them in place. All functions here are collective."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from collx._groups import Group, get

__all__ = ["empty", "empty_like", "register", "zeros"]


def empty(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    device: torch.device | str | int | None = None,
    group: Group = None,
) -> torch.Tensor:
    """Allocates a symmetric tensor, registered with a communicator: peers read and write it in
    place. Collective, with the same arguments on every rank.

    Args:
        size: the shape, as integers or one sequence. Without elements it is an ordinary tensor.
        dtype: by default torch's default dtype.
        device: the communicator's; another one is refused.
        group: the communicator.

    Returns:
        A contiguous tensor, not initialized. Every rank must keep its own while any rank uses
        them in a call. It is symmetric as long as its storage keeps this memory. After
        `share_memory_()` or `set_()`, which replace it, the tensor is an ordinary one; all ranks
        have to agree on that, as on all arguments.

    Raises:
        ValueError, TypeError: arguments that every rank refuses.
        InitError: some rank refused its arguments, or could not allocate or map it; rank and cause
            are named on all of them.
        CollectiveMismatch: the ranks asked for different tensors, or made different calls.
        CollectiveTimeout: some rank did not come. The communicator is poisoned then.
    """
    return get(group)._memory.empty(size, dtype, device)


def empty_like(
    tensor: torch.Tensor, *, dtype: torch.dtype | None = None, group: Group = None
) -> torch.Tensor:
    """`empty` of the shape and, if none is given, the dtype of `tensor`. Contiguous, whatever
    the strides of `tensor` are."""
    return get(group)._memory.empty_like(tensor, dtype)


def zeros(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    device: torch.device | str | int | None = None,
    group: Group = None,
) -> torch.Tensor:
    """`empty`, filled with zeros. Each rank fills its own."""
    return empty(*size, dtype=dtype, device=device, group=group).zero_()


def register(tensor: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Registers a tensor that PyTorch's symmetric memory allocated. Collective, with tensors of
    one size and dtype at one offset. All tensors that share its storage count as symmetric then.

    Returns:
        The tensor.

    Raises:
        ValueError, TypeError: no rank has a tensor of the communicator's device.
        InitError: some rank's tensor is not, or was not allocated as symmetric memory, or not
            mapped; rank and cause are named on all of them.
        CollectiveMismatch: the ranks' tensors do not fit together, or they made different calls.
        CollectiveTimeout: some rank did not come. The communicator is poisoned then.
    """
    return get(group).register(tensor)
