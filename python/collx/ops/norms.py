"""Reductions fused with a normalization, and with a quantization behind it: a function for each
family of operators in torch.ops.collx. docs/numerics.md says to the bit what each computes,
`collx.reference` the same in plain PyTorch; the formulas of the quantizing ones follow Modular's
`allreduce_rmsnorm_fp8`.

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

They return the normalized tensor, of the shape and dtype of the input; or with a quantization `q`
of that shape, and `scale`. Then come, where they were asked for, the sum with the residual added,
and the normalized tensor. One result is a tensor, several are a tuple.

All of them raise:

    ValueError, TypeError, NotImplementedError    an argument is refused; nothing was launched
    CollectiveTimeout, CollectiveMismatch, CommunicatorPoisoned
                                                  this call on the CPU, or an earlier one, failed

None has a backward: an argument that requires grad is refused (NotImplementedError).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from collx._groups import Group, name_of
from collx.epilogues import Epilogue, expression_of
from collx.ops.arguments import Extra, extras_of, quick, refuse_without_epilogue
from collx.ops.quantization import Quantization

__all__ = ["Results", "allreduce_layernorm", "allreduce_rmsnorm", "reducescatter_rmsnorm"]

Results = torch.Tensor | tuple[torch.Tensor, ...]


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
) -> Results:
    """Sums `input` over the ranks, adds `residual`, and normalizes the rows of that: acc * (weight
    + weight_offset) / sqrt(mean(acc ** 2) + eps).

    Returns:
        The normalized tensor, or q and its scale; then, with a residual, the sum with it added;
        then the normalized tensor if `keep_norm`.
    """
    return _rmsnorm(
        "allreduce",
        input,
        residual,
        weight,
        eps,
        group,
        quantization,
        scale,
        keep_norm,
        out,
        _changed(rounding, algorithm, max_blocks, weight_offset)
        | _mapped("allreduce_rmsnorm", epilogue, input, extras, index),
    )


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
) -> Results:
    """`allreduce_rmsnorm` of this rank's rows alone.

    Args:
        input: [rows, cols]. The rows are divided as `reducescatter` does: rows // world each, the
            first rows % world ranks get one more.
        residual: [this rank's rows, cols], its own.

    Returns:
        The same, of the rows that `residual` has.
    """
    quantization = Quantization.of(quantization)
    if quantization is not None and quantization.kind == "int8":
        raise NotImplementedError(
            "collx.reducescatter_rmsnorm: quantization: got int8; accepted: fp8, or None"
        )
    return _rmsnorm(
        "reducescatter",
        input,
        residual,
        weight,
        eps,
        group,
        quantization,
        scale,
        keep_norm,
        out,
        _changed(rounding, algorithm, max_blocks, weight_offset)
        | _mapped("reducescatter_rmsnorm", epilogue, input, extras, index),
    )


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
) -> Results:
    """Sums `input` over the ranks, adds `residual`, and normalizes the rows of that as
    torch.nn.LayerNorm: (acc - mean(acc)) / sqrt(var(acc) + eps) * weight + bias.

    Returns:
        The normalized tensor; with a residual, then the sum with it added.
    """
    options = _changed(rounding, algorithm, max_blocks)
    options |= _mapped("allreduce_layernorm", epilogue, input, extras, index)
    if residual is None:
        given: tuple[Any, ...] = (input, weight, bias, eps, name_of(group))
        return _CALLERS["allreduce_layernorm"](out, given, options)
    given = (input, residual, weight, bias, eps, name_of(group))
    return _CALLERS["allreduce_residual_layernorm"](out, given, options)


def _rmsnorm(
    what: str,
    input: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    group: Group,
    quantization: Quantization | str | None,
    scale: torch.Tensor | None,
    keep_norm: bool,
    out: Results | None,
    options: dict[str, Any],
) -> Results:
    kind = None
    how = Quantization.of(quantization)
    if how is not None:
        kind = how.kind
        options |= how.arguments() if is_dynamo_compiling() else how._changed
        if scale is not None:
            options["scale"] = scale
    elif keep_norm or scale is not None:
        which = "keep_norm" if keep_norm else "scale"
        raise ValueError(f"collx.{what}_rmsnorm: {which}: given without a quantization")
    if residual is None:
        given: tuple[Any, ...] = (input, weight, eps, name_of(group))
    else:
        given = (input, residual, weight, eps, name_of(group))
    return _CALLERS[what, residual is not None, kind, keep_norm](out, given, options)


def _changed(
    rounding: str, algorithm: str, max_blocks: int, weight_offset: float = 0.0
) -> dict[str, Any]:
    """Those that are not what an operator takes by default: each one that is passed has to be
    found and converted."""
    options: dict[str, Any] = {}
    if (rounding, algorithm, max_blocks, weight_offset) == ("fp32", "auto", 0, 0.0):
        return options
    if rounding != "fp32":
        options["rounding"] = rounding
    if algorithm != "auto":
        options["algorithm"] = algorithm
    if max_blocks != 0:
        options["max_blocks"] = max_blocks
    if weight_offset != 0.0:
        options["weight_offset"] = weight_offset
    return options


def _mapped(
    op: str,
    epilogue: Epilogue | None,
    input: torch.Tensor,
    extras: Sequence[Extra],
    index: bool,
) -> dict[str, Any]:
    if epilogue is not None:
        dims = input.dim() if index else None
        tensors, numbers, kinds = extras_of(op, extras)
        text = expression_of(op, epilogue, input.dtype, kinds, dims)
        given: dict[str, Any] = {"expression": text, "extras": tensors}
        if numbers:
            given["numbers"] = numbers
        return given
    if extras or index:
        refuse_without_epilogue(op, extras)
    return {}


def _caller(op: str, keep_norm: bool) -> Callable[..., Results]:
    """As that of the collectives; options by name."""
    packet = getattr(torch.ops.collx, op)
    make = packet.keep_norm if keep_norm else packet.default
    write = packet.keep_norm_out if keep_norm else packet.out
    eager_make, eager_write = quick(make), quick(write)
    names = tuple(a.name for a in write._schema.arguments if a.is_out)

    def call(out: Results | None, given: tuple[Any, ...], options: dict[str, Any]) -> Results:
        if out is not None:
            outs: tuple[torch.Tensor, ...] = (
                out
                if type(out) is tuple
                else (out,)
                if isinstance(out, torch.Tensor)
                else tuple(out)
            )
            if len(outs) != len(names):
                raise ValueError(
                    f"collx.{op}: out: {len(outs)} tensors; accepted: {len(names)}: "
                    f"{', '.join(names)}"
                )
            if is_dynamo_compiling():
                write(*given, **options, **dict(zip(names, outs, strict=True)))
            elif options:
                eager_write(*given, *outs, **options)
            else:
                eager_write(*given, *outs)
            return out
        call_new = make if is_dynamo_compiling() else eager_make
        made: Results = call_new(*given, **options) if options else call_new(*given)
        return made

    return call


_CALLERS: dict[object, Callable[..., Results]] = {
    (what, residual, kind, keep_norm): _caller(
        f"{what}{'_residual' if residual else ''}_rmsnorm{'_' + kind if kind else ''}", keep_norm
    )
    for what in ("allreduce", "reducescatter")
    for residual in (False, True)
    for kind in (None, "fp8", "int8")
    for keep_norm in ((False, True) if kind else (False,))
    if what == "allreduce" or (residual and kind != "int8")
}
for _op in ("allreduce_layernorm", "allreduce_residual_layernorm"):
    _CALLERS[_op] = _caller(_op, False)
