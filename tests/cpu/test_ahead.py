"""Work that runs beside tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.common.ahead import Ahead, quietly

AUTOGROUP = Path("/proc/self/autogroup")


def test_a_command_beside_tests_only_gets_idle_cores() -> None:
    if not AUTOGROUP.exists():
        pytest.skip("this kernel does not schedule sessions as groups")
    done = quietly(["sh", "-c", f"sleep 1; cat {AUTOGROUP}; cut -d' ' -f41 /proc/self/stat"])
    group, policy = done.stdout.splitlines()
    assert group.endswith("nice 19"), done.stdout
    assert policy == "5", done.stdout  # SCHED_IDLE


class Item:
    """A test with the mark `ahead`."""

    nodeid = "test"

    def __init__(self, work: Callable[..., Any], **params: Any) -> None:
        self.callspec = SimpleNamespace(params=params)
        self._mark = pytest.mark.ahead(work=work).mark

    def get_closest_marker(self, name: str) -> pytest.Mark:
        assert name == "ahead"
        return self._mark


@pytest.mark.parametrize("begun", [True, False], ids=["begun", "not begun"])
def test_a_test_gets_the_result_of_its_work(begun: bool) -> None:
    """Workers of pytest-xdist begin nothing before the test."""
    ahead = Ahead()  # without end(), which would kill the commands for other tests
    right: Any = Item(lambda number: number + 1, number=2)
    wrong: Any = Item(lambda: pytest.skip("a tool is missing"))
    for item in (right, wrong):
        if begun:
            ahead.begin([item])
        if item is right:
            assert ahead.result(item) == 3
        else:
            with pytest.raises(pytest.skip.Exception, match="a tool is missing"):
                ahead.result(item)
