"""Matrix products that overlap with collectives: collx.nn.allgather_matmul and its counterpart.

Values are small integers with exact sums: a product's bits do not depend on its number of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.fx import Graph

import collx
from collx.nn import products

from ..attempt import assert_raised, attempt
from ..check import differences
from ..compiling import needs_compiler, operators_in, through_pass
from ..pool import on_ranks
from ..rank import Rank

SHAPES = ((3, 5, 2), (64, 48, 40), (1, 1, 1), (512, 256, 128))  # rows per rank, inner, cols
DTYPES = ("float32", "bfloat16", "float64")


def _integers(rank: Rank, *shape: int, own: bool = True, dtype: str = "float32") -> Tensor:
    numbers = torch.Generator().manual_seed(100 + rank.rank if own else 7)
    values = torch.randint(-3, 4, shape, generator=numbers)
    return values.to(rank.device, getattr(torch, dtype))


@contextmanager
def overlapping(overlaps: bool) -> Iterator[None]:
    """Makes all calls overlap, also small calls and calls on the CPU, or none."""
    usual = products._overlaps
    products._overlaps = lambda communicator, count: overlaps and count > 0
    try:
        yield
    finally:
        products._overlaps = usual


def _both(rank: Rank, communicator: Any, shape: tuple[int, int, int], dtype: str) -> list[str]:
    rows, inner, cols = shape
    x = _integers(rank, rows, inner, dtype=dtype)
    h = _integers(rank, rows * rank.size, inner, dtype=dtype)
    w = _integers(rank, cols, inner, own=False, dtype=dtype)
    found = []
    for _ in range(3):  # the memory for gathered rows is reused
        pairs = {
            "gathered": (
                collx.nn.allgather_matmul(x, w.t(), communicator),
                collx.allgather(x, communicator) @ w.t(),
            ),
            "scattered": (
                collx.nn.matmul_reducescatter(h, w.t(), communicator),
                collx.reducescatter(h @ w.t(), "sum", communicator),
            ),
        }
        for what, (a, b) in pairs.items():
            found += [f"{what} {shape} {dtype}: {d}" for d in [differences(a, b)] if d]
        x += 1
        h -= 1
    return found


@pytest.mark.worlds(1, 2, 3, 4)
@pytest.mark.parametrize("overlaps", [True, False])
@on_ranks
def test_results_are_those_of_the_two_steps(rank: Rank, overlaps: bool) -> list[str]:
    communicator = rank.communicator("products")
    with overlapping(overlaps):
        return [d for s in SHAPES for t in DTYPES for d in _both(rank, communicator, s, t)]


@pytest.mark.worlds(2)
@on_ranks
def test_results_of_large_products(rank: Rank) -> list[str]:
    communicator = rank.communicator("products")
    return _both(rank, communicator, (1024, 512, 256), "bfloat16")


@pytest.mark.worlds(2, 3)
@on_ranks
def test_late_ranks(rank: Rank) -> list[str]:
    """Ranks are late in turn, and overwrite their inputs right after the calls."""
    import time

    communicator = rank.communicator("products")
    w = _integers(rank, 8, 16, own=False)
    found: list[str] = []
    with overlapping(True):
        for i in range(1, 31):
            if i % rank.size == rank.rank:
                time.sleep(0.005)
            x = torch.full((4, 16), float(i + rank.rank), device=rank.device)
            y = collx.nn.allgather_matmul(x, w.t(), communicator)
            z = collx.nn.matmul_reducescatter(x.repeat(rank.size, 1), w.t(), communicator)
            x.fill_(-1)
            one = w.sum(1)
            total = sum(i + r for r in range(rank.size))
            for r in range(rank.size):
                found.append(differences(y[4 * r : 4 * r + 4], (one * (i + r)).expand(4, 8)))
            found.append(differences(z, (one * total).expand(4, 8)))
    return [difference for difference in found if difference]


@pytest.mark.worlds(1, 2, 3)
@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 6), (2, 1, 2, 6)])
@pytest.mark.parametrize("overlaps", [True, False])
@on_ranks
def test_gradients_and_shapes(rank: Rank, shape: tuple[int, ...], overlaps: bool) -> list[str]:
    communicator = rank.communicator("products")
    x = _integers(rank, *shape, dtype="float64").requires_grad_()
    w = _integers(rank, 5, shape[-1], own=False, dtype="float64").requires_grad_()
    v = _integers(rank, 7, 5, own=False, dtype="float64").requires_grad_()

    def run(gather: Callable[..., Tensor], scatter: Callable[..., Tensor]) -> list[Tensor]:
        y = gather(x, w)
        z = scatter(y.relu(), v)
        z.square().sum().backward()
        made = [y.detach(), z.detach()]
        for leaf in (x, w, v):
            assert leaf.grad is not None
            made.append(leaf.grad)
            leaf.grad = None
        return made

    with overlapping(overlaps):
        fused = run(
            lambda x, w: collx.nn.allgather_matmul(x, w.t(), communicator),
            lambda y, v: collx.nn.matmul_reducescatter(y, v.t(), communicator),
        )
    steps = run(
        lambda x, w: collx.allgather(x, communicator) @ w.t(),
        lambda y, v: collx.reducescatter(y @ v.t(), "sum", communicator),
    )
    found = [differences(a, b) for a, b in zip(fused, steps, strict=True)]
    return [difference for difference in found if difference]


@pytest.mark.worlds(2)
@pytest.mark.parametrize("dims", [2, 3])
@needs_compiler
@on_ranks
def test_models_of_pytorch_are_rewritten(rank: Rank, dims: int) -> None:
    group = rank.fresh_group()
    rank.new_communicator(f"products-compiled-{dims}", group)
    x = _integers(rank, 2, 3, 8) if dims == 3 else _integers(rank, 6, 8)
    w, v = _integers(rank, 5, 8, own=False), _integers(rank, 8, 5, own=False)

    def model(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        y = functional.all_gather_tensor(x, 0, group)
        z = nn.functional.linear(torch.relu(nn.functional.linear(y, w)), v)
        return functional.reduce_scatter_tensor(z, "sum", 0, group)

    graphs: list[Graph] = []
    torch._dynamo.reset()
    compiled = torch.compile(
        model, fullgraph=True, dynamic=False, backend=through_pass(graphs, overlap=True)
    )
    before = dict(collx.compile.report().products)
    found = differences(compiled(x, w, v), model(x, w, v))
    counts = collx.compile.report().products
    assert {name: n - before.get(name, 0) for name, n in counts.items()} == {
        "allgather_matmul": 1,
        "matmul_reducescatter": 1,
    }
    operators = operators_in(graphs)
    assert found == ""
    assert sorted(operators) == ["allgather_matmul", "matmul_reducescatter"]


@pytest.mark.worlds(2)
@on_ranks
def test_products_that_cannot_be_fused_stay(rank: Rank) -> list[str]:
    """Compiles products that cannot be fused with the collective."""
    group = rank.fresh_group()
    communicator = rank.new_communicator("products-kept", group)
    size = rank.size

    def gathered(x: Tensor) -> Tensor:
        return functional.all_gather_tensor(x, 0, group)

    def scattered(y: Tensor) -> Tensor:
        return functional.reduce_scatter_tensor(y, "sum", 0, group)

    v, w = _integers(rank, 4), _integers(rank, 4 * size, 2 * size)
    square, cube = _integers(rank, 2, 2 * size), _integers(rank, 1, 2, 2 * size)
    cases: list[tuple[str, Callable[[Tensor], Tensor], Tensor]] = [
        ("a gathered vector", lambda x: gathered(x).view(1, -1) @ w, v),
        ("a scattered vector", lambda x: scattered((x @ w).view(-1)), _integers(rank, 1, 4 * size)),
        ("both operands", lambda x: torch.mm(g := gathered(x), g), square),
        (
            "a call of collx between",
            lambda x: gathered(x) @ collx.broadcast(x, 0, communicator).t(),
            square,
        ),
        ("both operands, reshaped", lambda x: torch.mm(g := gathered(x).view(4, 4), g), cube),
    ]
    wrong = []
    for what, model, given in cases:
        graphs: list[Graph] = []
        torch._dynamo.reset()
        backend = through_pass(graphs, overlap=True)
        found = torch.compile(model, fullgraph=True, dynamic=False, backend=backend)(given)
        operators = operators_in(graphs)
        kept = (["allgather"], ["reducescatter"], ["allgather", "broadcast"])
        if operators not in kept or differences(found, model(given)):
            wrong.append(f"{what}: {operators}")
    return wrong


@on_ranks
def test_bad_input_is_refused_by_name(rank: Rank) -> None:
    communicator = rank.communicator("products")
    nn_ = collx.nn

    def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=rank.device)

    def refused(
        function: Any, x: Tensor, w: Tensor, *words: str, group: Any = communicator
    ) -> None:
        assert_raised(attempt(lambda: function(x, w, group)), "ValueError", *words)

    gather, scatter = nn_.allgather_matmul, nn_.matmul_reducescatter
    x, w = make(4 * rank.size, 3), make(3, 2)
    refused(gather, make(3), w, "allgather_matmul", "(3,)", "[rows, ..., inner]")
    refused(scatter, make(), w, "matmul_reducescatter", "()")
    refused(gather, make(4, 2), w, "(4, 2)", "(3, 2)")
    refused(scatter, x.double(), w, "torch.float64", "torch.float32")
    refused(gather, x.int(), w.int(), "torch.int32", "floating-point")
    if rank.size > 1:
        refused(scatter, make(4 * rank.size + 1, 3), w, "rows", "multiple", "world size")
    refused(gather, x, w, "nobody", group="nobody")
    layer = partial(nn_.RowParallelLinear, 4, 4, group=communicator, reduce=abs, overlap=True)
    assert_raised(attempt(layer), "ValueError", "reduce", "overlap")
