"""The benchmark and its tools run to their end, and what they write can be read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
COLLECTIVES = (
    *("allreduce", "reducescatter", "allgather", "broadcast", "reduce"),
    *("gather", "scatter", "alltoall", "alltoallv", "barrier"),
)
NORM = "allreduce_residual_rmsnorm"
NORMS = (NORM, f"{NORM}_fp8", f"{NORM}_fp8_static")
ROUNDINGS = ("fp32", "parity_weight")
SIZES = (1024, 65536)
ROWS = (1, 3)

pytestmark = pytest.mark.skipif(find_spec("tqdm") is None, reason="tqdm is not installed")


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What a run of all operators prints, and the file that it writes."""
    file = tmp_path_factory.mktemp("bench") / "out.json"
    printed = run(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        str(BENCHMARKS / "bench.py"),
        *(*COLLECTIVES, *NORMS, "--device=cpu", "--dtype=bfloat16", "--peers=all"),
        *("--sizes=1K,64K", "--rows=1,3", "--cols=64", f"--rounding={','.join(ROUNDINGS)}"),
        *("-n=2", "-w=1", "--host-time", f"--json={file}"),
    )
    return printed, file


def records_of(file: Path) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = json.loads(file.read_text())
    return records


def test_every_operator_is_measured_beside_its_peers(bench: tuple[str, Path]) -> None:
    printed, file = bench
    records = [r for r in records_of(file) if not r["op"].endswith("_host_time")]
    assert all(r["correct"] and r["us"] > 0 and r["world"] == 2 for r in records), printed
    found = {(r["op"], r["impl"], r["rows"] or r["bytes"], r["rounding"]) for r in records}
    for impl in ("collx", "gloo"):
        for op in COLLECTIVES:
            for nbytes in SIZES if op != "barrier" else (0,):
                assert (op, impl, nbytes, None) in found, (op, impl, nbytes)
        for op in NORMS:
            for rows in ROWS:
                assert {(op, impl, rows, rounding) for rounding in ROUNDINGS} <= found
    [init] = [r for r in records if r["op"] == "init"]
    assert init["us"] < 60e6


def test_a_peer_that_is_not_installed_is_left_out_by_name(bench: tuple[str, Path]) -> None:
    printed, file = bench
    there = find_spec("vllm") is not None
    assert ("vllm-shm" in {r["impl"] for r in records_of(file)}) == there
    assert ("vllm-shm left out: rank 0: ModuleNotFoundError" in printed) != there


def test_host_times_name_the_form_of_every_call(bench: tuple[str, Path]) -> None:
    _, file = bench
    forms: dict[tuple[str, str], set[str]] = {}
    for r in records_of(file):
        if r["op"].endswith("_host_time"):
            assert r["us_min"] <= r["us"] <= r["us_max"]
            forms.setdefault((r["op"], r["impl"]), set()).add(r["form"])
    outs = {
        f"{kind}, {form}" for kind in ("operator", "function") for form in ("out", "functional")
    }
    places = {"operator, in place", "function, in place"}
    for op in ("allreduce", "broadcast", "reduce"):
        assert forms[f"{op}_host_time", "collx"] == outs | places
    for op in ("allgather", "alltoallv", *NORMS):
        assert forms[f"{op}_host_time", "collx"] == outs
    assert forms["allreduce_host_time", "gloo"] == {"function of torch.distributed"}


def test_markdown_fills_the_tables_of_a_document(bench: tuple[str, Path], tmp_path: Path) -> None:
    _, file = bench
    tool = str(BENCHMARKS / "markdown.py")
    titles = [
        line.removeprefix("### ") for line in run(tool, str(file)).splitlines() if "###" in line
    ]
    title = "allreduce, 2 ranks, cpu, bfloat16"
    assert {title, f"{NORM}, 2 ranks, cpu, bfloat16, parity_weight"} <= set(titles)
    document = tmp_path / "document.md"
    other = "<!-- table: allreduce, 9 ranks, cpu, bfloat16 -->\nold\n<!-- end -->\n"
    document.write_text(
        f"before\n<!-- table: {title} -->\nold\n<!-- end -->\n{other}"
        f"<!-- table: allgather, 2 ranks, cpu, bfloat16, brief -->\nold\n<!-- end -->\n"
    )
    printed = run(tool, str(file), "--into", str(document))
    assert f"no place for: {title}" not in printed
    assert "no place for: barrier" in printed
    text = document.read_text()
    assert other in text
    assert text.count("old") == 1
    assert "\n| bytes | collx | gloo | memcpy |" in text
    brief = text[text.index("allgather, 2 ranks") :]
    head, _, *lines = [line for line in brief.splitlines() if line.startswith("|")]
    assert head == (
        "| bytes | collx | collx-symmetric | algorithm | best peer | which | x best peer |"
    )
    assert [line.split(" | ")[0] for line in lines] == ["| 1 Ki", "| 64 Ki"]
    assert "Beside it ran gloo" in brief


def test_turns_compares_two_builds(tmp_path: Path) -> None:
    """Here, the same one twice."""
    import collx

    build = str(Path(collx.__file__).parents[1])
    printed = run(
        *(str(BENCHMARKS / "turns.py"), build, build, "--device=cpu", "--turns=1"),
        *("--sizes=1K", "--rows=1"),
    )
    lines = printed.splitlines()
    assert sum("MiB compiled" in line for line in lines) == 2
    cells = {tuple(line.split()[:2]) for line in lines}
    assert {(op, "collx") for op in (*COLLECTIVES, NORM, "init")} <= cells


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_plot_draws_one_picture_an_operator(tmp_path: Path) -> None:
    run(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *(str(BENCHMARKS / "bench.py"), "allreduce", "allgather", "--device=cpu"),
        *("--sizes=1K", "-n=1", "-w=1", "--peers=gloo", f"--plot={tmp_path / 'time.png'}"),
    )
    pictures = sorted(file.name for file in tmp_path.iterdir())
    assert pictures == ["time-allgather.png", "time-allreduce.png"]
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in pictures)
