"""Builds and runs the C++ tests, plainly and under the sanitizers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent.parent / "build" / "cpp"


def run(*command: str | Path) -> str:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        ended = f"ended with {done.returncode}"  # negative: the signal that killed it
        pytest.fail(f"{' '.join(map(str, command))} {ended}\n{done.stdout}", pytrace=False)
    return done.stdout


def require_tools() -> None:
    for tool in ("cmake", "ctest", "g++"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    probe = ["g++", "-E", "-x", "c++", "-include", "gtest/gtest.h", os.devnull]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("GoogleTest is not installed (Debian: libgtest-dev)")


def fresh(build: Path) -> bool:
    """Whether there is no configuration yet that belongs to this very folder."""
    cache = build / "CMakeCache.txt"
    return not cache.exists() or f"CMAKE_HOME_DIRECTORY:INTERNAL={HERE}" not in cache.read_text()


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("sanitizer", ["", "address", "thread"], ids=["plain", "address", "thread"])
def test_cpp_tests_pass(sanitizer: str) -> None:
    require_tools()
    build = BUILD / (sanitizer or "plain")
    if fresh(build):
        shutil.rmtree(build, ignore_errors=True)
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        run("cmake", *generator, "-S", HERE, "-B", build, f"-DCOLLX_SANITIZE={sanitizer}")
    run("cmake", "--build", build, "--parallel", os.environ.get("MAX_JOBS", "2"))
    summary = run("ctest", "--test-dir", build, "--output-on-failure", "--no-tests=error")
    assert re.search(r"100% tests passed", summary), summary
