"""Deterministic test data: every rank can make every rank's input, and so the reference too."""

from __future__ import annotations

from functools import lru_cache

import torch

DTYPES = ("float32", "float16", "bfloat16", "float64", "int32", "int64", "int8", "uint8")
FLOATS = ("float32", "float16", "bfloat16", "float64")
REDUCE_OPS = ("sum", "avg", "max", "min", "prod")

_SAME_SIZE_INT = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def dtype_of(name: str) -> torch.dtype:
    """torch.float32 for "float32"."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def legal_ops(dtype: str) -> tuple[str, ...]:
    """The reduce ops that exist for a dtype: an average of integers does not."""
    return tuple(op for op in REDUCE_OPS if op != "avg" or dtype in FLOATS)


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: comparing them compares bits."""
    return tensor.view(_SAME_SIZE_INT[tensor.element_size()])


def _random_bits(dtype: torch.dtype, numel: int, generator: torch.Generator) -> torch.Tensor:
    nbytes = numel * dtype.itemsize
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator).view(dtype)


def _special_floats(dtype: torch.dtype) -> torch.Tensor:
    info = torch.finfo(dtype)
    values = [0.0, -0.0, 1.0, -1.0, float("inf"), -float("inf"), float("nan"), info.max, info.min]
    values += [info.tiny, -info.tiny, info.smallest_normal / 2, 1 + info.eps, 1 / 3]
    as_floats = torch.tensor(values, dtype=torch.float64).to(dtype)
    ints = _SAME_SIZE_INT[dtype.itemsize]
    top = torch.iinfo(ints)
    # Smallest subnormals of both signs, and the NaNs with the lowest, the highest and all bits.
    bits = torch.tensor([1, top.min + 1, -1, top.max, -2], dtype=ints)
    return torch.cat([as_floats, bits.view(dtype)])


def _special_ints(dtype: torch.dtype) -> torch.Tensor:
    info = torch.iinfo(dtype)
    return torch.tensor([0, 1, info.max, info.min, info.max - 1, 2, 3], dtype=dtype)


def make_values(style: str, dtype_name: str, numel: int, seed: int, rank: int) -> torch.Tensor:
    """A rank's input, on the CPU, contiguous, of shape [numel].

    Styles: "random" (normal floats, any integers), "bits" (any bit pattern), "special" (zeros,
    subnormals, infinities, NaNs, extreme integers in changing combinations), "ones" (all bits set:
    -1, 255, the NaN that arms the slots), "patterns" (each 16-bit pattern in turn), "delayed"
    (small integers, whose sums are exact)."""
    dtype = dtype_of(dtype_name)
    generator = torch.Generator().manual_seed(seed * 1009 + rank)
    if style == "ones":
        return torch.full((numel * dtype.itemsize,), 255, dtype=torch.uint8).view(dtype)
    if style == "patterns":
        patterns = torch.arange(numel, dtype=torch.int64) * (2 * rank + 1) + rank * 12345
        return patterns.to(torch.int16).view(dtype)
    if style == "special":
        table = _special_floats(dtype) if dtype.is_floating_point else _special_ints(dtype)
        return table[torch.randint(0, len(table), (numel,), generator=generator)]
    if style == "bits" or not dtype.is_floating_point:
        return _random_bits(dtype, numel, generator)
    return torch.randn(numel, generator=generator, dtype=torch.float32).to(dtype)


@lru_cache(maxsize=8)
def inputs_and_reference(
    world: int, style: str, dtype: str, reduce_op: str, numel: int, seed: int
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Every rank's input, and what the reference makes of them. Not to be written to."""
    from collx import reference

    inputs = [make_values(style, dtype, numel, seed, rank) for rank in range(world)]
    return inputs, reference.allreduce(inputs, reduce_op)


def poison(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory in which every element is a NaN (integers: a bit pattern of its own)."""
    tensor = torch.full((numel * dtype.itemsize,), 0x5A, dtype=torch.uint8).view(dtype)
    if dtype.is_floating_point:
        tensor.fill_(float("nan"))
    return tensor.to(device)
