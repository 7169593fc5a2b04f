"""The examples run to their end, where their own checks pass."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(program: str, *arguments: str) -> str:
    """What the example prints on two ranks of the CPU."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", str(ROOT / "examples" / program), *arguments],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_split_llama_chooses_the_tokens_of_the_unsplit_one(dtype: str) -> None:
    sizes = {
        "layers": 2,
        "hidden-size": 96,
        "intermediate-size": 130,
        "heads": 6,
        "kv-heads": 3,  # two on one rank, one on the other
        "vocabulary": 200,
        "batch-size": 2,
        "prompt": 5,
        "tokens": 8,
        "rounds": 1,
    }
    options = [f"--{name}={value}" for name, value in sizes.items()]
    printed = run("tensor_parallel_llama.py", "--device=cpu", f"--dtype={dtype}", *options)
    assert re.findall(r"^  (ok|WRONG) ", printed, re.MULTILINE) == ["ok", "ok"]
    for name in ("collx, fused", "collx, unfused", "gloo, unfused"):
        assert re.search(rf"^  {name} +\d+$", printed, re.MULTILINE), printed
