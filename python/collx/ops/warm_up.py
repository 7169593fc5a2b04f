"""Compiles kernels ahead of the call that needs them. Collective."""

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
    """Compiles and loads the kernel of a call with an epilogue, on all ranks. Collective. Waits for
    the device.

    Pass the function and the arguments of the future call. Afterwards, calls with the same dtype,
    algorithm and form are ready, also for other lengths that use the same kernel. On the CPU,
    nothing is compiled.

    Without `warm_up`, the first such call of a rank compiles the kernel while its peers wait.
    During the capture of a CUDA graph nothing can be compiled, so a call whose kernel is not ready
    raises an error.

    Args:
        function: `collx.allreduce`, `collx.reducescatter`, or the function of a fused
            normalization.
        args, options: the arguments of the call, including `epilogue`. The values of tensors are
            not read, and `out` is not written.

    Raises:
        ValueError, TypeError, NotImplementedError: all ranks passed invalid arguments.
        InitError: a rank passed invalid arguments, or could not compile. All ranks raise it, with
            the rank and the cause.
        CollectiveTimeout: a rank did not make the call in time. The communicator is poisoned.
    """
    if function not in _FUNCTIONS:
        name = getattr(function, "__name__", repr(function))
        accepted = ", ".join(f"collx.{known.__name__}" for known in _FUNCTIONS)
        raise TypeError(f"collx.warm_up: function: got {name}; accepted: {accepted}")
    given = inspect.signature(function).bind(*args, **options).arguments
    if given.get("epilogue") is None:
        raise ValueError(
            "collx.warm_up: epilogue: got None; accepted: a call with an epilogue, since "
            "collx.init has loaded all other kernels"
        )
    communicator = get(given.get("group"))

    def get_ready() -> None:
        refuse_in_capture("warm_up", communicator.device)
        if communicator.device.type == "cuda":
            torch.cuda.synchronize(communicator.device)
        with torch.no_grad(), extension.GettingReady():
            function(*args, **options)

    communicator._memory.agree("warm_up", get_ready)
