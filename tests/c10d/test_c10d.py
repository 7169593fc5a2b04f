"""PyTorch's own tests of a distributed backend pass on "collx", except those in left_out.py."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.c10d.left_out import REASONS
from tests.c10d.suite import Suite, names

# Variants of other tests, which run with --full only.
ALIKE = re.compile(r"_(product|min|max|full_group|complex|twice|profiler)")


def _parameter(name: str) -> Any:
    full = name in REASONS or ALIKE.search(name)
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


def test_tests_that_are_left_out_exist() -> None:
    assert set(REASONS) <= set(names())
