"""Negative controls of the family's tests: what they rely on notices the mistakes that it is there
for, and their samples reach what they are drawn from."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.common.family_cases import (
    GROUP_BYTES,
    IN_PLACE,
    NEW,
    OPS,
    SPLITS,
    Call,
    border_shapes,
    data_of,
    each,
    legal,
    parts,
    splits_of,
    spread,
    ways,
)
from tests.common.family_check import NEW_TENSORS, Prepared, byte_differences
from tests.common.rank import Rank
from tests.common.values import COPIED, as_bits, dtype_of, make_values
from tests.common.worlds import World

WORLD, ME = 3, 1


def _prepared(call: Call) -> Prepared:
    nobody: Any = SimpleNamespace(world_size=WORLD, rank=ME, name="nobody")
    return Prepared(Rank(ME, World("cpu", WORLD)), nobody, call)


def _answer(prepared: Prepared) -> tuple[torch.Tensor, ...]:
    """Does what the op should have done."""
    if prepared.call.form in NEW_TENSORS:
        return tuple(result.clone() for result in prepared.expected)
    for placed, result in zip(prepared.outs, prepared.expected, strict=True):
        placed.view.copy_(result)
    return tuple(placed.view for placed in prepared.outs)


FORMS = [(op, form) for op in ("allreduce", *NEW) for form in OPS[op].forms]


def _call(op: str, form: str, **fields: Any) -> Call:
    call = Call(op, "int16", (8, 5), form=form, splits="uneven", spare=2, unused=1, root=2)
    return legal(replace(call, **{"uneven": True, "input_offset": 1, **fields}))


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "spread"])
@pytest.mark.parametrize(("op", "form"), FORMS)
def test_a_right_answer_passes_and_a_wrong_byte_does_not(op: str, form: str, layout: str) -> None:
    """The control of all comparisons: one bit of one element."""
    prepared = _prepared(_call(op, form, layout=layout, output_layout=layout))
    results = _answer(prepared)
    assert prepared.wrong(results) == ""
    results[0][0, 3] ^= 1
    assert "differ, the first at 3" in prepared.wrong(results)


@pytest.mark.parametrize(("op", "form"), [pair for pair in FORMS if pair[1] not in NEW_TENSORS])
def test_a_write_around_an_output_of_the_family_is_noticed(op: str, form: str) -> None:
    """Hazard 19: before it, behind it, between its elements."""
    for layout in ("contiguous", "spread") if form != "part" else ("contiguous",):
        prepared = _prepared(_call(op, form, layout=layout, output_layout=layout))
        results = _answer(prepared)
        out = prepared.outs[0]
        start = out.view.storage_offset() - out.whole.storage_offset()
        end = start + sum(
            (size - 1) * stride
            for size, stride in zip(out.view.shape, out.view.stride(), strict=True)
        )
        for position in {start - 1, end + 1, start + 1 if layout == "spread" else end + 1}:
            kept = out.whole[position].clone()
            out.whole[position] = 77
            assert "outside of the tensor changed" in prepared.wrong(results), position
            out.whole[position] = kept
        assert prepared.wrong(results) == ""


@pytest.mark.parametrize(
    ("op", "form"), [(op, form) for op, form in FORMS if form not in IN_PLACE and form != "part"]
)
def test_a_changed_input_is_noticed(op: str, form: str) -> None:
    prepared = _prepared(_call(op, form))
    results = _answer(prepared)
    prepared.source.view[0, 0] ^= 1
    assert prepared.wrong(results) == "the input changed"
    assert prepared.wrong(results, input_kept=False) == ""


@pytest.mark.parametrize("op", NEW)
def test_a_result_that_shares_memory_with_the_input_is_noticed(op: str) -> None:
    """Hazard 25: also when it would be right."""
    prepared = _prepared(_call(op, "functional", input_offset=0))
    shared = [result.clone() for result in prepared.expected]
    memory = torch.empty(2 * shared[0].numel() + prepared.source.view.numel(), dtype=torch.int16)
    source = memory[: prepared.source.view.numel()].view(prepared.source.view.shape)
    prepared.source.view = source.copy_(prepared.source.view)
    shared[0] = memory[-shared[0].numel() :].view(shared[0].shape).copy_(shared[0])
    assert "shares memory" in prepared.wrong(tuple(shared))


@pytest.mark.parametrize("op", NEW)
def test_data_of_another_call_rank_or_place_is_noticed(op: str) -> None:
    """Every rank, chunk and call has data of its own."""
    call = Call(op, "int32", (9, 5), root=2)
    results = [result[0] for result in data_of(call, WORLD)[1]]
    others = [result[0] for result in data_of(replace(call, seed=2), WORLD)[1]]
    for result, other in zip(results, others, strict=True):
        if bool(result.any()):  # gather gives zeros to all but root
            assert byte_differences(other, result)
            assert byte_differences(result.roll(1, 0), result)
    if op not in ("allgather", "broadcast"):
        assert byte_differences(results[0], results[2])


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", COPIED)
def test_one_flipped_bit_of_any_dtype_is_noticed(dtype: str) -> None:
    """Copies: NaN payloads, too, and both halves of what has sixteen bytes."""
    values = make_values("bits", dtype, 40, 1, 0)
    assert byte_differences(values, values.clone()) == ""
    for byte in {0, dtype_of(dtype).itemsize - 1}:
        changed = values.clone()
        changed.view(torch.uint8)[17 * dtype_of(dtype).itemsize + byte] ^= 1
        assert "1 of 40 elements differ, the first at 17" in byte_differences(changed, values)


def test_words_that_look_armed_come_alone_and_in_long_stretches() -> None:
    """Hazard 14: whole groups of them, groups with some, groups with none."""
    words = as_bits(make_values("armed", "float32", 30_000, 1, 0))
    assert {-1, 0, 0x7FFFFFFF, -0x80000000, 1, 65535} <= set(words.tolist())
    group = GROUP_BYTES // 4
    shares = (words[: len(words) // group * group].view(-1, group) == -1).float().mean(1)
    assert bool((shares == 0).any())
    assert bool(((shares > 0.05) & (shares < 0.4)).any())
    assert bool((shares > 0.5).any())
    assert bool((as_bits(make_values("ones", "int64", 9, 1, 0)) == -1).all())


def test_a_sample_has_every_value_of_every_dimension() -> None:
    dimensions = [each("a", range(7)), each("b", range(3)), each("c", range(20))]
    chosen = spread(21, 5, *dimensions)
    assert len(chosen) == 21
    for name, size in (("a", 7), ("b", 3), ("c", 20)):
        assert {fields[name] for fields in chosen} == set(range(size))
    assert len({tuple(fields.values()) for fields in chosen}) > 15
    assert chosen != spread(21, 6, *dimensions)
    assert len(spread(420, 5, *dimensions)) == 420
    assert len({tuple(fields.values()) for fields in spread(420, 5, *dimensions)}) == 420


@pytest.mark.parametrize("world", [1, 2, 3, 8, 16])
def test_sizes_reach_every_border(world: int) -> None:
    """0, 1, fewer elements than ranks, one more and one less than vectors, groups, tiles, parts."""
    sizes = {fields["shape"][0] for fields in border_shapes(("float32",), world)}
    for nbytes in (16, 496, 512, 1024, 2048, 16 * world, 496 * world, 1024 * world):
        assert {nbytes // 4 - 1, nbytes // 4, nbytes // 4 + 1} <= sizes
    assert {0, 1, 2, 3, world} <= sizes


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_patterns_of_splits_are_what_they_are_called(world: int) -> None:
    found = {
        pattern: splits_of(Call("alltoallv", shape=(10,), splits=pattern, root=1), world)
        for pattern in SPLITS
    }
    me = 1 % world
    assert all(len(sent) == world for splits in found.values() for sent in splits)
    assert not any(map(any, found["nobody"]))
    assert [any(sent) for sent in found["one_sends"]] == [rank == me for rank in range(world)]
    assert all(
        sent == [10 * (rank == me) for rank in range(world)] for sent in found["one_receives"]
    )
    if world > 1:
        assert max(map(max, found["wild"])) >= 5 * min(map(min, found["wild"]))
        assert len({count for sent in found["uneven"] for count in sent}) > 1
        assert 0 in {count for sent in found["zeros"] for count in sent}


def test_parts_are_those_of_the_protocol() -> None:
    from collx import _C, reference

    for n in (0, 1, 5, 16, 1000):
        for world in (1, 3, 8, 16):
            sizes = parts(n, world)
            assert sizes == reference.parts(n, world)
            starts = [sum(sizes[:rank]) for rank in range(world)]
            protocol = [_C.part_of(n, world, rank) for rank in range(world)]
            assert protocol == list(zip(starts, sizes, strict=True))


def test_every_op_has_its_ways() -> None:
    """What a test that loops over them loops over."""
    assert set(NEW) == {
        "reducescatter",
        "allgather",
        "broadcast",
        "reduce",
        "gather",
        "scatter",
        "alltoall",
        "alltoallv",
        "alltoallv_device",
    }
    staged = {op for op, way in ways() if way == "staged"}
    assert staged == set(NEW) - {"broadcast"}
    assert {op for op, way in ways() if way == "direct"} == staged - {
        "alltoallv",
        "alltoallv_device",
    }
    assert {way for op, way in ways("broadcast")} == {
        "auto",
        "onestage",
        "twostage",
        "pipelined",
        "lanes",
        "copy_engine",
        "fallback",
    }
    assert {op for op, way in ways() if way == "copy_engine"} == {
        "allgather",
        "broadcast",
        "gather",
        "scatter",
        "alltoall",
    }
    assert {op for op, way in ways() if way == "lanes"} == set(NEW)
    assert {op for op, way in ways() if way == "fallback"} == set(NEW)
