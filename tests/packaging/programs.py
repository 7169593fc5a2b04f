"""Compiles the C++ programs of these tests."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from tests.common.ahead import quietly
from tests.common.commands import ROOT

HERE = Path(__file__).resolve().parent
TORCH = ".".join(torch.__version__.split(".")[:2])


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
