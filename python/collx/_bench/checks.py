"""Checks the results of calls: counts the wrong elements."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from collx import reference
from collx._bench.op import Op
from collx._bench.timing import Ranks

LATE = 0.02  # seconds


def wrong(op: Op, result: Tensor, expected: Tensor, world: int) -> int:
    """Counts the wrong elements of a peer's result. Copies are compared by bytes, and reductions
    with a tolerance for any order and precision of accumulation."""
    return not_close(result, expected, world) if op.reduces else other_bytes(result, expected)


def inexact(op: Op, result: Tensor, expected: Tensor) -> int:
    """Counts the elements that differ from the reference by any byte, except for the payloads of
    NaNs in a reduction."""
    return other_bits(result, expected) if op.reduces else other_bytes(result, expected)


def other_bytes(result: Tensor, expected: Tensor) -> int:
    if reference.equal_bytes(result, expected):
        return 0
    return int(_differ(result, expected).sum())


def other_bits(result: Tensor, expected: Tensor) -> int:
    if reference.same_bits(result, expected):
        return 0
    both_nan = (result.isnan() & expected.isnan()).view(-1)
    return int((_differ(result, expected) & ~both_nan).sum())


def not_close(result: Tensor, expected: Tensor, world: int) -> int:
    if not result.is_floating_point():
        return int((result != expected).sum())
    bound = 4 * world * torch.finfo(result.dtype).eps
    scale = max(1.0, expected.abs().max().item())
    return int((~torch.isclose(result, expected, rtol=bound, atol=bound * scale)).sum())


def _differ(result: Tensor, expected: Tensor) -> Tensor:
    """Returns for each element whether any of its bytes differs."""
    assert result.shape == expected.shape
    assert result.dtype == expected.dtype
    a, b = (t.reshape(-1, 1).view(torch.uint8) for t in (result, expected))
    return (a != b).any(1)


def waits(barrier: Callable[[], object], ranks: Ranks) -> bool:
    """Whether no rank leaves `barrier`, which blocks the host, before the last rank arrives. Each
    rank is the last one once. All processes of a machine share the clock."""
    for late in range(ranks.world):
        ranks.barrier()
        if ranks.rank == late:
            time.sleep(LATE)
        came = time.monotonic()
        barrier()
        left = time.monotonic()
        last_came, first_left = ranks.maximum([came, -left])
        if -first_left < last_came:
            return False
    return True
