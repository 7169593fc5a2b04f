"""The unfused sequences of a model whose results the parity modes match: an all-reduce, an addition
in the dtype, and a normalization in float32. They only differ from PyTorch's own layers in the
order in which a row is summed, which `row_sum` defines."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from collx.reference._common import exactly
from collx.reference._rows import Tensors, float32, reciprocal_root, row_sum
from collx.reference.collectives import allreduce

__all__ = ["unfused_layernorm", "unfused_rmsnorm"]


def unfused_rmsnorm(
    inputs: Sequence[torch.Tensor],
    weight: torch.Tensor,
    eps: float,
    weight_offset: float = 0.0,
    rounding: str = "parity",
    residual: torch.Tensor | None = None,
) -> Tensors:
    """Returns (out, residual_out). residual_out is the input of the norm: the sum plus the
    residual.

    "parity" is torch.nn.RMSNorm, and Gemma's norm with a weight_offset of 1: everything in float32,
    with one rounding. "parity_weight" is LlamaRMSNorm, which multiplies by the weight in the dtype.
    """
    hidden = _hidden(inputs, residual)
    dtype = hidden.dtype
    with exactly():
        offset = float32(weight_offset, hidden).to(dtype)
        wide = hidden.to(torch.float32)
        norm = _norm(wide, eps)
        if rounding == "parity_weight":
            gain = (weight.to(torch.float32) + offset.to(torch.float32)).to(dtype)
            return gain * (wide * norm).to(dtype), hidden
        gain = weight.to(torch.float32) + offset.to(torch.float32)
        return (wide * gain * norm).to(dtype), hidden


def unfused_layernorm(
    inputs: Sequence[torch.Tensor],
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    rounding: str = "parity",
    residual: torch.Tensor | None = None,
) -> Tensors:
    """Returns (out, residual_out). "parity" is torch.nn.LayerNorm. "parity_weight" multiplies by
    the weight and adds the bias in the dtype."""
    hidden = _hidden(inputs, residual)
    dtype = hidden.dtype
    with exactly():
        wide = hidden.to(torch.float32)
        centered = wide - row_sum(wide + 0.0) / float32(wide.shape[-1], wide)
        normed = centered * _norm(centered, eps)
        if rounding == "parity_weight":
            return normed.to(dtype) * weight.to(dtype) + bias.to(dtype), hidden
        return (normed * weight.to(torch.float32) + bias.to(torch.float32)).to(dtype), hidden


def _hidden(inputs: Sequence[torch.Tensor], residual: torch.Tensor | None) -> torch.Tensor:
    reduced = allreduce(inputs)
    with exactly():
        return reduced if residual is None else reduced + residual


def _norm(wide: torch.Tensor, eps: float) -> torch.Tensor:
    variance = row_sum(wide * wide) / float32(wide.shape[-1], wide)
    return reciprocal_root(variance + float32(eps, wide))
