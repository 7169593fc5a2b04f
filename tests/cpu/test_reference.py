"""Compares collx.reference with exact arithmetic on fractions.

All other tests compare with collx.reference. These tests compare it with code that does not use
PyTorch.
"""

from __future__ import annotations

import itertools
import math
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import NamedTuple

import pytest
import torch

from collx import reference


class Format(NamedTuple):
    """A binary floating-point format. `wide`: the dtype in which sums are accumulated."""

    dtype: torch.dtype
    integer: torch.dtype
    exponent_bits: int
    fraction_bits: int
    wide: torch.dtype


FORMATS = {
    f.dtype: f
    for f in (
        Format(torch.float16, torch.int16, 5, 10, torch.float32),
        Format(torch.bfloat16, torch.int16, 8, 7, torch.float32),
        Format(torch.float32, torch.int32, 8, 23, torch.float32),
        Format(torch.float64, torch.int64, 11, 52, torch.float64),
    )
}
FLOATS = tuple(FORMATS)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)

# Python floats represent the values of all formats, because all of them are float64 values.
SPECIAL = (0.0, -0.0, 1.0, -1.0, 1.5, 3.0, -7.0, 0.1, 1 / 3, math.inf, -math.inf, math.nan)


def limits(f: Format) -> list[float]:
    """Returns the largest, the smallest normal and subnormal numbers, and ties between
    neighbors."""
    bias = 2 ** (f.exponent_bits - 1) - 1
    ulp = 2.0**-f.fraction_bits
    largest = (2 - ulp) * 2.0**bias
    normal = 2.0 ** (1 - bias)
    # ldexp avoids an underflow for float64.
    subnormal = math.ldexp(1.0, 1 - bias - f.fraction_bits)
    positive = [largest, largest / 2, normal, normal - subnormal, subnormal, 3 * subnormal]
    positive += [1 + ulp, 1 + 2 * ulp, ulp, ulp / 2, ulp / 2 * (1 + ulp)]
    return [sign * value for value in positive for sign in (1, -1)]


def round_to(value: Fraction, f: Format, sign_of_zero: float = 1.0) -> float:
    """Rounds `value` to the format, to nearest even. `sign_of_zero`: the sign of an exact zero."""
    if value == 0:
        return math.copysign(0.0, sign_of_zero)
    bias = 2 ** (f.exponent_bits - 1) - 1
    magnitude, sign = abs(value), -1.0 if value < 0 else 1.0
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > magnitude
    exponent = max(exponent, 1 - bias)
    step = Fraction(2) ** (exponent - f.fraction_bits)
    quotient, remainder = divmod(magnitude, step)
    quotient += remainder * 2 > step or (remainder * 2 == step and quotient % 2 == 1)
    rounded = quotient * step
    if rounded >= Fraction(2) ** (bias + 1):
        return sign * math.inf
    return sign * float(rounded)


def add(a: float, b: float, f: Format) -> float:
    if not (math.isfinite(a) and math.isfinite(b)):
        return a + b
    # x + -x is +0. Only the sum of two negative zeros is -0.
    zero = -1.0 if math.copysign(1, a) < 0 and math.copysign(1, b) < 0 else 1.0
    return round_to(Fraction(a) + Fraction(b), f, zero)


def multiply(a: float, b: float, f: Format) -> float:
    if not (math.isfinite(a) and math.isfinite(b)):
        return a * b
    sign = math.copysign(1, a) * math.copysign(1, b)
    exact = Fraction(a) * Fraction(b)
    rounded = round_to(abs(exact), f)
    return math.copysign(rounded, sign)


def greater(a: float, b: float, f: Format) -> float:
    if math.isnan(a) or math.isnan(b):
        return math.nan
    return max(a, b, key=lambda v: (v, math.copysign(1, v)))


def smaller(a: float, b: float, f: Format) -> float:
    if math.isnan(a) or math.isnan(b):
        return math.nan
    return min(a, b, key=lambda v: (v, math.copysign(1, v)))


