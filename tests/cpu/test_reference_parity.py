"""Compares the parity modes of the reference with the layers of PyTorch and transformers, which sum
rows in another order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from collx import reference

DTYPES = (torch.float16, torch.bfloat16)


def values(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ordered(tensor: torch.Tensor) -> torch.Tensor:
    """Maps 16-bit floats to integers in the same order. Neighbors differ by one."""
    bits = tensor.view(torch.int16).to(torch.int32)
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


def torch_rmsnorm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    layer = torch.nn.RMSNorm(hidden.shape[-1], eps, dtype=hidden.dtype)
    layer.weight.data.copy_(weight)
    result: torch.Tensor = layer(hidden).detach()
    return result


def llama_rmsnorm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Computes LlamaRMSNorm.forward of transformers."""
    wide = hidden.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    return weight * (wide * torch.rsqrt(variance + eps)).to(hidden.dtype)


def gemma_rmsnorm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Computes GemmaRMSNorm.forward of transformers."""
    wide = hidden.to(torch.float32)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * (1.0 + weight.to(torch.float32))).to(hidden.dtype)


LAYERS: dict[str, tuple[Callable[..., torch.Tensor], str, float]] = {
    "torch.nn.RMSNorm": (torch_rmsnorm, "parity", 0.0),
    "LlamaRMSNorm": (llama_rmsnorm, "parity_weight", 0.0),
    "GemmaRMSNorm": (gemma_rmsnorm, "parity", 1.0),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_parity_is_within_one_ulp_of_the_layer(layer: str, dtype: torch.dtype) -> None:
    """The norm follows an all-reduce and the addition of a residual, which are both rounded as in
    the model. A sum in another order changes the first rounded value by at most one ulp. If that
    value is multiplied by a weight in the dtype, one ulp times the weight's fraction, which is
    below 2, may become two ulps."""
    norm, rounding, offset = LAYERS[layer]
    for cols in (384, 4096):
        inputs = [values(64, cols, dtype=dtype, seed=seed) for seed in range(4)]
        residual, weight = values(64, cols, dtype=dtype, seed=5), values(cols, dtype=dtype, seed=6)
        hidden = reference.allreduce(inputs) + residual
        out, residual_out = reference.allreduce_residual_rmsnorm(
            inputs, residual, weight, 1e-5, offset, rounding
        )
        assert torch.equal(residual_out, hidden)
        apart = (ordered(out) - ordered(norm(hidden, weight, 1e-5))).abs()
        assert int(apart.max()) <= (2 if rounding == "parity_weight" else 1)
        assert float((apart > 0).float().mean()) < 0.01
        ones = torch.ones_like(weight)
        unweighted, _ = reference.allreduce_residual_rmsnorm(
            inputs, residual, ones, 1e-5, offset, rounding
        )
        assert int((ordered(unweighted) - ordered(norm(hidden, ones, 1e-5))).abs().max()) <= 1
