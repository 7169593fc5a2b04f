"""The ops of the family as PyTorch sees them: schemas, forms, aliases, results that are known
without running."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ..attempt import Attempt, attempt
from ..family_cases import (
    NEW,
    OPS,
    WITH_AXIS,
    Call,
    data_of,
    each,
    legal,
    parts,
    splits_of,
    strides_of,
)
from ..family_check import (
    OUTS,
    Tensors,
    all_differences,
    arguments_of,
    byte_differences,
    overload,
)
from ..pool import Pool
from ..rank import Rank
from .family_numerics import check, forms

LAYOUTS = ("contiguous", "transposed", "sliced", "spread")
SHAPES: tuple[tuple[int, ...], ...] = ((1,), (0,), (0, 3), (24,), (6, 8), (2, 3, 4), (7, 0), (5, 1))


@pytest.mark.parametrize("op", NEW)
def test_every_form_and_layout_gives_what_the_reference_gives(pool: Pool, op: str) -> None:
    """Functional, out=, in place, out= that is the input or has it as its part, and the thin
    functions; strides of all kinds on both sides, also of tensors of one element; no element, and
    0-dimensional tensors."""
    shapes = (*SHAPES, ()) if OPS[op].least_dims == 0 else SHAPES
    dimensions = (
        each("algorithm", ("auto", *OPS[op].algorithms)),
        forms(op),
        each("layout", LAYOUTS),
        each("output_layout", LAYOUTS),
        each("shape", shapes),
        each("dtype", ("float32", "int8", "int64")),
        each("symmetric", ("none", "none", "both")),
        each("uneven", (False, True)),
        each("splits", ("uneven", "even")),
        each("root", range(pool.size)),
    )
    check(pool, op, "auto", *dimensions, count=(12 if pool.takes_turns else 160) // pool.size)


def _plain(rank: Rank, call: Call) -> tuple[dict[str, Any], Tensors]:
    """Arguments of a call with ordinary tensors, and its right results."""
    communicator = rank.communicator()
    inputs, results = data_of(call, rank.size)
    source = inputs[rank.rank].to(rank.device)
    strides = strides_of(call.layout, tuple(source.shape))
    strided = torch.empty_strided(source.shape, strides, dtype=source.dtype, device=rank.device)
    strided.copy_(source)
    return arguments_of(communicator, call, strided), results[rank.rank]


def _lazy(rank: Rank, op: str) -> list[str]:
    found = []
    for dtype in ("complex64", "float32"):
        if dtype not in OPS[op].dtypes:
            continue
        call = legal(Call(op, dtype, (6, 5), form="functional", style="random"))
        given, expected = _plain(rank, call)
        values = given["input"]
        if dtype == "complex64":
            given["input"] = values.conj().resolve_conj().conj()
            assert given["input"].is_conj()
        else:
            given["input"] = torch.complex(values, -values).conj().imag
            assert given["input"].is_neg()
        result = overload(op, "functional")(**given)
        results = result if isinstance(result, tuple) else (result,)
        found.append(all_differences(call, rank.size, rank.rank, results, expected))
    return found


@pytest.mark.worlds(1, 2, 3)
@pytest.mark.parametrize("op", NEW)
def test_lazy_conjugates_and_negatives_travel_as_their_values(pool: Pool, op: str) -> None:
    """What PyTorch has only marked as conjugate or negative is no longer so at the receiver."""
    for found in pool.run(_lazy, op):
        assert not any(found), found


def _strided_splits(rank: Rank) -> str:
    call = Call("alltoallv_device", "int16", (7, 3), splits="uneven", spare=2, form="functional")
    given, expected = _plain(rank, call)
    given["input_splits"] = given["input_splits"].repeat_interleave(2)[::2]
    assert rank.size == 1 or not given["input_splits"].is_contiguous()
    results = overload(call.op, "functional")(**given)
    return all_differences(call, rank.size, rank.rank, results, expected)


@pytest.mark.worlds(1, 2, 3)
def test_device_splits_may_have_any_strides(pool: Pool) -> None:
    assert pool.run(_strided_splits) == [""] * pool.size


def _in_holes(rank: Rank, op: str) -> tuple[Attempt, str]:
    """`input` has this rank's columns of `out`, or the other way round."""
    call = legal(Call(op, "float32", (4, 5), axis=1, form="out", style="random"))
    given, expected = _plain(rank, call)
    sizes = parts(5, rank.size) if op == "reducescatter" else [5] * rank.size
    start = sum(sizes[: rank.rank])
    if op == "allgather":
        out = torch.empty_like(expected[0], device=rank.device)
        mine = out.narrow(1, start, sizes[rank.rank])
        mine.copy_(given["input"])
        given["input"] = mine
    else:
        out = given["input"].narrow(1, start, sizes[rank.rank])
    found = attempt(lambda: overload(op, "out")(**given, out=out))
    rank.synchronize()
    return found, all_differences(call, rank.size, rank.rank, (out,), expected)


