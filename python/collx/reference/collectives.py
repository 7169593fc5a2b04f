"""The collectives that copy, and those that reduce."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from collx.reference._common import alike, larger, smaller, subnormals_kept
from collx.reference._epilogues import Extra, Function, applied

__all__ = [
    "REDUCE_OPS",
    "allgather",
    "allreduce",
    "alltoall",
    "alltoallv",
    "broadcast",
    "equal_bytes",
    "gather",
    "parts",
    "reduce",
    "reducescatter",
    "same_bits",
    "scatter",
]

REDUCE_OPS = ("sum", "avg", "max", "min", "prod")

# Below PyTorch's grain size, an operator runs in the calling thread. The threads of PyTorch's pool
# keep the denormal mode that they were created with, so they must not be used.
_CHUNK = 1 << 14

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def allreduce(
    inputs: Sequence[torch.Tensor],
    reduce_op: str = "sum",
    *,
    epilogue: Function | None = None,
    extras: Sequence[Extra] = (),
    index: bool = False,
) -> torch.Tensor:
    """Returns the result of an all-reduce of `inputs[r]`, the input of rank r. It is the same on
    every rank.

    Args:
        inputs: one tensor for each rank, with the same shape, dtype and device.
        reduce_op: "sum", "avg", "max", "min" or "prod" ("product").
        epilogue: ``f(value, *extras)``. It is computed by PyTorch's own ops on that device, in
            float32 for float16 and bfloat16, and rounded once.
        extras: the extras of the rank whose result is computed.
        index: True passes the coordinates to f as further arguments.

    Returns:
        A new contiguous tensor with that shape and dtype. With an epilogue whose last op is a
        cast, the dtype is that of the cast.

    Raises:
        ValueError: there are no inputs, shapes or devices differ, the reduce op is unknown, or an
            extra does not broadcast.
        TypeError: dtypes differ, also of an extra, or avg of integers.
    """
    whole = _allreduce("allreduce", inputs, reduce_op)
    return whole if epilogue is None else applied("allreduce", epilogue, whole, extras, index)


def parts(n: int, world: int) -> list[int]:
    """Returns the number of the `n` units that each rank gets: n // world, and one more for the
    first n % world ranks."""
    if n < 0 or world < 1:
        raise ValueError(
            f"parts: got {n} units and {world} ranks; accepted: 0 or more units, 1 or more ranks"
        )
    return [n // world + (rank < n % world) for rank in range(world)]


def reducescatter(
    inputs: Sequence[torch.Tensor],
    reduce_op: str = "sum",
    axis: int = 0,
    *,
    epilogue: Function | None = None,
    extras: Sequence[Sequence[Extra]] = (),
    index: bool = False,
) -> list[torch.Tensor]:
    """Rank r gets its part of the reduction. `axis` is divided as in `parts`. An epilogue is
    applied as in `allreduce`, with `extras[r]` on rank r; coordinates are those of the full
    tensor."""
    whole = _allreduce("reducescatter", inputs, reduce_op)
    axis = _axis("reducescatter", whole, axis)
    counts = parts(whole.shape[axis], len(inputs))
    values = _split(whole, counts, axis)
    if epilogue is None:
        return values
    extras = extras or [()] * len(inputs)
    if len(extras) != len(inputs):
        raise ValueError(
            f"reducescatter: got {len(inputs)} inputs, but extras of {len(extras)} ranks"
        )
    return [
        applied("reducescatter", epilogue, value, own, index, axis, sum(counts[:rank]))
        for rank, (value, own) in enumerate(zip(values, extras, strict=True))
    ]


def allgather(inputs: Sequence[torch.Tensor], axis: int = 0) -> list[torch.Tensor]:
    """Every rank gets all inputs, concatenated along `axis`, where their sizes may differ."""
    first = alike("allgather", inputs, shapes=False)
    axis = _axis("allgather", first, axis)
    _alike_but_for("allgather", inputs, axis)
    return [_joined(inputs, axis) for _ in inputs]


def broadcast(inputs: Sequence[torch.Tensor], root: int = 0) -> list[torch.Tensor]:
    """Every rank gets the input of the root."""
    alike("broadcast", inputs)
    _root("broadcast", inputs, root)
    return [_copy(inputs[root]) for _ in inputs]


def reduce(
    inputs: Sequence[torch.Tensor], reduce_op: str = "sum", root: int = 0
) -> list[torch.Tensor]:
    """The root gets the reduction; every other rank gets its own input."""
    whole = _allreduce("reduce", inputs, reduce_op)
    _root("reduce", inputs, root)
    return [whole if rank == root else _copy(own) for rank, own in enumerate(inputs)]


def gather(inputs: Sequence[torch.Tensor], root: int = 0) -> list[torch.Tensor]:
    """The root gets all inputs, concatenated along dimension 0; every other rank gets zeros of that
    shape."""
    first = alike("gather", inputs)
    _axis("gather", first, 0)
    _root("gather", inputs, root)
    whole = _joined(inputs, 0)
    return [whole if rank == root else torch.zeros_like(whole) for rank in range(len(inputs))]


def scatter(inputs: Sequence[torch.Tensor], root: int = 0) -> list[torch.Tensor]:
    """Rank r gets chunk r of the root's input, which consists of equal chunks along dimension 0."""
    alike("scatter", inputs)
    _root("scatter", inputs, root)
    rows = _chunk_rows("scatter", inputs)
    return _split(inputs[root], [rows] * len(inputs), 0)


