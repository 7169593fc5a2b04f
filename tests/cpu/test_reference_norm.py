"""Compares the reference of the fused normalizations with the formulas of
docs/internals/numerics.md, computed in NumPy one number at a time, and with float64 within a proven
bound."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from collx import reference

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WIDTHS = (1, 2, 3, 8, 31, 100, 384, 1025)
HALF_ULP = 2.0**-24  # relative, of float32; called u below

Row = list[np.float32]
F = np.float32


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gamma(k: int) -> float:
    """Bounds |product of k factors (1 + d) or 1 / (1 + d), minus 1| for all |d| <= u (Higham,
    Accuracy and Stability of Numerical Algorithms, lemma 3.1)."""
    return k * HALF_ULP / (1 - k * HALF_ULP)


def depth(cols: int) -> int:
    return (cols - 1).bit_length()


# --- formulas, one number at a time ---------------------------------------------------------------


def rounded(value: F, dtype: torch.dtype) -> F:
    """Returns float32(dtype(value)), rounded to nearest even."""
    if dtype == torch.float16:
        return F(np.float16(value))
    if dtype == torch.float32 or np.isnan(value):
        return F(value)
    bits = int(F(value).view(np.uint32))
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return np.uint32(bits).view(F)


def tree(row: Row) -> F:
    """Returns the tree sum of a row, which is padded to a power of two."""
    row = row + [F(0)] * ((1 << depth(len(row))) - len(row))
    if len(row) == 1:
        return row[0]
    half = len(row) // 2
    return tree(row[:half]) + tree(row[half:])


def by_the_book(
    rows: list[Row],
    residual: Row | None,
    weight: Row,
    bias: Row | None,
    eps: float,
    offset: float,
    rounding: str,
    dtype: torch.dtype,
) -> tuple[Row, Row]:
    """Returns y and acc of one row, from the rows of all ranks."""
    to = lambda value: rounded(F(value), dtype)  # noqa: E731
    parity, in_dtype = rounding != "fp32", rounding == "parity_weight"
    acc = []
    for column, first in enumerate(rows[0]):
        total = first
        for other in rows[1:]:
            total = total + other[column]
        total = to(total) if parity else total
        if residual is not None:
            total = total + residual[column]
            total = to(total) if parity else total
        acc.append(total)
    cols = F(len(acc))
    given = F(eps) if parity else to(eps)
    if bias is not None:
        mean = tree([a + F(0) for a in acc]) / cols
        centered = [a - mean for a in acc]
        norm = F(1) / np.sqrt(tree([d * d for d in centered]) / cols + given)
        if in_dtype:
            y = [
                to(to(to(d * norm) * to(w)) + to(b))
                for d, w, b in zip(centered, weight, bias, strict=True)
            ]
        else:
            y = [(d * norm) * w + b for d, w, b in zip(centered, weight, bias, strict=True)]
        return y, acc
    gain = [w + to(offset) for w in weight]
    norm = F(1) / np.sqrt(tree([a * a for a in acc]) / cols + given)
    if in_dtype:
        return [to(to(a * norm) * to(g)) for a, g in zip(acc, gain, strict=True)], acc
    return [(a * g) * norm for a, g in zip(acc, gain, strict=True)], acc


def row_of(tensor: torch.Tensor) -> Row:
    return list(tensor.to(torch.float32).numpy())


def tensor_of(rows: list[Row], dtype: torch.dtype) -> torch.Tensor:
    wide = np.array([[rounded(v, dtype) for v in row] for row in rows], dtype=F)
    return torch.from_numpy(wide).to(dtype)


SPECIAL = (0.0, -0.0, 1.0, -3.0, 1e-40, -1e-45, 65504.0, 3e38, math.inf, -math.inf, math.nan, 7e-6)


def odd_values(rows: int, cols: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Returns rows of ordinary values, of subnormals, and of special values in various
    combinations."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype)
    tensor = values(rows, cols, dtype=dtype, seed=seed)
    few = torch.rand(rows, cols, generator=generator) < 0.1
    picked = table[torch.randint(0, len(table), (rows, cols), generator=generator)]
    tensor[1::4] = torch.where(few, picked, tensor)[1::4]
    tensor[2::4] = (tensor * torch.finfo(dtype).tiny)[2::4]
    tensor[3::4] = picked[3::4]
    return tensor


@pytest.mark.parametrize("cols", WIDTHS[:-1])
@pytest.mark.parametrize("rounding", reference.ROUNDINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_every_step_is_that_of_the_contract(dtype: torch.dtype, rounding: str, cols: int) -> None:
    """The results are bitwise equal, including special values. Another order, another rounding or
    another place of eps would change them."""
    inputs = [odd_values(8, cols, dtype, seed) for seed in range(3)]
    residual = odd_values(8, cols, dtype, 7)
    for weights in {dtype, torch.float32}:
        weight, bias = (values(cols, dtype=weights, seed=seed) for seed in (8, 9))
        for added in (None, residual):
            for offset in (0.0, 1.1) if added is None else (1.1,):
                for over in (None, bias):
                    expected = [
                        by_the_book(
                            [row_of(tensor[row]) for tensor in inputs],
                            None if added is None else row_of(added[row]),
                            row_of(weight),
                            None if over is None else row_of(over),
                            1e-6,
                            offset,
                            rounding,
                            dtype,
                        )
                        for row in range(8)
                    ]
                    out, residual_out = _fused(inputs, added, weight, over, offset, rounding)
                    wanted = tensor_of([y for y, _ in expected], dtype)
                    assert reference.same_bits(out, wanted)
                    if residual_out is not None:
                        wanted = tensor_of([acc for _, acc in expected], dtype)
                        assert reference.same_bits(residual_out, wanted)


def _fused(
    inputs: list[torch.Tensor],
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    offset: float,
    rounding: str,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if bias is None and residual is None:
        return reference.allreduce_rmsnorm(inputs, weight, 1e-6, offset, rounding), None
    if bias is None:
        assert residual is not None
        results = reference.allreduce_residual_rmsnorm(
            inputs, residual, weight, 1e-6, offset, rounding
        )
    elif residual is None:
        return reference.allreduce_layernorm(inputs, weight, bias, 1e-6, rounding), None
    else:
        results = reference.allreduce_residual_layernorm(
            inputs, residual, weight, bias, 1e-6, rounding
        )
    return results[0], results[1]


def test_pieces_and_leading_dimensions_change_nothing() -> None:
    """The test uses more rows than one piece of the computation, one more dimension, and no rows
    at all."""
    rows = values(150, 1000, dtype=torch.bfloat16)
    weight = values(1000, seed=3)
    whole = reference.allreduce_rmsnorm([rows], weight, 1e-5)
    one_by_one = [reference.allreduce_rmsnorm([rows[at : at + 1]], weight, 1e-5) for at in (0, 149)]
    assert torch.equal(whole[[0, 149]], torch.cat(one_by_one))
    again = reference.allreduce_rmsnorm([rows.view(3, 50, 1000)], weight, 1e-5)
    assert torch.equal(whole.view(3, 50, 1000), again)
    assert reference.allreduce_rmsnorm([rows[:0]], weight, 1e-5).shape == (0, 1000)


# --- float64 ------------------------------------------------------------------------------------


@pytest.mark.parametrize("cols", WIDTHS)
@pytest.mark.parametrize("eps", [0.0, 1e-6, 0.5])
def test_rmsnorm_is_within_its_bound_of_float64(cols: int, eps: float) -> None:
    """Proof, without underflow and overflow: the tree has D levels, so each non-negative term of
    the sum of squares has D + 1 factors (1 + d). The mean and the addition of eps add one factor
    each. The root, which does not enlarge the error, and the reciprocal add two. The gain and its
    products with acc and norm add three: |y - exact| <= gamma(D + 8) |exact|. One more factor
    covers the errors of float64."""
    eps = float(F(eps))
    acc, weight = values(20, cols), values(cols, seed=2)
    exact = acc.double() * (weight.double() + 0.5)
    exact /= (acc.double().square().mean(-1, keepdim=True) + eps).sqrt()
    result = reference.allreduce_rmsnorm([acc], weight, eps, 0.5)
    bound = gamma(depth(cols) + 9) * exact.abs()
    assert bool(((result.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("cols", WIDTHS)
def test_layernorm_is_within_its_bound_of_float64(cols: int) -> None:
    """Proof: the error of the mean is at most gamma(D + 1) m, where m is the mean of the
    magnitudes. The error of d is therefore at most e = gamma(1) |d| + gamma(D + 2) m. The root of
    the mean of (d + e)^2 bounds that of the squares that are summed, whose sum and mean have D + 2
    factors. The norm lies between those for the root mean square +- that of e, times
    1 +- gamma(D + 5). Two products and a sum follow."""
    eps = float(F(1e-5))
    acc, weight, bias = values(20, cols) + 3, values(cols, seed=2), values(cols, seed=3)
    wide, levels = acc.double(), depth(cols)
    d = wide - wide.mean(-1, keepdim=True)
    e = gamma(1) * d.abs() + gamma(levels + 3) * wide.abs().mean(-1, keepdim=True)
    rms, slack = (v.square().mean(-1, keepdim=True).sqrt() for v in (d, e))
    norm = 1 / (rms.square() + eps).sqrt()
    high = 1 / ((rms - slack).clamp(min=0).square() + eps).sqrt() * (1 + gamma(levels + 6))
    low = 1 / ((rms + slack).square() + eps).sqrt() * (1 - gamma(levels + 6))
    product = d.abs() * weight.double().abs()
    away = e * weight.double().abs() * high + product * torch.maximum(high - norm, norm - low)
    exact = d * norm * weight.double() + bias.double()
    bound = away + gamma(4) * (product * high + away + bias.double().abs())
    result = reference.allreduce_layernorm([acc], weight, bias, eps)
    assert bool(((result.double() - exact).abs() <= bound).all())


# --- unfused sequence ---------------------------------------------------------------------------


@pytest.mark.parametrize("cols", [1, 100, 1025])
@pytest.mark.parametrize("rounding", ["parity", "parity_weight"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parity_has_the_bits_of_the_unfused_sequence(
    dtype: torch.dtype, rounding: str, cols: int
) -> None:
    inputs = [odd_values(40, cols, dtype, seed) for seed in range(3)]
    for residual in (None, odd_values(40, cols, dtype, 7)):
        for weights in {dtype, torch.float32}:
            weight, bias = (values(cols, dtype=weights, seed=seed) for seed in (8, 9))
            normed, hidden = reference.unfused_rmsnorm(
                inputs, weight, 1e-6, 1.0, rounding, residual
            )
            out, residual_out = _fused(inputs, residual, weight, None, 1.0, rounding)
            assert reference.same_bits(out, normed)
            assert residual_out is None or reference.same_bits(residual_out, hidden)
            normed, _ = reference.unfused_layernorm(inputs, weight, bias, 1e-6, rounding, residual)
            out, _ = _fused(inputs, residual, weight, bias, 0.0, rounding)
            assert reference.same_bits(out, normed)


# --- environment ----------------------------------------------------------------------------------


@contextmanager
def flushing(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(before)


def test_a_caller_that_flushes_denormals_gets_the_same_bits() -> None:
    """The rows are so wide that PyTorch would use several threads."""
    inputs = [values(3, 70_000, seed=seed) * 2.0**-126 for seed in range(2)]
    weight = values(70_000, seed=5) * 2.0**-60
    kept = reference.allreduce_residual_rmsnorm(inputs, inputs[1], weight, 1e-30)
    smallest = torch.ones(1, dtype=torch.int32).view(torch.float32)
    with flushing(2):
        assert float(smallest * 1.0) == 0.0
        flushed = reference.allreduce_residual_rmsnorm(inputs, inputs[1], weight, 1e-30)
        assert float(smallest * 1.0) == 0.0
        assert torch.get_num_threads() == 2
    assert all(reference.same_bits(a, b) for a, b in zip(kept, flushed, strict=True))
    assert bool(((kept[1] != 0) & (kept[1].abs() < 2.0**-126)).any())


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_reducescatter_gives_each_rank_its_rows(world: int) -> None:
    inputs = [values(7, 32, dtype=torch.bfloat16, seed=seed) for seed in range(world)]
    residual, weight = values(7, 32, dtype=torch.bfloat16, seed=8), values(32, seed=9)
    sizes = reference.parts(7, world)
    own = list(residual.split(sizes))
    whole = reference.allreduce_residual_rmsnorm(inputs, residual, weight, 1e-5)
    results = reference.reducescatter_residual_rmsnorm(inputs, own, weight, 1e-5)
    for which, tensor in enumerate(whole):
        assert torch.equal(torch.cat([result[which] for result in results]), tensor)
    quantized = reference.allreduce_residual_rmsnorm_fp8(
        inputs, residual, weight, 1e-5, keep_norm=True
    )
    parts = reference.reducescatter_residual_rmsnorm_fp8(inputs, own, weight, 1e-5, keep_norm=True)
    for which, tensor in enumerate(quantized):
        joined = torch.cat([result[which].view(torch.uint8) for result in parts])
        assert torch.equal(joined, tensor.view(torch.uint8))
