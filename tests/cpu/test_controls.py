"""Negative controls of the test harness: it detects errors in every operator and form."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.common import collectives, norms
from tests.common.calls import NEW_TENSORS, Call, Prepared, Tensors, byte_differences
from tests.common.check import Placed, differences, extent
from tests.common.collectives import OPS
from tests.common.norms import quantizes
from tests.common.operators import NAMES, is_norm
from tests.common.rank import Rank
from tests.common.values import COPIED, as_bits, dtype_of, make_values, poison
from tests.common.worlds import World

WORLD, ME = 3, 1
FORMS = [
    (op, form) for op in NAMES for form in (norms.forms_of(op) if is_norm(op) else OPS[op].forms)
]
FORMS_THAT_WRITE = [(op, form) for op, form in FORMS if form not in NEW_TENSORS]


def _call(op: str, form: str, layout: str = "contiguous", **fields: Any) -> Call:
    call: Any = collectives.Call(op, "int16", (8, 5), splits="uneven", spare=2, unused=1, root=2)
    if is_norm(op):
        group: Any = {"scale_mode": "group", "quant_group_size": 16, "scale_layout": "column"}
        call = norms.Call(op, rows=7, cols=64, keep_norm=True, **{**group, **fields})
    else:
        call = replace(call, uneven=True, **fields)
    placed: Any = {"layout": layout, "output_layout": layout, "output_offset": 1}
    legal: Call = replace(call, form=form, input_offset=1, **placed).legal()
    return legal


def _prepared(call: Call) -> Prepared:
    nobody: Any = SimpleNamespace(world_size=WORLD, rank=ME, name="nobody")
    return Prepared(Rank(ME, World("cpu", WORLD)), nobody, call)


def _like(want: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(want.shape, want.stride(), dtype=want.dtype).copy_(want)


def _answer(prepared: Prepared) -> Tensors:
    """Returns the expected results, and writes them to the outputs if the form has any."""
    if prepared.call.form in NEW_TENSORS:
        return tuple(map(_like, prepared.expected))
    for placed, result in zip(prepared.outs, prepared.expected, strict=True):
        placed.view.copy_(result)
    return tuple(placed.view for placed in prepared.outs)


def _flip(tensor: torch.Tensor, number: int = 0) -> None:
    """Flips the lowest bit of one element. `number`: its index in row-major order."""
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(number), tensor.shape))
    as_bits(tensor)[place] ^= 1


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "spread"])
@pytest.mark.parametrize(("op", "form"), FORMS)
def test_a_right_answer_passes_and_a_wrong_bit_does_not(op: str, form: str, layout: str) -> None:
    """Control of all comparisons: one wrong bit of one element is noticed in each result."""
    prepared = _prepared(_call(op, form, layout))
    results = _answer(prepared)
    assert prepared.wrong(results) == ""
    for name, result in zip(prepared.call.outputs(), results, strict=True):
        place = min(3, result.numel() - 1)
        _flip(result, place)
        wrong = prepared.wrong(results)
        assert wrong.startswith(f"{name}: 1 of "), wrong
        assert f"differ, the first at {place}" in wrong
        _flip(result, place)
    assert prepared.wrong(results) == ""
    assert "results instead of" in prepared.wrong(results[1:])


def _places_around(out: Placed) -> set[int]:
    """Returns the indices of elements before and after the tensor, at the end of the memory, and
    between the tensor's elements."""
    start = int(out.view.storage_offset() - out.whole.storage_offset())
    size = extent(tuple(out.view.shape), out.view.stride())
    between = {start + 1} if out.view.stride(-1) == 2 else set()
    return {start - 1, start + size, len(out.whole) - 1} | between


@pytest.mark.parametrize("layout", ["contiguous", "spread"])
@pytest.mark.parametrize(("op", "form"), FORMS_THAT_WRITE)
def test_a_write_around_an_output_is_noticed(op: str, form: str, layout: str) -> None:
    """Hazard 19: a write on any side of any output is noticed."""
    prepared = _prepared(_call(op, form, layout))
    results = _answer(prepared)
    for out in prepared.outs:
        places = _places_around(out)
        assert len(places) == 3 + (layout == "spread" and form != "part")
        for place in places:
            _flip(out.whole, place)
            assert "outside of the tensor changed" in prepared.wrong(results), place
            _flip(out.whole, place)
    assert prepared.wrong(results) == ""


@pytest.mark.parametrize(("op", "form"), FORMS)
def test_a_changed_argument_is_noticed(op: str, form: str) -> None:
    """A change of any argument that is only read is noticed: input, splits, residual, weight, bias,
    scale."""
    prepared = _prepared(_call(op, form, **({"scale_mode": "tensor"} if is_norm(op) else {})))
    results = _answer(prepared)
    written = {prepared.call.shared(name) for name in prepared.call.outputs()}
    written |= {"input"} if form == "part" else set()
    for name in set(prepared.read) - written:
        _flip(prepared.read[name].view)
        assert prepared.wrong(results) == f"the {name} changed"
        assert prepared.wrong(results, input_kept=False) == ""
        _flip(prepared.read[name].view)
    wanted = {"input", "weight"} if is_norm(op) else {"input"}
    wanted |= {"residual"} if "residual" in op else set()
    wanted |= {"bias"} if "layernorm" in op else set()
    wanted |= {"scale"} if quantizes(op) else set()
    wanted |= {"input_splits"} if op == "alltoallv_device" else set()
    assert set(prepared.read) == wanted


