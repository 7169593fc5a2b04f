"""Reductions fused with a normalization and, optionally, a quantization. Each function covers a
family of operators in torch.ops.collx. `functions.py` creates the functions from these
declarations.

docs/internals/numerics.md defines the bits that each function computes, and `collx.reference`
implements it in plain PyTorch. The formulas of the quantization are those of Modular's
`allreduce_rmsnorm_fp8`.

The functions are collective: all ranks call the same function in the same order, with arguments
that match. None of them has a backward: an argument that requires grad raises NotImplementedError.
"""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections.abc import Sequence

import torch

from collx._groups import Group
from collx.epilogues import Epilogue
from collx.ops.arguments import Extra
from collx.ops.functions import built_in
from collx.ops.quantization import Quantization

__all__ = ["Results", "allreduce_layernorm", "allreduce_rmsnorm", "reducescatter_rmsnorm"]

Results = torch.Tensor | tuple[torch.Tensor, ...]


@built_in
def allreduce_rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    group: Group = None,
    *,
    residual: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    rounding: str = "fp32",
    quantization: Quantization | str | None = None,
    scale: torch.Tensor | None = None,
    keep_norm: bool = False,
    epilogue: Epilogue | None = None,
    extras: Sequence[Extra] = (),
    index: bool = False,
    out: Results | None = None,
    algorithm: str = "auto",
    max_blocks: int = 0,
    async_op: bool = False,
) -> Results:
    """Sums `input` over the ranks, adds `residual`, and applies RMSNorm to each row of the sum.

    With acc = sum + residual, a row of the result is
    acc * (weight + weight_offset) / sqrt(mean(acc ** 2) + eps). The result can be quantized.

    Args:
        input: a tensor [..., cols] of at least two dimensions, with dtype float32, float16 or
            bfloat16 and any strides. Shape and dtype are the same on all ranks. All dimensions but
            the last one form the rows.
        weight: a tensor [cols] with the dtype of the input or float32. Its values are the same on
            all ranks.
        eps: is added to the mean of the squares of a row.
        group: the communicator, as in `collx.allreduce`.
        residual: a tensor with the shape and dtype of the input, which is added to the sum. Its
            values are the same on all ranks.
        weight_offset: is added to the weight. 1 for Gemma.
        rounding: where values are rounded to the dtype of the input. "fp32" rounds once, at the
            end. "parity" rounds where torch.nn.RMSNorm after an all-reduce rounds.
            "parity_weight" rounds where LlamaRMSNorm rounds, which multiplies by the weight in the
            dtype of the input.
        quantization: a `collx.Quantization`; "fp8" or "int8" for its defaults; or None for a
            result that is not quantized.
        scale: a float32 tensor with one element: the scale of `scale_mode="tensor"`. It is also
            one of the results.
        keep_norm: with a quantization, also returns the normalized tensor, as the last result.
        epilogue: ``f(value, *extras)``, a function of elementwise PyTorch ops that is applied to
            the normalized value, after its rounding to the dtype (docs/guide/epilogues.md). Its
            result is rounded to the same dtype and replaces the normalized value, also as the
            input of the quantization.
        extras: further arguments of `epilogue`: Python numbers, and tensors that have the dtype
            and device of the input, broadcast to the shape of the normalized tensor, and have the
            same values on all ranks.
        index: True passes the coordinates of the element to `epilogue` as further arguments, one
            int64 tensor for each dimension.
        out: the tensor for the result, or a tuple of the tensors for the results, in their order.
            They share no memory with the arguments, except that the sum may replace `residual`.
        algorithm, max_blocks, async_op: as in `collx.allreduce`.

    Returns:
        The normalized tensor, with the shape and dtype of the input. With a quantization instead
        the quantized tensor, of the same shape, and its scale. Then, if there is a residual,
        acc rounded to the dtype. Then, if `keep_norm`, the normalized tensor. One result is a
        tensor, several results are a tuple.

    Raises the errors of `collx.allreduce`, and NotImplementedError if an argument requires grad:
    there is no backward.
    """


@built_in
def reducescatter_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    group: Group = None,
    *,
    weight_offset: float = 0.0,
    rounding: str = "fp32",
    quantization: Quantization | str | None = None,
    scale: torch.Tensor | None = None,
    keep_norm: bool = False,
    epilogue: Epilogue | None = None,
    extras: Sequence[Extra] = (),
    index: bool = False,
    out: Results | None = None,
    algorithm: str = "auto",
    max_blocks: int = 0,
    async_op: bool = False,
) -> Results:
    """Like `collx.allreduce_rmsnorm`, but every rank gets only its own rows.

    Args:
        input: a tensor [rows, cols]. The rows are divided as in `collx.reducescatter`: rows //
            world_size for each rank, and one more for the first rows % world_size ranks.
        residual: a tensor [this rank's rows, cols]. It may differ from rank to rank.
        extras: as in `collx.allreduce_rmsnorm`, for this rank's rows. They may differ from rank
            to rank.

    The other arguments are those of `collx.allreduce_rmsnorm`. `quantization` accepts "fp8" only.

    Returns:
        The results of `collx.allreduce_rmsnorm`, for the rows of `residual`.
    """


@built_in
def allreduce_layernorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    group: Group = None,
    *,
    residual: torch.Tensor | None = None,
    rounding: str = "fp32",
    epilogue: Epilogue | None = None,
    extras: Sequence[Extra] = (),
    index: bool = False,
    out: Results | None = None,
    algorithm: str = "auto",
    max_blocks: int = 0,
    async_op: bool = False,
) -> Results:
    """Sums `input` over the ranks, adds `residual`, and applies LayerNorm to each row of the sum.

    With acc = sum + residual, a row of the result is
    (acc - mean(acc)) / sqrt(var(acc) + eps) * weight + bias, as in torch.nn.LayerNorm.

    Args:
        bias: a tensor [cols] with the dtype of the input or float32. Its values are the same on
            all ranks.

    The other arguments are those of `collx.allreduce_rmsnorm`.

    Returns:
        The normalized tensor; with a residual, a tuple of it and acc rounded to the dtype.
    """
