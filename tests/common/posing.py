"""Makes test classes appear as classes of transformers, which need not be installed."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TypeVar

from torch import nn

Kind = TypeVar("Kind", bound=type[nn.Module])
HOME = "transformers.models.posing"


def posing(kind: Kind) -> Kind:
    """Registers a class as the class of transformers with its name."""
    setattr(sys.modules.setdefault(HOME, ModuleType(HOME)), kind.__name__, kind)
    kind.__module__ = HOME
    if "forward" in vars(kind):
        kind.forward.__module__ = HOME
    return kind
