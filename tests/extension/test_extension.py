"""Tests an additional algorithm and an additional collective, which are added as described in
docs/internals/development.md.

tests/cpp has kernels with both and their numeric tests. This test builds the CPU part with them and
runs the suites of the operators.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.common.commands import ROOT, run

HERE = Path(__file__).resolve().parent
PARTS = ("csrc", "python", "tests", "setup.py", "pyproject.toml", "README.md", "LICENSE")
ROWS = ("star_rows.h", "everyone_rows.h")
SUITES = ("numerics", "forms", "skew", "tracing")
THEIRS = "cpu2 and (star or reduce_to_everyone)"


def extended(tree: Path) -> None:
    """Copies this repository to `tree`, and adds the source of the algorithm."""
    built = shutil.ignore_patterns("_torch*", "__pycache__")
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, tree / part, ignore=built)
        elif (ROOT / part).exists():
            shutil.copy(ROOT / part, tree / part)
    source = (HERE / "star.cpp").read_text().replace('"cpu/collectives/', '"')
    (tree / "csrc/cpu/collectives/allreduce_star.cpp").write_text(source)


@pytest.mark.full
@pytest.mark.timeout(2400)
def test_rows_and_a_file_are_all_that_an_algorithm_and_a_collective_take(tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    extended(tmp_path)
    rows = " ".join(f"-include {tmp_path / 'tests/extension' / name}" for name in ROWS)

    def python(*arguments: str, **environment: Any) -> str:
        environment["PYTHONPATH"] = str(tmp_path / "python")
        command = (sys.executable, *arguments)
        return run(*command, where=tmp_path, limit=2400, **environment).stdout

    python("setup.py", "build_ext", "--inplace", COLLX_CUDA="0", CFLAGS=rows)
    said = python(
        "-c",
        "import collx, torch; from collx._extension import extension as e;"
        "print(e.algorithms('allreduce'), e.algorithms('reduce_to_everyone'),"
        "torch.ops.collx.reduce_to_everyone_.default._schema)",
    )
    for name in ("'star'", "'direct'", "reduce_op"):
        assert name in said, said
    assert "a built-in function: True" in python("-m", "tests.extension.everyone_function")
    suites = [f"tests/common/suites/{name}.py" for name in SUITES]
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", THEIRS, *suites)
    passed = re.search(r"(\d+) passed", done)
    assert passed is not None, done
    assert int(passed[1]) > 20, done
