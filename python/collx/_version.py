"""The version of the package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from collx._extension import extension

__all__ = ["VERSION"]


def _version() -> str:
    try:
        return version("collx")
    except PackageNotFoundError:  # imported from a source tree that is not installed
        return extension.version


VERSION = _version()
