"""Compiles at run time, as for epilogues, without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "csrc"


def compile_at_run_time(
    nvrtc: Any, source: str, *folders: Path, kernel: str = "", architecture: str = "sm_90"
) -> str:
    """Compiles `source` and an instance of a kernel's template with NVRTC. Returns the messages of
    NVRTC, "" on success. `nvrtc`: its bindings. `folders`: include paths. For an architecture
    without machine code, such as "compute_90", the code is not optimized."""
    options = [f"-arch={architecture}", "-std=c++20", "-fmad=false", "-default-device"]
    options += [f"-I{folder}" for folder in folders]
    options += ["--Ofast-compile=max"] if architecture.startswith("compute_") else []
    error, program = nvrtc.nvrtcCreateProgram(source.encode(), b"test.cu", 0, [], [])
    assert error == nvrtc.nvrtcResult.NVRTC_SUCCESS
    if kernel:
        nvrtc.nvrtcAddNameExpression(program, kernel.encode())
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    if error == nvrtc.nvrtcResult.NVRTC_SUCCESS:
        if kernel:
            error, name = nvrtc.nvrtcGetLoweredName(program, kernel.encode())
            assert error == nvrtc.nvrtcResult.NVRTC_SUCCESS
            assert name
        return ""
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = b" " * size
    nvrtc.nvrtcGetProgramLog(program, log)
    return log.decode() or str(error)
