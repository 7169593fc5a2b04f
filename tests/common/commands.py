"""Runs commands and Python programs in separate processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def run(
    *command: str | Path,
    where: Path = ROOT,
    code: int = 0,
    limit: int = 300,
    stderr: int = subprocess.STDOUT,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Runs a command for at most `limit` seconds. Its exit status must be `code`. `stdout` contains
    both of its streams, unless `stderr` is subprocess.PIPE."""
    done = subprocess.run(
        command,
        cwd=where,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        check=False,
        timeout=limit,
    )
    printed = done.stdout + (done.stderr or "")
    assert done.returncode == code, f"{command} ended with {done.returncode}\n{printed}"
    return done


def python(program: str, *, path: Path | None = None, code: int = 0, **environment: Any) -> str:
    """Returns the output of a Python program. `path`: the folder with its collx; the default is
    this checkout."""
    source = ROOT / "python" if path is None else path
    environment["PYTHONPATH"] = str(source)
    return run(sys.executable, "-c", program, where=source, code=code, **environment).stdout
