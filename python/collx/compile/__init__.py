"""The operators in code that torch.compile makes, and models that are rewritten to use them.

    torch.compile(model)                     keeps every operator of collx, in the program's order
    torch.compile(model, backend="collx")    turns PyTorch's own collectives into them, too, and one
                                             with the norm and quantization behind it into one
    collx.compile.Pass()                     the same as a pass for Inductor
    print(collx.compile.report())            what has been rewritten, and what has not and why

docs/compile.md says how.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collx.compile.rewriting import Pass, Report, backend, report

__all__ = ["Pass", "Report", "backend", "report"]


def __getattr__(name: str) -> Any:
    # A program that compiles nothing does not pay for Inductor.
    if name in __all__:
        return getattr(importlib.import_module("collx.compile.rewriting"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
