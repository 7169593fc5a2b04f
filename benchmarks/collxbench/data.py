"""Inputs that every rank can compute for every rank, and the results to expect.

A block of random elements repeats over the tensor. Its length is prime, so that no element of it
meets the same place of a tile, vector or part twice in a row.
"""

from collections.abc import Callable

import torch
from torch import Tensor

BLOCK = 1_000_003  # elements

Reference = Callable[[list[Tensor], str], Tensor]


def block(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """The repeated elements of `rank`'s input, on the CPU."""
    generator = torch.Generator().manual_seed(1000 + rank)
    shape = (min(numel, BLOCK),)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    low, high = (0, 16) if dtype == torch.uint8 else (-8, 8)
    return torch.randint(low, high, shape, generator=generator).to(dtype)


def tiled(elements: Tensor, numel: int) -> Tensor:
    """`elements` repeated to `numel`: [numel]."""
    return elements.repeat(-(-numel // elements.numel()))[:numel].contiguous()


def expected_block(
    world: int, numel: int, dtype: torch.dtype, reduce_op: str, reference: Reference
) -> Tensor:
    """The repeated elements of the result."""
    return reference([block(rank, numel, dtype) for rank in range(world)], reduce_op)


def close(result: Tensor, expected: Tensor, world: int) -> bool:
    """Whether a peer's result is right for some order and precision of accumulation."""
    if not result.is_floating_point():
        return torch.equal(result, expected)
    bound = 4 * world * torch.finfo(result.dtype).eps
    scale = max(1.0, expected.abs().max().item())
    return torch.allclose(result, expected, rtol=bound, atol=bound * scale)