EXACT: dict[str, Callable[[float, float, Format], float]] = {
    "sum": add,
    "avg": add,
    "prod": multiply,
    "max": greater,
    "min": smaller,
}


def convert(value: float, f: Format) -> float:
    return round_to(Fraction(value), f, value) if math.isfinite(value) else value


def exact_allreduce(values: Sequence[float], op: str, f: Format) -> float:
    """Implements the numeric contract on Python floats that are values of the format."""
    wide = FORMATS[f.wide]
    total = values[0]
    for value in values[1:]:
        total = EXACT[op](total, value, wide)
    if op == "avg" and math.isfinite(total):
        total = round_to(Fraction(total) / len(values), wide, total)
    return convert(total, f)


def values_of(f: Format) -> list[float]:
    # By their text, since a set would drop one of the zeros.
    found = {repr(value): value for value in (convert(v, f) for v in (*SPECIAL, *limits(f)))}
    return [found[text] for text in sorted(found)]


def tensor_of(values: Sequence[float], f: Format) -> torch.Tensor:
    """Creates a tensor from bits, so that PyTorch converts nothing."""
    bits = [encode(value, f) for value in values]
    top = 1 << (f.exponent_bits + f.fraction_bits)
    signed = [b - 2 * top if b >= top else b for b in bits]
    return torch.tensor(signed, dtype=f.integer).view(f.dtype)


def encode(value: float, f: Format) -> int:
    """Returns the bits of a value of the format."""
    sign = (math.copysign(1, value) < 0) << (f.exponent_bits + f.fraction_bits)
    all_ones = (1 << f.exponent_bits) - 1
    if math.isnan(value):
        return all_ones << f.fraction_bits | 1 << (f.fraction_bits - 1)
    if math.isinf(value):
        return sign | all_ones << f.fraction_bits
    if value == 0:
        return sign
    bias = all_ones >> 1
    _, exponent = math.frexp(value)
    biased = max(exponent - 1 + bias, 1)
    units = Fraction(abs(value)) / Fraction(2) ** (biased - bias - f.fraction_bits)
    assert units.denominator == 1, f"{value} is no value of {f.dtype}"
    # The leading one of a normal number is in `units`. Adding it corrects the exponent field.
    return sign | ((biased - 1) << f.fraction_bits) + units.numerator


@contextmanager
def flush_denormal(on: bool) -> Iterator[None]:
    """Only use this for the code under test: the mode also affects Python's own floats."""
    if not torch.set_flush_denormal(on):
        pytest.skip("this CPU cannot flush denormals")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def check(columns: Sequence[Sequence[float]], op: str, f: Format, flushing: bool = False) -> None:
    """Compares an all-reduce with the exact one. `columns[i]`: the ranks' values of element i."""
    inputs = [tensor_of(row, f) for row in zip(*columns, strict=True)]
    expected = tensor_of([exact_allreduce(column, op, f) for column in columns], f)
    with flush_denormal(flushing):
        result = reference.allreduce(inputs, op)
        same = reference.same_bits(result, expected)
    if not same:
        bits = (result.view(f.integer), expected.view(f.integer))
        wrong = next(
            i for i in range(len(columns)) if not reference.same_bits(result[i], expected[i])
        )
        pytest.fail(f"{op} of {columns[wrong]} in {f.dtype}: {[b[wrong].item() for b in bits]}")


MODES = pytest.mark.parametrize("flushing", [False, True], ids=["kept", "flush_denormal"])


def test_encode_agrees_with_the_machine() -> None:
    f = FORMATS[torch.float32]
    for value in values_of(f):
        if not math.isnan(value):
            assert encode(value, f) == struct.unpack("<I", struct.pack("<f", value))[0]
    f = FORMATS[torch.float64]
    for value in values_of(f):
        if not math.isnan(value):
            assert encode(value, f) == struct.unpack("<Q", struct.pack("<d", value))[0]


