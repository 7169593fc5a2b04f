"""Negative controls of the norms' tests: what they rely on notices the mistakes that it is there
for, and their samples and data reach what they are drawn for."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.common.norm_cases import (
    DTYPES,
    LARGEST,
    OPS,
    Call,
    data_of,
    legal,
    outputs_of,
    quantizes,
)
from tests.common.norm_check import NEW_TENSORS, Prepared
from tests.common.norm_samples import SCALES, calls_of, forms_of, modes_of, pairwise, sizes
from tests.common.rank import Rank
from tests.common.worlds import World

WORLD, ME = 3, 1
FORMS = [(op, form) for op in OPS for form in forms_of(op)]


def _prepared(call: Call) -> Prepared:
    nobody: Any = SimpleNamespace(world_size=WORLD, rank=ME, name="nobody")
    return Prepared(Rank(ME, World("cpu", WORLD)), nobody, call)


def _call(op: str, form: str, **fields: Any) -> Call:
    group = {"scale_mode": "group", "quant_group_size": 16, "scale_layout": "column"}
    call = Call(op, rows=7, cols=64, form=form, keep_norm=True, **group)  # type: ignore[arg-type]
    return legal(replace(call, **fields))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, in the same memory; of the scales by columns, through their contiguous side."""
    dense = tensor if tensor.is_contiguous() else tensor.movedim(-1, 0)
    return dense.view(torch.uint8)


def _answer(prepared: Prepared) -> tuple[torch.Tensor, ...]:
    """Does what the op should have done."""
    if prepared.call.form in NEW_TENSORS:
        return tuple(
            torch.empty_strided(want.shape, want.stride(), dtype=want.dtype).copy_(want)
            for want in prepared.expected
        )
    for placed, result in zip(prepared.outs, prepared.expected, strict=True):
        placed.view.copy_(result)
    return tuple(placed.view for placed in prepared.outs)


@pytest.mark.parametrize(("op", "form"), FORMS)
def test_a_right_answer_of_a_norm_passes_and_a_wrong_bit_does_not(op: str, form: str) -> None:
    """One bit of one element, in each of the results."""
    prepared = _prepared(_call(op, form, output_offset=1))
    results = _answer(prepared)
    assert prepared.wrong(results) == ""
    for name, result in zip(outputs_of(op, prepared.call.keep_norm), results, strict=True):
        flat = _bytes(result)
        flat.view(-1)[0] ^= 1
        assert f"{name}: 1 of " in prepared.wrong(results)
        flat.view(-1)[0] ^= 1
    assert prepared.wrong(results) == ""
    assert "results instead of" in prepared.wrong(results[1:])


@pytest.mark.parametrize(("op", "form"), [pair for pair in FORMS if pair[1] not in NEW_TENSORS])
def test_a_write_around_an_output_of_a_norm_is_noticed(op: str, form: str) -> None:
    """Hazard 19: before each, behind it, between its elements."""
    for layout in ("natural", "spread"):
        prepared = _prepared(_call(op, form, output_layout=layout))
        results = _answer(prepared)
        for out in prepared.outs:
            start = out.view.storage_offset() - out.whole.storage_offset()
            raw, size = out.whole.view(torch.uint8), out.whole.element_size()
            updated = form == "updated" and out is prepared.read["residual"]
            behind = 1 if layout == "spread" and not updated else -1
            for position in (start - 1, len(out.whole) - 1, start + behind):
                raw[position * size] ^= 1
                assert "outside of the tensor changed" in prepared.wrong(results), position
                raw[position * size] ^= 1
        assert prepared.wrong(results) == ""


@pytest.mark.parametrize(("op", "form"), FORMS)
def test_a_changed_argument_of_a_norm_is_noticed(op: str, form: str) -> None:
    """Whatever is read alone: input, residual, weight, bias, scale."""
    prepared = _prepared(legal(Call(op, form=form, rows=7, scale_mode="tensor")))
    results = _answer(prepared)
    for name, placed in prepared.read.items():
        if form == "updated" and name == "residual":
            continue
        _bytes(placed.view).view(-1)[0] ^= 1
        assert prepared.wrong(results) == f"the {name} changed"
        assert prepared.wrong(results, input_kept=False) == ""
        _bytes(placed.view).view(-1)[0] ^= 1
    assert {"input", "weight"} <= set(prepared.read)
    assert ("scale" in prepared.read) == quantizes(op)


@pytest.mark.parametrize("op", OPS)
def test_strides_and_shared_memory_of_new_tensors_are_noticed(op: str) -> None:
    """Hazard 25: also when the values are right."""
    prepared = _prepared(_call(op, "functional"))
    for number, result in enumerate(_answer(prepared)):
        others = list(_answer(prepared))
        strides = [2 * stride for stride in result.stride()]
        spread = torch.empty_strided(result.shape, strides, dtype=result.dtype)
        others[number] = spread.copy_(result)
        assert f"result {number} " in prepared.wrong(tuple(others))
    placed = prepared.read["input"]
    shared = list(_answer(prepared))
    where = outputs_of(op, prepared.call.keep_norm).index("norm_out" if quantizes(op) else "out")
    if placed.view.shape == shared[where].shape:
        shared[where] = placed.view.copy_(shared[where])
        assert "shares memory" in prepared.wrong(tuple(shared), input_kept=False)


