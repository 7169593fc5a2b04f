"""Thin functions over torch.ops.collx, with defaults filled in. `collx.reference` says in plain
PyTorch what each computes.

They are collective: every rank calls the same one, with arguments that fit together, in the same
order. All of them have three arguments in common, and raise the same errors:

    group       the communicator: itself, its name, a process group that has one, or None for the
                default group's
    algorithm   "auto", or a name of README.md's "Algorithms"
    max_blocks  CUDA thread blocks to use at most; 0 for no bound. The same on all ranks.

    ValueError, TypeError, NotImplementedError    an argument is refused; nothing was launched
    CollectiveTimeout, CollectiveMismatch, CommunicatorPoisoned
                                                  this call on the CPU, or an earlier one, failed

A given `out` takes the result and is returned. It has the result's shape, dtype and device, and
shares no memory with `input` except as its function says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from collx import _registry
from collx._extension import extension
from collx.functional import Group, name_of

__all__ = [
    "allgather",
    "allreduce",
    "allreduce_",
    "alltoall",
    "alltoall_",
    "alltoallv",
    "alltoallv_device",
    "barrier",
    "broadcast",
    "broadcast_",
    "gather",
    "reduce",
    "reduce_",
    "reducescatter",
    "scatter",
]


def allreduce(
    input: torch.Tensor,
    reduce_op: str = "sum",
    group: Group = None,
    *,
    out: torch.Tensor | None = None,
    algorithm: str = "auto",
    max_blocks: int = 0,
) -> torch.Tensor:
    """Reduces `input` over the ranks; every rank gets the result.

    Args:
        input: float32, float16, bfloat16, float64, int32, int64, int8 or uint8; one shape and
            dtype on all ranks, of any length and strides.
        reduce_op: "sum", "avg" (floating point only), "max", "min" or "prod".
        group: the communicator.
        out: takes the result: `input` itself, or a tensor of its shape, dtype and device that
            does not overlap it.
        algorithm: "auto", or a name of README.md's "Algorithms".
        max_blocks: CUDA thread blocks to use at most; 0 for no bound. The same on all ranks.

    Returns:
        `out`, or a new tensor of the shape and dtype of `input`.

    Raises:
        ValueError, TypeError, NotImplementedError: an argument is refused; nothing was launched.
        CollectiveTimeout, CollectiveMismatch, CommunicatorPoisoned: this call on the CPU, or an
            earlier one, failed.
    """
    op = torch.ops.collx.allreduce
    return _call(op, out, input, reduce_op, name_of(group), algorithm, max_blocks)


def allreduce_(
    input: torch.Tensor,
    reduce_op: str = "sum",
    group: Group = None,
    *,
    algorithm: str = "auto",
    max_blocks: int = 0,
) -> torch.Tensor:
    """`allreduce` in place: `input` takes the result, and is returned."""
    torch.ops.collx.allreduce_.default(input, reduce_op, name_of(group), algorithm, max_blocks)
    return input


def reducescatter(
    input: torch.Tensor,
    reduce_op: str = "sum",
    group: Group = None,
    *,
    axis: int = 0,
    out: torch.Tensor | None = None,
    algorithm: str = "auto",
    max_blocks: int = 0,
) -> torch.Tensor:
    """Reduces `input` over the ranks; every rank gets its part of the result.

    Args:
        input: float32, float16, bfloat16, float64, int32, int64, int8 or uint8; one shape and
            dtype on all ranks, of at least one dimension.
        reduce_op: "sum", "avg" (floating point only), "max", "min" or "prod".
        group, algorithm, max_blocks: as everywhere.
        axis: is divided among the ranks: n // world elements each, the first n % world ranks get
            one more (`collx.reference.parts`).
        out: takes the result. With axis 0, or everything before the axis of size 1, it may be
            exactly this rank's part of `input`.

    Returns:
        `out`, or a new contiguous tensor: this rank's part.

    Backward: sum and avg gather the gradient; max, min and prod refuse (NotImplementedError).
    """
    name = name_of(group)
    size = _group_size("reducescatter", name)
    op = torch.ops.collx.reducescatter
    return _call(op, out, input, reduce_op, size, name, axis, algorithm, max_blocks)


def allgather(
    input: torch.Tensor,
    group: Group = None,
    *,
    axis: int = 0,
    total: int | None = None,
    out: torch.Tensor | None = None,
    algorithm: str = "auto",
    max_blocks: int = 0,
) -> torch.Tensor:
    """Every rank gets the inputs of all, one behind the other along `axis` in the order of ranks.

    Args:
        input: of any dtype, the same on all ranks, and of at least one dimension. One shape on
            all ranks, unless `total` is given.
        group, algorithm, max_blocks: as everywhere.
        axis: the dimension along which the inputs are joined.
        total: size of `axis` in the result, divided among the ranks as `reducescatter` does; this
            rank's input must have the size of its part.
        out: takes the result. With axis 0, or everything before the axis of size 1, `input` may
            be exactly this rank's part of it.

    Returns:
        `out`, or a new contiguous tensor. Bits are unchanged.

    Backward: reducescatter(sum) of the gradient.
    """
    name = name_of(group)
    size = _group_size("allgather", name)
    op = torch.ops.collx.allgather
    return _call(op, out, input, size, name, axis, total, algorithm, max_blocks)


def broadcast(
    input: torch.Tensor,
    root: int = 0,
    group: Group = None,
    *,
    out: torch.Tensor | None = None,
    algorithm: str = "auto",
    max_blocks: int = 0,
) -> torch.Tensor:
    """Every rank gets root's input.

    Args:
        input: of any shape and dtype, the same on all ranks. Its values count on root alone.
        root: the rank that gives.
        group, algorithm, max_blocks: as everywhere.
        out: takes the result; it may be `input` itself.

    Returns:
        `out`, or a new contiguous tensor. Bits are unchanged.

    Backward: refused (NotImplementedError).
    """
    op = torch.ops.collx.broadcast
    return _call(op, out, input, root, name_of(group), algorithm, max_blocks)


def broadcast_(
    input: torch.Tensor,
    root: int = 0,
    group: Group = None,
    *,
    algorithm: str = "auto",
    max_blocks: int = 0,
) -> torch.Tensor:
    """`broadcast` in place: `input` takes root's values, and is returned."""
    torch.ops.collx.broadcast_.default(input, root, name_of(group), algorithm, max_blocks)
    return input


