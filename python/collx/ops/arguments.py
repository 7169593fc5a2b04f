"""What all functions here do with their arguments, and how they call an operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.compiler import is_dynamo_compiling

from collx._extension import extension

__all__ = [
    "Extra",
    "ReduceOp",
    "caller",
    "extras_of",
    "name_of_reduce_op",
    "quick",
    "refuse_without_epilogue",
]

ReduceOp = str | dist.ReduceOp | dist.ReduceOp.RedOpType
"""The name of a reduction, or PyTorch's value for it."""

_NAMES: tuple[tuple[Any, str], ...] = (
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.AVG, "avg"),
    (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.MIN, "min"),
    (dist.ReduceOp.PRODUCT, "prod"),
)


def name_of_reduce_op(op: str, given: ReduceOp) -> str:
    """What the operators call a reduction. `op`: whose argument it is."""
    if isinstance(given, str):
        return given
    for known, name in _NAMES:
        if given == known:
            return name
    message = (
        f"collx.{op}: reduce_op: got {_repr(given)}; accepted: sum, avg, max, min, prod, as a "
        "string or as torch.distributed.ReduceOp.SUM, AVG, MAX, MIN, PRODUCT"
    )
    raise (ValueError if isinstance(given, dist.ReduceOp) else TypeError)(message)


def _repr(given: Any) -> str:
    premultiplied: Any = dist.ReduceOp.PREMUL_SUM  # whose values have no words of their own
    if isinstance(given, dist.ReduceOp) and given == premultiplied:
        return "ReduceOp.PREMUL_SUM"
    return f"ReduceOp.{given.name}" if isinstance(given, dist.ReduceOp.RedOpType) else repr(given)


Extra = torch.Tensor | float
"""Of an epilogue: a tensor, or a number that its kernel takes as an argument."""


class Extras(NamedTuple):
    """Extras as the operators take them."""

    tensors: list[torch.Tensor]
    numbers: list[float]
    kinds: int | tuple[str, ...]
    """As `expression_of` takes them."""


def extras_of(op: str, extras: Sequence[Extra]) -> Extras:
    for extra in extras:
        if not isinstance(extra, torch.Tensor):
            return _with_numbers(op, extras)
    return Extras([*extras], [], len(extras))  # type: ignore[list-item]


def _with_numbers(op: str, extras: Sequence[Extra]) -> Extras:
    found = Extras([], [], ())
    kinds = []
    for which, extra in enumerate(extras):
        if isinstance(extra, torch.Tensor):
            kinds.append("tensor")
            found.tensors.append(extra)
            continue
        if not isinstance(extra, (bool, int, float)):
            raise TypeError(
                f"collx.{op}: extras[{which}]: got {type(extra).__name__}; accepted: a tensor, or "
                "a Python float, int or bool"
            )
        if isinstance(extra, int) and (abs(extra) > 2**1023 or float(extra) != extra):
            raise ValueError(
                f"collx.{op}: extras[{which}]: got {extra}; accepted: an integer that is a float64 "
                "without rounding, as all up to 2**53 are"
            )
        kind = bool if isinstance(extra, bool) else int if isinstance(extra, int) else float
        kinds.append(kind.__name__)
        found.numbers.append(float(extra))
    return found._replace(kinds=tuple(kinds))


def refuse_without_epilogue(op: str, extras: Sequence[Extra]) -> NoReturn:
    """Arguments of an epilogue that there is not."""
    got = f"extras: got {len(extras)}" if extras else "index: got True"
    raise ValueError(f"collx.{op}: {got}; accepted: with an epilogue")


def quick(overload: Any) -> Callable[..., Any]:
    """A built-in function that does what the overload does, in less time. It takes the tensors of a
    form with out= as the last ones by position, since keywords cost a dict. Not for Dynamo, which
    knows the overloads alone."""
    schema = overload._schema
    return extension.quick_call(schema.name, schema.overload_name, overload._op)


def caller(name: str) -> Callable[..., torch.Tensor]:
    """A function that calls the operator of a name: with the tensor for `out`, or None for the
    functional form; what it must be given, the input first; and its options. In place for one that
    ends in "_", which returns its input.

    It does what torch.ops.collx.NAME.default(...) does, in less time. The overloads are looked up
    once. Options that are the defaults are left to the operator, since each one that is passed is
    converted."""
    packet = getattr(torch.ops.collx, name)
    make, write = packet.default, getattr(packet, "out", packet.default)
    eager_make, eager_write = quick(make), quick(write)
    defaults = tuple(a.default_value for a in make._schema.arguments if a.has_default_value())

    def call(
        out: torch.Tensor | None, given: tuple[Any, ...], options: tuple[Any, ...]
    ) -> torch.Tensor:
        if options != defaults:
            given += options
        compiling = is_dynamo_compiling()
        if out is None:
            made: torch.Tensor = (make if compiling else eager_make)(*given)
            return made
        if compiling:
            write(*given, out=out)
        else:
            eager_write(*given, out)
        return out

    def call_in_place(given: tuple[Any, ...], options: tuple[Any, ...]) -> torch.Tensor:
        if options != defaults:
            given += options
        (write if is_dynamo_compiling() else eager_write)(*given)
        written: torch.Tensor = given[0]
        return written

    return call_in_place if name.endswith("_") else call
