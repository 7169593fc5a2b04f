"""Compares the reference of epilogues with results that were calculated by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from collx import reference

ONES = torch.ones(3, 2)
BF16 = torch.bfloat16


def test_arithmetic_is_in_float32_and_rounded_once() -> None:
    """1 + 2^-8 + 2^-8 is a value of bfloat16. If a sum is rounded after each addition, both
    additions have no effect."""
    small = torch.tensor(2.0**-8, dtype=BF16)
    halves = [torch.full((2,), 0.5, dtype=BF16)] * 2

    def twice(v: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
        return v + e + e

    assert reference.allreduce(halves, epilogue=twice, extras=[small]).tolist() == [1 + 2**-7] * 2
    assert twice(torch.ones(2, dtype=BF16), small).tolist() == [1, 1]
    # A cast within f rounds.
    rounded = reference.allreduce(
        halves, epilogue=lambda v, e: (v + e).bfloat16() + e, extras=[small]
    )
    assert rounded.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (lambda v: v.float(), torch.float32),  # v is already float32 within f
        (lambda v: (v > 0).to(torch.int8), torch.int8),
        (lambda v: v.to(torch.float64), torch.float64),
        (lambda v: v.type(torch.float64), torch.float64),
        (lambda v: v > 0, BF16),
        (lambda v: v.float() * 2, BF16),
        (lambda v: v, BF16),
    ],
)
def test_the_last_cast_names_the_dtype(function: Callable[..., Any], dtype: torch.dtype) -> None:
    assert reference.allreduce([ONES.to(BF16)], epilogue=function).dtype == dtype


def test_every_rank_has_its_own_extras_and_coordinates_of_the_whole() -> None:
    def place(v: torch.Tensor, e: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return v * e + 10 * i + j

    own = [torch.tensor(100.0), torch.tensor([[1000.0, 2000.0]])]
    options: dict[str, Any] = {"epilogue": place, "index": True}
    parts = reference.reducescatter([ONES, ONES], extras=[[e] for e in own], **options)
    assert [part.tolist() for part in parts] == [[[200, 201], [210, 211]], [[2020, 4021]]]
    whole = reference.allreduce([ONES, ONES], extras=[own[1]], **options)
    assert whole.tolist() == [[2000, 4001], [2010, 4011], [2020, 4021]]
    columns = reference.reducescatter([ONES, ONES], axis=1, extras=[own[:1]] * 2, **options)
    assert columns[1].tolist() == [[201], [211], [221]]


def test_zeros_are_ordered_and_nan_stays() -> None:
    zeros = torch.tensor([0.0, -0.0, float("nan")])
    for function, signs in {
        torch.relu: [False, False],
        lambda v: v.clamp(min=0): [False, False],
        lambda v: torch.maximum(-v, v): [False, False],
        lambda v: torch.minimum(v, -v): [True, True],
        lambda v: torch.clamp(v, max=-0.0): [True, True],
    }.items():
        result = reference.allreduce([zeros], epilogue=function)
        assert result[:2].signbit().tolist() == signs
        assert result[2].isnan()


def test_bounds_and_operands_of_other_dtypes_are_promoted() -> None:
    value = torch.tensor([0, 1, 2, 3], dtype=torch.uint8)
    for function in (
        lambda v: 4 * v.clamp(0.5, 2.25),
        lambda v: torch.minimum(v, torch.tensor([1.5])),
        lambda v: torch.maximum(v, torch.tensor([1.5])),
    ):
        result = reference.allreduce([value], epilogue=function)
        assert result.tolist() == function(value).to(torch.uint8).tolist()


def test_extras_that_do_not_fit_are_refused() -> None:
    def allreduce(*extras: torch.Tensor) -> torch.Tensor:
        return reference.allreduce([ONES], epilogue=torch.add, extras=extras)

    with pytest.raises(TypeError, match=r"allreduce: extras\[0\] is torch.float64"):
        allreduce(torch.ones(2).double())
    for shape in ((3,), (1, 3, 2), (3, 3)):
        with pytest.raises(ValueError, match=r"extras\[0\] has .* accepted: what broadcasts"):
            allreduce(torch.ones(shape))
    with pytest.raises(ValueError, match="got 2 inputs, but extras of 1"):
        reference.reducescatter([ONES] * 2, epilogue=torch.add, extras=[[torch.ones(2)]])
