"""Symmetric tensors, which peers read and write in place. All functions here are collective."""

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
    """Allocates a symmetric tensor and registers it with a communicator, so that peers can read and
    write it in place. Collective, with the same arguments on all ranks.

    Args:
        size: the shape, as integers or as one sequence. A tensor without elements is an ordinary
            tensor. So are all tensors if the communicator uses the process group.
        dtype: by default torch's default dtype.
        device: the device of the communicator; any other device is an error.
        group: the communicator, as in `collx.allreduce`.

    Returns:
        A contiguous tensor that is not initialized. Every rank must keep its tensor as long as any
        rank uses it in a call. The tensor is symmetric as long as its storage keeps this memory:
        after `share_memory_()` or `set_()`, which replace the memory, it is an ordinary tensor.
        All ranks must then do the same, as with all arguments.

    Raises:
        ValueError, TypeError: all ranks passed invalid arguments.
        InitError: a rank passed invalid arguments, or could not allocate or map the memory. All
            ranks raise it, with the rank and the cause.
        CollectiveMismatch: the ranks requested different tensors, or made different calls.
        CollectiveTimeout: a rank did not make the call in time. The communicator is poisoned.
    """
    return get(group)._memory.empty(size, dtype, device)


def empty_like(
    tensor: torch.Tensor, *, dtype: torch.dtype | None = None, group: Group = None
) -> torch.Tensor:
    """Allocates a symmetric tensor with the shape of `tensor` and, unless `dtype` is given, its
    dtype. The result is contiguous, whatever the strides of `tensor` are. See `collx.empty`."""
    return get(group)._memory.empty_like(tensor, dtype)


def zeros(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    device: torch.device | str | int | None = None,
    group: Group = None,
) -> torch.Tensor:
    """Allocates a symmetric tensor of zeros. Each rank fills its own tensor. See `collx.empty`."""
    return empty(*size, dtype=dtype, device=device, group=group).zero_()


def register(tensor: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Registers a tensor that PyTorch's symmetric memory has allocated. All tensors that share its
    storage become symmetric. Collective: the tensors of all ranks have the same size, dtype and
    storage offset.

    Returns:
        The tensor.

    Raises:
        ValueError, TypeError: no rank passed a tensor on the communicator's device that was
            allocated as symmetric memory.
        InitError: the tensor of a rank is on another device, was not allocated as symmetric
            memory, or could not be mapped. All ranks raise it, with the rank and the cause.
        CollectiveMismatch: the tensors of the ranks do not match, or the ranks made different
            calls.
        CollectiveTimeout: a rank did not make the call in time. The communicator is poisoned.
    """
    return get(group).register(tensor)