def reduce(
    input: torch.Tensor,
    reduce_op: str = "sum",
    root: int = 0,
    group: Group = None,
    *,
    out: torch.Tensor | None = None,
    algorithm: str = "auto",
    max_blocks: int = 0,
) -> torch.Tensor:
    """Reduces `input` over the ranks; root gets the result, the others what they gave.

    Args:
        input: float32, float16, bfloat16, float64, int32, int64, int8 or uint8; one shape and
            dtype on all ranks.
        reduce_op: "sum", "avg" (floating point only), "max", "min" or "prod".
        root: the rank that gets the result.
        group, algorithm, max_blocks: as everywhere.
        out: takes the result; it may be `input` itself.

    Returns:
        `out`, or a new contiguous tensor of the shape and dtype of `input`.

    Backward: refused (NotImplementedError).
    """
    op = torch.ops.collx.reduce
    return _call(op, out, input, reduce_op, root, name_of(group), algorithm, max_blocks)


def reduce_(
    input: torch.Tensor,
    reduce_op: str = "sum",
    root: int = 0,
    group: Group = None,
    *,
    algorithm: str = "auto",
    max_blocks: int = 0,
) -> torch.Tensor:
    """`reduce` in place: root's `input` takes the result, the others' stay. Returns `input`."""
    torch.ops.collx.reduce_.default(input, reduce_op, root, name_of(group), algorithm, max_blocks)
    return input


def gather(
    input: torch.Tensor,
    root: int = 0,
    group: Group = None,
    *,
    out: torch.Tensor | None = None,
    algorithm: str = "auto",
    max_blocks: int = 0,
) -> torch.Tensor:
    """Root gets the inputs of all, one behind the other along dimension 0 in the order of ranks.

    Args:
        input: [n, ...] of any dtype; one shape and dtype on all ranks.
        root: the rank that gets them.
        group, algorithm, max_blocks: as everywhere.
        out: takes the result.

    Returns:
        `out`, or a new contiguous tensor, [world * n, ...]: bits unchanged on root, zeros on the
        other ranks.

    Backward: refused (NotImplementedError).
    """
    name = name_of(group)
    size = _group_size("gather", name)
    return _call(torch.ops.collx.gather, out, input, root, size, name, algorithm, max_blocks)


def scatter(
    input: torch.Tensor,
    root: int = 0,
    group: Group = None,
    *,
    out: torch.Tensor | None = None,
    algorithm: str = "auto",
    max_blocks: int = 0,
) -> torch.Tensor:
    """Rank r gets the r-th of the equal chunks of root's input along dimension 0.

    Args:
        input: [world * n, ...] of any dtype; one shape and dtype on all ranks. Its values count
            on root alone.
        root: the rank that gives.
        group, algorithm, max_blocks: as everywhere.
        out: takes the result.

    Returns:
        `out`, or a new contiguous tensor, [n, ...]. Bits are unchanged.

    Backward: refused (NotImplementedError).
    """
    name = name_of(group)
    size = _group_size("scatter", name)
    return _call(torch.ops.collx.scatter, out, input, root, size, name, algorithm, max_blocks)


