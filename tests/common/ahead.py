"""Work that tests wait for, done while others run: builds, and model checkers.

Many tests here wait for a time-out, and leave the cores idle. A test marked

    @pytest.mark.ahead(work=function)

has function(its parameters) called before its turn, in a thread beside the tests, in the order of
the tests. Its fixture `ahead` is what that returned; what it raised, a skip included, is raised
there.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Ahead", "quietly"]


class Ahead:
    def __init__(self) -> None:
        self._workers = ThreadPoolExecutor(2, "ahead")
        self._begun: dict[str, Future[Any]] = {}

    def begin(self, items: list[pytest.Item]) -> None:
        """Begins the work of the tests that are marked."""
        for item in items:
            mark = item.get_closest_marker("ahead")
            if mark is not None:
                work: Callable[..., Any] = mark.kwargs["work"]
                parametrized = getattr(item, "callspec", None)
                given = {} if parametrized is None else parametrized.params
                self._begun[item.nodeid] = self._workers.submit(work, **given)

    def result(self, item: pytest.Item) -> Any:
        return self._begun.pop(item.nodeid).result()

    def end(self) -> None:
        """What has not begun is left; what has ends by itself."""
        self._workers.shutdown(wait=True, cancel_futures=True)


def quietly(
    command: list[str], where: Path | None = None, limit_s: float = 1200
) -> subprocess.CompletedProcess[str]:
    """Runs a command that yields to the test at hand, not to all else that the machine may be busy
    with. Both of its streams are in `stdout`."""
    return subprocess.run(
        ["nice", "-n", "10", *command],
        cwd=where,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit_s,
        check=False,
    )
