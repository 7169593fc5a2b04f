"""The collectives. `collx.reference` says in plain PyTorch what each computes; `functions.py` makes
the functions from these declarations.

They are collective: every rank calls the same one, with arguments that fit together, in the same
order. All of them have four arguments in common, and raise the same errors:

    group       the communicator: itself or its name; a process group or a device mesh of one
                dimension, whose default one is meant; or None for the default group's
    algorithm   "auto", or the name of one; the error for an unknown name lists them
    max_blocks  CUDA thread blocks to use at most; 0 for no bound. The same on all ranks.
    async_op    post the call and return its `Handle`, as `collx.post` does.

    ValueError, TypeError, NotImplementedError    an argument is refused; nothing was launched
    CollectiveTimeout, CollectiveMismatch, CommunicatorPoisoned
                                                  this call on the CPU, or an earlier one, failed

A given `out` takes the result and is returned. It has the result's shape, dtype and device, and
shares no memory with `input` except as its function says.
"""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch

from collx._groups import Group
from collx.epilogues import Epilogue
from collx.ops.arguments import Extra, ReduceOp
from collx.ops.functions import built_in

__all__ = [
    "allgather",
    "allreduce",
    "allreduce_",
    "alltoall",
    "alltoall_",
    "alltoallv",
    "barrier",
    "broadcast",
    "broadcast_",
    "gather",
    "reduce",
    "reduce_",
    "reducescatter",
    "scatter",
]


@built_in
def allreduce(
    input: torch.Tensor,
    reduce_op: ReduceOp = "sum",
    group: Group = None,
    *,
    epilogue: Epilogue | None = None,
    extras: Sequence[Extra] = (),
    index: bool = False,
    out: torch.Tensor | None = None,
    algorithm: str = "auto",
    max_blocks: int = 0,
    async_op: bool = False,
) -> torch.Tensor:
    """Reduces `input` over the ranks; every rank gets the result.

    Args:
        input: float32, float16, bfloat16, float64, int32, int64, int8 or uint8; one shape and
            dtype on all ranks, of any length and strides.
        reduce_op: "sum", "avg" (floating point only), "max", "min" or "prod", or the value of
            torch.distributed.ReduceOp that means it.
        group: the communicator.
        epilogue: ``f(value, *extras)``, a function of elementwise PyTorch ops that every rank
            applies to the reduced value: docs/epilogues.md. It sees float32 where the input is
            narrower, and is rounded once, to the input's dtype or that of a cast which is its last
            op.
        extras: tensors of the input's dtype and device that broadcast to the result's shape, and
            Python numbers, which compile nothing when they change. They may differ from rank to
            rank.
        index: f takes int64 coordinates of the element besides, one for each dimension.
        out: takes the result: `input` itself, or a tensor of its shape, dtype and device that
            does not overlap it. With an epilogue, of its dtype.
        algorithm: "auto", or the name of one; the error for an unknown name lists them.
        max_blocks: CUDA thread blocks to use at most; 0 for no bound. The same on all ranks.
        async_op: post the call, and return its `Handle`, as `collx.post` does.

    Returns:
        `out`, or a new tensor of the shape and dtype of `input`; with an epilogue, of its dtype.

    Raises:
        ValueError, TypeError, NotImplementedError: an argument is refused; nothing was launched.
        CollectiveTimeout, CollectiveMismatch, CommunicatorPoisoned: this call on the CPU, or an
            earlier one, failed.
    """


@built_in
def allreduce_(
    input: torch.Tensor,
    reduce_op: ReduceOp = "sum",
    group: Group = None,
    *,
    algorithm: str = "auto",
    max_blocks: int = 0,
    async_op: bool = False,
) -> torch.Tensor:
    """`allreduce` in place: `input` takes the result, and is returned."""


@built_in
def reducescatter(
    input: torch.Tensor,
    reduce_op: ReduceOp = "sum",
    group: Group = None,
    *,
    axis: int = 0,
    epilogue: Epilogue | None = None,
    extras: Sequence[Extra] = (),
    index: bool = False,
    out: torch.Tensor | None = None,
    algorithm: str = "auto",
    max_blocks: int = 0,
    async_op: bool = False,
) -> torch.Tensor:
    """Reduces `input` over the ranks; every rank gets its part of the result.

    Args:
        input: float32, float16, bfloat16, float64, int32, int64, int8 or uint8; one shape and
            dtype on all ranks, of at least one dimension.
        reduce_op: "sum", "avg" (floating point only), "max", "min" or "prod", or the value of
            torch.distributed.ReduceOp that means it.
        group, algorithm, max_blocks, async_op: as everywhere.
        axis: is divided among the ranks: n // world elements each, the first n % world ranks get
            one more (`collx.reference.parts`).
        epilogue, extras, index: as of `allreduce`, on this rank's part, with coordinates in the
            full tensor.
        out: takes the result. With axis 0, or everything before the axis of size 1, it may be
            exactly this rank's part of `input`.

    Returns:
        `out`, or a new contiguous tensor: this rank's part.

    Backward: sum and avg gather the gradient; max, min and prod refuse (NotImplementedError).
    """


