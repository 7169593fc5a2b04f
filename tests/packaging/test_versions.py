"""Tests a build, an import and an all-reduce of two ranks with other versions of Python and
PyTorch."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.common.commands import ROOT, run

PROGRAM = """
import torch, torch.distributed as dist, collx

dist.init_process_group("gloo")
with collx.init(device="cpu", timeout=30) as comm:
    x = torch.full((1000,), dist.get_rank() + 1.0)
    assert (collx.allreduce(x) == 3.0).all()
print("summed", torch.__version__, flush=True)
dist.destroy_process_group()
"""


def interpreter(version: str) -> str:
    """Returns a working interpreter of a version, from PATH or beside the current interpreter."""
    beside = Path(sys.base_prefix).parent.glob(f"{version}.*/bin/python")
    named = shutil.which(f"python{version}")
    for found in [*([named] if named else []), *map(str, beside)]:
        if subprocess.run([found, "--version"], capture_output=True, check=False).returncode == 0:
            return found
    pytest.skip(f"Python {version} is not installed")


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("python", "torch"),
    [
        *[("3.10", "2.11"), ("3.13", "2.11"), ("3.12", "2.12")],
        *[("3.12", "2.13"), ("3.12", "2.14"), ("3.12", "2.15")],
    ],
)
def test_two_ranks_add_up(python: str, torch: str, tmp_path: Path) -> None:
    found = interpreter(python)
    tree = tmp_path / "collx"
    for name in run("git", "ls-files").stdout.split("\n"):
        if name and (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    given = [f"PYTHON={found}", f"TORCH={torch}", "COLLX_CUDA=0", "COLLX_UNITY=0"]
    run("make", *given, "build", where=tree, limit=1200)
    (tree / "program.py").write_text(PROGRAM)
    venv = tree / (".venv" if torch == "2.11" else f".venv-{torch}")
    torchrun: list[str | Path] = [
        venv / "bin" / "torchrun",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    said = run(*torchrun, "program.py", where=tree, PYTHONPATH=str(tree / "python")).stdout
    assert said.count(f"summed {torch}.") == 2
