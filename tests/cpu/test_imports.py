"""Tests that imports have no cycles, and that `import collx` imports no more than it needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def check(*folders: Path) -> subprocess.CompletedProcess[str]:
    tool = ROOT / "tools" / "check_imports.py"
    command = [sys.executable, str(tool), *map(str, folders)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_tree_passes() -> None:
    done = check()
    assert (done.returncode, done.stdout) == (0, "imports go one way\n"), done.stdout + done.stderr


@pytest.mark.parametrize(
    "back",
    [
        "from house import attic",
        "import house.attic",
        "from house.attic import roof",
        "def f():\n    from house import attic",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from house.attic import roof",
    ],
)
def test_a_circle_is_named(tmp_path: Path, back: str) -> None:
    house = tmp_path / "house"
    house.mkdir()
    (house / "__init__.py").write_text("from house.attic import roof\n")
    (house / "attic.py").write_text("from house import cellar\nroof = 1\n")
    (house / "cellar.py").write_text("import os\n")
    assert check(house).returncode == 0
    (house / "cellar.py").write_text(back + "\n")
    done = check(house)
    assert done.returncode == 1
    assert "house: imports in a circle" in done.stdout
    assert "house.attic" in done.stdout
    assert "house.cellar" in done.stdout


def test_the_oracle_comes_when_it_is_asked_for() -> None:
    program = """
import sys, collx
assert "collx.reference" not in sys.modules
assert collx.reference.parts(5, 2) == [3, 2]
assert "collx.reference" in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT / "python")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_compiler_is_not_imported() -> None:
    """Importing the compiler takes ten times as long as everything else."""
    program = """
import sys, collx
assert not {"sympy", "torch._dynamo", "torch._inductor"} & set(sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT / "python")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
