"""The operators as the compiler sees them: opcheck, compiled graphs, and what remains in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import collx

from .. import norms
from ..attempt import ones
from ..calls import Call, Fields, Tensors, as_tuple, make, strides_of
from ..check import differences
from ..collectives import OPS
from ..compiling import inductor, needs_compiler
from ..norms import SCALES, quantizes
from ..opcheck import OPCHECKS, PASSED, opcheck
from ..operators import NAMES, call_of, is_norm
from ..overloads import all_overloads, arguments_for
from ..pool import on_ranks, some_stand_for_all
from ..rank import Rank

GRADIENTS = ("allreduce", "reducescatter", "allgather", "alltoall", "alltoallv", "alltoallv_device")
LAYOUTS = ("contiguous", "transposed")

# Fields that differ between the calls of one overload.
VARIANTS: dict[str, list[Fields]] = {
    "reducescatter": [{}, {"reduce_op": "avg", "shape": (5, 3)}, {"axis": -1}],
    "allgather": [{}, {"axis": 1}, {"uneven": True, "shape": (5, 3)}],
    **{op: [{"root": root} for root in (0, -1)] for op in ("broadcast", "gather", "scatter")},
    "reduce": [{}, {"reduce_op": "max", "root": -1}],
    "alltoallv": [{"splits": "uneven"}],
    "alltoallv_device": [{"splits": "uneven", "spare": 2, "unused": 1}],
}
GROUPS: Fields = {"scale_mode": "group", "scale_layout": "column"}


def variants(op: str) -> list[Fields]:
    """Returns the fields of the checked calls of an operator."""
    if not is_norm(op):
        return [{"shape": (4, 3), "style": "random", **v} for v in VARIANTS.get(op, [{}])]
    modes = [{}, {"keep_norm": True}, GROUPS, {"keep_norm": True, **GROUPS}]
    rows: Fields = {"dtype": "float32", "rows": 5, "cols": 256, "keep_norm": False}
    return [{**rows, **mode} for mode in (modes if quantizes(op) else modes[:1])]


def forms(op: str) -> tuple[str, ...]:
    """Returns the forms that are overloads."""
    in_place = not is_norm(op) and "inplace" in OPS[op].forms
    return ("functional", "out", "inplace") if in_place else ("functional", "out")


def call_with(rank: Rank, call: Call, form: str, gradients: bool = False) -> tuple[Any, Fields]:
    """Returns the overload of a form and a rank's arguments."""
    tensors = call.tensors(rank)
    for name in {"input", "residual"} & set(tensors):
        dense, strides = tensors[name], strides_of(call.layout, tuple(tensors[name].shape))
        empty = torch.empty_strided(dense.shape, strides, dtype=dense.dtype, device=rank.device)
        tensors[name] = empty.copy_(dense).requires_grad_(gradients)
    given = call.arguments(rank.communicator(), tensors)
    if form == "out":
        outs = call.data(rank.size).expected[rank.rank]
        given |= {
            name: torch.empty_like(out, device=rank.device)
            for name, out in zip(call.outputs(), outs, strict=True)
        }
    return call.overload(form), given


def _kinds(op: str, form: str) -> list[Fields]:
    """Returns layouts and dtypes. Dtypes other than float32 matter for new results and in place,
    where the Meta kernel could be wrong."""
    dtypes: tuple[str, ...] = ("float32",)
    if not is_norm(op) and form == "functional":
        dtypes += ("bfloat16", "int8") if OPS[op].reduces else ("int16", "bool", "complex64")
    dtypes += ("uint8",) if form == "inplace" else ()
    return [{"dtype": dtype, "layout": layout} for dtype in dtypes for layout in LAYOUTS]


@pytest.mark.worlds(1, 2)
@pytest.mark.parametrize(("op", "form"), [(op, form) for op in NAMES for form in forms(op)])
@on_ranks
def test_opcheck_passes_in_lockstep(rank: Rank, op: str, form: str) -> list[str]:
    """Hazard 25: schema, autograd registration, exact Meta kernel, dynamic shapes, on all ranks."""
    some_stand_for_all(rank, rank.size == 2)
    wrong = []
    kinds = _kinds(op, form)
    for kind in kinds[:1] if rank.world.takes_turns else kinds:
        for fields in variants(op):
            call = call_of(op, world=rank.size, **{**fields, **kind})
            gradients = op in GRADIENTS and form == "functional"
            gradients &= call.dtype in ("float32", "complex64")
            overload, given = call_with(rank, call, form, gradients)
            checks: tuple[str, ...] = OPCHECKS
            if any("float8" in str(getattr(given.get(n), "dtype", "")) for n in call.outputs()):
                # test_schema cannot compare float8 arguments; the int8 variants stand in.
                checks = tuple(check for check in OPCHECKS if check != "test_schema")
            found = opcheck(rank, overload, (), given, checks)
            if found != dict.fromkeys(checks, "SUCCESS"):
                wrong.append(f"{call}: {found}")
    return wrong