@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize("op", WITH_AXIS)
def test_a_part_with_holes_is_refused_or_right(pool: Pool, op: str) -> None:
    """Columns of a tensor lie between those of other ranks: never a result that is half right."""
    for found, wrong in pool.run(_in_holes, op):
        if found.error:
            assert found.error == "ValueError", found
            assert "overlap" in found.message
        else:
            assert wrong == ""


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def _calls_for_meta(op: str) -> list[Call]:
    dtypes: tuple[str, ...] = ("float32", "int64", "bfloat16")
    dtypes += () if OPS[op].reduces else ("bool", "complex64", "float8_e4m3fn")
    shapes = (*SHAPES, ()) if OPS[op].least_dims == 0 else SHAPES
    calls = []
    for number, shape in enumerate(shapes):
        for layout in LAYOUTS[: max(1, len(shape))]:
            for axis in range(len(shape)) if op in WITH_AXIS else (0,):
                dtype = dtypes[(number + axis) % len(dtypes)]
                call = Call(op, dtype, shape, axis=axis, layout=layout, splits="uneven", spare=2)
                calls += [call] + [Call(**{**vars(call), "uneven": True})] * (op == "allgather")
    return calls


def _exact(rank: Rank, op: str) -> list[str]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    calls = _calls_for_meta(op)
    found = []
    for call in calls[:: 6 if rank.world.shared else 1]:
        given, _ = _plain(rank, call)
        real = overload(op, "functional")(**given)
        with FakeTensorMode() as mode:
            fakes = {
                name: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
                for name, value in given.items()
            }
            fake = overload(op, "functional")(**fakes)
            outs = fake if isinstance(fake, tuple) else (fake,)
            by_name = dict(zip(OUTS, outs, strict=False))
            assert overload(op, "out")(**fakes, **by_name) is None
            by_name["out"] = torch.empty((97, 3), dtype=outs[0].dtype, device=rank.device)
            refused = attempt(lambda: overload(op, "out")(**fakes, **by_name))  # noqa: B023
        reals = real if isinstance(real, tuple) else (real,)
        if [_kind(t) for t in reals] != [_kind(t) for t in outs]:
            found.append(f"{call}: {[_kind(t) for t in reals]} is not {[_kind(t) for t in outs]}")
        if refused.error != "ValueError" or "out" not in refused.message:
            found.append(f"{call}: out of another shape: {refused}")
    return found[:5]


@pytest.mark.worlds(1, 2, 3)
@pytest.mark.parametrize("op", NEW)
def test_meta_kernels_of_the_family_are_exact(pool: Pool, op: str) -> None:
    """Hazard 25: shape, strides, dtype and device are known without running, also of an uneven
    part; an out= of another shape is refused there, too."""
    for found in pool.run(_exact, op):
        assert not found, found


_NOWHERE = 5  # ranks of a group that does not exist

# Shapes of inputs and results in a group of five.
ON_META: dict[str, tuple[tuple[int, ...], dict[str, Any], tuple[int, ...]]] = {
    "reducescatter": ((10, 3), {"reduce_op": "sum", "axis": 0}, (2, 3)),
    "allgather": ((2, 3), {"axis": -1}, (2, 15)),
    "broadcast": ((2, 3), {"root": 1}, (2, 3)),
    "reduce": ((2, 3), {"reduce_op": "max", "root": 1}, (2, 3)),
    "gather": ((2, 3), {"root": 0}, (10, 3)),
    "scatter": ((10, 3), {"root": 0}, (2, 3)),
    "alltoall": ((10, 3), {}, (10, 3)),
    "alltoallv": (
        (7, 3),
        {"output_splits": [1, 2, 0, 0, 1], "input_splits": [7, 0, 0, 0, 0]},
        (4, 3),
    ),
    "alltoallv_device": ((7, 3), {"capacity": 9}, (9, 3)),
}


@pytest.mark.parametrize("op", NEW)
def test_meta_needs_no_rank(op: str) -> None:
    """Only an uneven reducescatter asks which rank it is: group_size says the rest."""
    import collx  # noqa: F401

    shape, given, wanted = ON_META[op]
    if OPS[op].sized:
        given = {**given, "group_size": _NOWHERE}
    if op == "alltoallv_device":
        given = {**given, "input_splits": torch.empty(5, dtype=torch.int64, device="meta")}
    source = torch.empty(shape, device="meta")
    result = overload(op, "functional")(input=source, group_name="nowhere", **given)
    results = result if isinstance(result, tuple) else (result,)
    assert tuple(results[0].shape) == wanted
    assert results[0].is_contiguous()
    if op == "alltoallv_device":
        assert tuple(results[1].shape) == (_NOWHERE,)
        assert results[1].dtype == torch.int64


def test_meta_of_an_uneven_part_names_the_group_that_is_not_there() -> None:
    import collx  # noqa: F401

    source = torch.empty((11, 3), device="meta")
    with pytest.raises(ValueError, match="nowhere"):
        torch.ops.collx.reducescatter(source, "sum", _NOWHERE, "nowhere")


def _capacity_is_filled(rank: Rank) -> str:
    """Rows behind those received are zero although the memory was full of something else."""
    call = Call("alltoallv_device", "int32", (3, 5), splits="uneven", spare=50, style="ones")
    given, expected = _plain(rank, call)
    out = torch.full_like(expected[0], 77, device=rank.device)
    counts = torch.full((rank.size,), -5, device=rank.device)
    overload(call.op, "out")(**given, out=out, output_splits=counts)
    rank.synchronize()
    assert counts.tolist() == [sent[rank.rank] for sent in splits_of(call, rank.size)]
    return byte_differences(out.cpu(), expected[0])


@pytest.mark.worlds(1, 2, 4)
def test_rows_that_nobody_sends_are_zero(pool: Pool) -> None:
    assert pool.run(_capacity_is_filled) == [""] * pool.size
