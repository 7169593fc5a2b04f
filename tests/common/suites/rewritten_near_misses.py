"""Patterns close to a supported norm or quantization: they are not rewritten, and are reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn

from ..pool import on_ranks
from ..rank import Rank
from ..rewriting import (
    COLS,
    E4M3,
    EPS,
    INT8,
    WEIGHT,
    Results,
    by_row,
    group_of,
    passed,
    stored,
    tensor_of,
)


def _layer(y: Tensor, w: Tensor, dim: int = -1, correction: int = 0) -> tuple[Tensor, Tensor]:
    wide = y.float()
    variance, mean = torch.var_mean(wide, dim, correction=correction, keepdim=True)
    return ((wide - mean) * torch.rsqrt(variance + EPS) * w).to(y.dtype), mean


def _rms(y: Tensor, w: Tensor) -> Tensor:
    return nn.functional.rms_norm(y, (COLS,), w, EPS)


def _unweighted(y: Tensor, dim: int = -1) -> Tensor:
    wide = y.float()
    return wide * torch.rsqrt(wide.pow(2).mean(dim, keepdim=True) + EPS)


def _llama(y: Tensor, w: Tensor, dim: int = -1) -> Tensor:
    return w * _unweighted(y, dim).to(y.dtype)


def _with_scale(y: Tensor, scale: Tensor, dtype: torch.dtype = E4M3, limit: float = 448) -> Results:
    return (y.float() * scale.reciprocal()).clamp(-limit, limit).to(dtype), scale


def _largest(y: Tensor, dim: int = -1) -> Tensor:
    return y.abs().amax(dim, keepdim=True).float()


NO_NORM, NORM, RESIDUAL = "allreduce", "allreduce_rmsnorm", "allreduce_residual_rmsnorm"
Model = Callable[..., Any]
"""A function of the sum, a tensor of its shape and dtype, a weight and a scale."""

# By the operator after the pass: patterns that are nearly rewritten, and words of the report.
NEARLY: dict[str, dict[str, tuple[Model, str]]] = {
    NO_NORM: {
        # Layer norms.
        "variance of a sample": (
            lambda y, r, w, s: _layer(y + r, w, correction=1)[0],
            "the variance is that of a sample",
        ),
        "layer norm of columns": (
            lambda y, r, w, s: _layer(y + r, w, 0)[0],
            "variance is over dimensions [0]",
        ),
        "the mean is used": (lambda y, r, w, s: _layer(y + r, w), "the mean has other uses"),
        "a matrix of biases": (
            lambda y, r, w, s: (_layer((y + r).float(), w)[0] + r.float()).to(r.dtype),
            "is not rounded to the dtype of the sum, or gets no bias",
        ),
        "the sum is used": (lambda y, r, w, s: (_layer(y, w)[0], 2 * y), "other uses"),
        "the sum is doubled": (lambda y, r, w, s: _rms(y + y, w), ""),
        "a weight made of the sum": (
            lambda y, r, w, s: _layer(n := y + r, w * n[0])[0],
            "computed after the sum",
        ),
        "an offset": (
            lambda y, r, w, s: _layer(y + r, 1 + w)[0],
            "added to the weight of a layer norm",
        ),
        # RMS norms.
        "a rounded offset": (
            lambda y, r, w, s: _rms(y, 1 + w),
            "weight and offset are added in the dtype",
        ),
        "another offset": (
            lambda y, r, w, s: _rms(y.float(), 0.1 + w.float()).bfloat16(),
            "is no value of",
        ),
        "a wide weight of what is rounded": (
            lambda y, r, w, s: (_unweighted(y).bfloat16() * w.float()).bfloat16(),
            "multiplied by a weight in torch.float32",
        ),
        "RMS norm of columns": (
            lambda y, r, w, s: _llama(y + r, w, 0),
            "the mean is over dimensions [0], not the last",
        ),
        "another dtype of the weight": (
            lambda y, r, w, s: _llama(y + r, w.half()),
            "the weight has dtype torch.float16",
        ),
        "a matrix of weights": (
            lambda y, r, w, s: _llama(y + r, w.expand(4, COLS) * r),
            "the weight is not a vector over the last",
        ),
        "the sum of an RMS norm is used": (
            lambda y, r, w, s: (_llama(y, w), y * 2),
            "the sum has other uses than the norm",
        ),
        "a row as residual": (lambda y, r, w, s: _llama(y + r[0], w), ""),
        "the mean of squares is used": (
            lambda y, r, w, s: (_llama(y + r, w), (y + r).float().pow(2).mean(-1, keepdim=True)),
            "",
        ),
        "a transposed residual": (
            lambda y, r, w, s: _llama(r.t().contiguous().t() + y, w),
            "is not contiguous",
        ),
        "no weight": (lambda y, r, w, s: _llama(y + r, torch.ones_like(w)) + w, "is not weighted"),
        "another power": (
            lambda y, r, w, s: (
                w * ((y + r) * torch.rsqrt((y + r).pow(4).mean(-1, keepdim=True) + EPS))
            ),
            "",
        ),
    },
    RESIDUAL: {
        # Scales of rows.
        "scales of columns": (
            lambda y, r, w, s: _with_scale(n := _rms(y + r, w), _largest(n, 0) / 448),
            "the scales are not those of rows",
        ),
        "one scale of all": (
            lambda y, r, w, s: _with_scale(n := _rms(y + r, w), n.abs().amax().float() / 448),
            "the scales are not those of rows",
        ),
        # Given scales.
        "a scale made of the sum": (
            lambda y, r, w, s: stored(_rms(n := y + r, w).float() / n[:1, :1].float(), E4M3),
            "the scale is computed after the sum",
        ),
    },
    NORM: {
        # Scales of rows.
        "another least magnitude": (
            lambda y, r, w, s: _with_scale(n := _rms(y, w), _largest(n).clamp(min=1e-12) / 448),
            "the minimum largest magnitude is 1e-12",
        ),
        "a least scale": (
            lambda y, r, w, s: _with_scale(n := _rms(y, w), (_largest(n) / 448).clamp(min=1e-10)),
            "the minimum scale is 1e-10",
        ),
        "another limit": (
            lambda y, r, w, s: _with_scale(n := _rms(y, w), _largest(n) / 240, limit=240),
            "not the largest magnitudes divided by 448",
        ),
        "another clamp": (
            lambda y, r, w, s: _with_scale(n := _rms(y, w), _largest(n) / 448, limit=240),
            "it is clamped to",
        ),
        "another float8": (
            lambda y, r, w, s: _with_scale(
                n := _rms(y, w), _largest(n) / 240, torch.float8_e4m3fnuz
            ),
            "it is quantized to torch.float8_e4m3fnuz",
        ),
        "int8 that is cut off": (
            lambda y, r, w, s: _with_scale(n := _rms(y, w), _largest(n) / 127, INT8, 127),
            "it is truncated, not rounded",
        ),
        "scales rounded to powers of two": (
            lambda y, r, w, s: _with_scale(
                n := _rms(y, w), (_largest(n) / 448).to(torch.float8_e8m0fnu).float()
            ),
            "are rounded to torch.float8_e8m0fnu",
        ),
        "whole largest magnitudes": (
            lambda y, r, w, s: _with_scale(n := _rms(y, w), _largest(n).int().float() / 448),
            "are rounded to torch.int32",
        ),
        "a rounded minimum": (
            lambda y, r, w, s: _with_scale(
                n := _rms(y, w), (_largest(n).clamp(min=1e-10).bfloat16() / 448).float()
            ),
            "are rounded to torch.bfloat16",
        ),
        "magnitudes of rounded values": (
            lambda y, r, w, s: _with_scale(n := _rms(y, w), _largest(n.half()) / 448),
            "are rounded to torch.float16",
        ),
        "a rounded inverse": (
            lambda y, r, w, s: _with_scale(n := _rms(y, w), n.abs().amax(-1, keepdim=True) / 448),
            "the inverse of its scales is rounded to torch.bfloat16",
        ),
        "multiplied by the scale": (
            lambda y, r, w, s: (_rms(y, w).float() * s).clamp(-448, 448).to(E4M3),
            "not the inverse of a scale",
        ),
        # Given scales.
        "scales of all columns": (
            lambda y, r, w, s: stored(_rms(y, w).float() / w.float(), E4M3),
            "neither one for each row nor",
        ),
        "a given scale of another dtype": (
            lambda y, r, w, s: stored(_rms(y, w) / s.bfloat16(), E4M3),
            "it is scaled in torch.bfloat16",
        ),
        "int8 down to -128": (
            lambda y, r, w, s: torch.round(_rms(y, w).float() / s).clamp(-128, 127).to(INT8),
            "it is clamped to",
        ),
    },
    "reducescatter": {
        "scattered, no residual": (
            lambda y, r, w, s: _rms(y, w),
            "there is no reducescatter_rmsnorm",
        ),
        "scattered, layer norm": (
            lambda y, r, w, s: _layer(y + r, w)[0],
            "there is no reducescatter_residual_layernorm",
        ),
        "scattered, doubled": (lambda y, r, w, s: _rms(y + y, w), ""),
        "scattered, another residual": (lambda y, r, w, s: _rms(y + r[0], w), ""),
    },
    "reducescatter_residual_rmsnorm": {
        "scattered, int8": (
            lambda y, r, w, s: by_row(_rms(y + r, w), INT8),
            "there is no reducescatter_residual_rmsnorm_int8",
        ),
    },
}


@pytest.mark.worlds(2)
@on_ranks(deadline=300.0)
def test_sizes_that_only_the_data_determines(rank: Rank) -> list[str]:
    """Runs models with numbers of rows that the compiler must not compare with another number."""
    group, communicator = group_of(rank)
    bias = tensor_of(rank, (1, COLS), torch.float32, False)
    weight = WEIGHT.to(rank.device)
    # A model of the sum and the residual, and its operators after the pass.
    models: dict[str, tuple[Callable[..., Results], str]] = {
        "a row as residual": (lambda y, r: (_rms(y + bias, weight),), NO_NORM),
        "residual": (lambda y, r: (_rms(y + r, weight),), RESIDUAL),
        "pointwise": (lambda y, r: (torch.relu(y + bias) * r,), NO_NORM),
        "scales of rows": (
            lambda y, r: by_row(_rms(y + r, weight)),
            "allreduce_residual_rmsnorm_fp8",
        ),
        "given scales of rows": (
            lambda y, r: (stored(n := _rms(y, weight) / (r[:, :1].abs() + 1), E4M3), n),
            NORM,
        ),
    }
    wrong = []
    with communicator, torch.no_grad():
        for what, (model, operator) in models.items():
            given = [tensor_of(rank, (6, COLS), torch.float32, own) for own in (True, False)]
            for tensor in given:
                torch._dynamo.decorators.mark_unbacked(tensor, 0)

            def reduced(x: Tensor, residual: Tensor) -> Results:
                return model(functional.all_reduce(x, "sum", group), residual)  # noqa: B023

            found, kept, left, _ = passed(reduced, *given)
            if kept != [operator] or not torch.allclose(found[-1], reduced(*given)[-1], 1e-4, 1e-4):
                wrong.append(f"{what}: {kept}, {left}")
    return wrong


@pytest.mark.worlds(2)
@on_ranks(deadline=300.0)
def test_what_is_nearly_rewritten_stays_and_is_told(rank: Rank) -> list[str]:
    group, communicator = group_of(rank)
    wrong = []
    weight = WEIGHT.bfloat16().to(rank.device)
    scale = torch.tensor([0.0123], device=rank.device)
    with communicator, torch.no_grad():
        cases = ((op, what, case) for op, of in NEARLY.items() for what, case in of.items())
        for operator, what, (nearly, why) in cases:
            scatters = operator.startswith("reducescatter")
            x = tensor_of(rank, (4 * rank.size if scatters else 4, COLS), torch.bfloat16, True)
            residual = tensor_of(rank, (4, COLS), torch.bfloat16, False)

            def model(x: Tensor, residual: Tensor) -> Any:
                if scatters:  # noqa: B023
                    y = functional.reduce_scatter_tensor(x, "sum", 0, group)
                else:
                    y = functional.all_reduce(x, "sum", group)
                return nearly(y, residual, weight, scale)  # noqa: B023

            _, kept, left, _ = passed(model, x, residual)
            if kept != [operator] or why not in "".join(left):
                wrong.append(f"{what}: {kept}, {left}")
    return wrong
