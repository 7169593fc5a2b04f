"""Whether a call did what it should."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from collx import reference
from collxbench.op import Op
from collxbench.timing import Ranks

LATE = 0.02  # seconds


def right(op: Op, result: Tensor, expected: Tensor, world: int) -> bool:
    """Whether a peer's result is right: what was copied by every byte, a reduction for some order
    and precision of accumulation."""
    return close(result, expected, world) if op.reduces else reference.equal_bytes(result, expected)


def exact(op: Op, result: Tensor, expected: Tensor) -> bool:
    """Whether the result is the reference's: by every byte, but for the payloads of NaNs in a
    reduction."""
    same = reference.same_bits if op.reduces else reference.equal_bytes
    return same(result, expected)


def close(result: Tensor, expected: Tensor, world: int) -> bool:
    if not result.is_floating_point():
        return torch.equal(result, expected)
    bound = 4 * world * torch.finfo(result.dtype).eps
    scale = max(1.0, expected.abs().max().item())
    return torch.allclose(result, expected, rtol=bound, atol=bound * scale)


def waits(barrier: Callable[[], object], ranks: Ranks) -> bool:
    """Whether no rank leaves `barrier`, which returns on the host, before the last has come. Each
    rank is the last once. The clock is one for all processes of a machine."""
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
