"""Runs tests on the copy: all tests for the map of executed code, or some with one mutant."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
BYTES = 1 << 20  # size of the shared memory, as in switch.h
LINES = 1 << 16  # offset from which each line of Python has one byte
TESTS = ("tests/common", "tests/cpu")
MAP_S, RUN_S = (
    60,
    120,
)  # time limits of a test: for the map, and with a mutant, possibly on a busier machine


class Test(NamedTuple):
    """A test and the code that it executes. C++ tests are named program:Suite.name."""

    name: str
    seconds: float
    reached: frozenset[int]

    @property
    def native(self) -> bool:
        return not self.name.partition("[")[0].count(".py::")


class Runner:
    """Runs tests in `folder`. Its `tree` is the copy, and its `programs` are the C++ tests."""

    def __init__(self, folder: Path, worlds: str, tests: list[str]) -> None:
        self.folder, self.copy, self.worlds = folder, folder / "tree", worlds
        self.tests = tests

    def another(self, number: int) -> Runner:
        """Returns a runner with its own copy of the tree, so that both can run tests at once."""
        folder = self.folder / f"runner{number}"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.copy, folder / "tree", ignore=shutil.ignore_patterns("build"))
        (folder / "programs").symlink_to(self.folder / "programs")
        return Runner(folder, self.worlds, self.tests)

    def bases(self) -> dict[str, int]:
        """Returns the offset of the lines of each Python file in the shared memory."""
        found, base = {}, LINES
        for path in sorted((self.copy / "python/collx").rglob("*.py")):
            found[str(path)] = base
            base += len(path.read_text().splitlines()) + 1
        return found

    def map(self, minutes: float, parts: int) -> list[Test]:
        """Returns the tests that pass within the time limit, with the code that they execute. Runs
        them in a number of parts at once."""
        (self.folder / "lines.json").write_text(json.dumps(self.bases()))
        started = [self._start_map(shard, parts, minutes) for shard in range(parts)]
        found = self._map_programs()
        for shard, process in enumerate(started):
            process.wait()
            output = self.folder / f"map{shard}.json"
            for name, (seconds, reached) in json.loads(output.read_text()).items():
                found.append(Test(name, seconds, frozenset(reached)))
        return found

    def _start_map(self, shard: int, parts: int, minutes: float) -> subprocess.Popen[bytes]:
        output = self.folder / f"map{shard}.json"
        plan = {"output": str(output), "shard": [shard, parts], "seconds": 60 * minutes}
        memory = self._memory(f"map{shard}", -1)
        environment = self._environment(memory, {**plan, "worlds": self.worlds})
        environment["COLLX_MUTANTS_LINES"] = str(self.folder / "lines.json")
        files = [test for test in self.tests if (self.copy / test).exists()]
        with open(self.folder / f"map{shard}.log", "wb") as log:
            return subprocess.Popen(
                self._pytest(f"--timeout={MAP_S}", *files),
                cwd=self.copy,
                env=environment,
                stdout=log,
                stderr=log,
            )

    def _map_programs(self) -> list[Test]:
        found = []
        for name in self._program_tests():
            memory = self._memory("programs", -1)
            started = time.monotonic()
            if self._passes(name, memory):
                reached = {m.start() for m in re.finditer(b"\x01", memory.read_bytes()[4:])}
                found.append(Test(name, time.monotonic() - started, frozenset(reached)))
        return found

    def _program_tests(self) -> list[str]:
        names = []
        for program in sorted((self.folder / "programs").glob("test_*")):
            if program.suffix:
                continue
            listing = subprocess.run(
                [program, "--gtest_list_tests"], capture_output=True, text=True, check=True
            ).stdout
            suite = ""
            for line in listing.splitlines()[1:]:
                if line.startswith(" "):
                    names.append(f"{program.name}:{suite}{line.split()[0]}")
                else:
                    suite = line.split()[0]
        return names

    def _passes(self, name: str, memory: Path) -> bool:
        program, _, test = name.partition(":")
        command = [str(self.folder / "programs" / program), f"--gtest_filter={test}"]
        environment = {**os.environ, "COLLX_MUTANTS": str(memory)}
        return self._status(command, environment, RUN_S) == 0

    def first_failure(self, tests: list[Test], mutant: int, seconds: float) -> tuple[str, bool]:
        """Returns the test that fails with a mutant (-1: a Python mutant, or none), and whether the
        collection failed. A test that crashes or hangs has failed."""
        memory = self._memory("run", mutant)
        for test in tests:
            if test.native and not self._passes(test.name, memory):
                return test.name, False
        names = [test.name for test in tests if not test.native]
        if not names:
            return "", False
        output = self.folder / "run.output"
        output.write_text("")
        environment = self._environment(memory, {"output": str(output), "tests": names})
        files = sorted({name.partition("::")[0] for name in names})
        limits = [f"--timeout={RUN_S}", "--timeout-method=thread"]  # also ends a hang in C++
        status = self._status(self._pytest(*limits, "-x", *files), environment, seconds)
        last = output.read_text()
        return ("", False) if status == 0 else (last or "collection", not last)

    def _pytest(self, *arguments: str) -> list[str]:
        options = ["-p", "tools.mutants.plugin", "-p", "no:cacheprovider", "-q", "--tb=short"]
        return [sys.executable, "-m", "pytest", *options, "-m", "not cuda", *arguments]

    def _memory(self, name: str, mutant: int) -> Path:
        """Creates a file for switch.h, with an active mutant."""
        file = self.folder / f"{name}.memory"
        file.write_bytes(mutant.to_bytes(4, sys.byteorder, signed=True) + bytes(BYTES - 4))
        return file

    def _environment(self, memory: Path, plan: dict[str, Any]) -> dict[str, str]:
        file = memory.with_suffix(".plan")
        file.write_text(json.dumps(plan))
        paths = [self.copy / "python", self.copy, HERE.parents[1], HERE / "site"]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "COLLX_MUTANTS": str(memory),
            "COLLX_MUTANTS_PLAN": str(file),
            "OMP_NUM_THREADS": "1",
        }

    def _status(self, command: list[str], environment: dict[str, str], seconds: float) -> int:
        """Runs a command and returns the exit status. After the time limit, kills the session of
        processes and returns -1."""
        with open(self.folder / "run.log", "wb") as log:
            process = subprocess.Popen(
                command,
                cwd=self.copy,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return -1
