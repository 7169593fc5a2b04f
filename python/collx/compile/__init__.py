"""Operators of collx in compiled code, and models that are rewritten to use them.

    torch.compile(model)                     keeps every operator of collx, in the program's order
    torch.compile(model, backend="collx")    also replaces PyTorch's collectives by operators of
                                             collx, and fuses the norms that follow them
    collx.compile.Pass()                     does the same as a pass for Inductor
    print(collx.compile.report())            shows what was rewritten, what was not, and why

docs/guide/compile.md describes the details.
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
