"""Converts the arguments of functions to those of their operators. Both the built-in functions and
their twins use these conversions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from collx._groups import Group, name_of
from collx.communicator import group_size_of, known
from collx.epilogues import Epilogue, expression_of, traced_texts
from collx.ops.quantization import Quantization

__all__ = [
    "Extra",
    "ReduceOp",
    "distributed_c10d",
    "epilogue_arguments",
    "group_arguments",
    "known",
    "quantization_of",
    "reduce_op_argument",
    "refuse_without_epilogue",
    "traced_texts",
]

ReduceOp: TypeAlias = str | dist.ReduceOp | dist.ReduceOp.RedOpType
"""A reduction: "sum", "avg", "max", "min" or "prod", or PyTorch's value for it, such as
torch.distributed.ReduceOp.SUM."""

_NAMES = {"SUM": "sum", "AVG": "avg", "MAX": "max", "MIN": "min", "PRODUCT": "prod"}


def group_arguments(op: str, group: Group, size: bool) -> tuple[str, int | None]:
    """Returns the name of the communicator and, with `size`, the number of its ranks. `op`: the
    function, for error messages."""
    name = name_of(group)
    return name, group_size_of(op, name) if size else None


def reduce_op_argument(op: str, given: ReduceOp) -> str:
    """Returns the operators' name for a reduction. `op`: the function, for error messages."""
    if isinstance(given, str):
        return given
    # By name, because Dynamo cannot compare the values. It guards on the name.
    kind: Any = getattr(given, "op", given)  # of a ReduceOp, which also has a factor
    name = kind.name if isinstance(kind, dist.ReduceOp.RedOpType) else ""
    if name in _NAMES:
        return _NAMES[name]
    raise (ValueError if name else TypeError)(
        f"collx.{op}: reduce_op: got {f'ReduceOp.{name}' if name else repr(given)}; accepted: sum, "
        "avg, max, min, prod, as a string or as torch.distributed.ReduceOp.SUM, AVG, MAX, MIN, "
        "PRODUCT"
    )


quantization_of = Quantization.of

Extra = torch.Tensor | float
"""An extra of an epilogue: a tensor, or a number that its kernel takes as an argument."""


def epilogue_arguments(
    op: str, epilogue: Epilogue, input: torch.Tensor, extras: Sequence[Extra], index: bool
) -> tuple[str, list[torch.Tensor], list[float]]:
    """Returns the expression of an epilogue, its tensors and its numbers."""
    if isinstance(extras, (torch.Tensor, int, float)):
        raise TypeError(
            f"collx.{op}: extras: got a {type(extras).__name__}; accepted: a sequence of tensors "
            "and numbers, such as a tuple of one"
        )
    tensors, numbers, kinds = _extras_of(op, extras) if extras else _NO_EXTRAS
    dims = input.dim() if index else None
    return expression_of(op, epilogue, input.dtype, kinds, dims), tensors, numbers


_Extras: TypeAlias = tuple[list[torch.Tensor], list[float], int | tuple[str, ...]]
"""The tensors, the numbers, and the kinds of the extras for `expression_of`."""

_NO_EXTRAS: _Extras = ([], [], 0)


def _extras_of(op: str, extras: Sequence[Extra]) -> _Extras:
    for extra in extras:
        if not isinstance(extra, torch.Tensor):
            return _with_numbers(op, extras)
    return list(extras), [], len(extras)  # type: ignore[arg-type]


def _with_numbers(op: str, extras: Sequence[Extra]) -> _Extras:
    tensors: list[torch.Tensor] = []
    numbers: list[float] = []
    kinds: list[str] = []
    for which, extra in enumerate(extras):
        if isinstance(extra, torch.Tensor):
            kinds.append("tensor")
            tensors.append(extra)
            continue
        if not isinstance(extra, (bool, int, float)):
            raise TypeError(
                f"collx.{op}: extras[{which}]: got {type(extra).__name__}; accepted: a tensor, or "
                "a Python float, int or bool"
            )
        if isinstance(extra, int) and (abs(extra) > 2**1023 or float(extra) != extra):
            raise ValueError(
                f"collx.{op}: extras[{which}]: got {extra}; accepted: an integer that float64 "
                "represents exactly, such as any up to 2**53"
            )
        kind = bool if isinstance(extra, bool) else int if isinstance(extra, int) else float
        kinds.append(kind.__name__)
        numbers.append(float(extra))
    return tensors, numbers, tuple(kinds)


def refuse_without_epilogue(op: str, extras: Sequence[Extra]) -> NoReturn:
    """Raises ValueError for arguments of an epilogue without an epilogue."""
    got = f"extras: got {len(extras)}" if extras else "index: got True"
    raise ValueError(f"collx.{op}: {got} without epilogue=; accepted: with it")