def test_the_sample_covers_every_pair_that_is_allowed() -> None:
    """And nothing that is not; the same one each time."""
    for op in OPS:
        factors = {"rows": (0, 1, 64), "cols": (8, 384, 20000), **modes_of(op)}
        allowed = sizes(30_000)
        found = pairwise(factors, allowed)
        assert found == pairwise(factors, allowed)
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
    """Groups of 4,096 divide none of those columns."""
    return isinstance(value, dict) and value.get("quant_group_size") == 4096


def test_a_choice_that_leads_nowhere_is_taken_back() -> None:
    """b = 1 goes with c = 0 alone, which goes with a = 0 alone."""

    def allowed(fields: dict[str, Any]) -> bool:
        if {"b", "c"} <= set(fields):
            return bool(fields["b"] != 1 or fields["c"] == 0)
        return not ({"a", "c"} <= set(fields) and fields["c"] == 0 and fields["a"] != 0)

    found = pairwise({"a": (0, 1), "b": (0, 1), "c": (1, 0)}, allowed)
    assert {"a": 0, "b": 1, "c": 0} in found
    assert all(one["b"] == 0 for one in found if one["a"] == 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_of_the_kinds_that_they_are_made_for(dtype: str) -> None:
    call = Call("allreduce_rmsnorm_fp8", dtype, 9, 64, style="rows", eps=0.0, seed=9)
    data = data_of(call, WORLD)
    sums = torch.stack([tensor.float() for tensor in data.inputs]).sum(0)
    info = torch.finfo(data.inputs[0].dtype)
    q, scale = data.expected[0]
    codes = q.view(torch.uint8)
    assert not bool(sums[1].any())
    assert bool(torch.stack([t[1].signbit() for t in data.inputs]).any())
    assert bool(sums[2].isinf().any())
    assert bool(sums[3].isnan().any())
    assert 0 < float(sums[4].abs().max()) < 4 * info.tiny
    assert len(sums[6].unique()) > 5
    assert int((sums[7] != 0).sum()) == 1
    assert bool(scale[1:4].isnan().all())
    assert bool((codes[1] == 0x7F).all())
    assert bool(scale[[0, 8]].isfinite().all())
    # In bfloat16 and float32 the squares of subnormals vanish, and those of the largest overflow.
    assert bool(scale[4].isfinite()) == (dtype == "float16")
    assert float(sums[5].abs().max()) >= info.max


def test_words_of_all_ones_are_what_results_are_made_of() -> None:
    """Hazard 14: in int8, a tensor of -1; NaN in fp8 is 0x7F, in the scales the ordinary one."""
    call = Call("allreduce_residual_rmsnorm_int8", "float32", 4, 64, style="minus", eps=0.0)
    q, _, residual = data_of(replace(call, scale_mode="tensor", given=1.0), WORLD).expected[0]
    assert bool((q == -1).all())
    assert bool((residual == -1).all())
    for scale in SCALES:
        (call,) = calls_of(
            "allreduce_rmsnorm_fp8", [{"style": "ones", "cols": 4096, "scale": scale}]
        )
        q, scales = data_of(call, WORLD).expected[0]
        assert bool((data_of(call, WORLD).inputs[0].view(torch.int16) == -1).all())
        assert bool((q.view(torch.uint8) == 0x7F).all())
        if call.scale_mode != "tensor":
            assert bool(scales.to(torch.float32).isnan().all())


def test_bounds_are_met_exactly_and_reciprocals_overflow() -> None:
    call = Call("allreduce_rmsnorm_fp8", "float32", 3, 256, style="constant", eps=0.0)
    _, scale, norm = data_of(replace(call, keep_norm=True), WORLD).expected[0]
    assert norm.abs().amax(-1).tolist() == [LARGEST] * 3
    _, bounded = data_of(replace(call, scale_ub=2.4999998), WORLD).expected[0]
    assert bool((bounded < scale).all())
    tiny = Call("allreduce_rmsnorm_fp8", "float32", 3, 256, style="tiny", weights="float32")
    q, scale = data_of(tiny, WORLD).expected[0]
    assert bool((scale > 0).all())
    assert math.isinf(1 / float(scale.max()) if float(scale.max()) > 3e-39 else math.inf)
    assert not bool((q.view(torch.uint8) & 0x7F).any())


@pytest.mark.parametrize("dtype", DTYPES)
def test_another_order_of_the_row_or_of_the_ranks_would_show(dtype: str) -> None:
    """The data of the tests tell the tree from a running sum, and the ranks' order from another."""
    from collx import reference

    call = Call("allreduce_rmsnorm", "float32", 7, 384)
    data = data_of(call, WORLD)
    assert not reference.same_bits(
        reference.allreduce_rmsnorm(data.inputs[::-1], data.weight, call.eps), data.expected[0][0]
    )
    rows = data_of(replace(call, dtype=dtype), WORLD).inputs[0].float()
    squares = rows * rows
    running = squares.cumsum(-1)[:, -1:]
    assert not torch.equal(reference.row_sum(squares), running)
    halves = reference.row_sum(squares.roll(1, -1))
    assert not torch.equal(reference.row_sum(squares), halves)


def test_every_option_changes_what_is_computed() -> None:
    """So that an option that is not looked at would show."""
    base = Call("allreduce_residual_rmsnorm_fp8", "bfloat16", 5, 512, keep_norm=True)

    def results(**fields: Any) -> list[list[int]]:
        expected = data_of(legal(replace(base, **fields)), WORLD).expected[0]
        return [_bytes(tensor.contiguous()).flatten().tolist() for tensor in expected]

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
