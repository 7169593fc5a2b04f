"""Makes the text of an epilogue a constant of a graph that Dynamo compiles, with guards on
everything that the epilogue reads. Only imported after Dynamo."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._dynamo.comptime import ComptimeContext, comptime
from torch.fx.experimental.symbolic_shapes import guard_scalar
from torch.utils._python_dispatch import _disable_current_modes

from collx.epilogues import Epilogue, expression_of

__all__ = ["guarded_expression_of"]


def guarded_expression_of(
    op: str,
    f: Epilogue,
    dtype: torch.dtype,
    extras: int | tuple[str, ...] = 0,
    dims: int | None = None,
) -> str:
    """Does the same as `expression_of`, which Dynamo replaces by this function."""
    comptime(_require_constant)
    text: str = _constant_expression_of(op, f, dtype, extras, dims)
    # Dynamo guards on what a function reads when it traces the function, but not when the function
    # is called to compute a constant.
    count = extras if isinstance(extras, int) else len(extras)
    operand = f(*[_stand_in] * (1 + count + (dims or 0)))  # noqa: F841
    comptime(_make_static)
    return text


_constant_expression_of = torch.compiler.assume_constant_result(
    lambda *arguments: expression_of(*arguments)  # a function of its own, which is not replaced
)


class _StandIn(torch.Tensor):
    """A tensor whose ops are not in the graph. They guard on the values of their numbers."""

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if not torch.compiler.is_dynamo_compiling():  # Dynamo itself reads its attributes
            return super().__torch_function__(func, types, args, kwargs)
        for operand in (*args, *(kwargs or {}).values()):  # noqa: B007
            comptime(_make_static)
        return _stand_in


with _disable_current_modes():
    _stand_in = torch.empty((), device="cpu").as_subclass(_StandIn)


def _make_static(context: ComptimeContext) -> None:
    """Guards on the value of the number `operand`, which Dynamo may treat as a variable, or on the
    numbers from which the tensor `operand` is computed."""
    operand = context.get_local("operand")
    proxy: Any = operand.as_proxy() if operand.is_proxy() else None
    pending = [proxy.node] if isinstance(proxy, fx.Proxy) else []
    while pending:
        node = pending.pop()
        value = node.meta.get("example_value")
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            guard_scalar(value)
        else:
            pending += node.all_input_nodes


def _require_constant(context: ComptimeContext) -> None:
    """Breaks the graph if a function that the graph creates reads a variable of the graph."""
    if not context.get_local("f").is_python_constant():
        op = context.get_local("op").as_python_constant()
        context.graph_break(
            f"collx.{op}: epilogue: reads a value that is not a constant of the graph, such as a "
            "number that has changed between calls; accepted: numbers and tensors in extras="
        )
