"""The operators as PyTorch sees them: forms, layouts, aliases, and results of Meta kernels."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any
from unittest import mock
from zlib import crc32

import pytest
import torch

from collx import reference

from .. import collectives, norms
from ..attempt import assert_raised, attempt, works
from ..calls import Call, Fields, as_tuple, run_calls, strides_of
from ..check import assert_none
from ..collectives import OPS, SYMMETRIC, WITH_AXIS
from ..norms import SCALES, quantizes
from ..operators import NAMES, call_of, is_norm, name_in_errors
from ..pool import Pool, on_ranks
from ..rank import Rank
from ..sampling import each, spread

LAYOUTS = ("contiguous", "transposed", "sliced", "spread")
SHAPES: tuple[tuple[int, ...], ...] = ((1,), (0,), (0, 3), (24,), (6, 8), (2, 3, 4), (7, 0), (5, 1))


def _shapes(op: str) -> tuple[tuple[int, ...], ...]:
    return (*SHAPES, ()) if OPS[op].least_dims == 0 else SHAPES


@pytest.mark.parametrize("op", collectives.NAMES)
def test_every_form_and_layout_gives_what_the_reference_gives(pool: Pool, op: str) -> None:
    """Functional, out=, in place, out= that is the input or contains it as its part, and the
    Python functions; strides of all kinds on both sides, also of splits and of tensors with one
    element; tensors without elements and 0-dimensional ones; rows beyond those received.
    norm_numerics.py tests the forms of the fused normalizations."""
    combinations = spread(
        (12 if pool.takes_turns else 160) // pool.size,
        crc32(f"{pool.world} {op}".encode()),
        each("form", OPS[op].forms),
        each("algorithm", ("auto", *OPS[op].algorithms)),
        each("layout", LAYOUTS),
        each("output_layout", LAYOUTS),
        each("shape", _shapes(op)),
        each("dtype", ("float32", "int8", "int64")),
        each("symmetric", ("none", "none", "both")),
        each("uneven", (False, True)),
        each("splits", ("uneven", "even")),
        each("root", range(pool.size)),
        each("spare", (0, 50)),
    )
    calls = [
        collectives.Call(op, seed=number, **fields).legal()
        for number, fields in enumerate(combinations)
    ]
    assert_none(pool.run(run_calls, calls))


@pytest.mark.worlds(1, 2)
@pytest.mark.parametrize("op", NAMES)
def test_functional_results_never_alias_what_is_given(pool: Pool, op: str) -> None:
    """Hazard 25: also with one rank, where a reduction is the identity; for views, tensors without
    elements, and symmetric tensors."""
    calls = [
        call_of(op, numel, pool.size, form=form, symmetric=symmetric, input_offset=offset)
        for form in ("functional", "python")
        for numel in (0, 10)
        for symmetric in SYMMETRIC[:2]
        for offset in (0, 2)
    ]
    assert {call.form for call in calls} == {"functional", "python"}
    assert_none(pool.run(run_calls, calls))


@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize("op", WITH_AXIS)
@on_ranks
def test_a_part_with_holes_is_refused_or_right(rank: Rank, op: str) -> None:
    """Columns of a tensor lie between those of other ranks: a result is never partly right. `input`
    is this rank's columns of `out`, or the other way round."""
    call = collectives.Call(op, "float32", (4, 5), axis=1, style="random")
    tensors = call.tensors(rank)
    (want,) = call.data(rank.size).expected[rank.rank]
    sizes = [5] * rank.size if op == "allgather" else reference.parts(5, rank.size)
    mine = 1, sum(sizes[: rank.rank]), sizes[rank.rank]
    if op == "allgather":
        out = torch.empty_like(want, device=rank.device)
        tensors["input"] = out.narrow(*mine).copy_(tensors["input"])
    else:
        out = tensors["input"].narrow(*mine)
    given = call.arguments(rank.communicator(), tensors)
    found = attempt(lambda: call.overload("out")(**given, out=out))
    rank.synchronize()
    wrong = call.wrong_results(rank.size, rank.rank, (out,))
    if found.error:
        assert_raised(found, "ValueError", "overlap")
    else:
        assert wrong == ""


WITH_SEVERAL_OUTPUTS = tuple(op for op in NAMES if len(call_of(op).outputs()) > 1)


