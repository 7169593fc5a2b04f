"""Getting ready what a call would otherwise have to wait for. Collective."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from collx._bootstrap.symmetric import refuse_in_capture
from collx._extension import extension
from collx._groups import get
from collx.ops.collectives import allreduce, reducescatter
from collx.ops.norms import allreduce_layernorm, allreduce_rmsnorm, reducescatter_rmsnorm

__all__ = ["warm_up"]


_FUNCTIONS = (
    allreduce,
    reducescatter,
    allreduce_rmsnorm,
    reducescatter_rmsnorm,
    allreduce_layernorm,
)


def warm_up(function: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Compiles and loads the kernel of a call with an epilogue, on every rank: `function` with the
    arguments of a call to come. That makes calls alike in dtype, algorithm and form ready, and
    those of other lengths that take the same kernel; on the CPU there is nothing to compile.
    Collective, and waits for the device.

    Without it, the first such call of a rank does the same while its peers wait. During the capture
    of a CUDA graph, where it cannot be done, a call that is not ready is refused.

    Args:
        function: collx.allreduce, collx.reducescatter, or that of a fused normalization.
        args, options: as of the call, with an epilogue. Tensors are not looked into; `out` is not
            written.

    Raises:
        ValueError, TypeError, NotImplementedError: arguments that every rank refuses.
        InitError: some rank refused its arguments, or could not compile; rank and cause are named
            on all of them.
        CollectiveTimeout: some rank did not come. The communicator is poisoned then.
    """
    if function not in _FUNCTIONS:
        name = getattr(function, "__name__", repr(function))
        accepted = ", ".join(f"collx.{known.__name__}" for known in _FUNCTIONS)
        raise TypeError(f"collx.warm_up: function: got {name}; accepted: {accepted}")
    given = inspect.signature(function).bind(*args, **options).arguments
    if given.get("epilogue") is None:
        raise ValueError(
            "collx.warm_up: got a call without epilogue=; collx.init has loaded all other kernels"
        )
    communicator = get(given.get("group"))

    def get_ready() -> None:
        refuse_in_capture("warm_up", communicator.device)
        if communicator.device.type == "cuda":
            torch.cuda.synchronize(communicator.device)
        with torch.no_grad(), extension.GettingReady():
            function(*args, **options)

    communicator._memory.agree("warm_up", get_ready)
