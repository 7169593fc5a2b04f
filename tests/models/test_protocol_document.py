"""Tests that every test named in docs/internals/protocol.md exists."""

from __future__ import annotations

import re
from pathlib import Path

from tests.models.test_models import RELACY_CASES, SPIN

TESTS = Path(__file__).resolve().parent.parent
DOCUMENT = TESTS.parent / "docs" / "internals" / "protocol.md"


def named() -> list[str]:
    """Returns the names in backticks in the two tables, from the section of claims to the end."""
    text = DOCUMENT.read_text()
    tables = text[text.index("## Claims and tests") :]
    rows = [line for line in tables.splitlines() if line.startswith("|")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def existing() -> set[str]:
    names = {f"test_spin[{case.name}]" for case in SPIN}
    names |= {f"test_relacy[{case.name}]" for case in RELACY_CASES}
    for file in TESTS.rglob("*.py"):
        names |= set(re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE))
    for file in TESTS.rglob("*.cpp"):
        names |= set(re.findall(r"^TEST\w*\(\w+,\s*(\w+)\)", file.read_text(), re.MULTILINE))
    return names


def test_every_test_that_the_document_names_exists() -> None:
    assert set(named()) - existing() == set()


def test_every_model_stands_in_the_document() -> None:
    models = {f"test_spin[{case.name}]" for case in SPIN}
    models |= {f"test_relacy[{case.name}]" for case in RELACY_CASES}
    assert models - set(named()) == set()
