"""Tests that tools/count_instructions.py counts the instructions of calls and compares them with
earlier counts."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from tools import count_instructions as tool

from tests.common.commands import ROOT, run

VERSIONS = {"compiler": "GCC: 12.2.0", "python": "3.12.1", "torch": "2.11.0"}


def saved(folder: Path, **counts: int) -> Path:
    file = folder / "before.json"
    file.write_text(json.dumps({"versions": VERSIONS, "instructions": counts}))
    return file


def test_a_count_is_the_least_measurement_without_the_loop() -> None:
    measurements = [1100, 21_000, 31_500, 1000, 21_050, 31_000]  # two repeats, empty loop first
    assert tool.counts_of(measurements, ["a", "b"]) == {"a": 200, "b": 300}


@pytest.mark.parametrize(("now", "status"), [(900, 0), (1000, 0), (1020, 0), (1021, 1)])
def test_growth_above_the_tolerance_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], now: int, status: int
) -> None:
    before = saved(tmp_path, call=1000, other=5)
    assert tool.report({"call": now, "added": 7}, VERSIONS, before, tolerance=2) == status
    said = capsys.readouterr().out
    assert f"{now / 1000:5.3f}" in said
    assert ("call: 1,021 instructions, 2.1 % more than 1,000; accepted: 2 % more" in said) == bool(
        status
    )
    assert "--rewrite" in said or not status
    assert "not compared" not in said


def test_counts_of_other_versions_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, other in (("torch", "2.12.0"), ("compiler", "GCC: 13.1.0"), ("libc", "glibc 2.36")):
        made_with = {**VERSIONS, name: other}
        assert tool.report({"call": 9999}, made_with, saved(tmp_path, call=1), tolerance=2) == 0
        said = capsys.readouterr().out
        assert f"{name} {other} instead of {VERSIONS.get(name)}" in said
        assert "not compared" in said


def test_the_file_in_the_repository_has_all_calls() -> None:
    kept = json.loads(tool.GOLDEN.read_text())
    assert list(kept["instructions"]) == list(tool.CALLS)
    assert set(kept["versions"]) == set(tool.versions())


def test_rewriting_takes_all_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counted = dict.fromkeys(tool.CALLS, 5)
    golden = tmp_path / "golden.json"
    monkeypatch.setattr(tool, "GOLDEN", golden)
    monkeypatch.setattr(tool, "count", lambda names: counted)
    with pytest.raises(SystemExit):
        tool.main(["--rewrite", "allreduce_"])
    assert "--rewrite takes all calls" in capsys.readouterr().err
    assert tool.main(["--rewrite"]) == 0
    assert json.loads(golden.read_text()) == {
        "versions": tool.versions(),
        "instructions": counted,
    }


def test_a_machine_without_valgrind_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match="valgrind and callgrind_control not found"):
        tool.main(["allreduce_"])


def test_an_unknown_call_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tool.main(["allreduce__"])
    assert "no such call: allreduce__" in capsys.readouterr().err


@pytest.mark.full  # takes more than a minute, mostly to import PyTorch under valgrind
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
def test_calls_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "counts.json"
    command = (sys.executable, ROOT / "tools" / "count_instructions.py")
    run(*command, "allreduce_", "x.add_", "--save", file, limit=600)
    counts = json.loads(file.read_text())["instructions"]
    assert list(counts) == ["allreduce_", "x.add_"]
    assert all(1000 < number < 1_000_000 for number in counts.values()), counts
