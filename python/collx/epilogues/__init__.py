"""Translates elementwise Python functions after a reduction to texts that the operators accept."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeAlias

import torch

from collx.epilogues.reads import Unkeyed, check_reads, is_plain, key_of

__all__ = ["Epilogue", "expression_of", "traced_texts"]

Epilogue: TypeAlias = Callable[..., torch.Tensor]
"""An elementwise function f(value, *extras). With index=True it also accepts the coordinates of
each element, after the extras."""

_KEPT = 4096  # maximum number of cached texts; then the cache is cleared
_texts: dict[Hashable, str] = {}
traced_texts: dict[Hashable, str] = {}
"""Texts of functions that read nothing except their code and modules, by (function, (dtype, extras,
dims, default dtype)). Looking up a function takes less time than computing its key."""


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
        return traced_texts[f, rest]
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
    if is_plain(f):
        _keep(traced_texts, (f, rest), text)
    return text


def _keep(texts: dict[Hashable, str], key: Hashable, text: str) -> None:
    if len(texts) >= _KEPT:
        texts.clear()
    texts[key] = text
