"""CUDA graphs and their memory: several graphs on one communicator, pools that graphs share and
that grow between captures, expandable segments, and graphs that PyTorch makes from modules."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.common.attempt import finish
from tests.common.pool import on_ranks
from tests.common.rank import Rank

SIZES = (300, 70_000, 9, 4_000_000)  # of graphs, in the order of their captures
ROUNDS = 60
HIDDEN = 128


class Captured:
    """A graph of collectives on one input. Only the graph's pool holds the intermediate tensors,
    and it may give their memory to another graph of the same pool."""

    def __init__(self, rank: Rank, name: str, numel: int, pool: Any) -> None:
        self.numel, self._size, self._me = numel * rank.size, rank.size, rank.rank
        self.source = torch.zeros(self.numel, device=rank.device)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.results = self._calls(name)

    def _calls(self, name: str) -> tuple[torch.Tensor, ...]:
        ops = torch.ops.collx
        total = ops.allreduce(self.source * 2, "sum", name)
        part = ops.reducescatter(total + 1, "max", self._size, name)
        return total * 0.5, ops.allgather(part - 1, self._size, name)

    def wrong(self, value: int) -> torch.Tensor:
        """Replays the graph, where each rank's input is `value` + its number. Counts wrong elements
        on the device, before another graph reuses the memory."""
        self.source.fill_(value + self._me)
        self.graph.replay()
        total = self._size * value + self._size * (self._size - 1) // 2
        first, second = self.results
        return (first != total).sum() + (second != 2 * total).sum()


@pytest.mark.worlds(1, 2, 4)
@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@on_ranks
def test_graphs_are_replayed_in_any_order(rank: Rank, shared: bool, expandable: bool) -> None:
    """Several graphs on one communicator, each with its own pool or all in one pool, captured while
    others are in use, with eager calls in between."""
    communicator = rank.communicator()
    settings = torch.cuda.memory._set_allocator_settings
    if expandable:
        settings("expandable_segments:True")
    try:
        pool = torch.cuda.graph_pool_handle() if shared else None
        graphs = [Captured(rank, communicator.name, SIZES[0], pool)]
        wrong = graphs[0].wrong(1)  # the pool grows after a graph is in use
        graphs += [Captured(rank, communicator.name, numel, pool) for numel in SIZES[1:]]
        order = random.Random(5)  # the same on all ranks
        for number in range(ROUNDS):
            wrong += order.choice(graphs).wrong(number % 17)
            eager = torch.full((1 + order.randrange(3000),), float(number), device=rank.device)
            result = torch.ops.collx.allreduce(eager, "max", communicator.name)
            wrong += (result != number).sum()
        finish(communicator)
        assert int(wrong) == 0
    finally:
        if expandable:
            settings("expandable_segments:False")


class Layers(nn.Module):
    """A column-parallel and a row-parallel layer, and a norm; collectives in both passes."""

    def __init__(self, rank: Rank, name: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(rank.rank)
        weights = torch.randn(2, HIDDEN, HIDDEN, generator=generator) / HIDDEN
        self.inner = nn.Parameter(weights[0].to(rank.device))
        self.outer = nn.Parameter(weights[1].to(rank.device))
        self.weight = nn.Parameter(torch.ones(HIDDEN, device=rank.device))
        self._name, self._size = name, rank.size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ops = torch.ops.collx
        hidden = torch.relu(x @ self.inner) @ self.outer
        total = ops.allreduce(hidden, "sum", self._name) + x
        norm = functional.rms_norm(total, (HIDDEN,), self.weight)
        whole: torch.Tensor = ops.allgather(norm + total, self._size, self._name)
        return whole


@pytest.mark.worlds(1, 2)
@on_ranks
def test_modules_become_graphs_with_their_backward_passes(rank: Rank) -> list[str]:
    """torch.cuda.make_graphed_callables returns the bits of the module: results and gradients."""
    communicator = rank.communicator()
    plain = Layers(rank, communicator.name)
    graphed = copy.deepcopy(plain)
    sample = torch.zeros(4, HIDDEN, device=rank.device, requires_grad=True)
    callables: Any = torch.cuda.make_graphed_callables(graphed, (sample,))
    different = []
    for step in range(4):
        found = []
        for module, call in ((plain, plain), (graphed, callables)):
            x = torch.linspace(-1, 1, 4 * HIDDEN, device=rank.device).view(4, HIDDEN) + step
            x.requires_grad_()
            module.zero_grad()
            y = call(x)
            y.square().sum().backward()
            gradients = {name: p.grad for name, p in module.named_parameters()}
            found.append({"result": y, "input": x.grad, **gradients})
        for name, want in found[0].items():
            got = found[1][name]
            if want is None or got is None or not torch.equal(want, got):
                different.append(f"step {step}: {name}")
    finish(communicator)
    return different
