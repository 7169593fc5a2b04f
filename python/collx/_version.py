"""The version of the package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

__all__ = ["VERSION"]


def _version() -> str:
    try:
        return version("collx")
    except PackageNotFoundError:  # imported from a source tree that is not installed
        return "unknown"


VERSION = _version()
