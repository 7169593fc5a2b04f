"""Whether a call of a fused module is to have gradients, which fused operators do not have."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path

import torch
from torch import nn

__all__ = ["wanted"]

_OWN = str(Path(__file__).parents[1])
_MODULE_FILE = inspect.getfile(nn.Module)
_warned = False  # of gradients in eval mode, in this process


def wanted(module: nn.Module, *tensors: torch.Tensor | None) -> bool:
    """True if gradients are on and one of the tensors requires some. In eval mode that is rarely
    meant, so a process is warned once of it."""
    if not torch.is_grad_enabled():
        return False
    if not any(tensor is not None and tensor.requires_grad for tensor in tensors):
        return False
    _warn_if_not_training(module)
    return True


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
    """The stacklevel, for a warning of this function's caller, of the code that called the module:
    past this package and the hooks of torch.nn.Module."""
    level, frame = 0, inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith((_OWN, _MODULE_FILE)):
        level, frame = level + 1, frame.f_back
    return level
