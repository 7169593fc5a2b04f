"""Parts and splits of tensors, and values whose sums are exact."""

from __future__ import annotations

import torch

from collx import reference

from .rank import Rank

CAPACITY = 3  # rows per rank: the maximum split
UNSENT = 2  # rows of an input that no split includes


def integers(shape: tuple[int, ...], seed: int, factor: int = 1) -> torch.Tensor:
    """Returns small integers as float64 on the CPU. They only depend on the seed."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-8, 9, shape, generator=generator)
    return values.to(torch.float64) * factor


def parts(n: int, world: int) -> list[int]:
    return reference.parts(n, world)


def own_part(tensor: torch.Tensor, rank: Rank, axis: int = 0) -> torch.Tensor:
    """Returns this rank's part of a tensor that is the same on all ranks."""
    return tensor.split(parts(tensor.shape[axis], rank.size), axis)[rank.rank]


def splits(world: int, rank: int) -> list[int]:
    """Returns the number of rows that a rank sends to each rank: uneven, and 0 for some."""
    return [(rank + 2 * target + 1) % 4 for target in range(world)]


def received(world: int, rank: int) -> list[int]:
    """Returns the number of rows that a rank receives from each rank."""
    return [splits(world, source)[rank] for source in range(world)]
