"""Deterministic test data. Every rank can create the inputs of all ranks and the reference."""

from __future__ import annotations

from functools import lru_cache

import torch

from collx import reference

DTYPES = ("float32", "float16", "bfloat16", "float64", "int32", "int64", "int8", "uint8")
FLOATS = ("float32", "float16", "bfloat16", "float64")
REDUCE_OPS = ("sum", "avg", "max", "min", "prod")

# Dtypes that can only be copied, as several elements of a dtype with known special values.
_MADE_OF = {
    "complex32": ("float16", 2),
    "complex64": ("float32", 2),
    "complex128": ("float64", 2),
    "uint16": ("int16", 1),
    "uint32": ("int32", 1),
    "uint64": ("int64", 1),
    "float8_e4m3fn": ("uint8", 1),
    "float8_e4m3fnuz": ("uint8", 1),
    "float8_e5m2": ("uint8", 1),
    "float8_e5m2fnuz": ("uint8", 1),
    "float8_e8m0fnu": ("uint8", 1),
    "float4_e2m1fn_x2": ("uint8", 1),
}
# PyTorch cannot fill a dtype with several elements per byte, but the operators can copy it.
PACKED = "float4_e2m1fn_x2"
COPIED = (*DTYPES, "bool", "int16", *(name for name in _MADE_OF if name != PACKED))

# Words that some protocol could interpret as an empty slot, as the flags of such words, or as the
# epoch of a call.
_ARMED = (-1, 0, 0x7FFFFFFF, -0x80000000, -2, 0x7FFF7FFF, -32769, 65535, -65536, 1, 2, 3, 4)

_SAME_SIZE_INT = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def dtype_of(name: str) -> torch.dtype:
    """Returns the dtype with a name, such as torch.float32 for "float32"."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def legal_ops(dtype: str) -> tuple[str, ...]:
    """Returns the reduce ops of a dtype. Integers have no average."""
    return tuple(op for op in REDUCE_OPS if op != "avg" or dtype in FLOATS)


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view as integers, for comparisons of bits."""
    return tensor.view(_SAME_SIZE_INT[tensor.element_size()])


def unequal(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns a 1-D mask of the elements that differ in any bit. The tensors have the same shape
    and any dtype."""
    if a.element_size() <= 8:
        return as_bits(a.contiguous().view(-1)) != as_bits(b.contiguous().view(-1))
    halves = [dense(tensor).view(-1).view(torch.int64).view(-1, 2) for tensor in (a, b)]
    return (halves[0] != halves[1]).any(1)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous copy with the default strides of its shape, also with one element or
    none."""
    return tensor.clone(memory_format=torch.contiguous_format)


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
    # The smallest subnormals of both signs, and the NaNs with the lowest, the highest and all bits.
    bits = torch.tensor([1, top.min + 1, -1, top.max, -2], dtype=ints)
    return torch.cat([as_floats, bits.view(dtype)])


def _special_ints(dtype: torch.dtype) -> torch.Tensor:
    info = torch.iinfo(dtype)
    return torch.tensor([0, 1, info.max, info.min, info.max - 1, 2, 3], dtype=dtype)


def _armed_words(dtype: torch.dtype, numel: int, generator: torch.Generator) -> torch.Tensor:
    """Returns sections in which all, some or none of the words are from `_ARMED`. Half of these
    words have all bits set."""
    words = -(-numel * dtype.itemsize // 4)
    table = torch.tensor((-1,) * len(_ARMED) + _ARMED, dtype=torch.int32)
    special = table[torch.randint(0, len(table), (words,), generator=generator)]
    ordinary = _random_bits(torch.int32, words, generator)
    # A section is longer than a group of vectors that share their flags.
    stretches = torch.tensor([0.0, 0.3, 0.9, 1.0, 1.0])
    kinds = torch.randint(0, len(stretches), (words // 150 + 1,), generator=generator)
    share = stretches[kinds].repeat_interleave(150)[:words]
    chosen = torch.rand(words, generator=generator) < share
    mixed = torch.where(chosen, special, ordinary)
    return mixed.view(torch.uint8)[: numel * dtype.itemsize].view(dtype)


def make_values(style: str, dtype_name: str, numel: int, seed: int, rank: int) -> torch.Tensor:
    """Returns a rank's input, a contiguous CPU tensor [numel].

    Styles: "random" (normal floats, any integers), "bits" (any bit pattern), "special" (zeros,
    subnormals, infinities, NaNs, extreme integers in changing combinations), "ones" (all bits set:
    -1, 255, the NaN that arms the slots), "armed" (words that have a meaning in slots, single and
    in long sections), "patterns" (all 16-bit patterns in order), "exact" (integers whose sums over
    the ranks are exact in any order)."""
    if dtype_name == "bool":
        return (make_values(style, "uint8", numel, seed, rank) & 1).view(torch.bool)
    if dtype_name in _MADE_OF:
        other, count = _MADE_OF[dtype_name]
        return make_values(style, other, numel * count, seed, rank).view(dtype_of(dtype_name))
    dtype = dtype_of(dtype_name)
    generator = torch.Generator().manual_seed(seed * 1009 + rank)
    if style == "ones":
        return torch.full((numel * dtype.itemsize,), 255, dtype=torch.uint8).view(dtype)
    if style == "patterns":
        patterns = torch.arange(numel, dtype=torch.int64) * (2 * rank + 1) + rank * 12345
        return patterns.to(torch.int16).view(dtype)
    if style == "armed":
        return _armed_words(dtype, numel, generator)
    if style == "exact":
        return torch.randint(-8, 9, (numel,), generator=generator).to(dtype)
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
    """Returns the inputs of all ranks and the result of the reference. Must not be modified."""
    inputs = [make_values(style, dtype, numel, seed, rank) for rank in range(world)]
    return inputs, reference.allreduce(inputs, reduce_op)


def poison(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns memory in which every element is NaN (for integers, a fixed bit pattern)."""
    pattern = 0 if dtype == torch.bool else 0x5A  # a bool only has two valid patterns
    tensor = torch.full((numel * dtype.itemsize,), pattern, dtype=torch.uint8).view(dtype)
    if dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        tensor.fill_(float("nan"))
    return tensor.to(device)
