"""What keeps the calls of compiled code: all of them, on every rank, in the order of the program.

The compiler takes an operator for a function of its arguments. It drops calls whose result nobody
uses, merges equal ones, computes some again in the backward pass, and sorts them as suits memory;
each rank for itself, so that ranks come to wait for each other in different calls. Two marks
together forbid that in all versions of PyTorch, neither does alone: an effect token, up to
Inductor's own graph, and there a lowering to its collective nodes (lowering.py), which it keeps in
order.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch._library.effects import EffectType
from torch._ops import OpOverload
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx import traceback as fx_traceback
from torch.library import _register_effectful_op, register_torch_dispatch
from torch.utils.checkpoint import CheckpointPolicy

from collx.compile.operators import Writing, making, writing

__all__ = ["register"]


def register() -> None:
    """Marks every operator. Once, after the operators' library has been loaded."""
    for op in making():
        _register_effectful_op(op, EffectType.ORDERED)
        register_torch_dispatch(op, FunctionalTensorMode, _traced)
    for form in writing():
        rule = partial(_replaced, form)
        register_torch_dispatch(form.op, FunctionalTensorMode, rule)


def _traced(
    mode: FunctionalTensorMode,
    op: OpOverload,
    types: Sequence[type],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Goes on as without a rule, but that under activation checkpointing the result is kept: called
    again in the backward pass, it would be called by the ranks alone that get there."""
    _lower_later()
    meta = fx_traceback.current_meta
    policy = meta.get("recompute")
    if policy is not None:
        meta["recompute"] = CheckpointPolicy.MUST_SAVE
    try:
        return mode.__torch_dispatch__(op, types, tuple(args), dict(kwargs or {}))
    finally:
        if policy is not None:
            meta["recompute"] = policy


def _lower_later() -> None:
    """Registers the lowerings if Inductor is about to compile: tracing comes first. It is imported
    by whom it compiles for, never by `import collx`."""
    if "torch._inductor.compile_fx" in sys.modules:
        from collx.compile import lowering

        lowering.register()


def _replaced(
    form: Writing,
    mode: FunctionalTensorMode,
    op: OpOverload,
    types: Sequence[type],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Traces the functional form instead of one that writes its arguments, which cannot have a
    token, and copies. Of the copies those stay that the caller of the compiled code can see."""
    given = {a.name: value for a, value in zip(op._schema.arguments, args, strict=False)}
    given.update(kwargs or {})
    written = [given[name] for name in form.written]
    taken = {a.name for a in form.functional._schema.arguments}
    with mode:
        made = form.functional(**{name: value for name, value in given.items() if name in taken})
        results = made if isinstance(made, tuple) else (made,)
        for target, result in zip(written, results, strict=True):
            target.copy_(result)
