"""Tests that the code in the README runs unchanged."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.common.commands import ROOT, run
from tests.common.worlds import NEEDS_GPU, gpu_count

README = (ROOT / "README.md").read_text()

# Definitions that the two versions of the layer use.
BEFORE = """
import os
import torch
import torch.distributed as dist
import collx

device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
dist.init_process_group()
comm = collx.init(device=device, timeout=10)
torch.manual_seed(dist.get_rank())
attention, mlp = (torch.nn.Linear(256, 256, bias=False, device=device) for _ in range(2))
norm1, norm2 = (torch.nn.RMSNorm(256, eps=1e-6, device=device) for _ in range(2))
torch.manual_seed(1)
given = torch.randn(8, 256, device=device), torch.randn(8, 256, device=device)
torch.set_grad_enabled(False)
"""
BETWEEN = "before = layer(*given)\n"
AFTER = """
after = layer(*given)
for one, other in zip(before, after):
    assert one.shape == (8, 256)
    torch.testing.assert_close(one, other)
comm.destroy()
print("equal")
"""


def code() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def output_of(program: str, where: str, folder: Path) -> str:
    if where == "cuda" and gpu_count() < 2:
        pytest.skip(f"{NEEDS_GPU} for each rank")
    script = folder / "example.py"
    script.write_text(program)
    environment: dict[str, Any] = {"CUDA_VISIBLE_DEVICES": ""} if where == "cpu" else {}
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    command = (*torchrun, "--nproc-per-node", "2", script)
    return run(*command, limit=120, stderr=subprocess.PIPE, **environment).stdout


EVERYWHERE = pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])


@EVERYWHERE
def test_the_quick_start_runs(where: str, tmp_path: Path) -> None:
    example = code()[0]
    assert len(example.splitlines()) <= 12
    # The last line of the example shows that everything before it succeeded.
    assert output_of(example, where, tmp_path).count("allreduce of 32,768 x bfloat16") == 2


@EVERYWHERE
def test_the_layer_before_and_after_gives_the_same(where: str, tmp_path: Path) -> None:
    _, before, after = code()
    program = "".join([BEFORE, before, BETWEEN, after, AFTER])
    assert output_of(program, where, tmp_path).count("equal") == 2


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150
