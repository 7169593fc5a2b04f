"""Compares the reference of quantized results with every value of the formats, and its scales with
NumPy and exact fractions. Also tests rows whose scales are error-prone."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from collx import reference
from collx.reference._scales import FORMATS, Quantizer, power_of_two_above

F = np.float32
LEAST = 1e-6  # the eps of most calls


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def quantizer(target: str = "e4m3fn", cols: int = 128, **options: Any) -> Quantizer:
    dtype = options.pop("dtype", torch.float32)
    return Quantizer.checked(f"op_{target}", torch.empty(1, cols, dtype=dtype), target, **options)


def codes(tensor: torch.Tensor) -> list[int]:
    flat: list[int] = tensor.contiguous().view(torch.uint8).flatten().tolist()
    return flat


def words(tensor: torch.Tensor) -> list[int]:
    flat: list[int] = tensor.contiguous().view(torch.int32).flatten().tolist()
    return flat


# --- conversions ----------------------------------------------------------------------------------


def decoded(code: int, target: str) -> Fraction:
    """Returns the value of a code without sign."""
    fraction_bits, bias = (3, 7) if target == "e4m3fn" else (2, 15)
    exponent, fraction = divmod(code, 1 << fraction_bits)
    if exponent == 0:
        return Fraction(fraction, 1 << fraction_bits) * Fraction(2) ** (1 - bias)
    return (1 + Fraction(fraction, 1 << fraction_bits)) * Fraction(2) ** (exponent - bias)


def nearest(value: float, target: str, table: list[Fraction]) -> int:
    """Returns the code nearest to |value|, with ties to even. Larger values have the last code."""
    exact = abs(Fraction(value))
    above = min(bisect_left(table, exact), len(table) - 1)
    if table[above] <= exact or above == 0:
        return above
    below = above - 1
    low, high = exact - table[below], table[above] - exact
    return below if low < high or (low == high and below % 2 == 0) else above


def around(value: F) -> list[F]:
    return [value, np.nextafter(value, F(np.inf)), np.nextafter(value, F(0))]


@pytest.mark.parametrize("target", ["e4m3fn", "e5m2"])
def test_every_fp8_value_and_every_tie_is_converted_to_nearest_even(target: str) -> None:
    last = {"e4m3fn": 0x7E, "e5m2": 0x7B}[target]
    table = [decoded(code, target) for code in range(last + 1)]
    assert float(table[-1]) == FORMATS[target][0]
    tried: list[F] = [F(1e-45), F(3e38), F(math.inf), F(0)]
    for low, high in itertools.pairwise(table):
        tried += [*around(F(float(high))), *around(F(float((low + high) / 2)))]
    tried += [-value for value in tried]
    expected = [
        (last if math.isinf(v) else nearest(float(v), target, table))
        | (128 if np.signbit(v) else 0)
        for v in tried
    ]
    # PyTorch converts vectors in long tensors.
    for repeats in (1, 9):
        tensor = torch.from_numpy(np.array(tried * repeats, dtype=F))
        assert codes(quantizer(target).quantized(tensor)) == expected * repeats


@pytest.mark.parametrize("repeats", [1, 50])
def test_nan_has_one_code_in_each_format(repeats: int) -> None:
    """NaNs of either sign and any payload have this code, so that no NaN has all bits set."""
    bits = torch.tensor([0x7FC00000, -1, 0x7F800001, -0x400000] * repeats, dtype=torch.int32)
    for target, code in (("e4m3fn", 0x7F), ("e5m2", 0x7F), ("int8", 0)):
        assert set(codes(quantizer(target).quantized(bits.view(torch.float32)))) == {code}


def test_int8_is_rounded_to_nearest_even_and_never_less_than_minus_127() -> None:
    tried = torch.tensor([0.5, 1.5, -0.5, -2.5, 126.5, 127.4, 1e9, -math.inf, -127.9, -0.0, 1e-40])
    expected = [0, 2, 0, -2, 126, 127, 127, -127, -127, 0, 0]
    assert quantizer("int8").quantized(tried).tolist() == expected


# --- scales ---------------------------------------------------------------------------------------


def power_above(value: F) -> F:
    if value == 0 or not np.isfinite(value):
        return value
    fraction, exponent = math.frexp(float(value))
    with np.errstate(over="ignore"):
        return F(math.ldexp(1.0, exponent - (fraction == 0.5)))


def magnitudes() -> list[F]:
    """Returns values of all binades with their neighbors, and edge cases."""
    found = [F(0), F(np.inf), F(np.nan), -F(np.nan), F(1e-10), F(448), F(3.4028235e38)]
    for exponent in range(-149, 128):
        power = F(math.ldexp(1.0, exponent))
        found += [*around(power), F(power * F(1.3))]
    return found


def rounded_scale(scale: F, name: str) -> tuple[F, int]:
    """Returns the value and the bits of a stored scale."""
    if name == "float16":
        half = np.float16(scale)
        return F(half), 0x7E00 if np.isnan(half) else int(half.view(np.uint16))
    if name == "bfloat16":
        if np.isnan(scale):
            return scale, 0x7FC0
        bits = int(scale.view(np.uint32))
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return np.uint32(bits << 16).view(F), bits
    if name == "float8_e8m0fnu":
        if not np.isfinite(scale):
            return F(np.nan), 0xFF
        code = 0 if scale <= 2.0**-127 else math.frexp(float(scale))[1] - 1 + 127
        return F(math.ldexp(1.0, code - 127)), code
    return scale, 0x7FC00000 if np.isnan(scale) else int(scale.view(np.uint32))


STORED = {
    "float32": ("float32", torch.float32, torch.int32, False),
    "float16": ("input", torch.float16, torch.int16, False),
    "bfloat16": ("input", torch.bfloat16, torch.int16, False),
    "float8_e8m0fnu": ("float8_e8m0fnu", torch.float32, torch.uint8, True),
}


@pytest.mark.parametrize("target", FORMATS)
@pytest.mark.parametrize("mode", ["row", "group"])
@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("scale_ub", [None, 0.0, 1e-37, 0.7])
def test_scales_of_all_magnitudes(
    target: str, mode: str, name: str, scale_ub: float | None
) -> None:
    """Checks the stored bits and the multipliers in every binade with every option."""
    option, dtype, integers, needs_powers = STORED[name]
    tried = magnitudes()
    for ue8m0 in (True,) if needs_powers else (False, True):
        made = quantizer(
            target,
            dtype=dtype,
            scale_mode=mode,
            scale_ub=scale_ub,
            ue8m0=ue8m0,
            scale_dtype=option,
        )
        stored, inverse = made.scales(torch.from_numpy(np.array(tried)))
        with np.errstate(all="ignore"):
            expected = []
            for largest in tried:
                bound = F(1e-10) if mode == "group" and largest < F(1e-10) else largest
                bound = F(scale_ub) if scale_ub is not None and bound > F(scale_ub) else bound
                scale = bound / F(FORMATS[target][0])
                scale, bits = rounded_scale(power_above(scale) if ue8m0 else scale, name)
                factor = F(0) if scale == 0 else F(1) / scale
                expected.append((bits, factor if np.isfinite(factor) else F(0)))
        mask = (1 << 8 * stored.element_size()) - 1
        assert [v & mask for v in stored.view(integers).tolist()] == [bits for bits, _ in expected]
        assert words(inverse) == [int(factor.view(np.int32)) for _, factor in expected]


def test_powers_of_two_above_every_kind_of_float() -> None:
    tried = magnitudes()
    found = power_of_two_above(torch.from_numpy(np.array(tried)))
    assert words(found) == [int(power_above(v).view(np.int32)) for v in tried]


def test_e8m0_scales_are_what_pytorch_reads() -> None:
    """PyTorch reads the same powers of two, and NaN for scales that are too large."""
    powers = torch.tensor([2.0**e for e in range(-126, 128)])
    made = quantizer(scale_dtype="float8_e8m0fnu", ue8m0=True)
    stored, inverse = made.scales(powers * 448)
    read = made.arranged(stored[:, None], (254,)).to(torch.float32)
    # 448 * 2^127 is infinite, which the format does not have.
    assert torch.equal(read[:-9], powers[:-9])
    assert bool(read[-8:].isnan().all())
    assert torch.equal(inverse[:-9], 1 / powers[:-9])


# --- whole rows -------------------------------------------------------------------------------


@pytest.mark.parametrize("target", FORMATS)
@pytest.mark.parametrize("rounding", reference.ROUNDINGS)
def test_a_row_of_zeros_has_scale_and_values_of_zero(target: str, rounding: str) -> None:
    """This holds if eps is not 0. Otherwise the formula results in NaN. Groups never have a scale
    of 0."""
    zeros, weight = torch.zeros(2, 128), values(128)
    q, scale = _quantized(target, [zeros], weight, LEAST, rounding=rounding)
    assert scale.tolist() == [0, 0]
    assert set(codes(q)) <= {0, 0x80}
    q, scale = _quantized(target, [zeros], weight, 0.0, rounding=rounding)
    assert words(scale) == [0x7FC00000] * 2
    assert set(codes(q)) == {0 if target == "int8" else 0x7F}
    _, scale = _quantized(target, [zeros], weight, LEAST, rounding=rounding, scale_mode="group")
    assert words(scale) == words(torch.full((2, 1), 1e-10) / FORMATS[target][0])


def _quantized(target: str, *arguments: Any, **options: Any) -> tuple[torch.Tensor, ...]:
    if target == "int8":
        return reference.allreduce_rmsnorm_int8(*arguments, **options)
    options["fp8_dtype"] = target
    return reference.allreduce_rmsnorm_fp8(*arguments, **options)


def test_where_norm_is_infinite_the_largest_is_not_looked_for_in_y() -> None:
    """The squares underflow and eps is 0, so that a row has infinite values and NaNs (0 times
    infinity)."""
    row = torch.tensor([[1e-30, 0.0, -1e-30, 0.0]])
    ones = torch.ones(4)
    for rounding, expected in (("fp32", math.inf), ("parity", math.inf), ("parity_weight", None)):
        _, scale, norm = reference.allreduce_rmsnorm_fp8(
            [row], ones, 0.0, rounding=rounding, keep_norm=True
        )
        assert norm.isnan().tolist() == [[False, True, False, True]]
        assert float(scale) == expected if expected else bool(scale.isnan())


@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_makes_the_row_nan_and_leaves_the_others(special: float) -> None:
    """An infinite square makes the norm 0, and infinity times 0 is NaN. The other values of the row
    are 0."""
    rows = values(3, 128)
    rows[1, 5] = special
    q, scale, norm = _quantized("e4m3fn", [rows], torch.ones(128), LEAST, keep_norm=True)
    assert words(scale)[1] == 0x7FC00000
    assert codes(q[1, 5]) == [0x7F]
    others = [code for at, code in enumerate(codes(q[1])) if at != 5]
    assert set(others) <= ({0x7F} if math.isnan(special) else {0, 0x80})
    assert bool(norm[1, 5].isnan())
    alone = _quantized("e4m3fn", [rows[::2]], torch.ones(128), LEAST)
    assert codes(q[::2]) == codes(alone[0])
    assert torch.equal(scale[::2], alone[1])


def test_values_are_clamped_at_a_bound_and_zero_where_nothing_can_be_told_apart() -> None:
    """scale_ub is below, equal to or above the largest magnitude. The reciprocal of a scale may
    overflow."""
    rows, ones = values(1, 128), torch.ones(128)
    _, scale, norm = _quantized("e4m3fn", [rows], ones, LEAST, keep_norm=True)
    largest = float(norm.abs().max())
    for bound in (largest, math.inf, 2 * largest):
        q, same = _quantized("e4m3fn", [rows], ones, LEAST, scale_ub=bound)
        assert torch.equal(same, scale)
        assert 448 in q.to(torch.float32).abs()
    q, less = _quantized("e4m3fn", [rows], ones, LEAST, scale_ub=largest / 4)
    assert float(less) == float(F(largest / 4) / F(448))
    assert int((q.to(torch.float32).abs() == 448).sum()) > 1
    for bound in (0.0, 1e-37):
        q, tiny = _quantized("e4m3fn", [rows], ones, LEAST, scale_ub=bound)
        assert float(tiny) == float(F(bound) / F(448))
        assert set(codes(q)) == {0, 0x80}


def test_powers_of_two_are_quantized_without_an_error() -> None:
    """A largest value of 448 * 2^k makes the scale 2^k, so that values of fp8 are exact."""
    weight = torch.tensor([448.0, 1.5, -0.25, 2.0**-9] * 32) * 2.0**-5
    q, scale, norm = _quantized("e4m3fn", [torch.ones(3, 128)], weight, 0.0, keep_norm=True)
    assert scale.tolist() == [2.0**-5] * 3
    assert torch.equal(q.to(torch.float32) * scale[:, None], norm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("quant_group_size", [16, 128, 512])
def test_groups_are_rows_of_their_own_once_normalized(
    dtype: torch.dtype, quant_group_size: int
) -> None:
    """y is the normalized tensor in the parity modes, and its groups are quantized like rows."""
    inputs = [values(6, 512, dtype=dtype, seed=seed) for seed in range(2)]
    weight = values(512, seed=3)
    options = {"rounding": "parity_weight", "keep_norm": True}
    q, scale, norm = _quantized(
        "int8",
        inputs,
        weight,
        LEAST,
        scale_mode="group",
        quant_group_size=quant_group_size,
        **options,
    )
    assert scale.shape == (6, 512 // quant_group_size)
    largest = norm.float().view(6, -1, quant_group_size).abs().amax(-1)
    assert torch.equal(scale, largest / torch.full_like(largest, 127.0))
    each = (1 / scale).repeat_interleave(quant_group_size, 1)
    assert torch.equal(q.float(), (norm.float() * each).round())


@pytest.mark.parametrize("shape", [(6, 512), (2, 3, 512), (0, 512), (1, 512), (5, 128)])
def test_scales_by_columns_are_the_same_numbers_the_other_way_round(shape: tuple[int, ...]) -> None:
    rows, weight = values(*shape), values(shape[-1], seed=3)
    _, by_row = _quantized("e4m3fn", [rows], weight, LEAST, scale_mode="group")
    _, by_column = _quantized(
        "e4m3fn", [rows], weight, LEAST, scale_mode="group", scale_layout="column"
    )
    assert torch.equal(by_row, by_column)
    assert by_row.is_contiguous()
    like = torch.empty(shape[-1] // 128, *shape[:-1]).movedim(0, -1)
    assert by_column.stride() == like.stride()


def test_a_given_scale_divides_and_comes_back_as_a_copy() -> None:
    rows, weight, given = values(4, 100), values(100, seed=3), torch.tensor([[3.0]])
    q, scale, norm = _quantized(
        "e5m2", [rows], weight, LEAST, scale_mode="tensor", scale=given, keep_norm=True
    )
    assert scale.tolist() == [3.0]
    assert scale.data_ptr() != given.data_ptr()
    assert codes(q) == codes((norm / given).to(torch.float8_e5m2))
    for odd, code in ((0.0, 0x7B), (math.nan, 0x7F)):
        q, _ = _quantized(
            "e5m2", [rows], weight, LEAST, scale_mode="tensor", scale=torch.tensor([odd])
        )
        assert {c & 0x7F for c in codes(q)} == {code}


REFUSED: dict[str, tuple[dict[str, Any], type[Exception]]] = {
    "rounding": ({"rounding": "bf16"}, ValueError),
    "eps": ({"eps": -1e-6}, ValueError),
    "eps nan": ({"eps": math.nan}, ValueError),
    "weight_offset": ({"weight_offset": math.inf}, ValueError),
    "fp8_dtype": ({"fp8_dtype": "int8"}, ValueError),
    "scale_mode": ({"scale_mode": "channel"}, ValueError),
    "scale_dtype": ({"scale_dtype": "bfloat16"}, ValueError),
    "scale_layout": ({"scale_layout": "diagonal"}, ValueError),
    "scale_layout column": ({"scale_layout": "column"}, ValueError),
    "scale_ub": ({"scale_ub": -1.0}, ValueError),
    "scale_ub nan": ({"scale_ub": math.nan}, ValueError),
    "float8_e8m0fnu": ({"scale_dtype": "float8_e8m0fnu"}, ValueError),
    "quant_group_size": ({"scale_mode": "group", "quant_group_size": 48}, ValueError),
    "quant_group_size small": ({"scale_mode": "group", "quant_group_size": 8}, ValueError),
    "multiple of quant_group_size": ({"scale_mode": "group", "quant_group_size": 256}, ValueError),
    "scale none": ({"scale_mode": "tensor"}, ValueError),
    "scale given": ({"scale": torch.ones(1)}, ValueError),
    "scale two": ({"scale_mode": "tensor", "scale": torch.ones(2)}, ValueError),
    "scale half": ({"scale_mode": "tensor", "scale": torch.ones(1).half()}, TypeError),
    "ue8m0": ({"scale_mode": "tensor", "scale": torch.ones(1), "ue8m0": True}, ValueError),
    "weight": ({"weight": torch.ones(129)}, ValueError),
    "weight double": ({"weight": torch.ones(128).double()}, TypeError),
    "inputs": ({"inputs": [torch.ones(128)]}, ValueError),
    "inputs empty": ({"inputs": [torch.ones(3, 0)]}, ValueError),
    "inputs double": ({"inputs": [torch.ones(3, 128).double()]}, TypeError),
    "residual": ({"residual": torch.ones(2, 128)}, ValueError),
    "residual half": ({"residual": torch.ones(3, 128).half()}, TypeError),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_together_is_refused_by_name(what: str) -> None:
    changed, error = REFUSED[what]
    fine = {
        "inputs": [torch.ones(3, 128)],
        "residual": torch.ones(3, 128),
        "weight": torch.ones(128),
        "eps": LEAST,
    }
    reference.allreduce_residual_rmsnorm_fp8(**fine)  # type: ignore[arg-type]
    with pytest.raises(error, match=f"allreduce_residual_rmsnorm_fp8.*{what.split()[0]}"):
        reference.allreduce_residual_rmsnorm_fp8(**{**fine, **changed})
