"""Thin functions over the reductions fused with a normalisation in torch.ops.collx, with defaults
filled in. docs/numerics.md says to the bit what each computes, `collx.reference` the same in plain
PyTorch; the formulas of the quantising ones follow Modular's `allreduce_rmsnorm_fp8`.

They are collective: every rank calls the same one, with arguments that fit together, in the same
order. What they have in common:

    input          [..., cols] of float32, float16 or bfloat16, of at least two dimensions and any
                   strides: one shape and dtype on all ranks. All but the last dimension make rows
    residual       is added to the sum: of the input's shape and dtype, of equal values on all ranks
    weight, bias   [cols], of the input's dtype or float32, equal on all ranks
    eps            is added to the mean of the squares of a row
    group          the communicator: itself, its name, a process group that has one, or None for the
                   default group's
    weight_offset  is added to the weight; Gemma's is 1
    rounding       where values are rounded to the dtype: "fp32", once, at the end; "parity" as
                   torch.nn.RMSNorm behind an all-reduce; "parity_weight" as LlamaRMSNorm, which
                   multiplies by the weight in the dtype
    out            takes the results, a tensor or a tuple of them in their order, and is returned.
                   It shares no memory with an argument, but that residual_out may be the residual
    algorithm      "auto", or a name of README.md's "Algorithms"
    max_blocks     CUDA thread blocks to use at most; 0 for no bound. The same on all ranks

Those that quantise make `q`, and `scale`, such that q * scale is the normalised tensor:

    fp8_dtype      "e4m3fn" or "e5m2"
    scale_mode     "row": one for each row, [...]; "group": one for `group_size` columns,
                   [..., cols / group_size]; "tensor": `scale`, float32 [1], is given and returned
    scale_ub       bounds the largest magnitude that a scale is made for
    group_size     a power of two from 16 to 4096 that divides cols
    ue8m0          scales are rounded up to powers of two
    scale_dtype    "float32", "input" (the input's), or with ue8m0 "float8_e8m0fnu"
    scale_layout   of groups: "row", contiguous, or "column", all rows of a group side by side
    keep_norm      the normalised tensor is one more result, the last

All of them raise:

    ValueError, TypeError, NotImplementedError    an argument is refused; nothing was launched
    CollectiveTimeout, CollectiveMismatch, CommunicatorPoisoned
                                                  this call on the CPU, or an earlier one, failed

None has a backward: an argument that requires grad is refused (NotImplementedError).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from collx.functional import Group, name_of

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

Tensors = tuple[torch.Tensor, ...]

_NORMED = ("out", "residual_out")


def allreduce_rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    group: Group = None,
    *,
    weight_offset: float = 0.0,
    rounding: str = "fp32",
    out: torch.Tensor | None = None,
    algorithm: str = "auto",
    max_blocks: int = 0,
) -> torch.Tensor:
    """Sums `input` over the ranks and normalises its rows: acc * (weight + weight_offset) /
    sqrt(mean(acc ** 2) + eps).

    Returns:
        `out`, or a new contiguous tensor of the shape and dtype of `input`.
    """
    options = (weight_offset, rounding, algorithm, max_blocks)
    op = torch.ops.collx.allreduce_rmsnorm
    return _one(op, out, input, weight, eps, name_of(group), *options)


def allreduce_residual_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    group: Group = None,
    *,
    weight_offset: float = 0.0,
    rounding: str = "fp32",
    out: Tensors | None = None,
    algorithm: str = "auto",
    max_blocks: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`allreduce_rmsnorm` of the sum plus `residual`.

    Returns:
        (out, residual_out): the normalised tensor, and the sum plus `residual`. They are those
        given as `out`, or new contiguous tensors of the shape and dtype of `input`.
    """
    options = (weight_offset, rounding, algorithm, max_blocks)
    op = torch.ops.collx.allreduce_residual_rmsnorm
    given = (input, residual, weight, eps, name_of(group), *options)
    normed, added = _several(op, _NORMED, False, out, *given)
    return normed, added


def allreduce_layernorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    group: Group = None,
    *,
    rounding: str = "fp32",
    out: torch.Tensor | None = None,
    algorithm: str = "auto",
    max_blocks: int = 0,
) -> torch.Tensor:
    """Sums `input` over the ranks and normalises its rows as torch.nn.LayerNorm:
    (acc - mean(acc)) / sqrt(var(acc) + eps) * weight + bias.

    Returns:
        `out`, or a new contiguous tensor of the shape and dtype of `input`.
    """
    op = torch.ops.collx.allreduce_layernorm
    options = (rounding, algorithm, max_blocks)
    return _one(op, out, input, weight, bias, eps, name_of(group), *options)


