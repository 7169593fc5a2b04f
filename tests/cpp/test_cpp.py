"""Builds and runs the C++ tests, without and with sanitizers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.common.ahead import quietly

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent.parent / "build" / "cpp"


def checked(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode:
        ended = f"ended with {done.returncode}"  # a negative number is the signal that killed it
        pytest.fail(f"{' '.join(map(str, done.args))} {ended}\n{done.stdout}", pytrace=False)
    return done.stdout


def require_tools() -> None:
    for tool in ("cmake", "ctest", "g++"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    probe = ["g++", "-E", "-x", "c++", "-include", "gtest/gtest.h", os.devnull]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("GoogleTest is not installed (Debian: libgtest-dev)")


def fresh(build: Path) -> bool:
    """Whether the folder has no configuration for this source folder yet."""
    cache = build / "CMakeCache.txt"
    return not cache.exists() or f"CMAKE_HOME_DIRECTORY:INTERNAL={HERE}" not in cache.read_text()


def build(sanitizer: str) -> Path:
    """Builds the tests and returns their folder."""
    require_tools()
    folder = BUILD / (sanitizer or "plain")
    if fresh(folder):
        shutil.rmtree(folder, ignore_errors=True)
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        where = ["-S", str(HERE), "-B", str(folder)]
        checked(quietly(["cmake", *generator, *where, f"-DCOLLX_SANITIZE={sanitizer}"]))
    jobs = os.environ.get("MAX_JOBS", "2")
    checked(quietly(["cmake", "--build", str(folder), "--parallel", jobs]))
    return folder


@pytest.mark.timeout(2400)  # includes builds, which run at a lower priority than other tests
@pytest.mark.ahead(work=build)
@pytest.mark.parametrize("sanitizer", ["", "address", "thread"], ids=["plain", "address", "thread"])
def test_cpp_tests_pass(sanitizer: str, ahead: Path) -> None:
    # More processes than cores, because some tests wait for timeouts while others compute.
    command = ["ctest", "--test-dir", str(ahead), "--parallel", "3", "--output-on-failure"]
    done = subprocess.run(
        [*command, "--no-tests=error"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert re.search(r"100% tests passed", checked(done)), done.stdout
