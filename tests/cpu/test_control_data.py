"""Negative controls of the tests' data and samples: they cover the intended cases, and wrong
results differ from right ones."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from collx import reference
from tests.common import collectives
from tests.common.check import differences
from tests.common.collectives import GROUP_BYTES, SPLITS, border_shapes, splits_of
from tests.common.norms import DTYPES, LARGEST, NAMES, SCALES, Call, calls_of, modes_of, sizes
from tests.common.operators import algorithms_of, ways
from tests.common.sampling import each, pairs, spread
from tests.common.values import as_bits, make_values

WORLD = 3


def _reduced(inputs: list[torch.Tensor], twice_rounded: bool) -> torch.Tensor:
    dtype = inputs[0].dtype
    total = inputs[0].float()
    for tensor in inputs[1:]:
        total = total + tensor.float()
        if twice_rounded:
            total = total.to(dtype).float()
    return total.to(dtype)


def test_the_data_tells_one_order_of_the_ranks_from_another() -> None:
    """Numeric contract: a sum in another order, or rounded at every step, has other bits."""
    inputs = [make_values("random", "bfloat16", 1000, 1, rank) for rank in range(4)]
    floats = [make_values("random", "float32", 1000, 1, rank) for rank in range(4)]
    right = _reduced(inputs, twice_rounded=False)
    assert differences(_reduced(inputs, twice_rounded=True), right) != ""
    in_order, reversed_order = _reduced(floats, False), _reduced(floats[::-1], False)
    assert differences(reversed_order, in_order) != ""


def test_the_data_has_what_breaks_flushing_and_maxima() -> None:
    """Numeric contract: subnormals, NaNs and zeros of both signs are among the special values."""
    inputs = [make_values("special", "float32", 500, 1, rank) for rank in range(3)]
    total = _reduced(inputs, False)
    tiny = torch.finfo(torch.float32).tiny
    flushed = torch.where((total.abs() < tiny) & (total != 0), torch.zeros(()), total)
    assert differences(flushed, total) != ""
    assert torch.stack(inputs).isnan().any(0).sum() > total.isnan().sum() * 0.5
    zeros = [as_bits(tensor[tensor == 0]) for tensor in inputs]
    assert all(len(bits.unique()) == 2 for bits in zeros)


def test_every_sixteen_bit_pattern_is_sent() -> None:
    """Hazard 14: "patterns" is a permutation of all 16-bit patterns on every rank."""
    for rank in range(16):
        patterns = as_bits(make_values("patterns", "bfloat16", 1 << 16, 1, rank))
        assert len(patterns.unique()) == 1 << 16


def test_words_that_look_armed_come_alone_and_in_long_stretches() -> None:
    """Hazard 14: the data has groups with only such words, with some, and with none."""
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
    """The sizes include 0, 1, fewer elements than ranks, and one more and one less than vectors,
    groups, tiles and parts."""
    sizes = {fields["shape"][0] for fields in border_shapes(("float32",), world)}
    for nbytes in (16, 496, 512, 1024, 2048, 16 * world, 496 * world, 1024 * world):
        assert {nbytes // 4 - 1, nbytes // 4, nbytes // 4 + 1} <= sizes
    assert {0, 1, 2, 3, world} <= sizes


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_patterns_of_splits_are_what_they_are_called(world: int) -> None:
    found = {
        pattern: splits_of(
            collectives.Call("alltoallv", shape=(10,), splits=pattern, root=1), world
        )
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


def test_every_op_has_its_ways() -> None:
    """Checks the algorithms that the tests loop over."""
    copied = {"allgather", "gather", "scatter", "alltoall"}
    split = {"alltoallv", "alltoallv_device"}
    every = {"allreduce", "reducescatter", "reduce", "broadcast"} | copied | split
    assert set(collectives.NAMES) == every
    having = {
        name: {op for op, way in ways(*collectives.NAMES) if way == name}
        for name in ("staged", "direct", "copy_engine", "lanes", "fallback")
    }
    assert having == {
        "staged": every - {"allreduce", "broadcast"},
        "direct": every - {"allreduce", "broadcast"},
        "copy_engine": copied | {"broadcast"},
        "lanes": every - {"allreduce"},
        "fallback": every,
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
    assert all(("auto" in algorithms_of(op)) and ("fallback" in algorithms_of(op)) for op in NAMES)


def test_the_sample_covers_every_pair_that_is_allowed() -> None:
    """The sample covers no other pair, and is the same each time."""
    for op in NAMES:
        factors = {"rows": (0, 1, 64), "cols": (8, 384, 20000), **modes_of(op)}
        allowed = sizes(30_000)
        found = pairs(factors, allowed)
        assert found == pairs(factors, allowed)
        for a, b in itertools.combinations(factors, 2):
            seen = [(one[a], one[b]) for one in found]
            for x, y in itertools.product(factors[a], factors[b]):
                if allowed({a: x, b: y}) and not _never(x) and not _never(y):
                    assert (x, y) in seen, (op, a, x, b, y)
                elif not allowed({a: x, b: y}):
                    assert (x, y) not in seen, (op, a, x, b, y)
        assert len(found) < 80
        assert len(set(calls_of(op, found))) == len(found)


def _never(value: Any) -> bool:
    """Whether a value is never allowed: groups of 4,096 do not divide any of these columns."""
    return isinstance(value, dict) and value.get("quant_group_size") == 4096


def test_a_choice_that_leads_nowhere_is_taken_back() -> None:
    """b = 1 is only allowed with c = 0, which is only allowed with a = 0."""

    def allowed(fields: dict[str, Any]) -> bool:
        if {"b", "c"} <= set(fields):
            return bool(fields["b"] != 1 or fields["c"] == 0)
        return not ({"a", "c"} <= set(fields) and fields["c"] == 0 and fields["a"] != 0)

    found = pairs({"a": (0, 1), "b": (0, 1), "c": (1, 0)}, allowed)
    assert {"a": 0, "b": 1, "c": 0} in found
    assert all(one["b"] == 0 for one in found if one["a"] == 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_of_the_kinds_that_they_are_made_for(dtype: str) -> None:
    call = Call("allreduce_rmsnorm_fp8", dtype, 9, 64, style="rows", eps=0.0, seed=9)
    data = call.data(WORLD)
    inputs = [given["input"] for given in data.given]
    sums = torch.stack([tensor.float() for tensor in inputs]).sum(0)
    info = torch.finfo(inputs[0].dtype)
    q, scale = data.expected[0]
    codes = q.view(torch.uint8)
    assert not bool(sums[1].any())
    assert bool(torch.stack([t[1].signbit() for t in inputs]).any())
    assert bool(sums[2].isinf().any())
    assert bool(sums[3].isnan().any())
    assert 0 < float(sums[4].abs().max()) < 4 * info.tiny
    assert len(sums[6].unique()) > 5
    assert int((sums[7] != 0).sum()) == 1
    assert bool(scale[1:4].isnan().all())
    assert bool((codes[1] == 0x7F).all())
    assert bool(scale[[0, 8]].isfinite().all())
    # In bfloat16 and float32, squares of subnormals are 0 and those of the largest values overflow.
    assert bool(scale[4].isfinite()) == (dtype == "float16")
    assert float(sums[5].abs().max()) >= info.max


def test_words_of_all_ones_are_what_results_are_made_of() -> None:
    """Hazard 14: an int8 result is a tensor of -1. NaN is 0x7F in fp8, and an ordinary NaN in the
    scales."""
    call = Call("allreduce_residual_rmsnorm_int8", "float32", 4, 64, style="minus", eps=0.0)
    q, _, residual = replace(call, scale_mode="tensor", given=1.0).data(WORLD).expected[0]
    assert bool((q == -1).all())
    assert bool((residual == -1).all())
    for scale in SCALES:
        (call,) = calls_of(
            "allreduce_rmsnorm_fp8", [{"style": "ones", "cols": 4096, "scale": scale}]
        )
        q, scales = call.data(WORLD).expected[0]
        assert bool((call.data(WORLD).given[0]["input"].view(torch.int16) == -1).all())
        assert bool((q.view(torch.uint8) == 0x7F).all())
        if call.scale_mode != "tensor":
            assert bool(scales.to(torch.float32).isnan().all())


def test_bounds_are_met_exactly_and_reciprocals_overflow() -> None:
    call = Call("allreduce_rmsnorm_fp8", "float32", 3, 256, style="constant", eps=0.0)
    _, scale, norm = replace(call, keep_norm=True).data(WORLD).expected[0]
    assert norm.abs().amax(-1).tolist() == [LARGEST] * 3
    _, bounded = replace(call, scale_ub=2.4999998).data(WORLD).expected[0]
    assert bool((bounded < scale).all())
    tiny = Call("allreduce_rmsnorm_fp8", "float32", 3, 256, style="tiny", weights="float32")
    q, scale = tiny.data(WORLD).expected[0]
    assert bool((scale > 0).all())
    assert math.isinf(1 / float(scale.max()) if float(scale.max()) > 3e-39 else math.inf)
    assert not bool((q.view(torch.uint8) & 0x7F).any())


@pytest.mark.parametrize("dtype", DTYPES)
def test_another_order_of_the_row_or_of_the_ranks_would_show(dtype: str) -> None:
    """A running sum and another order of the ranks change the results for the tests' data."""
    call = Call("allreduce_rmsnorm", "float32", 7, 384)
    data = call.data(WORLD)
    inputs = [given["input"] for given in data.given]
    weight = data.given[0]["weight"]
    assert not reference.same_bits(
        reference.allreduce_rmsnorm(inputs[::-1], weight, call.eps), data.expected[0][0]
    )
    rows = replace(call, dtype=dtype).data(WORLD).given[0]["input"].float()
    squares = rows * rows
    running = squares.cumsum(-1)[:, -1:]
    assert not torch.equal(reference.row_sum(squares), running)
    halves = reference.row_sum(squares.roll(1, -1))
    assert not torch.equal(reference.row_sum(squares), halves)


def test_every_option_changes_what_is_computed() -> None:
    """The tests would therefore detect an option that is ignored."""
    base = Call("allreduce_residual_rmsnorm_fp8", "bfloat16", 5, 512, keep_norm=True)

    def results(**fields: Any) -> list[list[int]]:
        expected = replace(base, **fields).legal().data(WORLD).expected[0]
        return [tensor.contiguous().view(torch.uint8).flatten().tolist() for tensor in expected]

    plain = results()
    for fields in (
        {"rounding": "parity"},
        {"rounding": "parity_weight"},
        {"eps": 0.01},
        {"weight_offset": 1.0},
        {"weights": "float32"},
        {"scale_ub": 0.7},
        {"fp8_dtype": "e5m2"},
        {"scale_mode": "tensor"},
        {"scale_mode": "group"},
        {"ue8m0": True},
        {"scale_dtype": "input"},
        {"ue8m0": True, "scale_dtype": "float8_e8m0fnu"},
    ):
        assert results(**fields) != plain, fields
    assert results(rounding="parity") != results(rounding="parity_weight")
