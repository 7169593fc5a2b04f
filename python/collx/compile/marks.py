"""Keeps all calls in compiled code, on every rank, in the order of the program.

By default, the compiler treats an operator as a pure function. It removes calls whose result is
unused, merges equal calls, recomputes some in the backward pass, and reorders them to save memory.
Each rank does so independently, so ranks could wait for each other in different calls. Two marks
together prevent this in all versions of PyTorch; neither is sufficient alone. The first is an
effect token, which is effective up to Inductor's own graph. The second is a lowering to Inductor's
collective nodes (lowering.py), which Inductor keeps in order.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch._library.effects import EffectType
from torch._ops import OpOverload
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.library import _register_effectful_op, register_torch_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, _CachingTorchDispatchMode

from collx.compile.operators import Writing, making, writing

if TYPE_CHECKING:
    from torch._functorch._aot_autograd.schemas import ViewAndMutationMeta

__all__ = ["keep_tokens", "register"]


def register() -> None:
    """Marks every operator. Must be called once, after the library of operators is loaded."""
    for op in making():
        _register_effectful_op(op, EffectType.ORDERED)
        register_torch_dispatch(op, FunctionalTensorMode, _traced)
    for form in writing():
        rule = partial(_replaced, form)
        register_torch_dispatch(form.op, FunctionalTensorMode, rule)
        register_torch_dispatch(form.op, _CachingTorchDispatchMode, partial(_checkpointed, form))


def keep_tokens() -> None:
    """Makes AOTAutograd keep the tokens of a graph that writes to one of several arguments that are
    views of one tensor. AOTAutograd replaces the views by the tensor, and loses the tokens there.
    Then it fails with an error that does not name the cause."""
    from torch._functorch._aot_autograd import runtime_wrappers

    replace_views = runtime_wrappers.create_synthetic_base_metadata

    def with_tokens(
        m: ViewAndMutationMeta, *args: Any, **kwargs: Any
    ) -> tuple[ViewAndMutationMeta, list[int]]:
        meta, indices = replace_views(m, *args, **kwargs)
        meta.tokens = m.tokens
        return meta, indices

    runtime_wrappers.create_synthetic_base_metadata = with_tokens


def _traced(
    mode: FunctionalTensorMode,
    op: OpOverload,
    types: Sequence[type],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Dispatches as without a rule, except that activation checkpointing keeps the result. A
    recomputation in the backward pass would only be called by the ranks that reach it."""
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
    """Registers the lowerings if Inductor is about to compile, because tracing precedes it.
    Inductor is imported by the program that uses it, never by `import collx`."""
    if "torch._inductor.compile_fx" in sys.modules:
        from collx.compile import lowering

        lowering.register()


def _checkpointed(
    form: Writing,
    mode: TorchDispatchMode,
    op: OpOverload,
    types: Sequence[type],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Replaces the operator before activation checkpointing decides what to keep. It keeps the
    results of an operator with a token. From PyTorch 2.15 on, its decision takes precedence over
    that of `_traced`."""
    if get_proxy_mode() is None:  # in eager mode
        mode.__torch_dispatch__(op, types, tuple(args), dict(kwargs or {}))
    else:
        _replaced(form, mode, op, types, args, kwargs)


def _replaced(
    form: Writing,
    mode: TorchDispatchMode,
    op: OpOverload,
    types: Sequence[type],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Traces the functional form and copies its results, because an operator that writes its
    arguments cannot have a token. Only copies that the caller of the compiled code can observe
    remain."""
    given = {a.name: value for a, value in zip(op._schema.arguments, args, strict=False)}
    given.update(kwargs or {})
    written = [given[name] for name in form.written]
    taken = {a.name for a in form.functional._schema.arguments}
    with mode:
        made = form.functional(**{name: value for name, value in given.items() if name in taken})
        results = made if isinstance(made, tuple) else (made,)
        for target, result in zip(written, results, strict=True):
            target.copy_(result)
