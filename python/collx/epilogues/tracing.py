"""Traces an elementwise function of tensors. The first call with an epilogue imports this module,
because importing PyTorch's tracing takes a second."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode, resolve_name
from torch.utils._python_dispatch import _disable_current_modes

from collx.epilogues.lowering import Refusal, lower, wide

__all__ = ["traced"]

# PyTorch's tracer patches classes, so threads take turns. The lock is held across fork(), so that a
# child inherits neither the lock of a thread that it does not have nor patched classes.
_turn = threading.RLock()
os.register_at_fork(
    before=_turn.acquire, after_in_parent=_turn.release, after_in_child=_turn.release
)


def traced(
    op: str,
    f: Callable[..., torch.Tensor],
    dtype: torch.dtype,
    extras: tuple[str, ...],
    dims: int | None,
) -> str:
    """Returns the text of a function. Arguments and errors are those of `expression_of`."""
    try:
        # Tracing does not use the caller's modes, transforms or data. The stand-ins are not of a
        # subclass, because modes do not see reads of a subclass's attributes.
        with (
            _turn,
            _disable_current_modes(),
            temporarily_clear_interpreter_stack(),
            _without_function_modes(),  # such as a default device
            torch.no_grad(),
        ):
            leaves, given = _arguments(dtype, extras, dims)
            # The lambda has the number of parameters that make_fx expects, and runs only f in the
            # mode.
            module = make_fx(lambda *given: _Calls.of(f, given), tracing_mode="real")(*given)
            module.graph.eliminate_dead_code()
            return lower(module, leaves, dtype)
    except Refusal as refusal:
        what: str = str(refusal)
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise TypeError(_message(op, f, what)) from error
    raise TypeError(_message(op, f, what))


@contextmanager
def _without_function_modes() -> Iterator[None]:
    modes = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)


def _arguments(
    dtype: torch.dtype, extras: tuple[str, ...], dims: int | None
) -> tuple[list[tuple[str, ...]], list[torch.Tensor]]:
    """Returns the leaves that the arguments of a function become, and their stand-ins."""
    leaves: list[tuple[str, ...]] = [("value",)]
    given = [_stand_in(wide(dtype))]
    counts = {"extra": 0, "number": 0}
    for kind in extras:
        name = "extra" if kind == "tensor" else "number"
        leaves.append((name, str(counts[name])))
        given.append(_stand_in(wide(dtype)) if kind == "tensor" else _number(kind))
        counts[name] += 1
    leaves += [("index", str(i)) for i in range(dims or 0)]
    given += [_stand_in(torch.int64) for _ in range(dims or 0)]
    return leaves, given


def _stand_in(dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(2, dtype=dtype, device="meta")


def _number(kind: str) -> torch.Tensor:
    """Returns a tensor of no dimension, for which types are promoted as for a Python number."""
    dtypes = {"float": torch.get_default_dtype(), "int": torch.int64, "bool": torch.bool}
    return torch.empty((), dtype=dtypes[kind], device="meta")


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


_VALUES = frozenset(
    getattr(torch.Tensor, name)
    for name in ("__bool__", "__float__", "__index__", "__int__", "item", "tolist")
)


_CLAMPS = frozenset(getattr(of, name) for of in (torch, torch.Tensor) for name in ("clamp", "clip"))
_DETACHES = (
    torch.detach,
    torch.Tensor.detach,
    torch.Tensor.data.__get__,  # type: ignore[attr-defined]
)


def _clamped(input: torch.Tensor, min: Any = None, max: Any = None) -> torch.Tensor:
    """Clamps to a number and a tensor, which PyTorch's own functions do not accept together."""
    result = input if min is None else torch.clamp_min(input, min)
    return result if max is None else torch.clamp_max(result, max)


class _Calls(TorchFunctionMode):
    """Traces every cast, including casts to the type that a tensor has during tracing: the last
    cast determines the type of the result. Refuses functions that do not return a tensor, such as
    shape and dtype, because they would return those of the stand-ins."""

    @classmethod
    def of(cls, f: Callable[..., torch.Tensor], given: tuple[torch.Tensor, ...]) -> torch.Tensor:
        with cls():
            return f(*given)

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        dtype = _CASTS.get(func)
        if func in (torch.Tensor.to, torch.Tensor.type):
            given = [*args[1:], *(kwargs or {}).values()]
            if any(isinstance(v, torch.Tensor) for v in given):
                raise _refused(func)
            named = [v for v in given if isinstance(v, torch.dtype)]
            dtype = named[0] if named else None
        if dtype is not None:
            return torch.ops.aten._to_copy.default(args[0], dtype=dtype)
        if func in _VALUES:
            raise Refusal(
                f"{_name_of(func)}, which reads the value of a tensor, as control flow does"
            )
        if func in _DETACHES:
            raise Refusal(
                f"{_name_of(func)}, which stops gradients; accepted: ops that have gradients"
            )
        if func in _CLAMPS and _has_tensor((*args[1:], *(kwargs or {}).values())):
            return _clamped(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.type_as or not (
            isinstance(result, torch.Tensor) or result is NotImplemented or not _has_tensor(args)
        ):
            raise _refused(func)
        return result


def _has_tensor(args: tuple[Any, ...]) -> bool:
    return any(isinstance(arg, torch.Tensor) for arg in args)


def _name_of(func: Any) -> str:
    name: str = resolve_name(func) or getattr(func, "__name__", str(func))
    return name.removesuffix(".__get__")


def _refused(func: Any) -> Refusal:
    return Refusal(
        f"{_name_of(func)}, which depends on more than the elements; accepted: ops "
        "that return one tensor, and numbers in extras="
    )


def _message(op: str, f: Callable[..., torch.Tensor], what: str) -> str:
    return f"collx.{op}: epilogue: {getattr(f, '__name__', f)} has {what}"
