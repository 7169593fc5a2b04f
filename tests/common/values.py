"""Deterministic test data: every rank can make every rank's input, and so the reference too."""

from __future__ import annotations

from functools import lru_cache

import torch

DTYPES = ("float32", "float16", "bfloat16", "float64", "int32", "int64", "int8", "uint8")
FLOATS = ("float32", "float16", "bfloat16", "float64")
REDUCE_OPS = ("sum", "avg", "max", "min", "prod")

# Those that can only be copied, as so many elements of one whose special values are known.
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
# PyTorch cannot fill what packs several elements into a byte, but the ops can move it.
PACKED = "float4_e2m1fn_x2"
COPIED = (*DTYPES, "bool", "int16", *(name for name in _MADE_OF if name != PACKED))

# Words that the slots of some form could take for "nothing has arrived", for flags that say which
# words were that, or for the epoch of a call.
_ARMED = (-1, 0, 0x7FFFFFFF, -0x80000000, -2, 0x7FFF7FFF, -32769, 65535, -65536, 1, 2, 3, 4)

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


def unequal(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Which elements of two tensors of one shape and any dtype differ in some bit, in 1-D."""
    if a.element_size() <= 8:
        return as_bits(a.contiguous().view(-1)) != as_bits(b.contiguous().view(-1))
    halves = [dense(tensor).view(-1).view(torch.int64).view(-1, 2) for tensor in (a, b)]
    return (halves[0] != halves[1]).any(1)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose strides are those of its shape, also where there is one element or none."""
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
    # Smallest subnormals of both signs, and the NaNs with the lowest, the highest and all bits.
    bits = torch.tensor([1, top.min + 1, -1, top.max, -2], dtype=ints)
    return torch.cat([as_floats, bits.view(dtype)])


def _special_ints(dtype: torch.dtype) -> torch.Tensor:
    info = torch.iinfo(dtype)
    return torch.tensor([0, 1, info.max, info.min, info.max - 1, 2, 3], dtype=dtype)


def _armed_words(dtype: torch.dtype, numel: int, generator: torch.Generator) -> torch.Tensor:
    """Stretches in which every word, some of them, or none is one of `_ARMED`: half the time the
    one with all bits set."""
    words = -(-numel * dtype.itemsize // 4)
    table = torch.tensor((-1,) * len(_ARMED) + _ARMED, dtype=torch.int32)
    special = table[torch.randint(0, len(table), (words,), generator=generator)]
    ordinary = _random_bits(torch.int32, words, generator)
    # A stretch is longer than a group of vectors that share their flags.
    stretches = torch.tensor([0.0, 0.3, 0.9, 1.0, 1.0])
    kinds = torch.randint(0, len(stretches), (words // 150 + 1,), generator=generator)
    share = stretches[kinds].repeat_interleave(150)[:words]
    chosen = torch.rand(words, generator=generator) < share
    mixed = torch.where(chosen, special, ordinary)
    return mixed.view(torch.uint8)[: numel * dtype.itemsize].view(dtype)


def make_values(style: str, dtype_name: str, numel: int, seed: int, rank: int) -> torch.Tensor:
    """A rank's input, on the CPU, contiguous, of shape [numel].

    Styles: "random" (normal floats, any integers), "bits" (any bit pattern), "special" (zeros,
    subnormals, infinities, NaNs, extreme integers in changing combinations), "ones" (all bits set:
    -1, 255, the NaN that arms the slots), "armed" (words that a slot could take for its own, alone
    and in long stretches), "patterns" (each 16-bit pattern in turn), "exact" (integers whose sums
    over the ranks are not rounded, in whatever order)."""
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
    """Every rank's input, and what the reference makes of them. Not to be written to."""
    from collx import reference

    inputs = [make_values(style, dtype, numel, seed, rank) for rank in range(world)]
    return inputs, reference.allreduce(inputs, reduce_op)


def poison(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory in which every element is a NaN (integers: a bit pattern of its own)."""
    pattern = 0 if dtype == torch.bool else 0x5A  # a bool has two legal patterns
    tensor = torch.full((numel * dtype.itemsize,), pattern, dtype=torch.uint8).view(dtype)
    if dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        tensor.fill_(float("nan"))
    return tensor.to(device)
