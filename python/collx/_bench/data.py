"""Inputs that every rank can compute for every rank.

A block of random elements is repeated over the tensor. Its length is prime, so that an element is
not at the same position of a tile, vector or part in two consecutive blocks.
"""

import functools

import torch
from torch import Tensor

BLOCK = 1_000_003  # elements


def input_of(rank: int, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns the input of `rank`, [numel]."""
    if numel == 0:
        return torch.empty(0, dtype=dtype, device=device)
    elements = _block(rank, dtype)[:numel].to(device)
    return elements.repeat(-(-numel // elements.numel()))[:numel].contiguous()


@functools.cache
def _block(rank: int, dtype: torch.dtype) -> Tensor:
    """Returns the repeated elements of the input of `rank`, on the CPU."""
    generator = torch.Generator().manual_seed(1000 + rank)
    if dtype.is_floating_point:
        return torch.randn(BLOCK, generator=generator).to(dtype)
    low, high = (0, 16) if dtype == torch.uint8 else (-8, 8)
    return torch.randint(low, high, (BLOCK,), generator=generator).to(dtype)
