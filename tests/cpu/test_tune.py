"""Tests the file, the output and the exit status of `python -m collx tune` on CPU ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import collx
from collx import __main__ as commands
from collx import _tuning
from collx._tune.cases import BUILT_IN, Case, Choice
from collx._tune.options import parse
from collx._tune.search import Found, entries
from tests.common.commands import run
from tests.common.pool import Pool
from tests.common.rank import Rank

PLOT = find_spec("matplotlib") is not None


def tune(*arguments: str, launcher: tuple[str, ...] = ()) -> str:
    command = (sys.executable, *launcher, "-m", "collx", "tune", *arguments)
    environment: dict[str, Any] = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return run(*command, stderr=subprocess.PIPE, **environment).stdout


def _loads(rank: Rank, file: str) -> list[str]:
    """Returns the algorithm for each entry, and checks where the choice came from."""
    found = []
    with rank.new_communicator("written", tuning=file) as communicator:
        for row in json.loads(Path(file).read_text())["entries"]:
            plan = communicator.explain(
                row["op"],
                row["to_bytes"] // 4,
                torch.float32,
                input_symmetric=row["symmetric"],
                output_symmetric=row["symmetric"],
            )
            assert file in plan.tuning, plan
            assert plan.algorithm == row["algorithm"]
            found.append(plan.algorithm)
    return found


@pytest.mark.worlds(2)
def test_the_tool_writes_a_table_that_init_loads(pool: Pool, tmp_path: Path) -> None:
    file, picture = tmp_path / "tuning.json", tmp_path / "tuning.png"
    plot = ("--plot", str(picture)) if PLOT else ()
    sizes = ("-b", "1K", "-e", "16K", "-f", "16", "--seconds", "0.02")
    ranks = ("--device", "cpu", "--ranks", "2")
    printed = tune(
        *("--ops", "allreduce,allgather", "--symmetric", "--output", str(file)),
        *(*sizes, *ranks, *plot),
    )
    assert printed.count("allreduce") == printed.count("allgather") == 4
    assert "faster by" in printed
    assert picture.exists() == PLOT
    table = _tuning.read(file)
    assert table == _tuning.read(json.loads(table.to_json()))
    assert (table.world_size, table.device_type, table.driver) == (2, "cpu", None)
    assert f"entries in {file}: {len(table.entries)}" in printed
    for found in pool.run(_loads, str(file)):
        assert len(found) == len(table.entries)


@pytest.mark.full
def test_the_tool_uses_the_ranks_of_torchrun(tmp_path: Path) -> None:
    file = tmp_path / "tuning.json"
    tune(
        *("--ops", "allreduce", "-b", "1K", "-e", "1K", "--seconds", "0.02", "--device", "cpu"),
        *("--output", str(file)),
        launcher=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"),
    )
    assert _tuning.read(file).world_size == 3


WRONG: dict[str, tuple[tuple[str, ...], str]] = {
    "operator": (("--ops", "allsum"), "--ops: got allsum; accepted: allreduce, "),
    "counted": (("--ops", "alltoallv"), "--ops: got alltoallv"),
    "no operator": (("--ops", ","), "--ops: got nothing"),
    "no dtype": (("--dtypes", ","), "--dtypes: got nothing"),
    "dtype": (("--dtypes", "float8"), "--dtypes: got float8"),
    "size": (("-b", "1Q"), "got '1Q'"),
    "order": (("-b", "2K", "-e", "1K"), "-e: the largest size is less"),
    "factor": (("-f", "1"), "got 1; accepted: numbers above 1"),
    "no number": (("-f", "x"), "got x; accepted: numbers above 1"),
    "seconds": (("--seconds", "0"), "got 0; accepted: numbers above 0"),
    "one rank": (("--ranks", "1"), "--ranks: got 1; accepted on cpu"),
    "many ranks": (("--ranks", "17"), "--ranks: got 17; accepted on cpu"),
    "no file": (("--output", "/tmp"), "--output: got /tmp, which cannot be written"),
    "picture": (("--plot", "x.xyz"), "--plot: got x.xyz; accepted: files .png, .svg, .pdf"),
    "folder": (("--output", "/nowhere/at/all.json"), "--output: there is no folder /nowhere/at"),
}


@pytest.mark.parametrize("what", WRONG)
def test_invalid_arguments_end_with_status_2(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, words = WRONG[what]
    with pytest.raises(SystemExit) as end:
        parse(["--device", "cpu", *arguments])
    assert end.value.code == 2
    assert words in capsys.readouterr().err


def test_the_help_and_the_version_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--help", "--version"):
        with pytest.raises(SystemExit) as end:
            commands.main([option])
        assert end.value.code == 0
    printed = capsys.readouterr().out
    assert printed.endswith(f"\ncollx {collx.__version__}\n")
    for name, (_, line) in commands.COMMANDS.items():
        assert re.search(rf"^  {name} +{line}$", printed, re.MULTILINE)


def test_an_unknown_command_ends_with_status_2() -> None:
    done = run(sys.executable, "-m", "collx", "bake", code=2, stderr=subprocess.PIPE)
    assert "usage: python -m collx" in done.stderr
    assert "invalid choice: 'bake'" in done.stderr


COMMAND = (sys.executable, "-m", "collx")


def test_a_closed_pipe_ends_a_command_without_a_traceback() -> None:
    closed, output = os.pipe()
    os.close(closed)
    measure = ("bench", "barrier", "--ranks", "1", "--device", "cpu", "--peers", "none")
    try:
        for arguments in (("doctor", "--ranks", "1", "--device", "cpu"), measure):
            done = subprocess.run(
                (*COMMAND, *arguments),
                stdout=output,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
            assert (done.returncode, done.stderr) == (1, ""), arguments
    finally:
        os.close(output)


def test_an_interrupt_ends_the_ranks_without_a_traceback() -> None:
    """As Ctrl-C in a terminal, which interrupts every process of the foreground group."""
    ranks = ("-g", "2", "--device", "cpu", "--peers", "none")
    with subprocess.Popen(
        # Background processes of a shell without job control, such as that of CI, ignore it.
        ("env", "--default-signal=INT", *COMMAND, "bench", "barrier", "allreduce", *ranks),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("barrier"):  # the ranks measure the next operator
                os.killpg(process.pid, signal.SIGINT)
                break
        _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert "Traceback" not in errors


def test_a_refused_variable_ends_the_ranks_without_a_traceback(tmp_path: Path) -> None:
    ranks = ("--ranks", "2", "--device", "cpu")
    for arguments in (("bench", "barrier"), ("tune", "--output", str(tmp_path / "tuning.json"))):
        done = run(*COMMAND, *arguments, *ranks, code=1, stderr=subprocess.PIPE, COLLX_CHECK="2")
        assert "ValueError: init: environment variable COLLX_CHECK: got '2'" in done.stderr
        assert "Traceback" not in done.stderr


def found(nbytes: int, choice: Choice = BUILT_IN, **changes: Any) -> Found:
    given = {"op": "allreduce", "dtype": torch.float32, "symmetric": False, **changes}
    case = Case(nbytes=nbytes, **given)
    return Found(case, "twoshot_push", 2.0, choice, 1.0)


def test_neighbors_with_the_same_choice_form_a_range() -> None:
    """The borders of a range are between sizes with different choices. Ranges do not overlap."""
    fast, slow = Choice("oneshot_push"), Choice("twoshot_pull", 8)
    made = entries(
        [
            *(found(nbytes=1 << 10, choice=fast), found(nbytes=1 << 12, choice=fast)),
            *(found(nbytes=1 << 14), found(nbytes=1 << 16, choice=slow)),
            found(nbytes=1 << 10, choice=fast, op="allgather"),
        ]
    )
    rows = [(e.op, e.dtype, e.from_bytes, e.to_bytes, e.algorithm, e.max_blocks) for e in made]
    assert rows == [
        ("allgather", None, 1 << 10, 1 << 10, "oneshot_push", 0),
        ("allreduce", "float32", 1 << 10, 1 << 13, "oneshot_push", 0),
        ("allreduce", "float32", (1 << 15) + 1, 1 << 16, "twoshot_pull", 8),
    ]
