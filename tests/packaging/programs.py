"""Runs the Python and C++ programs of these tests in separate processes."""

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
    """Runs a command for at most `limit` seconds. Its exit status must be `code`."""
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
    """Returns the output of a Python program. `path`: the folder with its collx; the default is
    this checkout."""
    source = ROOT / "python" if path is None else path
    environment["PYTHONPATH"] = str(source)
    command = (sys.executable, "-c", program)
    return run(*command, where=source, code=code, limit=300, **environment).stdout


def compiled(source: str, *options: str) -> Path:
    """Compiles a C++ source of this folder and links it to LibTorch, without Python. Returns the
    program."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    target = ROOT / "build" / TORCH / "programs" / Path(source).stem
    target.parent.mkdir(parents=True, exist_ok=True)
    libraries = cpp_extension.library_paths()
    command = [compiler, "-std=c++20", "-O0", str(HERE / source), "-o", str(target)]
    command += [o for path in cpp_extension.include_paths() for o in ("-isystem", path)]
    command += [o for path in libraries for o in (f"-L{path}", f"-Wl,-rpath,{path}")]
    # Links all of PyTorch, like a program that runs a model, so that the library finds its symbols.
    command += ["-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10", "-ldl", *options]
    done = quietly(command)
    assert done.returncode == 0, done.stdout
    return target
