"""Reductions fused with a normalization and, optionally, a quantization: the steps of
docs/internals/numerics.md, "Reductions fused with a normalization".

`inputs` is a list with one tensor [..., cols] for each rank, with dtype float32, float16 or
bfloat16. `weight` and `bias` are [cols], with that dtype or float32, and `residual` has the same
values on all ranks. The options are those of the operators. `eps` and `weight_offset` are converted
to float32 first. An `epilogue`, as in `collx.reference.allreduce`, is applied to the normalized
rows after their rounding to the dtype; its result has the same dtype and replaces the rows, also as
the input of the quantization. If rows are scattered, `extras` is a list with the extras of each
rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from collx.reference._rows import Layer, Tensors, normalized, own_rows, quantized, row_epilogue

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from collx.reference._epilogues import Extra, Function
    from collx.reference._scales import ScaleOptions

__all__ = [
    "allreduce_layernorm",
    "allreduce_residual_layernorm",
    "allreduce_residual_rmsnorm",
    "allreduce_residual_rmsnorm_fp8",
    "allreduce_residual_rmsnorm_int8",
    "allreduce_rmsnorm",
    "allreduce_rmsnorm_fp8",
    "allreduce_rmsnorm_int8",
    "reducescatter_residual_rmsnorm",
    "reducescatter_residual_rmsnorm_fp8",
]


def allreduce_rmsnorm(
    inputs: Sequence[torch.Tensor],
    weight: torch.Tensor,
    eps: float,
    weight_offset: float = 0.0,
    rounding: str = "fp32",
    epilogue: Function | None = None,
    extras: Sequence[Extra] = (),
    index: bool = False,
) -> torch.Tensor:
    """Returns the normalized rows of the sum, the same on every rank."""
    layer = Layer(
        "allreduce_rmsnorm",
        weight,
        None,
        eps,
        weight_offset,
        rounding,
        row_epilogue(epilogue, extras, index),
    )
    return normalized(layer, inputs, None)[0]


def allreduce_residual_rmsnorm(
    inputs: Sequence[torch.Tensor],
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float = 0.0,
    rounding: str = "fp32",
    epilogue: Function | None = None,
    extras: Sequence[Extra] = (),
    index: bool = False,
) -> Tensors:
    """Returns (out, residual_out), the same on every rank."""
    layer = Layer(
        "allreduce_residual_rmsnorm",
        weight,
        None,
        eps,
        weight_offset,
        rounding,
        row_epilogue(epilogue, extras, index),
    )
    return normalized(layer, inputs, residual)


def allreduce_layernorm(
    inputs: Sequence[torch.Tensor],
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    rounding: str = "fp32",
    epilogue: Function | None = None,
    extras: Sequence[Extra] = (),
    index: bool = False,
) -> torch.Tensor:
    """Returns the normalized rows of the sum, the same on every rank."""
    return normalized(
        Layer(
            "allreduce_layernorm",
            weight,
            bias,
            eps,
            0.0,
            rounding,
            row_epilogue(epilogue, extras, index),
        ),
        inputs,
        None,
    )[0]


def allreduce_residual_layernorm(
    inputs: Sequence[torch.Tensor],
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    rounding: str = "fp32",
    epilogue: Function | None = None,
    extras: Sequence[Extra] = (),
    index: bool = False,
) -> Tensors:
    """Returns (out, residual_out), the same on every rank."""
    layer = Layer(
        "allreduce_residual_layernorm",
        weight,
        bias,
        eps,
        0.0,
        rounding,
        row_epilogue(epilogue, extras, index),
    )
    return normalized(layer, inputs, residual)


def allreduce_rmsnorm_fp8(
    inputs: Sequence[torch.Tensor],
    weight: torch.Tensor,
    eps: float,
    weight_offset: float = 0.0,
    fp8_dtype: str = "e4m3fn",
    rounding: str = "fp32",
    keep_norm: bool = False,
    epilogue: Function | None = None,
    extras: Sequence[Extra] = (),
    index: bool = False,
    **options: Unpack[ScaleOptions],
) -> Tensors:
    """Returns (q, scale), or (q, scale, norm) with `keep_norm`, the same on every rank."""
    layer = Layer(
        "allreduce_rmsnorm_fp8",
        weight,
        None,
        eps,
        weight_offset,
        rounding,
        row_epilogue(epilogue, extras, index),
    )
    return quantized(layer, inputs, None, fp8_dtype, keep_norm, options)


def allreduce_residual_rmsnorm_fp8(
    inputs: Sequence[torch.Tensor],
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float = 0.0,
    fp8_dtype: str = "e4m3fn",
    rounding: str = "fp32",
    keep_norm: bool = False,
    epilogue: Function | None = None,
    extras: Sequence[Extra] = (),
    index: bool = False,
    **options: Unpack[ScaleOptions],
) -> Tensors:
    """Returns (q, scale, residual_out), and norm with `keep_norm`, the same on every rank."""
    layer = Layer(
        "allreduce_residual_rmsnorm_fp8",
        weight,
        None,
        eps,
        weight_offset,
        rounding,
        row_epilogue(epilogue, extras, index),
    )
    return quantized(layer, inputs, residual, fp8_dtype, keep_norm, options)


def allreduce_rmsnorm_int8(
    inputs: Sequence[torch.Tensor],
    weight: torch.Tensor,
    eps: float,
    weight_offset: float = 0.0,
    rounding: str = "fp32",
    keep_norm: bool = False,
    epilogue: Function | None = None,
    extras: Sequence[Extra] = (),
    index: bool = False,
    **options: Unpack[ScaleOptions],
) -> Tensors:
    """Returns (q, scale), or (q, scale, norm) with `keep_norm`, the same on every rank."""
    layer = Layer(
        "allreduce_rmsnorm_int8",
        weight,
        None,
        eps,
        weight_offset,
        rounding,
        row_epilogue(epilogue, extras, index),
    )
    return quantized(layer, inputs, None, "int8", keep_norm, options)


def allreduce_residual_rmsnorm_int8(
    inputs: Sequence[torch.Tensor],
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float = 0.0,
    rounding: str = "fp32",
    keep_norm: bool = False,
    epilogue: Function | None = None,
    extras: Sequence[Extra] = (),
    index: bool = False,
    **options: Unpack[ScaleOptions],
) -> Tensors:
    """Returns (q, scale, residual_out), and norm with `keep_norm`, the same on every rank."""
    layer = Layer(
        "allreduce_residual_rmsnorm_int8",
        weight,
        None,
        eps,
        weight_offset,
        rounding,
        row_epilogue(epilogue, extras, index),
    )
    return quantized(layer, inputs, residual, "int8", keep_norm, options)


def reducescatter_residual_rmsnorm(
    inputs: Sequence[torch.Tensor],
    residuals: Sequence[torch.Tensor],
    weight: torch.Tensor,
    eps: float,
    weight_offset: float = 0.0,
    rounding: str = "fp32",
    epilogue: Function | None = None,
    extras: Sequence[Sequence[Extra]] = (),
    index: bool = False,
) -> list[Tensors]:
    """Returns (out, residual_out) for each rank r: its rows of the sum, plus `residuals[r]`."""
    layer = Layer("reducescatter_residual_rmsnorm", weight, None, eps, weight_offset, rounding)
    ranks = own_rows(layer, inputs, residuals, epilogue, extras, index)
    return [normalized(own, rows, residual) for own, rows, residual in ranks]


def reducescatter_residual_rmsnorm_fp8(
    inputs: Sequence[torch.Tensor],
    residuals: Sequence[torch.Tensor],
    weight: torch.Tensor,
    eps: float,
    weight_offset: float = 0.0,
    fp8_dtype: str = "e4m3fn",
    rounding: str = "fp32",
    keep_norm: bool = False,
    epilogue: Function | None = None,
    extras: Sequence[Sequence[Extra]] = (),
    index: bool = False,
    **options: Unpack[ScaleOptions],
) -> list[Tensors]:
    """Returns (q, scale, residual_out), and norm with `keep_norm`, for the rows of each rank."""
    layer = Layer("reducescatter_residual_rmsnorm_fp8", weight, None, eps, weight_offset, rounding)
    return [
        quantized(own, rows, residual, fp8_dtype, keep_norm, options)
        for own, rows, residual in own_rows(layer, inputs, residuals, epilogue, extras, index)
    ]
