"""The collectives. `functions.py` creates the functions from these declarations. `collx.reference`
defines in plain PyTorch what each function computes.

The functions are collective: all ranks call the same function in the same order, with arguments
that match. These arguments and errors are common to all of them:

    group       the communicator: a `Communicator` or its name; a process group or a device mesh of
                one dimension, which stands for its default communicator; or None, which stands for
                the communicator of the default process group
    algorithm   "auto", or the name of an algorithm; the error for an unknown name lists the names
    max_blocks  upper bound on the number of CUDA thread blocks; 0 for no bound. The same on all
                ranks
    async_op    True posts the call and returns its `Handle`, as `collx.post` does

    ValueError, TypeError, NotImplementedError    an argument is invalid; nothing was launched
    CollectiveTimeout, CollectiveMismatch, CommunicatorPoisoned
                                                  this call (CPU) or an earlier call (GPU) failed

If `out` is given, the result is written to it, and the function returns it. It must have the shape,
dtype and device of the result, and must not share memory with `input` unless the function's
documentation allows it.
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
    """Reduces `input` elementwise over the ranks. Every rank gets the result.

    Args:
        input: a tensor of any shape and strides, with dtype float32, float16, bfloat16, float64,
            int32, int64, int8 or uint8. Shape and dtype are the same on all ranks.
        reduce_op: "sum", "avg" (floating-point dtypes only), "max", "min" or "prod", or the
            corresponding value of torch.distributed.ReduceOp.
        group: the communicator: a `collx.Communicator` or its name; a process group or a device
            mesh of one dimension, which stands for its default communicator; or None, which
            stands for the communicator of the default process group.
        epilogue: ``f(value, *extras)``, a function of elementwise PyTorch ops that every rank
            applies to the reduced value (docs/guide/epilogues.md). It computes in float32 if the
            input is float16 or bfloat16. Its result is rounded once, to the dtype of the input,
            or to the dtype of a cast if that is its last op.
        extras: further arguments of `epilogue`: tensors that have the dtype and device of the input
            and broadcast to the shape of the result, and Python numbers. A number that changes
            does not cause a compilation. The extras may differ from rank to rank.
        index: True passes the coordinates of the element to `epilogue` as further arguments, one
            int64 tensor for each dimension.
        out: the tensor for the result: `input` itself, or a tensor that does not overlap it and
            has the shape, device and dtype of the result.
        algorithm: "auto", or the name of an algorithm. The error for an unknown name lists the
            names.
        max_blocks: upper bound on the number of CUDA thread blocks; 0 for no bound. The same on
            all ranks.
        async_op: True posts the call and returns its `collx.Handle`, as `collx.post` does.

    Returns:
        `out`, or a new tensor with the shape and dtype of `input`. With an epilogue, the dtype is
        that of the epilogue's result.

    Raises:
        ValueError, TypeError, NotImplementedError: an argument is invalid; nothing was launched.
        CollectiveTimeout, CollectiveMismatch, CommunicatorPoisoned: this call (CPU) or an earlier
            call (GPU) failed.

    Backward: an allreduce of the gradient with the same `reduce_op`. "max", "min" and "prod" raise
    NotImplementedError.
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
    """In-place `collx.allreduce`: the result replaces `input`, which is returned."""


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
    """Reduces `input` elementwise over the ranks. Every rank gets its part of the result.

    Args:
        input: a tensor of at least one dimension, with a dtype that `collx.allreduce` accepts.
            Shape and dtype are the same on all ranks.
        reduce_op: "sum", "avg" (floating-point dtypes only), "max", "min" or "prod", or the
            corresponding value of torch.distributed.ReduceOp.
        group, algorithm, max_blocks, async_op: as in `collx.allreduce`.
        axis: the dimension that is divided among the ranks. Of n elements each rank gets
            n // world_size, and the first n % world_size ranks get one more
            (`collx.reference.parts`).
        epilogue, extras, index: as in `collx.allreduce`, applied to this rank's part. Coordinates
            are those of the full tensor.
        out: the tensor for the result. If `axis` is 0, or if all dimensions before `axis` have
            size 1, it may be exactly this rank's part of `input`.

    Returns:
        `out`, or a new contiguous tensor: this rank's part.

    Raises the errors of `collx.allreduce`.

    Backward: an allgather of the gradient for "sum", divided by the world size for "avg". "max",
    "min" and "prod" raise NotImplementedError.
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
    """Concatenates the inputs of all ranks along `axis`, in the order of the ranks. Every rank gets
    the result.

    Args:
        input: a tensor of at least one dimension and of any dtype, the same dtype on all ranks.
            The shape is the same on all ranks, unless `total` is given.
        group, algorithm, max_blocks, async_op: as in `collx.allreduce`.
        axis: the dimension along which the inputs are concatenated.
        total: the size of `axis` in the result, for inputs of different sizes. `total` is divided
            among the ranks as `collx.reducescatter` divides an axis, and the input of each rank
            must have the size of its part.
        out: the tensor for the result. If `axis` is 0, or if all dimensions before `axis` have
            size 1, `input` may be exactly this rank's part of it.

    Returns:
        `out`, or a new contiguous tensor. The bits of the elements do not change.

    Raises the errors of `collx.allreduce`.

    Backward: a reducescatter(sum) of the gradient.
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
    """Copies the input of rank `root` to all ranks.

    Args:
        input: a tensor of any shape and dtype, the same on all ranks. Only the values of the root
            are read.
        root: the rank that sends, as its number in the communicator.
        group, algorithm, max_blocks, async_op: as in `collx.allreduce`.
        out: the tensor for the result; it may be `input` itself.

    Returns:
        `out`, or a new contiguous tensor. The bits of the elements do not change.

    Raises the errors of `collx.allreduce`.

    Backward: not supported (NotImplementedError).
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
    """In-place `collx.broadcast`: the values of the root replace `input`, which is returned."""


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
    """Reduces `input` elementwise over the ranks. Rank `root` gets the result, and every other rank
    gets a copy of its own input.

    Args:
        input: a tensor of any shape, with a dtype that `collx.allreduce` accepts. Shape and dtype
            are the same on all ranks.
        reduce_op: "sum", "avg" (floating-point dtypes only), "max", "min" or "prod", or the
            corresponding value of torch.distributed.ReduceOp.
        root: the rank that gets the result, as its number in the communicator.
        group, algorithm, max_blocks, async_op: as in `collx.allreduce`.
        out: the tensor for the result; it may be `input` itself.

    Returns:
        `out`, or a new contiguous tensor with the shape and dtype of `input`.

    Raises the errors of `collx.allreduce`.

    Backward: not supported (NotImplementedError).
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
    """In-place `collx.reduce`: on the root, the result replaces `input`; the inputs of the other
    ranks do not change. Returns `input`."""


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
    """Concatenates the inputs of all ranks along dimension 0, in the order of the ranks. Rank
    `root` gets the result, and every other rank gets zeros.

    Args:
        input: a tensor [n, ...] of any dtype. Shape and dtype are the same on all ranks.
        root: the rank that gets the result, as its number in the communicator.
        group, algorithm, max_blocks, async_op: as in `collx.allreduce`.
        out: the tensor for the result.

    Returns:
        `out`, or a new contiguous tensor [world_size * n, ...]. On the root, the bits of the
        elements do not change.

    Raises the errors of `collx.allreduce`.

    Backward: not supported (NotImplementedError).
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
    """Divides the input of rank `root` into equal chunks along dimension 0. Rank r gets chunk r.

    Args:
        input: a tensor [world_size * n, ...] of any dtype. Shape and dtype are the same on all
            ranks. Only the values of the root are read.
        root: the rank that sends, as its number in the communicator.
        group, algorithm, max_blocks, async_op: as in `collx.allreduce`.
        out: the tensor for the result.

    Returns:
        `out`, or a new contiguous tensor [n, ...]. The bits of the elements do not change.

    Raises the errors of `collx.allreduce`.

    Backward: not supported (NotImplementedError).
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
    """Every rank sends one chunk of its input to each rank. Chunk s of the result is this rank's
    chunk of the input of rank s.

    Args:
        input: a tensor [world_size * n, ...] of any dtype, which consists of equal chunks along
            dimension 0. Shape and dtype are the same on all ranks.
        group, algorithm, max_blocks, async_op: as in `collx.allreduce`.
        out: the tensor for the result; it may be `input` itself.

    Returns:
        `out`, or a new contiguous tensor with the shape of `input`. The bits of the elements do
        not change.

    Raises the errors of `collx.allreduce`.

    Backward: an alltoall of the gradient.
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
    """In-place `collx.alltoall`: the result replaces `input`, which is returned."""


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
    """An all-to-all with chunks of different sizes.

    If the sizes are known on the host, pass `output_splits` and `input_splits`. If they are in
    device memory, pass `device_splits` and `capacity`; then the host never waits for the device.

    Args:
        input: a tensor [rows, ...] of any dtype. The dtype and the shape of a row are the same on
            all ranks.
        output_splits: the number of rows that arrive from each rank. Entry s equals this rank's
            entry in the `input_splits` of rank s. With `device_splits`: an int64 tensor
            [world_size] for these numbers; required if `out` is given.
        input_splits: the number of rows for each rank. Their sum is `input.size(0)`.
        group, algorithm, max_blocks, async_op: as in `collx.allreduce`.
        device_splits: an int64 tensor [world_size] on the communicator's device: the number of
            rows for each rank, starting with the first row of `input`. Their sum may be less than
            `input.size(0)`.
        capacity: with `device_splits`, the number of rows of the result. At least as many as
            arrive.
        out: the tensor for the result. With algorithm "direct": a part of a symmetric tensor that
            begins at the same place on every rank, for example `buffer[: sum(output_splits)]`.

    Returns:
        `out`, or a new contiguous tensor [sum(output_splits), ...]: the received rows, in the
        order of the ranks. The bits of the elements do not change.

        With `device_splits`, a tuple of two tensors: `out` or a new tensor [capacity, ...], which
        is zero after the received rows; and `output_splits` or a new tensor with the number of
        rows that arrived from each rank.

    Raises:
        CollectiveMismatch: an entry of `device_splits` is negative, their sum exceeds the rows of
            the input, or more than `capacity` rows arrive. The call detects this on the device,
            and all ranks raise it. The communicator is poisoned, and nothing was written outside
            of the tensors.

    The other errors are those of `collx.allreduce`.

    Backward: an alltoallv of the gradient with the splits exchanged. `output_splits` has no
    gradient.
    """


@built_in
def barrier(group: Group = None, *, async_op: bool = False) -> None:
    """Waits until all ranks have called it.

    On CUDA, the current stream waits and the host does not: work that is enqueued after the barrier
    starts when the streams of all ranks have reached it.
    """
