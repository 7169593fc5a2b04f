"""Helpers for the suites of rewritten norms: runs a model after `collx.compile.Pass`, creates its
inputs, and defines a quantization."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph

import collx

from .compiling import operators_in, others_in, through_pass
from .rank import Rank

COLS, EPS = 64, 1e-5
WEIGHT = torch.linspace(-1.5, 2.5, COLS)
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
Results = tuple[Tensor, ...]


class Run(NamedTuple):
    """The result of compiling and running a model."""

    results: Results
    operators: list[str]
    left: list[str]
    others: list[str]


def passed(model: Callable[..., Results], *given: Tensor, **options: Any) -> Run:
    before = dict(collx.compile.report().left)
    graphs: list[Graph] = []
    torch._dynamo.reset()
    results = torch.compile(model, fullgraph=True, backend=through_pass(graphs, **options))(*given)
    left = [why for why, n in collx.compile.report().left.items() if n != before.get(why)]
    return Run(results, operators_in(graphs), left, others_in(graphs))


def group_of(rank: Rank) -> tuple[Any, Any]:
    group = rank.fresh_group()
    return group, rank.new_communicator("rewritten-norms", group)


def tensor_of(rank: Rank, shape: tuple[int, ...], dtype: torch.dtype, own: bool) -> Tensor:
    """Returns random values that differ between ranks, or are equal on all ranks."""
    numbers = torch.Generator().manual_seed(100 + rank.rank if own else 7)
    return torch.randn(shape, generator=numbers).to(rank.device, dtype)


def stored(scaled: Tensor, dtype: torch.dtype) -> Tensor:
    limit = 127 if dtype == INT8 else torch.finfo(dtype).max
    scaled = torch.round(scaled) if dtype == INT8 else scaled
    return scaled.clamp(-limit, limit).to(dtype)


def by_row(y: Tensor, dtype: torch.dtype = E4M3) -> Results:
    scale = y.abs().amax(-1, keepdim=True).float() / (127 if dtype == INT8 else 448)
    return stored(y.float() * scale.reciprocal(), dtype), scale
