"""A pytest plugin for the runs of tools/mutants: selects tests, and records what they execute.

COLLX_MUTANTS_PLAN is a JSON file:
  map     {"output": file, "shard": [0, 2], "worlds": "cpu2", "seconds": 1200}: runs a share of the
          tests. Writes the seconds of each test that passes, and the bytes that are set after it.
  run     {"output": file, "tests": [...]}: runs these tests in order. The output is the name of the
          test that is running or has failed.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

PLAN: dict[str, Any] = json.loads(Path(os.environ["COLLX_MUTANTS_PLAN"]).read_text())
HEADER = 4  # size in bytes of the number of the active mutant
WORLD = re.compile(r"\b(?:cpu|cuda)(?:\d+)?(?:shared)?\b")

_found: dict[str, list[Any]] = {}
_began = time.monotonic()
_passed: dict[str, bool] = {}


def is_wanted(item: pytest.Item) -> bool:
    """Whether to run a test for the map: tests of one world size, or without a world, in this share
    of the files."""
    parameters = item.nodeid.partition("[")[2]
    number, count = PLAN["shard"]
    mine = crc32(str(item.path.name).encode()) % count == number
    return mine and set(WORLD.findall(parameters)) <= {"cpu", PLAN["worlds"]}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "tests" in PLAN:
        order = {name: place for place, name in enumerate(PLAN["tests"])}
        kept = sorted((i for i in items if i.nodeid in order), key=lambda i: order[i.nodeid])
    else:
        # The order of the files is random, so that a time limit omits some tests of every kind.
        kept = sorted(filter(is_wanted, items), key=lambda i: crc32(str(i.path).encode()))
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if "tests" in PLAN:
        Path(PLAN["output"]).write_text(item.nodeid)
        return (yield)
    with open(os.environ["COLLX_MUTANTS"], "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[HEADER:] = bytes(len(memory) - HEADER)
        started = time.monotonic()
        result = yield
        seconds = time.monotonic() - started
        if _passed.get(item.nodeid):
            reached = [m.start() for m in re.finditer(b"\x01", memory[HEADER:])]
            _found[item.nodeid] = [round(seconds, 3), reached]
    if time.monotonic() - _began > PLAN["seconds"]:
        item.session.shouldstop = "the time for the map is over"
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _passed[report.nodeid] = _passed.get(report.nodeid, True) and report.passed


def pytest_sessionfinish(session: pytest.Session) -> None:
    if "shard" in PLAN:
        Path(PLAN["output"]).write_text(json.dumps(_found))
