"""Traces an elementwise function of tensors. Imported by the first call that has one: what PyTorch
traces with takes a second to import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from collx.epilogues.lowering import Refusal, lower, wide

__all__ = ["traced"]


def traced(
    op: str, f: Callable[..., torch.Tensor], dtype: torch.dtype, extras: int, dims: int | None
) -> str:
    """The text of a function; arguments and errors are those of `expression_of`."""
    if not callable(f):
        raise TypeError(
            f"collx.{op}: epilogue: got {type(f).__name__}; accepted: a function of tensors"
        )
    leaves = [("value",), *(("extra", str(i)) for i in range(extras))]
    leaves += [("index", str(i)) for i in range(dims or 0)]
    try:
        # Neither the caller's modes nor its data take part.
        with _disable_current_modes(), FakeTensorMode(), torch.no_grad(), _Casts():
            given = [
                torch.empty(2, dtype=torch.int64 if name == "index" else wide(dtype))
                for name, *_ in leaves
            ]
            # By way of a lambda: tracing counts the parameters of what it is given.
            module = make_fx(lambda *given: f(*given), tracing_mode="fake")(*given)
        module.graph.eliminate_dead_code()
        return lower(module, leaves, dtype)
    except Refusal as refusal:
        what: str = str(refusal)
    except DataDependentOutputException as error:
        what = f"what depends on values, as control flow does ({error})"
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        if "FakeTensor" in what:
            what = "a tensor that is neither the value nor an extra; accepted: extras="
        raise TypeError(_message(op, f, what)) from error
    raise TypeError(_message(op, f, what))


_CASTS: dict[Any, torch.dtype] = {
    torch.Tensor.float: torch.float32,
    torch.Tensor.double: torch.float64,
    torch.Tensor.half: torch.float16,
    torch.Tensor.bfloat16: torch.bfloat16,
    torch.Tensor.char: torch.int8,
    torch.Tensor.byte: torch.uint8,
    torch.Tensor.short: torch.int16,
    torch.Tensor.int: torch.int32,
    torch.Tensor.long: torch.int64,
    torch.Tensor.bool: torch.bool,
}


class _Casts(TorchFunctionMode):
    """Traces every cast, also one to the type that a tensor has while it is traced: the last one
    says what the result is to be."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        dtype = _CASTS.get(func)
        if func is torch.Tensor.to:
            given = [*args[1:], *(kwargs or {}).values()]
            named = [
                v if isinstance(v, torch.dtype) else v.dtype
                for v in given
                if isinstance(v, (torch.dtype, torch.Tensor))
            ]
            dtype = named[0] if named else None
        if dtype is None:
            return func(*args, **(kwargs or {}))
        return torch.ops.aten._to_copy.default(args[0], dtype=dtype)


def _message(op: str, f: Callable[..., torch.Tensor], what: str) -> str:
    return f"collx.{op}: epilogue: {getattr(f, '__name__', f)} has {what}"