def allreduce_residual_layernorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    group: Group = None,
    *,
    rounding: str = "fp32",
    out: Tensors | None = None,
    algorithm: str = "auto",
    max_blocks: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`allreduce_layernorm` of the sum plus `residual`.

    Returns:
        (out, residual_out), as `allreduce_residual_rmsnorm`.
    """
    op = torch.ops.collx.allreduce_residual_layernorm
    given = (input, residual, weight, bias, eps, name_of(group), rounding, algorithm, max_blocks)
    normed, added = _several(op, _NORMED, False, out, *given)
    return normed, added


def reducescatter_residual_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    group: Group = None,
    *,
    weight_offset: float = 0.0,
    rounding: str = "fp32",
    out: Tensors | None = None,
    algorithm: str = "auto",
    max_blocks: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`allreduce_residual_rmsnorm` of this rank's rows alone.

    Args:
        input: [rows, cols]. The rows are divided as `reducescatter` does: rows // world each, the
            first rows % world ranks get one more.
        residual: [this rank's rows, cols], its own.

    Returns:
        (out, residual_out), of the shape of `residual`.
    """
    options = (weight_offset, rounding, algorithm, max_blocks)
    op = torch.ops.collx.reducescatter_residual_rmsnorm
    given = (input, residual, weight, eps, name_of(group), *options)
    normed, added = _several(op, _NORMED, False, out, *given)
    return normed, added


def allreduce_rmsnorm_fp8(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    group: Group = None,
    *,
    weight_offset: float = 0.0,
    scale_ub: float | None = None,
    fp8_dtype: str = "e4m3fn",
    scale_mode: str = "row",
    scale: torch.Tensor | None = None,
    group_size: int = 128,
    ue8m0: bool = False,
    scale_dtype: str = "float32",
    scale_layout: str = "row",
    rounding: str = "fp32",
    keep_norm: bool = False,
    out: Tensors | None = None,
    algorithm: str = "auto",
    max_blocks: int = 0,
) -> Tensors:
    """`allreduce_rmsnorm`, quantised to 8-bit floats.

    Returns:
        (q, scale), with `keep_norm` (q, scale, norm): those given as `out`, or new tensors. `q` has
        the shape of `input` and is torch.float8_e4m3fn or torch.float8_e5m2; `norm` has its dtype,
        too.
    """
    op = torch.ops.collx.allreduce_rmsnorm_fp8
    names = ("q_out", "scale_out")
    given = (input, weight, eps, name_of(group), weight_offset, scale_ub, fp8_dtype)
    scales = (scale_mode, scale, group_size, ue8m0, scale_dtype, scale_layout)
    options = (*scales, rounding, algorithm, max_blocks)
    return _several(op, names, keep_norm, out, *given, *options)


def allreduce_residual_rmsnorm_fp8(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    group: Group = None,
    *,
    weight_offset: float = 0.0,
    scale_ub: float | None = None,
    fp8_dtype: str = "e4m3fn",
    scale_mode: str = "row",
    scale: torch.Tensor | None = None,
    group_size: int = 128,
    ue8m0: bool = False,
    scale_dtype: str = "float32",
    scale_layout: str = "row",
    rounding: str = "fp32",
    keep_norm: bool = False,
    out: Tensors | None = None,
    algorithm: str = "auto",
    max_blocks: int = 0,
) -> Tensors:
    """`allreduce_residual_rmsnorm`, quantised to 8-bit floats.

    Returns:
        (q, scale, residual_out), with `keep_norm` (q, scale, residual_out, norm): those given as
        `out`, or new tensors. `q` has the shape of `input` and is an 8-bit float; `residual_out`,
        the sum plus `residual`, and `norm` have its dtype, too.
    """
    op = torch.ops.collx.allreduce_residual_rmsnorm_fp8
    names = ("q_out", "scale_out", "residual_out")
    given = (input, residual, weight, eps, name_of(group), weight_offset, scale_ub, fp8_dtype)
    scales = (scale_mode, scale, group_size, ue8m0, scale_dtype, scale_layout)
    options = (*scales, rounding, algorithm, max_blocks)
    return _several(op, names, keep_norm, out, *given, *options)