@built_in
def allgather(
    input: torch.Tensor,
    group: Group = None,
    *,
    axis: int = 0,
    total: int | None = None,
    out: torch.Tensor | None = None,
    algorithm: str = "auto",
    max_blocks: int = 0,
    async_op: bool = False,
) -> torch.Tensor:
    """Every rank gets the inputs of all, one behind the other along `axis` in the order of ranks.

    Args:
        input: of any dtype, the same on all ranks, and of at least one dimension. One shape on
            all ranks, unless `total` is given.
        group, algorithm, max_blocks, async_op: as everywhere.
        axis: the dimension along which the inputs are joined.
        total: size of `axis` in the result, divided among the ranks as `reducescatter` does; this
            rank's input must have the size of its part.
        out: takes the result. With axis 0, or everything before the axis of size 1, `input` may
            be exactly this rank's part of it.

    Returns:
        `out`, or a new contiguous tensor. Bits are unchanged.

    Backward: reducescatter(sum) of the gradient.
    """


@built_in
def broadcast(
    input: torch.Tensor,
    root: int = 0,
    group: Group = None,
    *,
    out: torch.Tensor | None = None,
    algorithm: str = "auto",
    max_blocks: int = 0,
    async_op: bool = False,
) -> torch.Tensor:
    """Every rank gets root's input.

    Args:
        input: of any shape and dtype, the same on all ranks. Only root's values are read.
        root: the rank that gives.
        group, algorithm, max_blocks, async_op: as everywhere.
        out: takes the result; it may be `input` itself.

    Returns:
        `out`, or a new contiguous tensor. Bits are unchanged.

    Backward: refused (NotImplementedError).
    """


@built_in
def broadcast_(
    input: torch.Tensor,
    root: int = 0,
    group: Group = None,
    *,
    algorithm: str = "auto",
    max_blocks: int = 0,
    async_op: bool = False,
) -> torch.Tensor:
    """`broadcast` in place: `input` takes root's values, and is returned."""


@built_in
def reduce(
    input: torch.Tensor,
    reduce_op: ReduceOp = "sum",
    root: int = 0,
    group: Group = None,
    *,
    out: torch.Tensor | None = None,
    algorithm: str = "auto",
    max_blocks: int = 0,
    async_op: bool = False,
) -> torch.Tensor:
    """Reduces `input` over the ranks; root gets the result, the others what they gave.

    Args:
        input: float32, float16, bfloat16, float64, int32, int64, int8 or uint8; one shape and
            dtype on all ranks.
        reduce_op: "sum", "avg" (floating point only), "max", "min" or "prod", or the value of
            torch.distributed.ReduceOp that means it.
        root: the rank that gets the result.
        group, algorithm, max_blocks, async_op: as everywhere.
        out: takes the result; it may be `input` itself.

    Returns:
        `out`, or a new contiguous tensor of the shape and dtype of `input`.

    Backward: refused (NotImplementedError).
    """


@built_in
def reduce_(
    input: torch.Tensor,
    reduce_op: ReduceOp = "sum",
    root: int = 0,
    group: Group = None,
    *,
    algorithm: str = "auto",
    max_blocks: int = 0,
    async_op: bool = False,
) -> torch.Tensor:
    """`reduce` in place: root's `input` takes the result, the others' stay. Returns `input`."""


@built_in
def gather(
    input: torch.Tensor,
    root: int = 0,
    group: Group = None,
    *,
    out: torch.Tensor | None = None,
    algorithm: str = "auto",
    max_blocks: int = 0,
    async_op: bool = False,
) -> torch.Tensor:
    """Root gets the inputs of all, one behind the other along dimension 0 in the order of ranks.

    Args:
        input: [n, ...] of any dtype; one shape and dtype on all ranks.
        root: the rank that gets them.
        group, algorithm, max_blocks, async_op: as everywhere.
        out: takes the result.

    Returns:
        `out`, or a new contiguous tensor, [world * n, ...]: bits unchanged on root, zeros on the
        other ranks.

    Backward: refused (NotImplementedError).
    """


