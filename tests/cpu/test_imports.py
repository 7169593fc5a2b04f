"""Tests that imports have no cycles, and that `import collx` imports no more than it needs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.common.commands import ROOT, python, run


def check(*folders: Path, code: int = 0) -> str:
    return run(sys.executable, ROOT / "tools" / "check_imports.py", *folders, code=code).stdout


def test_the_tree_passes() -> None:
    assert check() == "imports go one way\n"


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
    check(house)
    (house / "cellar.py").write_text(back + "\n")
    said = check(house, code=1)
    assert "house: imports in a circle" in said
    assert "house.attic" in said
    assert "house.cellar" in said


def test_the_oracle_comes_when_it_is_asked_for() -> None:
    python("""
import sys, collx
assert "collx.reference" not in sys.modules
assert collx.reference.parts(5, 2) == [3, 2]
assert "collx.reference" in sys.modules
""")


def test_the_compiler_is_not_imported() -> None:
    """Importing the compiler takes ten times as long as everything else."""
    python("""
import sys, collx
assert not {"sympy", "torch._dynamo", "torch._inductor"} & set(sys.modules)
""")
