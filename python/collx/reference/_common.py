"""Helpers of the reference: checks of the inputs, and arithmetic that flushes no denormals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

__all__ = ["alike", "exactly", "larger", "smaller", "subnormals_kept"]


def alike(op: str, inputs: Sequence[torch.Tensor], shapes: bool = True) -> torch.Tensor:
    """Returns the first input. All must have the same dtype, device and, if `shapes`, shape."""
    if not inputs:
        raise ValueError(f"{op}: inputs is empty; accepted: one tensor for each rank")
    first = inputs[0]
    for rank, tensor in enumerate(inputs):
        if tensor.dtype != first.dtype:
            raise TypeError(f"{op}: rank {rank} has {tensor.dtype}, but rank 0 has {first.dtype}")
        if (shapes and tensor.shape != first.shape) or tensor.device != first.device:
            raise ValueError(
                f"{op}: rank {rank} has {tuple(tensor.shape)} on {tensor.device}, "
                f"rank 0 {tuple(first.shape)} on {first.device}"
            )
    return first


@contextmanager
def subnormals_kept() -> Iterator[None]:
    """Disables flushing of denormals in the calling thread, and restores it afterwards."""
    smallest = torch.ones(1, dtype=torch.int32, device="cpu").view(torch.float32)
    flushing = int((smallest * 1.0).view(torch.int32)) == 0
    if flushing:
        torch.set_flush_denormal(False)
    try:
        yield
    finally:
        if flushing:
            torch.set_flush_denormal(True)


@contextmanager
def exactly() -> Iterator[None]:
    """Makes every operation round once and flush nothing. Uses a single thread, because the threads
    of PyTorch's pool keep the denormal mode that they were created with."""
    threads = torch.get_num_threads()
    with subnormals_kept():
        try:
            if threads > 1:
                torch.set_num_threads(1)
            yield
        finally:
            if threads > 1:
                torch.set_num_threads(threads)


def larger(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns the maximum: NaN if either value is NaN, and +0 above -0."""
    greater = torch.maximum(a, b)
    if not a.is_floating_point():
        return greater
    # The sum of two zeros is -0 only if both are.
    return torch.where((a == 0) & (b == 0), a + b, greater)


def smaller(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if not a.is_floating_point():
        return torch.minimum(a, b)
    return -larger(-a, -b)
