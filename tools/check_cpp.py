"""Runs clang-format on all C++ and CUDA files, and clang-tidy on those without Torch and CUDA.

A tool that is not installed is skipped with a message, except on CI. `--fix` formats in place.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
JOBS = 2
FORMATTED = (".h", ".cuh", ".cpp", ".cu")
# The files that clang-tidy checks. The headers of protocol are checked like sources.
SOURCES = ("csrc/protocol/*.h", "csrc/cpu/**/*.cpp")
# Checks that only report in the main file: those of the analyzer, and unused names.
MAIN_FILE = ("clang-analyzer-*", "misc-unused-*", "bugprone-suspicious-include")
# The other checks also report in headers. They traverse the headers of the standard library, which
# takes most of the time, so many files are checked as one source. Files with equal local names are
# checked separately.
EVERYWHERE = ("bugprone-*", "concurrency-*", "misc-definitions-*", "modernize-*", "performance-*")
APART = (
    ("csrc/cpu/norm.cpp", "csrc/cpu/**/norm_*.cpp"),
    ("csrc/cpu/allreduce.cpp", "csrc/cpu/simd/reduce_*.cpp"),
    ("csrc/cpu/exchange.cpp", "csrc/cpu/simd/expression_*.cpp"),
)
TIDY_FLAGS = ["-xc++", "-std=c++20", "-Wall", "-Wextra", "-Wno-pragma-once-outside-header"]


def files(*patterns: str) -> list[str]:
    found = {p for pattern in patterns for p in ROOT.glob(pattern) if p.is_file()}
    return sorted(str(p.relative_to(ROOT)) for p in found)


def installed(tool: str) -> bool:
    if shutil.which(tool):
        return True
    if os.environ.get("CI"):
        raise SystemExit(f"{tool} is not installed")
    print(f"skipped: {tool} is not installed")
    return False


def clang_format(fix: bool) -> bool:
    everything = files("csrc/**/*", "tests/**/*")
    sources = [f for f in everything if f.endswith(FORMATTED)]
    mode = ["-i"] if fix else ["--dry-run", "-Werror"]
    return subprocess.run(["clang-format", *mode, *sources], cwd=ROOT, check=False).returncode == 0


def tidy(source: str, without: Sequence[str], more: Sequence[str], *flags: str) -> list[str]:
    checks = ",".join([*(f"-{check}" for check in without), *more])
    options = ["--quiet", "--config-file=.clang-tidy", f"--checks={checks}"]
    return ["clang-tidy", *options, source, "--", *TIDY_FLAGS, *flags]


def alone(source: str) -> list[str]:
    return tidy(source, EVERYWHERE, MAIN_FILE[2:])


def together(sources: list[str]) -> list[str]:
    included = [part for source in sources for part in ("-include", source)]
    return tidy(os.devnull, MAIN_FILE, (), *included)


def passes(command: list[str]) -> bool:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.returncode == 0


def main(arguments: list[str]) -> int:
    fix = "--fix" in arguments
    good = not installed("clang-format") or clang_format(fix)
    if not fix and installed("clang-tidy"):
        sources = files(*SOURCES)
        groups = [files(*patterns) for patterns in APART]
        groups.append([s for s in sources if not any(s in group for group in groups)])
        commands = [*map(together, groups), *map(alone, sources)]
        with ThreadPoolExecutor(JOBS) as pool:
            good = all(list(pool.map(passes, commands))) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