def _beside(source: Placed, want: torch.Tensor) -> torch.Tensor:
    """Returns a result in the storage of a tensor that is read, but not a view of the tensor."""
    nbytes = source.view.numel() * source.view.element_size()
    before = -(-nbytes // want.element_size())
    size = before + extent(tuple(want.shape), want.stride())
    memory = torch.empty(size * want.element_size(), dtype=torch.uint8)
    source.view = memory[:nbytes].view(source.view.dtype).view(source.view.shape).copy_(source.view)
    result = torch.empty(0, dtype=want.dtype)
    result.set_(memory.untyped_storage(), before, want.shape, want.stride())
    return result.copy_(want)


@pytest.mark.parametrize("op", NAMES)
def test_strides_and_shared_memory_of_new_tensors_are_noticed(op: str) -> None:
    """Hazard 25: also when the values are right."""
    for number in range(len(_call(op, "functional").outputs())):
        prepared = _prepared(_call(op, "functional"))
        right = list(_answer(prepared))
        want = right[number]

        def wrong(result: torch.Tensor) -> str:
            changed = (*right[:number], result, *right[number + 1 :])  # noqa: B023
            return prepared.wrong(changed, input_kept=False)  # noqa: B023

        strides = [2 * stride for stride in want.stride()]
        spread = torch.empty_strided(want.shape, strides, dtype=want.dtype).copy_(want)
        assert wrong(spread).startswith(f"result {number} has strides")
        assert wrong(want.view(want.shape)) == f"result {number} shares memory"
        for name in prepared.read:
            assert wrong(_beside(prepared.read[name], want)) == f"result {number} shares memory"
        assert wrong(_like(want)) == ""


@pytest.mark.parametrize("op", NAMES)
def test_data_of_another_call_rank_or_place_is_noticed(op: str) -> None:
    """Every rank, chunk and call has its own data."""
    call: Any = collectives.Call(op, "int32", (9, 5), root=2)
    if is_norm(op):
        call = norms.Call(op, rows=9)
    others = replace(call, seed=2).data(WORLD).expected
    results = call.data(WORLD).expected
    for rank, result in enumerate(results):
        if bool(result[0].view(torch.uint8).any()):  # gather returns zeros except on the root
            assert call.wrong_results(WORLD, rank, others[rank])
            assert call.wrong_results(WORLD, rank, (result[0].roll(1, 0), *result[1:]))
    if not op.startswith(("allreduce", "allgather", "broadcast", "reduce_to_everyone")):
        assert call.wrong_results(WORLD, 0, results[2])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", "int32", "uint8"])
def test_one_flipped_bit_is_noticed(dtype: str) -> None:
    """Numeric contract: the lowest bit of one element is enough."""
    expected = make_values("random", dtype, 100, 1, 0)
    result = expected.clone()
    assert differences(result, expected) == ""
    as_bits(result)[57] ^= 1
    assert "1 of 100 elements differ, the first at 57" in differences(result, expected)


def test_signed_zeros_differ_and_nan_payloads_do_not() -> None:
    """Numeric contract: NaNs are compared as a mask, all other values by their bits."""
    zeros = torch.zeros(3)
    assert differences(-zeros, zeros) != ""
    nans = torch.full((3,), float("nan"))
    other = nans.clone()
    as_bits(other)[1] ^= 0x1234
    assert differences(other, nans) == ""
    assert differences(torch.where(torch.arange(3) == 1, zeros, nans), nans) != ""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "int8"])
def test_an_element_that_was_never_written_is_noticed(dtype: str) -> None:
    """Hazard 20: outputs are poisoned before each call."""
    expected = make_values("random", dtype, 50, 1, 0)
    result = poison(50, dtype_of(dtype), torch.device("cpu"))
    result[:49] = expected[:49]
    assert "the first at 49" in differences(result, expected)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", COPIED)
def test_one_flipped_bit_of_any_dtype_is_noticed(dtype: str) -> None:
    """Copies: also of NaN payloads, and in both halves of 16-byte elements."""
    values = make_values("bits", dtype, 40, 1, 0)
    assert byte_differences(values, values.clone()) == ""
    for byte in {0, dtype_of(dtype).itemsize - 1}:
        changed = values.clone()
        changed.view(torch.uint8)[17 * dtype_of(dtype).itemsize + byte] ^= 1
        assert "1 of 40 elements differ, the first at 17" in byte_differences(changed, values)
