"""Elementwise Python functions behind a reduction, as the texts that the operators take."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import FunctionType
from typing import Any, TypeVar

import torch

__all__ = ["Epilogue", "expression_of"]

Epilogue = Callable[..., torch.Tensor]
"""f(value, *extras), and behind them the coordinates where the call has index=True."""

F = TypeVar("F", bound=Callable[..., Any])

_KEPT = 4096  # texts, before all are forgotten
_texts: dict[Hashable, str] = {}
# By the function itself, which is looked up in less time than what it is written like.
_texts_of_plain: dict[Hashable, str] = {}


def _constant_to_dynamo(function: F) -> F:
    """What torch.compiler.assume_constant_result does, which imports the compiler for it."""
    function.__dict__["_dynamo_marked_constant"] = True
    return function


@_constant_to_dynamo
def expression_of(
    op: str, f: Epilogue, dtype: torch.dtype, extras: int = 0, dims: int | None = None
) -> str:
    """The text of an epilogue, which `lowering.py` describes.

    Args:
        op: whose argument it is, for errors.
        f: a function of elementwise PyTorch ops. Traced once for its code, its default values and
            what its closure holds; whatever else it reads is taken as it was then.
        dtype: of the reduced value and of the extras.
        extras: how many of them there are.
        dims: how many coordinates f takes besides, the number of the output's dimensions; None for
            none.

    Raises:
        TypeError: f is no function, or does what is not elementwise; the message names it.
    """
    call = (f, dtype, extras, dims)
    try:
        return _texts_of_plain[call]
    except (KeyError, TypeError):  # it is new here, or has no hash
        pass
    key = _key(f, dtype, extras, dims)
    text = _texts.get(key) if key is not None else None
    if text is None:
        from collx.epilogues.tracing import traced

        text = traced(op, f, dtype, extras, dims)
        if key is not None:
            _keep(_texts, key, text)
    if _is_plain(f):
        _keep(_texts_of_plain, call, text)
    return text


def _keep(texts: dict[Hashable, str], key: Hashable, text: str) -> None:
    if len(texts) >= _KEPT:
        texts.clear()
    texts[key] = text


def _is_plain(f: Epilogue) -> bool:
    """Whether it holds nothing that could be another thing the next time."""
    if type(f) is not FunctionType:
        return False
    return f.__closure__ is None and f.__defaults__ is None and f.__kwdefaults__ is None


def _key(f: Epilogue, *rest: Any) -> Hashable | None:
    """Equal for functions that are written alike and hold the same: a lambda is a new object each
    time. None where that cannot be told."""
    if type(f) is not FunctionType:
        key: tuple[Any, ...] = (f, *rest)
    else:
        held = tuple(_told_apart(cell.cell_contents) for cell in f.__closure__ or ())
        defaults = _told_apart(f.__defaults__)
        keywords = tuple((name, _told_apart(v)) for name, v in (f.__kwdefaults__ or {}).items())
        key = (f.__module__, f.__code__, held, defaults, keywords, *rest)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _told_apart(value: Any) -> Any:
    """1, 1.0 and True are equal, and so are 0.0 and -0.0, but not as operands."""
    if isinstance(value, tuple):
        return tuple(_told_apart(each) for each in value)
    return type(value), repr(value) if isinstance(value, float) else value
