"""Translates elementwise Python functions after a reduction to texts that the operators accept."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import CodeType, ModuleType
from typing import NamedTuple, TypeAlias, TypeVar

import torch

from collx.epilogues.reads import Unkeyed, check_reads, key_of, modules_read

__all__ = ["Epilogue", "expression_of", "traced_texts"]

Epilogue: TypeAlias = Callable[..., torch.Tensor]
"""An elementwise function f(value, *extras). With index=True it also accepts the coordinates of
each element, after the extras."""

_T = TypeVar("_T")
_KEPT = 4096  # maximum number of cached texts; then the cache is cleared
_texts: dict[Hashable, str] = {}


class Traced(NamedTuple):
    """The text of a function, and what the function read when it was traced."""

    text: str
    code: CodeType
    modules: dict[str, ModuleType | None]
    """The names that the code reads; None: a builtin, which the function's module does not
    define."""


traced_texts: dict[Hashable, Traced] = {}
"""Texts of functions that read nothing except their code and modules, by (function, (dtype, extras,
dims, default dtype)). Looking up a function takes less time than computing its key. Reloaders
replace the code of a function, and a module can define a builtin's name later, so each lookup
compares both."""


def expression_of(
    op: str,
    f: Epilogue,
    dtype: torch.dtype,
    extras: int | tuple[str, ...] = 0,
    dims: int | None = None,
) -> str:
    """Returns the text of an epilogue in the form that the operators accept.

    Args:
        op: the name of the operator, for error messages.
        f: a function of elementwise PyTorch ops. It is traced once for its code and for the
            numbers that it reads: default values, and variables of its closure and its module.
        dtype: the dtype of the reduced value and of the extras.
        extras: the number of extras, or the kind of each: "tensor", "float", "int" or "bool".
        dims: the number of coordinates that f accepts, which is the number of the output's
            dimensions; None for none.

    Raises:
        TypeError: f is not a function, is not elementwise, or reads something that can change from
            call to call. The message names it.
    """
    # The default dtype is that of constants, of number extras, and of quotients of integers.
    rest = (dtype, extras, dims, torch.get_default_dtype())
    try:
        found = traced_texts[f, rest]
        if f.__code__ is found.code and modules_read(f) == found.modules:
            return found.text
    except (KeyError, TypeError):  # not cached, or not hashable
        pass
    if not callable(f):
        raise TypeError(
            f"collx.{op}: epilogue: got {type(f).__name__}; accepted: a function of tensors"
        )
    try:
        key = (key_of(f), rest)
        text = _texts.get(key)
        if text is None:
            check_reads(f)
    except Unkeyed as unkeyed:
        name = getattr(f, "__name__", type(f).__name__)
        raise TypeError(f"collx.{op}: epilogue: {name} {unkeyed}") from None
    if text is None:
        from collx.epilogues.tracing import traced

        kinds = extras if isinstance(extras, tuple) else ("tensor",) * extras
        text = traced(op, f, dtype, kinds, dims)
        _keep(_texts, key, text)
    modules = modules_read(f)
    if modules is not None:
        _keep(traced_texts, (f, rest), Traced(text, f.__code__, modules))
    return text


def _keep(cache: dict[Hashable, _T], key: Hashable, kept: _T) -> None:
    if len(cache) >= _KEPT:
        cache.clear()
    cache[key] = kept
