"""The README's example runs as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.common.worlds import NEEDS_GPU, gpu_count

README = Path(__file__).resolve().parents[2] / "README.md"


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_the_example_of_the_readme_runs(where: str, tmp_path: Path) -> None:
    if where == "cuda" and gpu_count() < 2:
        pytest.skip(f"{NEEDS_GPU} for each rank")
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(code.splitlines()) <= 12
    script = tmp_path / "example.py"
    # The last line of the example shows that everything before it went well.
    script.write_text(code)
    environment = dict(os.environ)
    if where == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("allreduce of 32,768 x bfloat16") == 2, done.stdout
