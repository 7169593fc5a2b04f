"""Quantization in plain PyTorch, as a model writes it."""

from __future__ import annotations

import math

import torch

from collx.ops.quantization import Quantization

__all__ = ["quantized"]

_SMALLEST = 1e-10  # lower bound of the largest magnitude of a group


def quantized(
    y: torch.Tensor, how: Quantization, scale: torch.Tensor | None, input_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes rows as a model does, without gradients.

    Args:
        y: a floating-point tensor [..., cols].
        how: the options of the quantization.
        scale: a float32 tensor with one element if scale_mode is "tensor"; otherwise None.
        input_dtype: the dtype of the scale with scale_dtype "input".

    Returns:
        The values, [..., cols], and the scale: [...], [..., groups] or [1].
    """
    if (scale is not None) != (how.scale_mode == "tensor"):
        raise ValueError(
            f"scale: got {'None' if scale is None else 'a tensor'} with scale_mode "
            f'"{how.scale_mode}"; accepted: a tensor with "tensor", otherwise None'
        )
    y = y.detach().float()
    if scale is not None:
        return _converted(y / scale, how), scale.detach().reshape(1).clone()
    in_groups = how.scale_mode == "group"
    rows = y.unflatten(-1, (-1, how.quant_group_size)) if in_groups else y
    stored = _scale(rows.abs().amax(-1), how, input_dtype)
    used = stored.float()
    inverse = 1 / used
    inverse = inverse.masked_fill((used == 0) | ~inverse.isfinite(), 0)
    q = _converted(rows * inverse.unsqueeze(-1), how)
    if in_groups and how.scale_layout == "column":
        stored = stored.movedim(-1, 0).contiguous().movedim(0, -1)
    return (q.flatten(-2) if in_groups else q), stored


def _scale(largest: torch.Tensor, how: Quantization, input_dtype: torch.dtype) -> torch.Tensor:
    if how.scale_mode == "group":
        largest = largest.clamp(min=_SMALLEST)
    scale = largest.clamp(max=math.inf if how.scale_ub is None else how.scale_ub) / how.limit
    if how.ue8m0:
        fraction, exponent = torch.frexp(scale)  # fraction in [0.5, 1): 0.5 is a power of two
        power = torch.ldexp(torch.ones_like(scale), exponent - (fraction == 0.5).int())
        scale = torch.where(scale.isfinite() & (scale != 0), power, scale)
    if how.scale_dtype == "float32":
        return scale
    return scale.to(input_dtype if how.scale_dtype == "input" else torch.float8_e8m0fnu)


def _converted(y: torch.Tensor, how: Quantization) -> torch.Tensor:
    y = y.clamp(-how.limit, how.limit)
    if how.kind == "int8":
        return y.nan_to_num(nan=0.0).round().to(torch.int8)
    return y.to(how.dtype)
