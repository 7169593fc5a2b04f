"""The one place that imports the compiled extension."""

from __future__ import annotations

import torch  # first: its libraries have to be loaded before the extension's

try:
    from collx import _C
except ImportError as error:
    raise ImportError(
        "collx's compiled extension could not be loaded: "
        f"{error}. Build it with `pip install --no-build-isolation -e .` in a checkout "
        f"(this PyTorch is {torch.__version__}; the extension fits only the one it was built with)."
    ) from error

extension = _C

__all__ = ["extension"]
