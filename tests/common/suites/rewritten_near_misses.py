"""Patterns close to a supported norm or quantization: they are not rewritten, and are reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

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


class Nearly(NamedTuple):
    """A pattern that is nearly rewritten, its operators after the pass, and words of the report."""

    model: Callable[..., Any]
    """A function of the sum, a tensor of its shape and dtype, a weight and a scale."""
    operators: list[str]
    why: str
    scatters: bool = False


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


NO_NORM, NORM, RESIDUAL = ["allreduce"], ["allreduce_rmsnorm"], ["allreduce_residual_rmsnorm"]
NEARLY = {
    # Layer norms.
    "variance of a sample": Nearly(
        lambda y, r, w, s: _layer(y + r, w, correction=1)[0],
        NO_NORM,
        "the variance is that of a sample",
    ),
    "layer norm of columns": Nearly(
        lambda y, r, w, s: _layer(y + r, w, 0)[0], NO_NORM, "variance is over dimensions [0]"
    ),
    "the mean is used": Nearly(
        lambda y, r, w, s: _layer(y + r, w), NO_NORM, "the mean has other uses"
    ),
    "a matrix of biases": Nearly(
        lambda y, r, w, s: (_layer((y + r).float(), w)[0] + r.float()).to(r.dtype),
        NO_NORM,
        "is not rounded to the dtype of the sum, or gets no bias",
    ),
    "the sum is used": Nearly(lambda y, r, w, s: (_layer(y, w)[0], 2 * y), NO_NORM, "other uses"),
    "the sum is doubled": Nearly(lambda y, r, w, s: _rms(y + y, w), NO_NORM, ""),
    "a weight made of the sum": Nearly(
        lambda y, r, w, s: _layer(n := y + r, w * n[0])[0], NO_NORM, "computed after the sum"
    ),
    "an offset": Nearly(
        lambda y, r, w, s: _layer(y + r, 1 + w)[0], NO_NORM, "added to the weight of a layer norm"
    ),
    # RMS norms.
    "a rounded offset": Nearly(
        lambda y, r, w, s: _rms(y, 1 + w), NO_NORM, "weight and offset are added in the dtype"
    ),
    "another offset": Nearly(
        lambda y, r, w, s: _rms(y.float(), 0.1 + w.float()).bfloat16(), NO_NORM, "is no value of"
    ),
    "a wide weight of what is rounded": Nearly(
        lambda y, r, w, s: (_unweighted(y).bfloat16() * w.float()).bfloat16(),
        NO_NORM,
        "multiplied by a weight in torch.float32",
    ),
    "RMS norm of columns": Nearly(
        lambda y, r, w, s: _llama(y + r, w, 0),
        NO_NORM,
        "the mean is over dimensions [0], not the last",
    ),
    "another dtype of the weight": Nearly(
        lambda y, r, w, s: _llama(y + r, w.half()), NO_NORM, "the weight has dtype torch.float16"
    ),
    "a matrix of weights": Nearly(
        lambda y, r, w, s: _llama(y + r, w.expand(4, COLS) * r),
        NO_NORM,
        "the weight is not a vector over the last",
    ),
    "the sum of an RMS norm is used": Nearly(
        lambda y, r, w, s: (_llama(y, w), y * 2), NO_NORM, "the sum has other uses than the norm"
    ),
    "a row as residual": Nearly(lambda y, r, w, s: _llama(y + r[0], w), NO_NORM, ""),
    "the mean of squares is used": Nearly(
        lambda y, r, w, s: (_llama(y + r, w), (y + r).float().pow(2).mean(-1, keepdim=True)),
        NO_NORM,
        "",
    ),
    "a transposed residual": Nearly(
        lambda y, r, w, s: _llama(r.t().contiguous().t() + y, w), NO_NORM, "is not contiguous"
    ),
    "no weight": Nearly(
        lambda y, r, w, s: _llama(y + r, torch.ones_like(w)) + w, NO_NORM, "is not weighted"
    ),
    "another power": Nearly(
        lambda y, r, w, s: w * ((y + r) * torch.rsqrt((y + r).pow(4).mean(-1, keepdim=True) + EPS)),
        NO_NORM,
        "",
    ),
    # Scales of rows.
    "scales of columns": Nearly(
        lambda y, r, w, s: _with_scale(n := _rms(y + r, w), _largest(n, 0) / 448),
        RESIDUAL,
        "the scales are not those of rows",
    ),
    "one scale of all": Nearly(
        lambda y, r, w, s: _with_scale(n := _rms(y + r, w), n.abs().amax().float() / 448),
        RESIDUAL,
        "the scales are not those of rows",
    ),
    "another least magnitude": Nearly(
        lambda y, r, w, s: _with_scale(n := _rms(y, w), _largest(n).clamp(min=1e-12) / 448),
        NORM,
        "the minimum largest magnitude is 1e-12",
    ),
    "a least scale": Nearly(
        lambda y, r, w, s: _with_scale(n := _rms(y, w), (_largest(n) / 448).clamp(min=1e-10)),
        NORM,
        "the minimum scale is 1e-10",
    ),
    "another limit": Nearly(
        lambda y, r, w, s: _with_scale(n := _rms(y, w), _largest(n) / 240, limit=240),
        NORM,
        "not the largest magnitudes divided by 448",
    ),
    "another clamp": Nearly(
        lambda y, r, w, s: _with_scale(n := _rms(y, w), _largest(n) / 448, limit=240),
        NORM,
        "it is clamped to",
    ),
    "another float8": Nearly(
        lambda y, r, w, s: _with_scale(n := _rms(y, w), _largest(n) / 240, torch.float8_e4m3fnuz),
        NORM,
        "it is quantized to torch.float8_e4m3fnuz",
    ),
    "int8 that is cut off": Nearly(
        lambda y, r, w, s: _with_scale(n := _rms(y, w), _largest(n) / 127, INT8, 127),
        NORM,
        "it is truncated, not rounded",
    ),
    "scales rounded to powers of two": Nearly(
        lambda y, r, w, s: _with_scale(
            n := _rms(y, w), (_largest(n) / 448).to(torch.float8_e8m0fnu).float()
        ),
        NORM,
        "are rounded to torch.float8_e8m0fnu",
    ),
    "whole largest magnitudes": Nearly(
        lambda y, r, w, s: _with_scale(n := _rms(y, w), _largest(n).int().float() / 448),
        NORM,
        "are rounded to torch.int32",
    ),
    "a rounded minimum": Nearly(
        lambda y, r, w, s: _with_scale(
            n := _rms(y, w), (_largest(n).clamp(min=1e-10).bfloat16() / 448).float()
        ),
        NORM,
        "are rounded to torch.bfloat16",
    ),
    "magnitudes of rounded values": Nearly(
        lambda y, r, w, s: _with_scale(n := _rms(y, w), _largest(n.half()) / 448),
        NORM,
        "are rounded to torch.float16",
    ),
    "a rounded inverse": Nearly(
        lambda y, r, w, s: _with_scale(n := _rms(y, w), n.abs().amax(-1, keepdim=True) / 448),
        NORM,
        "the inverse of its scales is rounded to torch.bfloat16",
    ),
    "multiplied by the scale": Nearly(
        lambda y, r, w, s: (_rms(y, w).float() * s).clamp(-448, 448).to(E4M3),
        NORM,
        "not the inverse of a scale",
    ),
    # Given scales.
    "scales of all columns": Nearly(
        lambda y, r, w, s: stored(_rms(y, w).float() / w.float(), E4M3),
        NORM,
        "neither one for each row nor",
    ),
    "a given scale of another dtype": Nearly(
        lambda y, r, w, s: stored(_rms(y, w) / s.bfloat16(), E4M3),
        NORM,
        "it is scaled in torch.bfloat16",
    ),
    "a scale made of the sum": Nearly(
        lambda y, r, w, s: stored(_rms(n := y + r, w).float() / n[:1, :1].float(), E4M3),
        RESIDUAL,
        "the scale is computed after the sum",
    ),
    "int8 down to -128": Nearly(
        lambda y, r, w, s: torch.round(_rms(y, w).float() / s).clamp(-128, 127).to(INT8),
        NORM,
        "it is clamped to",
    ),
    # After a reduce-scatter.
    "scattered, no residual": Nearly(
        lambda y, r, w, s: _rms(y, w),
        ["reducescatter"],
        "there is no reducescatter_rmsnorm",
        True,
    ),
    "scattered, layer norm": Nearly(
        lambda y, r, w, s: _layer(y + r, w)[0],
        ["reducescatter"],
        "there is no reducescatter_residual_layernorm",
        True,
    ),
    "scattered, int8": Nearly(
        lambda y, r, w, s: by_row(_rms(y + r, w), INT8),
        ["reducescatter_residual_rmsnorm"],
        "there is no reducescatter_residual_rmsnorm_int8",
        True,
    ),
    "scattered, doubled": Nearly(lambda y, r, w, s: _rms(y + y, w), ["reducescatter"], "", True),
    "scattered, another residual": Nearly(
        lambda y, r, w, s: _rms(y + r[0], w), ["reducescatter"], "", True
    ),
}


@pytest.mark.worlds(2)
@on_ranks(deadline=300.0)
def test_sizes_that_only_the_data_determines(rank: Rank) -> list[str]:
    """Runs models with numbers of rows that the compiler must not compare with another number."""
    group, communicator = group_of(rank)
    bias = tensor_of(rank, (1, COLS), torch.float32, False)
    weight = WEIGHT.to(rank.device)
    # A model of the sum and the residual, and its operators after the pass.
    models: dict[str, tuple[Callable[..., Results], list[str]]] = {
        "a row as residual": (lambda y, r: (_rms(y + bias, weight),), NO_NORM),
        "residual": (lambda y, r: (_rms(y + r, weight),), RESIDUAL),
        "pointwise": (lambda y, r: (torch.relu(y + bias) * r,), NO_NORM),
        "scales of rows": (
            lambda y, r: by_row(_rms(y + r, weight)),
            ["allreduce_residual_rmsnorm_fp8"],
        ),
        "given scales of rows": (
            lambda y, r: (stored(n := _rms(y, weight) / (r[:, :1].abs() + 1), E4M3), n),
            NORM,
        ),
    }
    wrong = []
    with communicator, torch.no_grad():
        for what, (model, operators) in models.items():
            given = [tensor_of(rank, (6, COLS), torch.float32, own) for own in (True, False)]
            for tensor in given:
                torch._dynamo.decorators.mark_unbacked(tensor, 0)

            def reduced(x: Tensor, residual: Tensor) -> Results:
                return model(functional.all_reduce(x, "sum", group), residual)  # noqa: B023

            found, kept, left, _ = passed(reduced, *given)
            if kept != operators or not torch.allclose(found[-1], reduced(*given)[-1], 1e-4, 1e-4):
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
        for what, nearly in NEARLY.items():
            rows = 4 * rank.size if nearly.scatters else 4
            x = tensor_of(rank, (rows, COLS), torch.bfloat16, True)
            residual = tensor_of(rank, (4, COLS), torch.bfloat16, False)

            def model(x: Tensor, residual: Tensor) -> Any:
                if nearly.scatters:  # noqa: B023
                    y = functional.reduce_scatter_tensor(x, "sum", 0, group)
                else:
                    y = functional.all_reduce(x, "sum", group)
                return nearly.model(y, residual, weight, scale)  # noqa: B023

            _, kept, left, _ = passed(model, x, residual)
            if kept != nearly.operators or nearly.why not in "".join(left):
                wrong.append(f"{what}: {kept}, {left}")
    return wrong
