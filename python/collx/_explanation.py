"""Explains how a call would be carried out."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral

import torch

from collx._extension import extension

__all__ = ["Explanation", "shape_of", "workspace_bytes"]


@dataclass(frozen=True)
class Explanation:
    """How a call is carried out. str() formats it as a table.

    Attributes:
        communicator: the repr() of the communicator.
        op: the name of the operator.
        numel: the number of elements of the full tensor.
        dtype: the dtype of the tensor.
        algorithm: the algorithm that was requested or selected.
        executed_by: the algorithm that executes the call; it can differ from `algorithm`.
        blocks, threads: the grid on CUDA, and the threads of a block.
        chunks: the number of chunks into which the call is divided.
        bytes: the size of the full tensor.
        workspace_bytes: the bytes of the region that the call would occupy without chunks.
        region: the bytes of each part of this rank's region; empty if there is no region.
        pdl: the level of dependent launch.
        fallback_reason: why the call uses the process group, or None.
        multicast_unavailable_reason: why the ranks have no NVLink multicast, or None.
        deterministic: whether "auto" only selects algorithms that reduce in the order of the
            ranks.
        tuning: where the choice of the algorithm came from: the call, the built-in table, or an
            entry of the communicator's tuning table.
    """

    communicator: str
    op: str
    numel: int
    dtype: torch.dtype
    algorithm: str
    executed_by: str
    blocks: int
    threads: int
    chunks: int
    bytes: int
    workspace_bytes: int
    region: Mapping[str, int]
    pdl: str
    fallback_reason: str | None
    multicast_unavailable_reason: str | None
    deterministic: bool
    tuning: str

    def __str__(self) -> str:
        differs = self.executed_by != self.algorithm
        executed = f", executed by {self.executed_by}" if differs else ""
        lines = [
            f"{self.op} of {self.numel:,} x {str(self.dtype).removeprefix('torch.')} "
            f"({_size(self.bytes)}) on {self.communicator}",
            f"  algorithm  {self.algorithm}{executed}",
            f"  tuning     {self.tuning}",
            f"  grid       {self.blocks} x {self.threads} threads, pdl {self.pdl}",
            f"  chunks     {self.chunks}",
            f"  workspace  {_size(self.workspace_bytes)}",
        ]
        if self.fallback_reason is not None:
            lines.append(f"  fallback   {self.fallback_reason}")
        if self.multicast_unavailable_reason is None:
            order = "" if self.deterministic else ", which may add in its own order"
            lines.append(f"  multicast  yes{order}")
        else:
            lines.append(f"  multicast  none: {self.multicast_unavailable_reason}")
        if self.region:
            lines.append("  region")
            parts = {part: n for part, n in self.region.items() if n > 0}
            width = max(map(len, parts))
            lines += [f"    {part:<{width}}  {_size(n):>10}" for part, n in parts.items()]
        return "\n".join(lines)


def workspace_bytes(
    op: str,
    shape: int | Sequence[int],
    dtype: torch.dtype,
    world_size: int,
    algorithm: str = "auto",
    *,
    symmetric: bool = False,
) -> int:
    """Returns the bytes of a rank's region that a call occupies if it is not divided into chunks.

    If `algorithm` is "auto", this is the maximum over the algorithms that "auto" selects on any
    device. `Communicator.explain` returns the bytes for the device of a communicator.

    Args:
        op: the name of the operator.
        shape: the shape of the full tensor.
        dtype: the dtype of the tensor.
        world_size: the number of ranks.
        algorithm: as in the operator.
        symmetric: whether input and output are symmetric tensors.

    Raises:
        ValueError, TypeError: an argument is invalid. The message names it.
    """
    numel, cols = shape_of("workspace_bytes", shape, dtype)
    return extension.workspace_bytes(op, numel, cols, dtype, world_size, algorithm, symmetric)


def shape_of(call: str, shape: int | Sequence[int], dtype: torch.dtype) -> tuple[int, int]:
    """Returns the number of elements of a tensor, and that of one of its rows. Raises ValueError or
    TypeError if `shape` or `dtype` is invalid. `call` starts the message."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{call}: dtype: got {dtype!r}; accepted: a torch.dtype")
    sizes = shape if isinstance(shape, Sequence) else (shape,)
    if not all(isinstance(n, Integral) for n in sizes):
        raise TypeError(
            f"{call}: shape: got a {type(shape).__name__}; accepted: an integer or a sequence of "
            "integers"
        )
    numel = math.prod(sizes)
    if any(n < 0 for n in sizes) or numel > sys.maxsize:
        raise ValueError(
            f"{call}: shape: got {shape}; accepted: dimensions of 0 or more, and at most "
            f"{sys.maxsize} elements"
        )
    return numel, sizes[-1] if len(sizes) > 0 else 1


def _size(nbytes: int) -> str:
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
