"""tools/count_instructions.py counts calls, and compares counts with earlier ones."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tools import count_instructions as tool

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = {"python": "3.12.1", "torch": "2.11.0"}


def saved(folder: Path, **counts: int) -> Path:
    file = folder / "before.json"
    file.write_text(json.dumps({"versions": VERSIONS, "instructions": counts}))
    return file


def test_a_count_is_the_least_measurement_without_the_loop() -> None:
    measurements = [1100, 21_000, 31_500, 1000, 21_050, 31_000]  # the empty loop first, two repeats
    assert tool.counts_of(measurements, ["a", "b"]) == {"a": 200, "b": 300}


@pytest.mark.parametrize(("now", "status"), [(900, 0), (1000, 0), (1020, 0), (1021, 1)])
def test_growth_above_the_tolerance_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], now: int, status: int
) -> None:
    before = saved(tmp_path, call=1000, other=5)
    assert tool.report({"call": now, "added": 7}, VERSIONS, before, tolerance=2) == status
    said = capsys.readouterr().out
    assert f"{now / 1000:5.3f}" in said
    assert ("above" in said) == bool(status)
    assert "versions" not in said


def test_other_versions_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_with = {**VERSIONS, "torch": "2.12.0"}
    assert tool.report({"call": 1000}, made_with, saved(tmp_path, call=1000), tolerance=2) == 0
    assert "versions differ" in capsys.readouterr().out


def test_a_machine_without_valgrind_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match="valgrind and callgrind_control not found"):
        tool.main(["allreduce_"])


def test_an_unknown_call_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tool.main(["allreduce__"])
    assert "no such call: allreduce__" in capsys.readouterr().err


@pytest.mark.full  # more than a minute, most of which is the import of PyTorch under valgrind
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
def test_calls_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "counts.json"
    command = [sys.executable, str(ROOT / "tools" / "count_instructions.py")]
    command += ["allreduce_", "x.add_", "--save", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads(file.read_text())["instructions"]
    assert list(counts) == ["allreduce_", "x.add_"]
    assert all(1000 < number < 1_000_000 for number in counts.values()), counts