def allreduce_rmsnorm_int8(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    group: Group = None,
    *,
    weight_offset: float = 0.0,
    scale_ub: float | None = None,
    scale_mode: str = "row",
    scale: torch.Tensor | None = None,
    group_size: int = 128,
    ue8m0: bool = False,
    scale_dtype: str = "float32",
    scale_layout: str = "row",
    rounding: str = "fp32",
    keep_norm: bool = False,
    out: Tensors | None = None,
    algorithm: str = "auto",
    max_blocks: int = 0,
) -> Tensors:
    """`allreduce_rmsnorm`, quantised to the integers from -127 to 127.

    Returns:
        (q, scale), with `keep_norm` (q, scale, norm): those given as `out`, or new tensors. `q` has
        the shape of `input` and is torch.int8, `norm` has its dtype, too.
    """
    op = torch.ops.collx.allreduce_rmsnorm_int8
    names = ("q_out", "scale_out")
    given = (input, weight, eps, name_of(group), weight_offset, scale_ub)
    scales = (scale_mode, scale, group_size, ue8m0, scale_dtype, scale_layout)
    options = (*scales, rounding, algorithm, max_blocks)
    return _several(op, names, keep_norm, out, *given, *options)


def allreduce_residual_rmsnorm_int8(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    group: Group = None,
    *,
    weight_offset: float = 0.0,
    scale_ub: float | None = None,
    scale_mode: str = "row",
    scale: torch.Tensor | None = None,
    group_size: int = 128,
    ue8m0: bool = False,
    scale_dtype: str = "float32",
    scale_layout: str = "row",
    rounding: str = "fp32",
    keep_norm: bool = False,
    out: Tensors | None = None,
    algorithm: str = "auto",
    max_blocks: int = 0,
) -> Tensors:
    """`allreduce_residual_rmsnorm`, quantised to the integers from -127 to 127.

    Returns:
        (q, scale, residual_out), with `keep_norm` (q, scale, residual_out, norm): those given as
        `out`, or new tensors. `q` has the shape of `input` and is torch.int8; `residual_out`,
        the sum plus `residual`, and `norm` have its dtype, too.
    """
    op = torch.ops.collx.allreduce_residual_rmsnorm_int8
    names = ("q_out", "scale_out", "residual_out")
    given = (input, residual, weight, eps, name_of(group), weight_offset, scale_ub)
    scales = (scale_mode, scale, group_size, ue8m0, scale_dtype, scale_layout)
    options = (*scales, rounding, algorithm, max_blocks)
    return _several(op, names, keep_norm, out, *given, *options)


def reducescatter_residual_rmsnorm_fp8(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    group: Group = None,
    *,
    weight_offset: float = 0.0,
    scale_ub: float | None = None,
    fp8_dtype: str = "e4m3fn",
    scale_mode: str = "row",
    scale: torch.Tensor | None = None,
    group_size: int = 128,
    ue8m0: bool = False,
    scale_dtype: str = "float32",
    scale_layout: str = "row",
    rounding: str = "fp32",
    keep_norm: bool = False,
    out: Tensors | None = None,
    algorithm: str = "auto",
    max_blocks: int = 0,
) -> Tensors:
    """`reducescatter_residual_rmsnorm`, quantised to 8-bit floats: this rank's rows alone.

    Returns:
        (q, scale, residual_out), with `keep_norm` (q, scale, residual_out, norm), of the rows that
        `residual` has: those given as `out`, or new tensors.
    """
    op = torch.ops.collx.reducescatter_residual_rmsnorm_fp8
    names = ("q_out", "scale_out", "residual_out")
    given = (input, residual, weight, eps, name_of(group), weight_offset, scale_ub, fp8_dtype)
    scales = (scale_mode, scale, group_size, ue8m0, scale_dtype, scale_layout)
    options = (*scales, rounding, algorithm, max_blocks)
    return _several(op, names, keep_norm, out, *given, *options)


def _one(op: Any, out: torch.Tensor | None, *arguments: Any) -> torch.Tensor:
    """The operator's functional form, or the one that writes `out`."""
    if out is None:
        result: torch.Tensor = op.default(*arguments)
        return result
    op.out(*arguments, out=out)
    return out


def _several(
    op: Any, names: Sequence[str], keep_norm: bool, out: Tensors | None, *arguments: Any
) -> Tensors:
    """The same of an operator with several results, of which `names` are the outputs."""
    if out is None:
        results: Tensors = (op.norm if keep_norm else op.default)(*arguments)
        return results
    given = tuple(out)
    names = (*names, "norm_out") if keep_norm else names
    if len(given) != len(names):
        raise ValueError(
            f"collx.{op.__name__}: out: {len(given)} tensors; accepted: a tuple of "
            f"{len(names)}: {', '.join(names)}"
        )
    (op.norm_out if keep_norm else op.out)(*arguments, **dict(zip(names, given, strict=True)))
    return given