def _others() -> list[str]:
    """Returns the overloads that no operator's calls reach: those with epilogues, and barrier."""
    reached = [
        call_of(op, **fields).overload(form)
        for op in NAMES
        for fields in variants(op)
        for form in forms(op)
    ]
    return [str(overload) for overload in all_overloads() if overload not in reached]


@pytest.mark.worlds(1, 2)
@pytest.mark.parametrize("name", _others())
@on_ranks
def test_opcheck_of_every_other_overload_passes_in_lockstep(rank: Rank, name: str) -> None:
    """A new overload is checked as soon as it is registered."""
    some_stand_for_all(rank, rank.size == 2)
    overload = next(overload for overload in all_overloads() if str(overload) == name)
    given = arguments_for(rank, rank.communicator().name, overload)
    assert opcheck(rank, overload, (), given) == PASSED


@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize(
    "backend", ["eager", "aot_eager", pytest.param("inductor", marks=needs_compiler)]
)
@on_ranks(deadline=400.0)
def test_functions_compile_into_one_graph(rank: Rank, backend: str) -> list[str]:
    """The Python functions, which look up the number of ranks, cause no graph break. Compiled with
    other operations, they return the bits of the reference."""
    some_stand_for_all(rank, rank.size == 2)
    communicator = rank.communicator()
    calls = [
        call_of(op, 512, rank.size, form="python", style="random", splits="uneven", spare=2)
        for op in NAMES
    ]
    calls += norms.calls_of(
        "allreduce_residual_rmsnorm_fp8",
        [{"rows": 4, "cols": 256, "form": "python", "scale": scale} for scale in SCALES[5:9]],
    )
    tensors = [call.tensors(rank) for call in calls]
    others = [
        {
            name: value
            for name, value in call.arguments(communicator, mine).items()
            if name not in mine
        }
        for call, mine in zip(calls, tensors, strict=True)
    ]

    def function(tensors: list[Fields]) -> list[Tensors]:
        results = []
        for call, mine, other in zip(calls, tensors, others, strict=True):
            results.append(make(communicator, call, {**other, **mine}, ()))
            collx.barrier(communicator)
        return results

    def layer(tensor: torch.Tensor) -> torch.Tensor:
        return collx.allreduce(tensor * 2, group=communicator) + 1

    x = tensors[0]["input"]
    with inductor():
        results = torch.compile(function, fullgraph=True, backend=backend)(tensors)
        compiled = torch.compile(layer, fullgraph=True, backend=backend)(x)
    wrong = [
        call.wrong_results(rank.size, rank.rank, as_tuple(result))
        for call, result in zip(calls, results, strict=True)
    ]
    return [w for w in [*wrong, differences(compiled.cpu(), layer(x).cpu())] if w]


@pytest.mark.worlds(2)
@on_ranks
def test_arguments_can_be_views_of_one_tensor(rank: Rank) -> None:
    """PyTorch loses the effect tokens of a graph that writes to one of them."""
    ops, name, size = torch.ops.collx, rank.communicator().name, rank.size

    def scatter(whole: torch.Tensor, own: torch.Tensor, _: torch.Tensor) -> None:
        ops.reducescatter.out(whole, "sum", size, name, out=own)

    def gather(whole: torch.Tensor, own: torch.Tensor, _: torch.Tensor) -> None:
        ops.allgather.out(own, size, name, out=whole)

    def replace(whole: torch.Tensor, own: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        ops.allreduce_(whole, "sum", name)
        return own + 1

    def train(whole: torch.Tensor, own: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        own.add_(1)
        reduced: torch.Tensor = ops.allreduce(whole * weight, "sum", name)
        return reduced

    def results(function: Callable[..., torch.Tensor | None], trains: bool) -> Tensors:
        start = 2 * rank.rank
        whole = torch.arange(6.0 * size, device=rank.device).view(-1, 3) + rank.rank
        weight = torch.ones(3, device=rank.device, requires_grad=trains)
        result = function(whole, whole[start : start + 2], weight)
        if result is None:
            return (whole,)
        if not trains:
            return whole, result
        result.sum().backward()
        assert weight.grad is not None
        return whole, result.detach(), weight.grad

    wrong = []
    for function in (scatter, gather, replace, train):
        trains = function is train
        wanted = results(function, trains)
        with inductor():
            compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
            found = results(compiled, trains)
        wrong += [differences(a.cpu(), b.cpu()) for a, b in zip(found, wanted, strict=True)]
    assert wrong == [""] * 7


@pytest.mark.worlds(1, 2)
@on_ranks
def test_barriers_stay_in_a_compiled_graph(rank: Rank) -> None:
    """Nothing uses a barrier's result, and two barriers are equal calls: both are kept."""
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
    codes = [graph.code for graph in recorded.fw_graphs]
    assert [code.count("collx.barrier") for code in codes] == [2]
