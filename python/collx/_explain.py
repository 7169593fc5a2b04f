"""What `Communicator.explain` returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collx.communicator import Communicator

__all__ = ["Explanation", "describe", "last_axis"]


class Explanation(dict[str, Any]):
    """How a call is carried out. A dict of "communicator", "op", "numel", "dtype", "algorithm",
    "blocks", "threads", "chunks", "bytes", "workspace_bytes", "region" (part to bytes), "pdl" and
    "fallback_reason"; str() gives it as a table."""

    def __str__(self) -> str:
        lines = [
            f"{self['op']} of {self['numel']:,} x {str(self['dtype']).removeprefix('torch.')} "
            f"({_size(self['bytes'])}) on {self['communicator']}",
            f"  algorithm  {self['algorithm']}",
            f"  grid       {self['blocks']} x {self['threads']} threads, pdl {self['pdl']}",
            f"  chunks     {self['chunks']}",
            f"  workspace  {_size(self['workspace_bytes'])}",
        ]
        if self["fallback_reason"] is not None:
            lines.append(f"  fallback   {self['fallback_reason']}")
        if self["region"]:
            lines.append("  region")
            parts = {part: n for part, n in self["region"].items() if n > 0}
            width = max(map(len, parts))
            lines += [f"    {part:<{width}}  {_size(n):>10}" for part, n in parts.items()]
        return "\n".join(lines)


def describe(
    communicator: Communicator,
    op: str,
    numel: int,
    dtype: torch.dtype,
    call: dict[str, Any],
    region: dict[str, int],
) -> Explanation:
    """Puts together what the extension says of a call and what is known of the communicator."""
    return Explanation(
        communicator=repr(communicator),
        op=op,
        numel=numel,
        dtype=dtype,
        region=dict(region),
        pdl=communicator._native.pdl,
        fallback_reason=communicator.fallback_reason,
        **call,
    )


def last_axis(shape: int | Sequence[int]) -> int:
    """How many elements a row of such a tensor has."""
    if isinstance(shape, int):
        return shape
    return shape[-1] if len(shape) > 0 else 1


def _size(nbytes: int) -> str:
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
