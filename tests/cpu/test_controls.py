"""Negative controls: what the other tests rely on notices the mistakes that it is there for."""

from __future__ import annotations

import pytest
import torch

from tests.common.check import differences
from tests.common.values import as_bits, dtype_of, make_values, poison


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", "int32", "uint8"])
def test_one_flipped_bit_is_noticed(dtype: str) -> None:
    """Numeric contract: the lowest bit of one element is enough."""
    expected = make_values("random", dtype, 100, 1, 0)
    result = expected.clone()
    assert differences(result, expected) == ""
    as_bits(result)[57] ^= 1
    assert "1 of 100 elements differ, the first at 57" in differences(result, expected)


def test_signed_zeros_differ_and_nan_payloads_do_not() -> None:
    """Numeric contract: NaN mask, then bits."""
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
    """Hazard 14: "patterns" is a permutation of all of them on every rank."""
    for rank in range(16):
        patterns = as_bits(make_values("patterns", "bfloat16", 1 << 16, 1, rank))
        assert len(patterns.unique()) == 1 << 16
