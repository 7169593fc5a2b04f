"""The findings of the doctor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """A finding. `id` is the kind of finding and does not change between versions. An error means
    that collx does not work, or only through the process group. A warning is a limitation of this
    run or possibly of another program."""

    id: str
    level: Literal["error", "warning"]
    what: str
    fix: str


def error(id: str, what: str, fix: str) -> Finding:
    return Finding(id, "error", what, fix)


def warning(id: str, what: str, fix: str) -> Finding:
    return Finding(id, "warning", what, fix)
