"""The numeric contract in plain PyTorch: the oracle that every kernel is compared with.

Sum, avg and prod start as rank 0's value and accumulate the other ranks in order, in float32
(float64 for float64; integers wrap in their own width), and round once to the dtype, to nearest
even. avg divides the float32 sum by the number of ranks before that rounding. max and min
propagate NaN, order +0 above -0, and are exact. Only the payload of a NaN is left open.

Every step is one correctly rounded IEEE operation, so the same bits come out on CPU and CUDA
tensors, and with `torch.set_flush_denormal(True)` too: that switch is off while these functions
compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

__all__ = ["REDUCE_OPS", "allreduce", "same_bits"]

REDUCE_OPS = ("sum", "avg", "max", "min", "prod")

# Below PyTorch's grain size an operator runs in the calling thread. The threads of its pool keep
# the denormal mode that they were created with, which nothing here could change.
_CHUNK = 1 << 14

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def allreduce(inputs: Sequence[torch.Tensor], reduce_op: str = "sum") -> torch.Tensor:
    """What every rank gets from an all-reduce of `inputs[r]`, the input of rank r.

    Args:
        inputs: one tensor a rank, of one shape, dtype and device.
        reduce_op: "sum", "avg", "max", "min" or "prod" ("product").

    Returns:
        A new contiguous tensor of that shape and dtype.

    Raises:
        ValueError: no inputs, unequal shapes or devices, an unknown reduce op.
        TypeError: unequal dtypes, or avg of integers.
    """
    op = "prod" if reduce_op == "product" else reduce_op
    if op not in REDUCE_OPS:
        raise ValueError(f"allreduce: reduce_op {reduce_op!r} is none of {', '.join(REDUCE_OPS)}")
    if not inputs:
        raise ValueError("allreduce: inputs is empty; one tensor a rank is needed")
    first = inputs[0]
    for rank, tensor in enumerate(inputs):
        if tensor.dtype != first.dtype:
            raise TypeError(f"allreduce: rank {rank} has {tensor.dtype}, rank 0 {first.dtype}")
        if tensor.shape != first.shape or tensor.device != first.device:
            raise ValueError(
                f"allreduce: rank {rank} has {tuple(tensor.shape)} on {tensor.device}, "
                f"rank 0 {tuple(first.shape)} on {first.device}"
            )
    if op == "avg" and not first.is_floating_point():
        raise TypeError(f"allreduce: avg of {first.dtype}; avg takes floating-point tensors")

    flat = [tensor.detach().reshape(-1) for tensor in inputs]
    output = torch.empty(first.numel(), dtype=first.dtype, device=first.device)
    with _subnormals_kept():
        for start in range(0, first.numel(), _CHUNK):
            piece = slice(start, start + _CHUNK)
            output[piece] = _reduce([tensor[piece] for tensor in flat], op)
    return output.reshape(first.shape)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether `a` and `b` have one shape and dtype, NaN in the same places, and equal bits in all
    others. Unlike torch.equal: NaN equals NaN whatever its payload, and -0 is not +0."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    bits_a, bits_b = _without_nan(a), _without_nan(b)
    return torch.equal(bits_a, bits_b.to(bits_a.device))


def _without_nan(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers, every NaN replaced by one and the same pattern."""
    dense = tensor.detach().contiguous()
    if not dense.is_floating_point():
        return dense
    bits = dense.view(_BITS[dense.element_size()])
    # All ones is a NaN in every format, so it meets no other value.
    return torch.where(dense != dense, torch.full_like(bits, -1), bits)


def _reduce(values: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    dtype = values[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    step = _STEPS[op]
    total = values[0].to(wide)
    for value in values[1:]:
        total = step(total, value.to(wide))
    if op == "avg":
        # By a tensor: a scalar divisor may be carried out as a multiplication by its reciprocal.
        total = total / torch.full_like(total, len(values))
    return total.to(dtype)


def _max(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    greater = torch.maximum(a, b)
    if not a.is_floating_point():
        return greater
    # The sum of two zeros is -0 only if both are.
    return torch.where((a == 0) & (b == 0), a + b, greater)


def _min(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if not a.is_floating_point():
        return torch.minimum(a, b)
    return -_max(-a, -b)


_STEPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": _max,
    "min": _min,
    "prod": torch.mul,
}


@contextmanager
def _subnormals_kept() -> Iterator[None]:
    """Switches flushing of denormals off for the calling thread, and back on if it was on."""
    smallest = torch.ones(1, dtype=torch.int32).view(torch.float32)
    flushing = int((smallest * 1.0).view(torch.int32)) == 0
    if flushing:
        torch.set_flush_denormal(False)
    try:
        yield
    finally:
        if flushing:
            torch.set_flush_denormal(True)
