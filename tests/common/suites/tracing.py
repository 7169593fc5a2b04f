"""The family of operators as the compiler sees it: opcheck, compiled graphs, what stays in them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from ..attempt import ones
from ..check import differences
from ..opcheck import PASSED, opcheck
from ..pool import Pool, some_stand_for_all
from ..rank import Rank
from ..shares import CAPACITY, UNSENT, integers, parts, received, splits
from ..values import dtype_of, make_values


class Given(NamedTuple):
    """What the arguments of a checked call are made of."""

    rank: Rank
    name: str
    dtype: str
    layout: str

    @property
    def world(self) -> int:
        return self.rank.size

    def tensor(self, rows: int, gradients: bool = False, seed: int = 1) -> torch.Tensor:
        """[rows, 3] in the dtype and layout."""
        if self.dtype == "bool":
            values = make_values("random", "uint8", rows * 3, seed, self.rank.rank) > 127
        elif "complex" in self.dtype:
            real = make_values("random", "float32", rows * 3, seed, self.rank.rank)
            values = torch.complex(real, -2 * real).to(dtype_of(self.dtype))
        else:
            values = make_values("random", self.dtype, rows * 3, seed, self.rank.rank)
        tensor = values.view(rows, 3).to(self.rank.device)
        if self.layout == "transposed":
            tensor = tensor.t().contiguous().t()
        return tensor.requires_grad_(gradients and self.dtype in ("float32", "complex64"))

    def even(self, gradients: bool = False) -> torch.Tensor:
        return self.tensor(2 * self.world, gradients)

    def uneven(self, gradients: bool = False) -> torch.Tensor:
        return self.tensor(2 * self.world + 1, gradients)

    def own(self, gradients: bool = False) -> torch.Tensor:
        """This rank's part of 2 * world + 1 rows."""
        return self.tensor(parts(2 * self.world + 1, self.world)[self.rank.rank], gradients)

    def out(self, rows: int) -> dict[str, torch.Tensor]:
        return {"out": torch.empty(rows, 3, dtype=dtype_of(self.dtype), device=self.rank.device)}

    def sent(self) -> list[int]:
        return splits(self.world, self.rank.rank)

    def got(self) -> list[int]:
        return received(self.world, self.rank.rank)

    def counts(self) -> torch.Tensor:
        return torch.tensor(self.sent(), device=self.rank.device)


Arguments = tuple[tuple[Any, ...], dict[str, Any]]

# An overload (and a word that tells two calls of it apart), and its arguments.
CHECKED: dict[str, Callable[[Given], Arguments]] = {
    "reducescatter.default": lambda g: ((g.even(True), "sum", g.world, g.name), {}),
    "reducescatter.default avg uneven": lambda g: ((g.uneven(True), "avg", g.world, g.name), {}),
    "reducescatter.default columns": lambda g: ((g.even(True), "sum", g.world, g.name, -1), {}),
    "reducescatter.out": lambda g: ((g.even(), "max", g.world, g.name), g.out(2)),
    "allgather.default": lambda g: ((g.even(True), g.world, g.name), {}),
    "allgather.default columns": lambda g: ((g.even(True), g.world, g.name, 1), {}),
    "allgather.default uneven": lambda g: (
        (g.own(True), g.world, g.name, 0, 2 * g.world + 1),
        {},
    ),
    "allgather.out": lambda g: ((g.tensor(2), g.world, g.name), g.out(2 * g.world)),
    "broadcast.default": lambda g: ((g.even(), 0, g.name), {}),
    "broadcast.out": lambda g: ((g.even(), g.world - 1, g.name), g.out(2 * g.world)),
    "broadcast_.default": lambda g: ((g.even(), 0, g.name), {}),
    "reduce.default": lambda g: ((g.even(), "sum", 0, g.name), {}),
    "reduce.out": lambda g: ((g.even(), "max", g.world - 1, g.name), g.out(2 * g.world)),
    "reduce_.default": lambda g: ((g.even(), "sum", 0, g.name), {}),
    "gather.default": lambda g: ((g.tensor(2), 0, g.world, g.name), {}),
    "gather.out": lambda g: ((g.tensor(2), g.world - 1, g.world, g.name), g.out(2 * g.world)),
    "scatter.default": lambda g: ((g.even(), 0, g.world, g.name), {}),
    "scatter.out": lambda g: ((g.even(), g.world - 1, g.world, g.name), g.out(2)),
    "alltoall.default": lambda g: ((g.even(True), g.world, g.name), {}),
    "alltoall.out": lambda g: ((g.even(), g.world, g.name), g.out(2 * g.world)),
    "alltoall_.default": lambda g: ((g.even(), g.world, g.name), {}),
    "alltoallv.default": lambda g: (
        (g.tensor(sum(g.sent()), True), g.got(), g.sent(), g.name),
        {},
    ),
    "alltoallv.out": lambda g: (
        (g.tensor(sum(g.sent())), g.got(), g.sent(), g.name),
        g.out(sum(g.got())),
    ),
    "alltoallv.device_splits": lambda g: (
        (g.tensor(sum(g.sent()) + UNSENT, True), g.counts(), CAPACITY * g.world, g.name),
        {},
    ),
    "alltoallv.device_splits_out": lambda g: (
        (g.tensor(sum(g.sent()) + UNSENT), g.counts(), CAPACITY * g.world, g.name),
        g.out(CAPACITY * g.world) | {"output_splits": g.counts()},
    ),
}

