"""clang-format on all C++ and CUDA files, clang-tidy on those that need neither Torch nor CUDA.

A tool that is not installed is skipped by name, but not on CI. `--fix` formats in place.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
JOBS = 2
FORMATTED = (".h", ".cuh", ".cpp", ".cu")
# protocol has headers alone: each is looked at as if it were a source.
TIDY = ("csrc/cpu/**/*.cpp", "csrc/protocol/*.h")
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


def clang_tidy(source: str) -> bool:
    command = ["clang-tidy", "--quiet", source, "--", *TIDY_FLAGS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"clang-tidy {source}\n{done.stdout}{done.stderr}")
    return done.returncode == 0


def main(arguments: list[str]) -> int:
    fix = "--fix" in arguments
    good = not installed("clang-format") or clang_format(fix)
    if not fix and installed("clang-tidy"):
        with ThreadPoolExecutor(JOBS) as pool:
            good = all(list(pool.map(clang_tidy, files(*TIDY)))) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
