"""Marks the executed lines of python/collx. Every Python process of a test run imports this module.

Line events are only enabled for code objects of python/collx, so other code does not become slower.
"""

import json
import mmap
import os
import sys
from types import CodeType
from typing import Any


def watch(memory: mmap.mmap, bases: dict[str, int]) -> None:
    monitoring: Any = getattr(sys, "monitoring")  # noqa: B009 -- Python 3.12
    tool = 4
    monitoring.use_tool_id(tool, "mutants")

    def line(code: CodeType, number: int) -> Any:
        memory[bases[code.co_filename] + number] = 1

    def start(code: CodeType, offset: int) -> Any:
        if code.co_filename in bases:
            monitoring.set_local_events(tool, code, monitoring.events.LINE)
        return monitoring.DISABLE

    monitoring.register_callback(tool, monitoring.events.LINE, line)
    monitoring.register_callback(tool, monitoring.events.PY_START, start)
    monitoring.set_events(tool, monitoring.events.PY_START)


if os.environ.get("COLLX_MUTANTS_LINES"):
    with open(os.environ["COLLX_MUTANTS"], "r+b") as shared:
        mapped = mmap.mmap(shared.fileno(), 0)
    with open(os.environ["COLLX_MUTANTS_LINES"]) as layout:
        watch(mapped, json.load(layout))
