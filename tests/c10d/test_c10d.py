"""Tests that "collx" passes PyTorch's own tests of a distributed backend, except those in
left_out.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.c10d.left_out import REASONS
from tests.c10d.suite import Suite, names

# One of each kind. The others only run with --full.
QUICK = [
    "all_gather",
    "all_gather_coalesced_simple",
    "all_gather_object_subgroup",
    "all_reduce_coalesced_sum",
    "all_reduce_sum_async",
    "all_to_all",
    "all_to_all_single_unequal_split_group",
    "barrier_group",
    "batch_isend_irecv_gloo",
    "broadcast_group",
    "DistributedDataParallelCPU_grad_is_view",
    "gather",
    "get_future",
    "reduce_sum",
    "scatter",
    "send_recv_any_source",
    "sparse_all_reduce_sum",
]


def _parameter(name: str) -> Any:
    full = name.removeprefix("test_") not in QUICK
    return pytest.param(name, marks=[pytest.mark.full] if full else [])


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    suite = Suite(tmp_path_factory.mktemp("c10d"))
    yield suite
    suite.close()


@pytest.mark.parametrize("name", [_parameter(name) for name in names()])
def test_pytorch(suite: Suite, name: str) -> None:
    outcome = suite.run(name)
    if name not in REASONS:
        assert outcome.result == "passed", outcome.text
        return
    assert outcome.result != "passed", "the test passes now: remove it from left_out.py"
    pytest.skip(REASONS[name])


def test_tests_that_are_named_exist() -> None:
    assert set(REASONS) | {f"test_{name}" for name in QUICK} <= set(names())
