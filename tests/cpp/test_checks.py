"""Tests that tools/check_includes.py accepts the source tree and refuses each violation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS = (
    ("ptx", ""),
    ("arguments", "ptx"),
    ("stages", "arguments"),
    ("transports", "stages"),
    ("collectives", "transports"),
)


def check(csrc: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "check_includes.py"), str(csrc)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def write(csrc: Path, name: str, text: str) -> None:
    path = csrc / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Returns a small tree that follows the rules."""
    guarded = "#if defined(__CUDACC_RTC__)\n#else\n#include <cstdint>\n#endif\n"
    write(tmp_path, "protocol/types.h", guarded)
    write(tmp_path, "cuda/kernel.cuh", '#include <cuda_fp16.h>\n#include "../protocol/types.h"\n')
    for layer, below in LAYERS:
        include = f'#include "../{below}/a.cuh"\n' if below else ""
        write(tmp_path, f"cuda/{layer}/a.cuh", include + '#include "../../protocol/types.h"\n')
    write(tmp_path, "cuda/launch.h", '#include "ptx/a.cuh"\n#include "collectives/a.cuh"\n')
    write(tmp_path, "cpu/kernel.h", '#include <atomic>\n#include "../protocol/types.h"\n')
    write(tmp_path, "ops/op.cpp", '#include <ATen/ATen.h>\n#include "../cpu/kernel.h"\n')
    return tmp_path


def test_the_tree_keeps_the_rules() -> None:
    done = check(ROOT / "csrc")
    assert done.returncode == 0, done.stdout


def test_a_tree_that_keeps_the_rules_is_accepted(tree: Path) -> None:
    done = check(tree)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("name", "include", "complaint"),
    [
        ("protocol/bad.h", '"../cpu/kernel.h"', "protocol must not include"),
        ("cpu/bad.h", '"../cuda/kernel.cuh"', "cpu must not include"),
        ("cuda/bad.cu", '"../cpu/kernel.h"', "cuda must not include"),
        ("cuda/bad.cu", "<torch/torch.h>", "it knows no Torch"),
        ("cpu/bad.cpp", "<c10/util/Exception.h>", "it knows no Torch"),
        ("cpu/bad.cpp", "<cuda_runtime.h>", "it knows no CUDA"),
        ("cuda/bad.cuh", "<type_traits>", "is not there at run time"),
        ("cuda/bad.cuh", '"../protocol/missing.h"', "is not there"),
        ("elsewhere/bad.h", "<vector>", "is no part of the tree"),
        ("cuda/elsewhere/bad.h", '"../ptx/a.cuh"', "cuda/elsewhere is no part of the tree"),
        ("cuda/ptx/bad.cuh", '"../arguments/a.cuh"', "ptx must not include"),
        ("cuda/arguments/bad.cuh", '"../stages/a.cuh"', "arguments must not include"),
        ("cuda/stages/bad.cuh", '"../transports/a.cuh"', "stages must not include"),
        ("cuda/transports/bad.cuh", '"../collectives/a.cuh"', "transports must not include"),
        ("cuda/collectives/bad.cu", '"../launch.h"', "collectives must not include"),
    ],
)
def test_what_breaks_the_rules_is_named(
    tree: Path, name: str, include: str, complaint: str
) -> None:
    write(tree, name, f"#include {include}\n")
    done = check(tree)
    assert done.returncode == 1
    assert complaint in done.stdout
    assert Path(name).name in done.stdout


def test_a_standard_header_that_a_kernel_header_reaches_is_named(tree: Path) -> None:
    write(tree, "protocol/names.h", "#include <array>\n")
    write(tree, "cuda/far.cuh", '#include "../protocol/names.h"\n')
    done = check(tree)
    assert done.returncode == 1
    assert "<array>" in done.stdout