REDUCING = tuple(what for what in CHECKED if what.startswith("reduce"))
# Other dtypes than float32, in the forms that make their result: it is Meta that could be wrong.
OTHER_DTYPES = [
    (what, dtype)
    for what in CHECKED
    if what.endswith((".default", ".device_splits")) and "_." not in what
    for dtype in (("bfloat16", "int8") if what in REDUCING else ("int16", "bool", "complex64"))
]


def _checked(rank: Rank, what: str, dtype: str, layout: str) -> dict[str, str]:
    given = Given(rank, rank.communicator().name, dtype, layout)
    op, overload = what.split()[0].split(".")
    arguments, options = CHECKED[what](given)
    return opcheck(rank, getattr(getattr(torch.ops.collx, op), overload), arguments, options)


@pytest.mark.worlds(1, 2)
@pytest.mark.parametrize(
    ("what", "dtype", "layout"),
    [
        *itertools.product(CHECKED, ("float32",), ("contiguous", "transposed")),
        *((what, dtype, "contiguous") for what, dtype in OTHER_DTYPES),
    ],
)
def test_opcheck_of_the_family_passes_in_lockstep(
    pool: Pool, what: str, dtype: str, layout: str
) -> None:
    """Hazard 25: schema, autograd registration, exact Meta kernel, dynamic shapes, for each."""
    some_stand_for_all(pool, dtype == "float32" and layout == "contiguous" and pool.size == 2)
    for found in pool.run(_checked, what, dtype, layout):
        assert found == PASSED


def _checked_barrier(rank: Rank) -> dict[str, str]:
    return opcheck(rank, torch.ops.collx.barrier.default, (rank.communicator().name,))


@pytest.mark.worlds(1, 2)
def test_opcheck_of_barrier_passes_in_lockstep(pool: Pool) -> None:
    """It has no tensors, so there is nothing for autograd to miss."""
    for found in pool.run(_checked_barrier):
        assert found == PASSED


def _compiled_functions(rank: Rank) -> list[str]:
    import collx

    communicator = rank.communicator()
    sent, got = splits(rank.size, rank.rank), received(rank.size, rank.rank)

    def function(x: torch.Tensor, rows: torch.Tensor, sizes: torch.Tensor) -> list[torch.Tensor]:
        group = communicator.name
        ordered = collx.broadcast(x, 0, group)
        collx.barrier(group)
        exchanged, counts = collx.alltoallv(
            rows, group=group, device_splits=sizes, capacity=CAPACITY * rank.size
        )
        return [
            collx.allreduce(ordered, "max", group),
            collx.reducescatter(x, "sum", group, axis=1),
            collx.allgather(x, group, axis=-1),
            collx.reduce(x, "sum", rank.size - 1, group),
            collx.gather(x, 0, group),
            collx.scatter(x, 0, group),
            collx.alltoall(x, group),
            collx.alltoallv(rows, got, sent, group),
            exchanged,
            counts,
        ]

    x = integers((2 * rank.size, 2 * rank.size + 1), rank.rank).to(rank.device)
    rows = integers((sum(sent), 3), rank.rank).to(rank.device)
    sizes = torch.tensor(sent, device=rank.device)
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    return [
        differences(a.cpu(), b.cpu())
        for a, b in zip(compiled(x, rows, sizes), function(x, rows, sizes), strict=True)
    ]


@pytest.mark.worlds(2, 3)
def test_functions_compile_into_one_graph(pool: Pool) -> None:
    """The thin functions, which look up the number of ranks, break no graph."""
    some_stand_for_all(pool, pool.size == 2)
    assert pool.run(_compiled_functions) == [[""] * 10] * pool.size


def _barriers_kept(rank: Rank) -> list[str]:
    from torch._dynamo.testing import AotEagerAndRecordGraphs

    name = rank.communicator().name

    def function(x: torch.Tensor) -> torch.Tensor:
        first: torch.Tensor = x + 1
        torch.ops.collx.barrier(name)
        second = first * 2
        torch.ops.collx.barrier(name)
        return second

    torch._dynamo.reset()
    recorded = AotEagerAndRecordGraphs()
    result = torch.compile(function, fullgraph=True, backend=recorded)(ones(rank))
    assert bool((result == 4).all())
    return [graph.code for graph in recorded.fw_graphs]


@pytest.mark.worlds(1, 2)
def test_barriers_stay_in_a_compiled_graph(pool: Pool) -> None:
    """Nothing uses what a barrier returns, and two of them are equal calls: both are kept."""
    for codes in pool.run(_barriers_kept):
        assert [code.count("collx.barrier") for code in codes] == [2]
