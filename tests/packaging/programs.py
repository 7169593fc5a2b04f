"""Programs of these tests: Python and C++ processes of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from tests.common.ahead import quietly

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TORCH = ".".join(torch.__version__.split(".")[:2])


def run(
    *command: str | Path, where: Path = ROOT, code: int = 0, limit: int = 300, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs it to its end, which has to be `code`, for `limit` seconds at most."""
    done = subprocess.run(
        command,
        cwd=where,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=limit,
    )
    assert done.returncode == code, f"{command} ended with {done.returncode}\n{done.stdout}"
    return done


def python(program: str, *, path: Path | None = None, code: int = 0, **environment: str) -> str:
    """What a Python program says; `path` is where it finds collx, if not where we do."""
    source = ROOT / "python" if path is None else path
    environment["PYTHONPATH"] = str(source)
    command = (sys.executable, "-c", program)
    return run(*command, where=source, code=code, limit=300, **environment).stdout


def compiled(source: str, *options: str) -> Path:
    """A C++ source of this folder, compiled and linked to LibTorch, without Python."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    target = ROOT / "build" / TORCH / "programs" / Path(source).stem
    target.parent.mkdir(parents=True, exist_ok=True)
    libraries = cpp_extension.library_paths()
    command = [compiler, "-std=c++20", "-O0", str(HERE / source), "-o", str(target)]
    command += [o for path in cpp_extension.include_paths() for o in ("-isystem", path)]
    command += [o for path in libraries for o in (f"-L{path}", f"-Wl,-rpath,{path}")]
    # All of PyTorch, as in a program that runs a model: what the library needs is there.
    command += ["-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10", "-ldl", *options]
    done = quietly(command)
    assert done.returncode == 0, done.stdout
    return target