@built_in
def scatter(
    input: torch.Tensor,
    root: int = 0,
    group: Group = None,
    *,
    out: torch.Tensor | None = None,
    algorithm: str = "auto",
    max_blocks: int = 0,
    async_op: bool = False,
) -> torch.Tensor:
    """Rank r gets the r-th of the equal chunks of root's input along dimension 0.

    Args:
        input: [world * n, ...] of any dtype; one shape and dtype on all ranks. Only root's
            values are read.
        root: the rank that gives.
        group, algorithm, max_blocks, async_op: as everywhere.
        out: takes the result.

    Returns:
        `out`, or a new contiguous tensor, [n, ...]. Bits are unchanged.

    Backward: refused (NotImplementedError).
    """


@built_in
def alltoall(
    input: torch.Tensor,
    group: Group = None,
    *,
    out: torch.Tensor | None = None,
    algorithm: str = "auto",
    max_blocks: int = 0,
    async_op: bool = False,
) -> torch.Tensor:
    """Every rank sends each rank a chunk: chunk s of the result is this rank's chunk of rank s's
    input.

    Args:
        input: [world * n, ...] of any dtype: equal chunks along dimension 0. One shape and dtype
            on all ranks.
        group, algorithm, max_blocks, async_op: as everywhere.
        out: takes the result; it may be `input` itself.

    Returns:
        `out`, or a new contiguous tensor of the shape of `input`. Bits are unchanged.

    Backward: alltoall of the gradient.
    """


@built_in
def alltoall_(
    input: torch.Tensor,
    group: Group = None,
    *,
    algorithm: str = "auto",
    max_blocks: int = 0,
    async_op: bool = False,
) -> torch.Tensor:
    """`alltoall` in place: `input` takes the result, and is returned."""


@overload
def alltoallv(
    input: torch.Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    group: Group = None,
    *,
    out: torch.Tensor | None = None,
    algorithm: str = "auto",
    max_blocks: int = 0,
    async_op: bool = False,
) -> torch.Tensor: ...


@overload
def alltoallv(
    input: torch.Tensor,
    output_splits: torch.Tensor | None = None,
    input_splits: None = None,
    group: Group = None,
    *,
    device_splits: torch.Tensor,
    capacity: int,
    out: torch.Tensor | None = None,
    algorithm: str = "auto",
    max_blocks: int = 0,
    async_op: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]: ...


@built_in
def alltoallv(
    input: torch.Tensor,
    output_splits: Sequence[int] | torch.Tensor | None = None,
    input_splits: Sequence[int] | None = None,
    group: Group = None,
    *,
    device_splits: torch.Tensor | None = None,
    capacity: int | None = None,
    out: torch.Tensor | None = None,
    algorithm: str = "auto",
    max_blocks: int = 0,
    async_op: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`alltoall` with chunks of any sizes.

    The host knows the sizes, and gives output_splits and input_splits; or the device alone knows
    what it sends, and device_splits and capacity are given: then the host never waits for them.

    Args:
        input: [rows, ...] of any dtype; the same dtype and shape of a row on all ranks.
        output_splits: rows that come from each rank: what that rank's input_splits has for this
            one. With device_splits: an int64 tensor [world] that takes them, given if `out` is.
        input_splits: rows that go to each rank; their sum is `input.size(0)`.
        group, algorithm, max_blocks, async_op: as everywhere.
        device_splits: int64 [world] on the communicator's device: rows that go to each rank, the
            first of `input` first. Their sum may be less than `input.size(0)`.
        capacity: with device_splits, rows of the result: at least as many as arrive.
        out: takes the result.

    Returns:
        `out`, or a new contiguous tensor, [sum(output_splits), ...]: the rows received, in the
        order of ranks. Bits are unchanged.

        With device_splits two tensors: `out`, or a new one, [capacity, ...], with zeros behind the
        rows received; and `output_splits`, or a new one: the rows that came from each rank.

    Raises:
        CollectiveMismatch: of device_splits: a negative one, a sum beyond the input, or more rows
            than `capacity`, found inside the call, on all ranks. The communicator is poisoned;
            nothing was written out of bounds.

    Backward: alltoallv of the gradient with the splits exchanged; output_splits has no gradient.
    """


@built_in
def barrier(group: Group = None, *, async_op: bool = False) -> None:
    """Returns when all ranks have come. On CUDA the stream waits and the host does not: what is
    launched behind it starts when the streams of all ranks have come."""
