"""Runs cases on the ranks, compares NaN mask and bits with the reference, and checks other bytes.

Outputs are in larger, poisoned memory. After a call, every byte of that memory except the output
itself must be unchanged (hazards 19 and 20).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from collx import reference

from .rank import Rank
from .values import as_bits, poison, unequal

MARGIN = 64  # elements of poison before and after a tensor
ARENA_BYTES = 4 << 20
MOST_FAILURES = 8  # maximum number that each rank reports


def extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Returns the number of elements that a strided tensor spans in memory."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


class Arenas:
    """The symmetric memory for the symmetric tensors of all cases of a communicator."""

    def __init__(self, communicator: Any) -> None:
        self.input = communicator.empty(ARENA_BYTES, dtype=torch.uint8)
        self.output = communicator.empty(ARENA_BYTES, dtype=torch.uint8)


def arenas_of(rank: Rank, communicator: Any) -> Arenas:
    """Returns the arenas of a communicator. Creates them at the first call. Collective."""
    if communicator.name not in rank.arenas:
        rank.arenas[communicator.name] = Arenas(communicator)
    arenas: Arenas = rank.arenas[communicator.name]
    return arenas


def cut(memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns a view of the beginning of `memory` with the shape, dtype and strides of `like`."""
    front = memory[: like.untyped_storage().nbytes()].view(like.dtype)
    return front.as_strided(like.shape, like.stride(), front.storage_offset())


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view of the bytes of a tensor that is contiguous or in column-major order."""
    return (tensor if tensor.is_contiguous() else tensor.movedim(-1, 0)).view(torch.uint8)


class Placed:
    """A tensor inside of larger memory: `whole` is the memory, `view` the tensor."""

    def __init__(self, whole: torch.Tensor, view: torch.Tensor) -> None:
        self.whole = whole
        self.view = view

    @staticmethod
    def poisoned(
        dtype: torch.dtype,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        offset: int,
        memory: Any,
        device: torch.device,
    ) -> Placed:
        """Returns a poisoned tensor, `offset` elements after the margin of `memory` (None: new
        memory)."""
        needed = extent(shape, strides) + offset + 2 * MARGIN
        whole = poison(needed, dtype, device)
        if memory is not None:
            assert needed * dtype.itemsize <= memory.numel(), "the arena is too small"
            whole = memory[: needed * dtype.itemsize].view(dtype).copy_(whole)
        start = whole.storage_offset() + MARGIN + offset
        return Placed(whole, whole.as_strided(shape, strides, start))

    def part(self, axis: int, start: int, count: int) -> Placed:
        """Returns a part of the tensor, in the same memory."""
        return Placed(self.whole, self.view.narrow(axis, start, count))


def differences(result: torch.Tensor, expected: torch.Tensor) -> str:
    """Describes the differences of a result in NaN mask and bits; "" if there are none."""
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return f"got {result.dtype}{list(result.shape)}, not {expected.dtype}{list(expected.shape)}"
    if reference.same_bits(result, expected):
        return ""
    got, want = result.contiguous().flatten(), expected.contiguous().flatten()
    wrong = as_bits(got) != as_bits(want)
    if got.is_floating_point():
        wrong &= ~(got.isnan() & want.isnan())
    where = wrong.nonzero().flatten()
    first = int(where[0]) if len(where) else -1
    return (
        f"{len(where)} of {got.numel()} elements differ, the first at {first}: "
        f"{got[first].item()!r} instead of {want[first].item()!r}"
    )


def bytes_around(placed: Placed, before: torch.Tensor) -> str:
    """Describes changes of the memory outside of the placed tensor since the copy `before`."""
    after = placed.whole.cpu()
    inside = torch.zeros(after.shape, dtype=torch.bool)
    view = placed.view
    offset = view.storage_offset() - placed.whole.storage_offset()
    inside.as_strided(view.shape, view.stride(), offset).fill_(True)
    changed = unequal(after, before) & ~inside
    where = changed.nonzero().flatten()
    if len(where) == 0:
        return ""
    return f"{len(where)} elements outside of the tensor changed, the first at {int(where[0])}"


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    if math.prod(a.shape) == 0:
        return False
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def run_each(
    rank: Rank, cases: Iterable[Any], run: Callable[[Rank, Any, Any], str], key: str
) -> list[str]:
    """Runs the cases one after the other with `run`. Returns one line for each failure."""
    if key == "small":
        communicator = rank.small_communicator()
    else:
        communicator = rank.communicator(key, check=key == "checked")
    failures = []
    for case in cases:
        wrong = run(rank, communicator, case)
        if wrong:
            failures.append(f"{case}: {wrong}")
    communicator.raise_if_failed()
    return failures[:MOST_FAILURES] + ["..."] * (len(failures) > MOST_FAILURES)


def assert_none(failures: list[list[str]]) -> None:
    """Fails with the failures of all ranks if there are any."""
    lines = [f"rank {rank}: {line}" for rank, found in enumerate(failures) for line in found]
    assert not lines, "\n".join(lines)
