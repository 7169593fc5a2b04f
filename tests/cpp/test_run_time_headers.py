"""Kernel headers compile at run time too (NVRTC), where no standard header is to be had."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="PyTorch was built without CUDA")

ROOT = Path(__file__).resolve().parents[2]
HEADERS = sorted((ROOT / "csrc" / "cuda").rglob("*.cuh"))
CUDA_HEADERS = Path(torch.__file__).resolve().parents[1] / "nvidia" / "cu13" / "include"


def compile_at_run_time(source: str, folder: Path) -> str:
    """What NVRTC says of `source` for a GPU of generation 9.0: nothing when it compiles."""
    options = ["-arch=sm_90", "-std=c++20", "-fmad=false", "-default-device"]
    options += [f"-I{folder}", f"-I{CUDA_HEADERS}"]
    error, program = nvrtc.nvrtcCreateProgram(source.encode(), b"test.cu", 0, [], [])
    assert error == nvrtc.nvrtcResult.NVRTC_SUCCESS
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    if error == nvrtc.nvrtcResult.NVRTC_SUCCESS:
        return ""
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = b" " * size
    nvrtc.nvrtcGetProgramLog(program, log)
    return log.decode() or str(error)


@pytest.mark.parametrize("header", HEADERS, ids=lambda path: path.stem)
def test_kernel_header_compiles_at_run_time(header: Path) -> None:
    said = compile_at_run_time(f'#include "{header.name}"\n', header.parent)
    assert not said, said


def test_a_header_that_needs_the_standard_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.cuh").write_text("#include <vector>\n")
    assert "vector" in compile_at_run_time('#include "bad.cuh"\n', tmp_path)


def test_there_are_kernel_headers() -> None:
    assert HEADERS
