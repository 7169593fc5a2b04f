"""What the ranks share, and values of which every sum is exact."""

from __future__ import annotations

import torch

from .rank import Rank

CAPACITY = 3  # rows a rank: splits are no larger
UNSENT = 2  # rows of an input that no split covers


def integers(shape: tuple[int, ...], seed: int, factor: int = 1) -> torch.Tensor:
    """Small integers as float64 on the CPU, the same on every rank for one seed."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-8, 9, shape, generator=generator)
    return values.to(torch.float64) * factor


def parts(n: int, world: int) -> list[int]:
    from collx import reference

    return reference.parts(n, world)


def own_part(tensor: torch.Tensor, rank: Rank, axis: int = 0) -> torch.Tensor:
    """This rank's part of a tensor that all ranks have."""
    return tensor.split(parts(tensor.shape[axis], rank.size), axis)[rank.rank]


def splits(world: int, rank: int) -> list[int]:
    """Rows that a rank sends to each: uneven, and none to some."""
    return [(rank + 2 * target + 1) % 4 for target in range(world)]


def received(world: int, rank: int) -> list[int]:
    """Rows that a rank gets from each."""
    return [splits(world, source)[rank] for source in range(world)]