@MODES
@pytest.mark.parametrize("op", reference.REDUCE_OPS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_special_values_are_exact(dtype: torch.dtype, op: str, flushing: bool) -> None:
    f = FORMATS[dtype]
    check(list(itertools.product(values_of(f), repeat=2)), op, f, flushing)


@MODES
@pytest.mark.parametrize("op", reference.REDUCE_OPS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("world", [1, 3, 16])
def test_random_values_are_exact(dtype: torch.dtype, op: str, world: int, flushing: bool) -> None:
    f = FORMATS[dtype]
    generator = random.Random(world)
    special = values_of(f)

    def value() -> float:
        if generator.random() < 0.1:
            return generator.choice(special)
        return convert(math.ldexp(generator.uniform(-2, 2), generator.randint(-8, 8)), f)

    check([[value() for _ in range(world)] for _ in range(200)], op, f, flushing)


@pytest.mark.parametrize("op", ["sum", "max", "min", "prod"])
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_wrap_in_their_own_width(dtype: torch.dtype, op: str) -> None:
    info = torch.iinfo(dtype)
    generator = random.Random(1)
    edges = [info.min, info.max, info.max - 1, 0, 1, info.min + 1]
    columns = [
        [generator.choice([*edges, generator.randint(info.min, info.max)]) for _ in range(4)]
        for _ in range(500)
    ]

    def wrap(value: int) -> int:
        return (value - info.min) % 2**info.bits + info.min

    folds: dict[str, Callable[[list[int]], int]]
    folds = {"sum": sum, "prod": math.prod, "max": max, "min": min}
    expected = torch.tensor([wrap(folds[op](column)) for column in columns], dtype=dtype)
    inputs = [torch.tensor(row, dtype=dtype) for row in zip(*columns, strict=True)]
    assert reference.same_bits(reference.allreduce(inputs, op), expected)


def test_results_do_not_depend_on_position_or_length() -> None:
    """The inputs are longer than one piece of the computation, and flushing is on in the threads
    of the pool."""
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(70_001, generator=generator) * 2.0**-130 for _ in range(3)]
    with flush_denormal(True):
        whole = reference.allreduce(inputs, "sum")
    expected = (inputs[0].double() + inputs[1].double()).float().double() + inputs[2].double()
    assert reference.same_bits(whole, expected.float())
    assert bool((whole.abs() < 2.0**-126).any())
    part = reference.allreduce([tensor[69_990:] for tensor in inputs], "sum")
    assert reference.same_bits(whole[69_990:], part)


@pytest.mark.parametrize("on", [False, True])
def test_the_denormal_mode_is_left_as_it_was(on: bool) -> None:
    smallest = torch.ones(1, dtype=torch.int32).view(torch.float32)
    with flush_denormal(on):
        reference.allreduce([smallest, smallest], "sum")
        assert bool((smallest * 1.0).view(torch.int32) == 0) == on


def test_same_bits_tells_what_torch_equal_does_not() -> None:
    nan, other_nan = torch.tensor([0x7FC00000, -1], dtype=torch.int32).view(torch.float32)
    one, zero = torch.tensor(1.0), torch.tensor(0.0)
    assert reference.same_bits(nan, other_nan)
    assert not reference.same_bits(nan, one)
    assert not reference.same_bits(one, nan)
    assert not reference.same_bits(zero, -zero)
    assert torch.equal(zero, -zero)
    assert not reference.same_bits(one, one.double())
    assert not reference.same_bits(one, one.reshape(1))
    minus_one = torch.tensor([-1], dtype=torch.int32)
    assert not reference.same_bits(minus_one, minus_one + 1)


def test_what_is_no_allreduce_is_refused() -> None:
    one = torch.ones(2)
    with pytest.raises(ValueError, match="median"):
        reference.allreduce([one], "median")
    with pytest.raises(ValueError, match="empty"):
        reference.allreduce([])
    with pytest.raises(ValueError, match="rank 1"):
        reference.allreduce([one, torch.ones(3)])
    with pytest.raises(TypeError, match="rank 1"):
        reference.allreduce([one, one.double()])
    with pytest.raises(TypeError, match="avg"):
        reference.allreduce([one.int()], "avg")
    assert reference.same_bits(reference.allreduce([one, one], "product"), one)
