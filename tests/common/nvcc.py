"""Compiling kernels as the build does, for GPUs that need not be there."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from torch.utils import cpp_extension

KERNELS = Path(__file__).resolve().parents[2] / "csrc" / "cuda" / "collectives"


def compiler() -> str:
    """The path of nvcc; skips the test where there is none."""
    home = cpp_extension.CUDA_HOME
    found = shutil.which("nvcc", path=f"{home}/bin" if home else None)
    if found is None:
        pytest.skip("nvcc is not installed")
    return found


def nvcc(source: Path, architecture: str, *options: str) -> None:
    """Makes a .ptx (-ptx) or a .cubin of `source` beside it, without a warning; skips the test
    where there is no compiler."""
    out = source.with_suffix(".ptx" if "-ptx" in options else ".cubin")
    flags = ["-std=c++20", "-O3", "--fmad=false", "--expt-relaxed-constexpr"]
    flags += ["-Werror=all-warnings", f"-arch=sm_{architecture}", *options]
    done = subprocess.run(
        [compiler(), *flags, "-o", str(out), str(source)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