def alltoall(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Chunk s of rank r's output is chunk r of rank s's input. The chunks along dimension 0 have
    equal sizes."""
    alike("alltoall", inputs)
    rows = _chunk_rows("alltoall", inputs)
    return _exchanged(inputs, [[rows] * len(inputs)] * len(inputs))


def alltoallv(
    inputs: Sequence[torch.Tensor], input_splits: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """An all-to-all with chunks of different sizes: rank r sends `input_splits[r][s]` rows to rank
    s. Rank r gets `input_splits[s][r]` rows from rank s."""
    world = len(inputs)
    first = alike("alltoallv", inputs, shapes=False)
    _axis("alltoallv", first, 0)
    _alike_but_for("alltoallv", inputs, 0)
    if len(input_splits) != world:
        raise ValueError(f"alltoallv: got {world} inputs, but {len(input_splits)} lists of splits")
    for rank, (tensor, splits) in enumerate(zip(inputs, input_splits, strict=True)):
        if len(splits) != world or min(splits) < 0 or sum(splits) != tensor.shape[0]:
            raise ValueError(
                f"alltoallv: rank {rank} divides {tensor.shape[0]} rows into {list(splits)}; "
                f"accepted: {world} splits, none negative, that sum up to the rows"
            )
    return _exchanged(inputs, input_splits)


def equal_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether `a` and `b` have the same shape and dtype, and all of their bytes are equal."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    bytes_a = _copy(a).reshape(-1).view(torch.uint8)
    bytes_b = _copy(b).reshape(-1).view(torch.uint8)
    return torch.equal(bytes_a, bytes_b.to(bytes_a.device))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether `a` and `b` have the same shape and dtype, NaN in the same places, and equal bits in
    all other elements. Unlike in torch.equal, NaN equals NaN with any payload, and -0 differs from
    +0."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    bits_a, bits_b = _without_nan(a), _without_nan(b)
    return torch.equal(bits_a, bits_b.to(bits_a.device))


def _alike_but_for(op: str, inputs: Sequence[torch.Tensor], axis: int) -> None:
    first = inputs[0].shape
    for rank, tensor in enumerate(inputs):
        shape = tensor.shape
        if shape[:axis] != first[:axis] or shape[axis + 1 :] != first[axis + 1 :]:
            raise ValueError(
                f"{op}: rank {rank} has shape {tuple(shape)}, and rank 0 {tuple(first)}; accepted: "
                f"shapes that differ only in dimension {axis}"
            )


def _axis(op: str, tensor: torch.Tensor, axis: int) -> int:
    """Returns the axis as a non-negative number."""
    if not -tensor.dim() <= axis < tensor.dim():
        raise ValueError(f"{op}: axis: got {axis} for the shape {tuple(tensor.shape)}")
    return axis % tensor.dim()


def _root(op: str, inputs: Sequence[torch.Tensor], root: int) -> None:
    if not 0 <= root < len(inputs):
        raise ValueError(f"{op}: root: got {root}; accepted: 0 to {len(inputs) - 1}")


def _chunk_rows(op: str, inputs: Sequence[torch.Tensor]) -> int:
    """Returns the number of rows of each chunk. There is one chunk for each rank."""
    _axis(op, inputs[0], 0)
    rows = inputs[0].shape[0]
    if rows % len(inputs) != 0:
        raise ValueError(f"{op}: got {rows} rows; accepted: a multiple of {len(inputs)} ranks")
    return rows // len(inputs)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _split(tensor: torch.Tensor, sizes: Sequence[int], axis: int) -> list[torch.Tensor]:
    """Returns copies of consecutive pieces with the given sizes."""
    starts = [sum(sizes[:rank]) for rank in range(len(sizes))]
    return [
        _copy(tensor.narrow(axis, start, size)) for start, size in zip(starts, sizes, strict=True)
    ]


def _joined(tensors: Sequence[torch.Tensor], axis: int) -> torch.Tensor:
    return torch.cat([tensor.detach() for tensor in tensors], axis).contiguous()


def _exchanged(
    inputs: Sequence[torch.Tensor], splits: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    sent = [_split(tensor, sizes, 0) for tensor, sizes in zip(inputs, splits, strict=True)]
    return [_joined([chunks[rank] for chunks in sent], 0) for rank in range(len(inputs))]


def _allreduce(name: str, inputs: Sequence[torch.Tensor], reduce_op: str) -> torch.Tensor:
    op = "prod" if reduce_op == "product" else reduce_op
    if op not in REDUCE_OPS:
        raise ValueError(f"{name}: reduce_op: got {reduce_op!r}; accepted: {', '.join(REDUCE_OPS)}")
    first = alike(name, inputs)
    if op == "avg" and not first.is_floating_point():
        raise TypeError(f"{name}: avg: got {first.dtype}; accepted: floating-point tensors")

    flat = [tensor.detach().reshape(-1) for tensor in inputs]
    output = torch.empty(first.numel(), dtype=first.dtype, device=first.device)
    with subnormals_kept():
        for start in range(0, first.numel(), _CHUNK):
            piece = slice(start, start + _CHUNK)
            output[piece] = _fold([tensor[piece] for tensor in flat], op)
    return output.reshape(first.shape)


def _without_nan(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bits of the tensor as integers. Replaces every NaN with the same pattern."""
    dense = tensor.detach().contiguous()
    if not dense.is_floating_point():
        return dense
    bits = dense.view(_BITS[dense.element_size()])
    # All ones is a NaN in every format, so it equals no other value.
    return torch.where(dense != dense, torch.full_like(bits, -1), bits)


def _fold(values: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    dtype = values[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    step = _STEPS[op]
    total = values[0].to(wide)
    for value in values[1:]:
        total = step(total, value.to(wide))
    if op == "avg":
        # Not a scalar: PyTorch may divide by a scalar as a multiplication by its reciprocal.
        total = total / torch.full_like(total, len(values))
    return total.to(dtype)


_STEPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": larger,
    "min": smaller,
    "prod": torch.mul,
}
