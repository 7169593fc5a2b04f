"""Decides whether a call of a fused module needs gradients, which fused operators do not support,
and checks the arguments of such a call."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path

import torch
from torch import nn

__all__ = ["check_residual", "wanted"]

_OWN = str(Path(__file__).parents[1])
_MODULE_FILE = inspect.getfile(nn.Module)
_warned = False  # whether this process has warned about gradients in eval mode


def wanted(module: nn.Module, *tensors: torch.Tensor | None) -> bool:
    """Returns True if gradients are enabled and one of the tensors requires them. In eval mode this
    is rarely intended, so each process gets one warning."""
    if not torch.is_grad_enabled():
        return False
    if not any(tensor is not None and tensor.requires_grad for tensor in tensors):
        return False
    _warn_if_not_training(module)
    return True


def check_residual(where: str, partial: torch.Tensor, residual: torch.Tensor | None) -> None:
    """Raises the errors of the fused operators. Without the check, PyTorch would broadcast or
    convert the residual, and the same call would fail when no gradients are needed."""
    if residual is None:
        return
    if residual.shape != partial.shape:
        raise ValueError(
            f"{where}: residual: got shape {list(residual.shape)}; accepted: {list(partial.shape)}"
        )
    if residual.dtype != partial.dtype:
        raise TypeError(
            f"{where}: residual: got dtype {residual.dtype}; accepted: that of partial, "
            f"{partial.dtype}"
        )


def _warn_if_not_training(module: nn.Module) -> None:
    global _warned
    if torch.compiler.is_compiling() or module.training or _warned:
        return
    _warned = True
    warnings.warn(
        f"{type(module).__name__} is in eval mode, but a tensor requires gradients, so the module "
        "takes the unfused path, which is slower; call the model under torch.inference_mode() or "
        "torch.no_grad(), or call model.requires_grad_(False)",
        UserWarning,
        stacklevel=_callers_level(),
    )


def _callers_level() -> int:
    """Returns the stacklevel of the code that called the module, for a warning in the caller of
    this function. Skips the frames of this package and of torch.nn.Module."""
    level, frame = 0, inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith((_OWN, _MODULE_FILE)):
        level, frame = level + 1, frame.f_back
    return level
