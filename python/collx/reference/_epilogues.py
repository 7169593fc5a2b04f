"""Applies an epilogue to a reduced value by calling the function itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from collx.reference._common import exactly, larger, smaller

__all__ = ["Extra", "Function", "applied"]

Function = Callable[..., torch.Tensor]
Extra = torch.Tensor | float

aten = torch.ops.aten


def applied(
    op: str,
    f: Function,
    value: torch.Tensor,
    extras: Sequence[Extra],
    index: bool,
    axis: int = 0,
    start: int = 0,
) -> torch.Tensor:
    """Returns f(value, *extras), computed in float32 for narrower floats and rounded once: to the
    dtype of the value, or to that of a cast that is f's last op.

    With `index`, f also takes the coordinates in a tensor in which `value` begins at `start` along
    `axis`.
    """
    for which, extra in enumerate(extras):
        if not isinstance(extra, torch.Tensor):
            continue
        if extra.dtype != value.dtype:
            raise TypeError(
                f"{op}: extras[{which}] is {extra.dtype}, but the value is {value.dtype}"
            )
        sizes = [*reversed(extra.shape)], [*reversed(value.shape)]
        fits = all(size in (1, whole) for size, whole in zip(*sizes, strict=False))
        if extra.dim() > value.dim() or not fits or extra.device != value.device:
            raise ValueError(
                f"{op}: extras[{which}] has {tuple(extra.shape)} on {extra.device}, the value "
                f"{tuple(value.shape)} on {value.device}; accepted: what broadcasts to that"
            )
    narrow = value.dtype in (torch.float16, torch.bfloat16)
    wide = torch.float32 if narrow else value.dtype
    given: list[Extra] = [
        extra.detach().to(wide).expand(value.shape) if isinstance(extra, torch.Tensor) else extra
        for extra in (value, *extras)
    ]
    if index:
        given += [_coordinate(value, d, start if d == axis else 0) for d in range(value.dim())]
    with torch.no_grad(), exactly(), _Zeros(), _Casts() as casts:
        result = f(*given)
    dtype = result.dtype if result is casts.last else value.dtype
    with exactly():
        return result.expand(value.shape).to(dtype, copy=True).contiguous()


def _coordinate(value: torch.Tensor, dim: int, start: int) -> torch.Tensor:
    size = value.shape[dim]
    along = [size if d == dim else 1 for d in range(value.dim())]
    counted = torch.arange(start, start + size, device=value.device)
    return counted.view(along).expand(value.shape)


class _Casts(TorchFunctionMode):
    """Records the result of the last cast, including casts that have no effect."""

    _NAMES = ("to", "type", "type_as", "float", "double", "half", "bfloat16", "char", "byte")
    _FUNCTIONS = frozenset(
        getattr(torch.Tensor, name) for name in (*_NAMES, "short", "int", "long", "bool")
    )

    def __init__(self) -> None:
        super().__init__()
        self.last: torch.Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self._FUNCTIONS:
            self.last = result
        return result


class _Zeros(TorchDispatchMode):
    """Orders +0 above -0. PyTorch does not specify their order."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _ORDERED.get(func, func)(*args, **(kwargs or {}))


def _clamped(x: torch.Tensor, min: Any = None, max: Any = None) -> torch.Tensor:
    x = x if min is None else larger(*_promoted(x, min))
    return x if max is None else smaller(*_promoted(x, max))


def _promoted(x: torch.Tensor, bound: torch.Tensor | float) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch.result_type(x, bound)
    given = bound if isinstance(bound, torch.Tensor) else torch.full_like(x, bound, dtype=dtype)
    return x.to(dtype), given.to(dtype)


_ORDERED: dict[Any, Callable[..., torch.Tensor]] = {
    aten.maximum.default: lambda a, b: larger(*_promoted(a, b)),
    aten.minimum.default: lambda a, b: smaller(*_promoted(a, b)),
    aten.relu.default: lambda x: larger(x, torch.zeros_like(x)),
    aten.clamp.default: _clamped,
    aten.clamp.Tensor: _clamped,
    aten.clamp_min.default: _clamped,
    aten.clamp_min.Tensor: _clamped,
    aten.clamp_max.default: lambda x, max: _clamped(x, None, max),
    aten.clamp_max.Tensor: lambda x, max: _clamped(x, None, max),
}
