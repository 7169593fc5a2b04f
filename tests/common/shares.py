"""Parts of tensors, and values whose sums are exact."""

from __future__ import annotations

import torch

from collx import reference

from .rank import Rank


def integers(shape: tuple[int, ...], seed: int, factor: int = 1) -> torch.Tensor:
    """Returns small integers as float64 on the CPU. They only depend on the seed."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-8, 9, shape, generator=generator)
    return values.to(torch.float64) * factor


def own_part(tensor: torch.Tensor, rank: Rank, axis: int = 0) -> torch.Tensor:
    """Returns this rank's part of a tensor that is the same on all ranks."""
    return tensor.split(reference.parts(tensor.shape[axis], rank.size), axis)[rank.rank]
