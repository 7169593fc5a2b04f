"""Imports the compiled extension that was built for the installed PyTorch. No other module does."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import torch  # first, because its libraries must be loaded before those of the extension

from collx import errors

__all__ = ["Build", "build", "extension", "library"]

_PREFIX = "_torch"  # prefix of the build folders, as in setup.py
_CURE = "`pip install --no-build-isolation --no-deps --force-reinstall .` in collx's sources"


def _folder() -> Path:
    """Returns the folder of the build for this PyTorch. The check precedes loading, because the
    symbols of another build would be missing or different."""
    package = Path(__file__).parent
    minor = ".".join(torch.__version__.split(".")[:2])
    folder = package / (_PREFIX + minor.replace(".", "_"))
    if folder.is_dir():
        return folder
    found = [p.name.removeprefix(_PREFIX) for p in sorted(package.glob(f"{_PREFIX}*"))]
    here = f"this is PyTorch {torch.__version__}"
    if not found:
        raise ImportError(f"collx's extension is not built, and {here}. Build it: {_CURE}.")
    raise ImportError(
        f"collx was built for PyTorch {', '.join(found).replace('_', '.')}, and {here}. Build it "
        f"for this one: {_CURE}; or install the PyTorch that it was built for."
    )


_found = _folder()
library = _found / "libcollx.so"
"""All operators, without Python: torch.ops.load_library takes it, and so does a C++ process."""

# Takes precedence over a module of the same name that an older build left in this folder.
sys.modules["collx"].__path__.insert(0, str(_found))
try:
    from collx import _C
except ImportError as error:
    raise ImportError(
        f"collx's extension for PyTorch {torch.__version__} could not be loaded: {error}. "
        f"Build it: {_CURE}."
    ) from error

extension = _C


class Build(NamedTuple):
    """What this build of collx was compiled for."""

    torch: str
    """The version of PyTorch. The build works with the same minor version."""
    cuda: str | None
    """The version of CUDA that compiled the kernels; None if there are no kernels."""
    architectures: tuple[str, ...]
    """The compute capabilities that the kernels support; "+PTX" also supports newer GPUs."""


_torch_version, _cuda, _architectures = _C.built_for
build = Build(_torch_version, _cuda, tuple((_architectures or "").split(",")) if _cuda else ())
"""What this build of collx was compiled for."""

extension.raise_as(
    timeout=errors.CollectiveTimeout,
    mismatch=errors.CollectiveMismatch,
    overlap=errors.CollectiveOverlap,
    poisoned=errors.CommunicatorPoisoned,
)
