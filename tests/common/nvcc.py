"""Compiles kernels as the build does, without requiring a GPU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from torch.utils import cpp_extension

KERNELS = Path(__file__).resolve().parents[2] / "csrc" / "cuda" / "collectives"


def compiler() -> str:
    """Returns the path of nvcc. Skips the test if it is not installed."""
    home = cpp_extension.CUDA_HOME
    found = shutil.which("nvcc", path=f"{home}/bin" if home else None)
    if found is None:
        pytest.skip("nvcc is not installed")
    return found


def nvcc(source: Path, architecture: str, *options: str) -> None:
    """Compiles `source` to a .ptx (-ptx) or .cubin file in the same folder, with warnings as
    errors. Skips the test if there is no compiler."""
    out = source.with_suffix(".ptx" if "-ptx" in options else ".cubin")
    flags = ["-std=c++20", "-O3", "--fmad=false", "--expt-relaxed-constexpr"]
    flags += ["-Werror=all-warnings", f"-arch=sm_{architecture}", *options]
    done = subprocess.run(
        [compiler(), *flags, "-o", str(out), str(source)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
