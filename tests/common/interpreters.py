"""Runs programs in separate processes, including the finalization of the interpreter.

The processes are forked from one that has imported PyTorch and collx, because the import takes
longer than most programs. A forked process finalizes its interpreter like any other process. The
functions are not thread-safe.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent
IMPORTED = ("torch", "torch.distributed", "collx")

# Each line of the input is a list of [program, arguments, environment, file for the output] and the
# seconds that all of them may take. The line of the output contains their exit codes, negative for
# signals, and null for those that were killed after the time limit. The programs run at module
# level, after the loop, so their global variables exist when the interpreter finalizes.
_PARENT = """
import importlib, json, os, sys, time

for module in sys.argv[1:]:
    importlib.import_module(module)


def code_of(child, deadline):
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)


program = None
for line in sys.stdin:
    jobs, seconds = json.loads(line)
    children = []
    for text, arguments, environment, output in jobs:
        child = os.fork()
        if child == 0:
            program, sys.argv = text, ["-c", *arguments]
            os.environ.update(environment)
            file = os.open(output, os.O_WRONLY)
            os.dup2(file, 1)
            os.dup2(file, 2)
            break
        children.append(child)
    if program is not None:
        break
    deadline = time.monotonic() + seconds
    print(json.dumps([code_of(child, deadline) for child in children]), flush=True)
if program is not None:
    exec(program)
"""


def environment() -> dict[str, str]:
    """Returns the environment of this process, with a path to collx and the tests."""
    path = os.pathsep.join([str(REPOSITORY / "python"), *sys.path])
    return {**os.environ, "PYTHONPATH": path}


@functools.cache
def _parent(modules: tuple[str, ...]) -> subprocess.Popen[str]:
    parent = subprocess.Popen(
        [sys.executable, "-W", "ignore::DeprecationWarning:__main__", "-c", _PARENT, *modules],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(parent.communicate)  # closes its input, and waits
    return parent


def run(
    program: str,
    arguments: Sequence[Sequence[str]],
    settings: Mapping[str, str] | Sequence[Mapping[str, str]],
    seconds: float,
    modules: tuple[str, ...] = IMPORTED,
) -> list[tuple[int | None, str]]:
    """Runs `program` in one process for each list of arguments, at the same time. The processes
    have imported `modules`. `settings`: environment variables of all processes, or of each. Returns
    the exit codes and outputs. The code is None if a process has not ended after `seconds`."""
    each = [settings] * len(arguments) if isinstance(settings, Mapping) else settings
    parent = _parent(modules)
    assert parent.stdin is not None
    assert parent.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, str(number)) for number in range(len(arguments))]
        for output in outputs:
            output.touch()
        jobs = [
            (program, list(of), dict(own), str(output))
            for of, own, output in zip(arguments, each, outputs, strict=True)
        ]
        parent.stdin.write(json.dumps([jobs, seconds]) + "\n")
        parent.stdin.flush()
        codes = json.loads(parent.stdout.readline())
        return [(code, file.read_text()) for code, file in zip(codes, outputs, strict=True)]
