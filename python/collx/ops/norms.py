"""Reductions fused with a normalization, and with a quantization behind it: a function for each
family of operators in torch.ops.collx. docs/numerics.md says to the bit what each computes,
`collx.reference` the same in plain PyTorch; the formulas of the quantizing ones follow Modular's
`allreduce_rmsnorm_fp8`. `functions.py` makes the functions from these declarations.

They are collective: every rank calls the same one, with arguments that fit together, in the same
order. What they have in common:

    input          [..., cols] of float32, float16 or bfloat16, of at least two dimensions and any
                   strides: one shape and dtype on all ranks. All but the last dimension make rows
    weight, bias   [cols], of the input's dtype or float32, equal on all ranks
    eps            is added to the mean of the squares of a row
    group          the communicator: itself or its name; a process group or a device mesh of one
                   dimension, whose default one is meant; or None for the default group's
    residual       is added to the sum: of the input's shape and dtype, of equal values on all ranks
    weight_offset  is added to the weight; Gemma's is 1
    rounding       where values are rounded to the dtype: "fp32", once, at the end; "parity" as
                   torch.nn.RMSNorm behind an all-reduce; "parity_weight" as LlamaRMSNorm, which
                   multiplies by the weight in the dtype
    quantization   how the result is quantized: a `Quantization`, or "fp8" or "int8" for its
                   defaults; None: not at all
    scale          float32 [1]: the scale of scale_mode "tensor", which is returned as well
    keep_norm      with a quantization: the normalized tensor is one more result, the last
    epilogue       ``f(value, *extras)``, a function of elementwise PyTorch ops, applied to the
                   normalized value, rounded to the dtype; what it makes, rounded likewise, takes
                   the place of that, also where it is quantized: docs/epilogues.md
    extras         tensors of the input's dtype and device that broadcast to the normalized tensor's
                   shape, of equal values on all ranks
    index          f takes int64 coordinates of the element besides, one for each dimension
    out            takes the results, a tensor or a tuple of them in their order, and is returned.
                   It shares no memory with an argument, but that the sum may be the residual
    algorithm      "auto", or the name of one; the error for an unknown name lists them
    max_blocks     CUDA thread blocks to use at most; 0 for no bound. The same on all ranks
    async_op       post the call and return its `Handle`, as `collx.post` does

They return the normalized tensor, of the shape and dtype of the input; or with a quantization `q`
of that shape, and `scale`. Then come, where they were asked for, the sum with the residual added,
and the normalized tensor. One result is a tensor, several are a tuple.

All of them raise:

    ValueError, TypeError, NotImplementedError    an argument is refused; nothing was launched
    CollectiveTimeout, CollectiveMismatch, CommunicatorPoisoned
                                                  this call on the CPU, or an earlier one, failed

None has a backward: an argument that requires grad is refused (NotImplementedError).
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
    """Sums `input` over the ranks, adds `residual`, and normalizes the rows of that: acc * (weight
    + weight_offset) / sqrt(mean(acc ** 2) + eps).

    Returns:
        The normalized tensor, or q and its scale; then, with a residual, the sum with it added;
        then the normalized tensor if `keep_norm`.
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
    """`allreduce_rmsnorm` of this rank's rows alone.

    Args:
        input: [rows, cols]. The rows are divided as `reducescatter` does: rows // world each, the
            first rows % world ranks get one more.
        residual: [this rank's rows, cols], its own.

    Returns:
        The same, of the rows that `residual` has.
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
    """Sums `input` over the ranks, adds `residual`, and normalizes the rows of that as
    torch.nn.LayerNorm: (acc - mean(acc)) / sqrt(var(acc) + eps) * weight + bias.

    Returns:
        The normalized tensor; with a residual, then the sum with it added.
    """
