"""The one place that imports the compiled extension: the build for the PyTorch that is here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import torch  # first: its libraries have to be loaded before the extension's

from collx import errors

__all__ = ["Build", "build", "extension", "library"]

_PREFIX = "_torch"  # of the folders of builds, which setup.py names
_CURE = "`pip install --no-build-isolation --no-deps --force-reinstall .` in collx's sources"


def _folder() -> Path:
    """Where the build for this PyTorch lies. Nothing is loaded before it is known to be the right
    one: the symbols of another would not be found, or be other ones."""
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

# Before a module of the same name that an older build may have left beside this file.
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