def alltoall(
    input: torch.Tensor,
    group: Group = None,
    *,
    out: torch.Tensor | None = None,
    algorithm: str = "auto",
    max_blocks: int = 0,
) -> torch.Tensor:
    """Every rank sends each rank a chunk: chunk s of the result is this rank's chunk of rank s's
    input.

    Args:
        input: [world * n, ...] of any dtype: equal chunks along dimension 0. One shape and dtype
            on all ranks.
        group, algorithm, max_blocks: as everywhere.
        out: takes the result; it may be `input` itself.

    Returns:
        `out`, or a new contiguous tensor of the shape of `input`. Bits are unchanged.

    Backward: alltoall of the gradient.
    """
    name = name_of(group)
    size = _group_size("alltoall", name)
    return _call(torch.ops.collx.alltoall, out, input, size, name, algorithm, max_blocks)


def alltoall_(
    input: torch.Tensor,
    group: Group = None,
    *,
    algorithm: str = "auto",
    max_blocks: int = 0,
) -> torch.Tensor:
    """`alltoall` in place: `input` takes the result, and is returned."""
    name = name_of(group)
    size = _group_size("alltoall_", name)
    torch.ops.collx.alltoall_.default(input, size, name, algorithm, max_blocks)
    return input


def alltoallv(
    input: torch.Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    group: Group = None,
    *,
    out: torch.Tensor | None = None,
    algorithm: str = "auto",
    max_blocks: int = 0,
) -> torch.Tensor:
    """`alltoall` with chunks of any sizes, which the host knows.

    Args:
        input: [rows, ...] of any dtype; the same dtype and shape of a row on all ranks.
        output_splits: rows that come from each rank: what that rank's input_splits has for this
            one.
        input_splits: rows that go to each rank; their sum is `input.size(0)`.
        group, algorithm, max_blocks: as everywhere.
        out: takes the result.

    Returns:
        `out`, or a new contiguous tensor, [sum(output_splits), ...]: the rows received, in the
        order of ranks. Bits are unchanged.

    Backward: alltoallv of the gradient with the splits exchanged.
    """
    op = torch.ops.collx.alltoallv
    return _call(op, out, input, output_splits, input_splits, name_of(group), algorithm, max_blocks)


def alltoallv_device(
    input: torch.Tensor,
    input_splits: torch.Tensor,
    capacity: int,
    group: Group = None,
    *,
    out: torch.Tensor | None = None,
    output_splits: torch.Tensor | None = None,
    algorithm: str = "auto",
    max_blocks: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`alltoallv` with splits that only the device knows: the host never waits for them.

    Args:
        input: [rows, ...] of any dtype; the same dtype and shape of a row on all ranks.
        input_splits: int64 [world] on the communicator's device: rows that go to each rank, the
            first of `input` first. Their sum may be less than `input.size(0)`.
        capacity: rows of the result; at least as many as arrive.
        group, algorithm, max_blocks: as everywhere.
        out, output_splits: take the results; both or neither.

    Returns:
        `out`, or a new contiguous tensor, [capacity, ...]: the rows received, in the order of
        ranks, and zeros behind them; and `output_splits`, or a new int64 [world]: rows that came
        from each rank. Bits are unchanged.

    Raises:
        CollectiveMismatch: a negative split, a sum beyond the input, or more rows than `capacity`,
            found inside the call, on all ranks. The communicator is poisoned; nothing was written
            out of bounds.

    Backward: the same operator, with output_splits and a capacity of `input.size(0)`;
    output_splits has no gradient.
    """
    op = torch.ops.collx.alltoallv
    name = name_of(group)
    if out is None and output_splits is None:
        results: tuple[torch.Tensor, torch.Tensor] = op.device_splits(
            input, input_splits, capacity, name, algorithm, max_blocks
        )
        return results
    if out is None or output_splits is None:
        missing = "out" if out is None else "output_splits"
        raise ValueError(
            f"collx.alltoallv_device: {missing}: not given; accepted: both out and output_splits, "
            "or neither"
        )
    op.device_splits_out(
        input,
        input_splits,
        capacity,
        name,
        algorithm,
        max_blocks,
        out=out,
        output_splits=output_splits,
    )
    return out, output_splits


def barrier(group: Group = None) -> None:
    """Returns when all ranks have come. On CUDA the stream waits and the host does not: what is
    launched behind it starts when the streams of all ranks have come."""
    torch.ops.collx.barrier.default(name_of(group))


def _call(op: Any, out: torch.Tensor | None, *arguments: Any) -> torch.Tensor:
    """The operator's functional form, or the one that writes `out`."""
    if out is None:
        result: torch.Tensor = op.default(*arguments)
        return result
    op.out(*arguments, out=out)
    return out


def _group_size(op: str, name: str) -> int:
    """The number of ranks, which the schema has so that Meta needs no communicator."""
    # Our own registry first: the compiler can trace a look-up there.
    communicator = _registry.find(name) or extension.lookup(name)
    if communicator is None:
        raise ValueError(
            f'collx.{op}: group_name: "{name}" names no communicator of this process. '
            "Communicators are made by collx.init(); destroy() removes them"
        )
    return communicator.world_size
