"""What the compiler has to know of the operators beyond their schemas."""

from __future__ import annotations

import torch
from torch._library.effects import EffectType
from torch.library import _register_effectful_op

__all__ = ["register"]


def register() -> None:
    """Gives `barrier` an effect token: it has no result that anything uses, so the compiler would
    drop it, or move it past another one."""
    _register_effectful_op(torch.ops.collx.barrier.default, EffectType.ORDERED)