@pytest.mark.worlds(2)
@pytest.mark.parametrize("op", WITH_SEVERAL_OUTPUTS)
@on_ranks
def test_outputs_are_all_given_or_none(rank: Rank, op: str) -> None:
    """Calls the Python function with one output less than the operator has. The errors name the
    outputs."""
    communicator = rank.communicator()
    call = call_of(op, 512, rank.size, form="python_out")
    tensors = call.tensors(rank)
    outs = tuple(torch.empty_like(want) for want in call.data(rank.size).expected[rank.rank])
    function, given = call.function_call(
        communicator,
        call.arguments(communicator, tensors),
        tuple(out.to(rank.device) for out in outs),
    )
    found = []
    if is_norm(op):
        outs = given.pop("out")
        found = [attempt(lambda: function(**given, out=outs[:-1]))]
    else:
        for name in call.outputs():
            others = {key: value for key, value in given.items() if key != name}
            found.append(attempt(lambda: function(**others)))  # noqa: B023
    assert works(rank, communicator)
    name = name_in_errors(op)
    for result in found:
        assert_raised(result, "ValueError", *call.outputs())
        assert result.message.startswith((f"collx.{name}: out: ", f"collx.{name}: output_splits: "))


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def _calls_for_meta(op: str) -> list[Call]:
    if is_norm(op):
        return _norms_for_meta(op)
    row = OPS[op]
    dtypes: tuple[str, ...] = ("float32", "int64", "bfloat16")
    dtypes += () if row.reduces else ("bool", "complex64", "float8_e4m3fn")
    return [
        collectives.Call(
            op,
            dtypes[(number + axis + other) % len(dtypes)],
            shape,
            axis=axis,
            layout=layout,
            uneven=uneven,
            reduce_op=("sum", "max")[other % 2],
            splits="uneven",
            spare=2,
        )
        for number, shape in enumerate(_shapes(op))
        for other, layout in enumerate((*LAYOUTS, "permuted"))
        for axis in (range(len(shape)) if op in WITH_AXIS else (0,))
        for uneven in ((False, True) if op == "allgather" else (False,))
    ]


def _norms_for_meta(op: str) -> list[Call]:
    shapes: list[Fields] = [
        {"rows": rows, "cols": cols, "folded": folded}
        for rows, cols in ((0, 128), (1, 4096), (6, 384), (7, 1))
        for folded in (False, True)
    ]
    combinations = [
        {
            **shape,
            "dtype": norms.DTYPES[(number + other) % 3],
            "scale": scale,
            "keep_norm": bool(number % 2),
            "fp8_dtype": ("e5m2", "e4m3fn")[other % 2],
            "layout": LAYOUTS[(number + other) % 2],
            "weights": ("same", "float32")[other % 2],
        }
        for number, shape in enumerate(shapes)
        for other, scale in enumerate(SCALES if quantizes(op) else SCALES[:1])
    ]
    return list(norms.calls_of(op, combinations))


def _strided(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "permuted":
        return tensor.movedim(0, -1).contiguous().movedim(-1, 0) if tensor.dim() else tensor
    strides = strides_of(layout, tuple(tensor.shape))
    empty = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return empty.copy_(tensor)


def _exact(rank: Rank, calls: Iterable[Call]) -> list[str]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    # It formats the stack of each refusal, which takes longer than the calls.
    silent = mock.patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)
    found = []
    for call in calls:
        tensors = call.tensors(rank)
        for name in {"input", "residual", "input_splits"} & set(tensors):
            tensors[name] = _strided(tensors[name], call.layout)
        given = call.arguments(rank.communicator(), tensors)
        reals = as_tuple(call.overload("functional")(**given))
        with silent, FakeTensorMode() as mode:
            fakes = {
                name: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
                for name, value in given.items()
            }
            outs = as_tuple(call.overload("functional")(**fakes))
            by_name = dict(zip(call.outputs(), outs, strict=True))
            write = call.overload("out")
            assert write(**fakes, **by_name) is None
            refused = {}
            for name, out in by_name.items():
                other = torch.empty((97, 3, 5), dtype=out.dtype, device=rank.device)
                refused[name] = attempt(lambda: write(**fakes, **{**by_name, name: other}))  # noqa: B023
        if [_kind(t) for t in reals] != [_kind(t) for t in outs]:
            found.append(f"{call}: {[_kind(t) for t in reals]} is not {[_kind(t) for t in outs]}")
        for name, result in refused.items():
            if result.error != "ValueError" or name not in result.message:
                found.append(f"{call}: {name} of another shape: {result}")
    return found[:5]


@pytest.mark.worlds(1, 2, 3)
@pytest.mark.parametrize("op", NAMES)
def test_meta_kernels_are_exact(pool: Pool, op: str) -> None:
    """Hazard 25: shapes, strides (also of scales in column layout), dtypes and devices are known
    without running, also for uneven parts. Meta kernels refuse an output of another shape, too."""
    calls = _calls_for_meta(op)
    if is_norm(op):  # no step divides the number of scales, so all scales occur
        calls = calls[pool.size % 2 :: 20 if pool.world.shared else 4]
    elif pool.world.shared:
        calls = calls[::6]
    assert_none(pool.run(_exact, calls))


@pytest.mark.parametrize("op", NAMES)
def test_meta_needs_no_group(op: str) -> None:
    """Only an uneven reducescatter needs the caller's rank: arguments give the number of ranks, and
    the rows that a rank owns are those of its residual."""
    world = 5
    for rank in range(world):
        nowhere = SimpleNamespace(world_size=world, rank=rank, name="nowhere")
        for uneven in (False, True):
            call = call_of(op, 60, world, uneven=uneven, splits="uneven", spare=2)
            data = call.data(world)
            given = {name: tensor.to("meta") for name, tensor in data.given[rank].items()}
            results = as_tuple(call.overload("functional")(**call.arguments(nowhere, given)))
            wanted = [tensor.to("meta") for tensor in data.expected[rank]]
            assert [_kind(got) for got in results] == [_kind(want) for want in wanted]


def test_meta_of_an_uneven_part_names_the_group_that_is_not_there() -> None:
    source = torch.empty((11, 3), device="meta")
    with pytest.raises(ValueError, match="nowhere"):
        torch.ops.collx.reducescatter(source, "sum", 5, "nowhere")
