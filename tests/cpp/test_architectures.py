"""Tests that kernels for GPUs before compute capability 9.0 use neither clusters nor dependent
launch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.common.nvcc import KERNELS, nvcc

HOPPER = re.compile(r"griddepcontrol|\bcluster\b|::cluster|mapa|mbarrier|st\.async")
# One instance of each kernel, because compiling a whole file takes a minute.
INSTANCES = {
    "allreduce_oneshot_push": "allreduce_oneshot_push_kernel<Reduce<DType::bfloat16>, 2, true>",
    "norm_oneshot_push": "norm_oneshot_push_kernel<Normalized<DType::bfloat16>, 2, true>",
}


def compiled(name: str, architecture: str, folder: Path) -> str:
    """Returns the PTX of one kernel, which the assembler accepts for that GPU without a warning."""
    source = folder / f"{name}.cu"
    source.write_text(
        f'#include "{KERNELS}/{name}.cuh"\n'
        "namespace collx::cuda {\nconst void* kernel() {\n"
        f"  return reinterpret_cast<const void*>({INSTANCES[name]});\n}}\n}}\n"
    )
    nvcc(source, architecture, "-cubin", "--keep", f"--keep-dir={folder}")
    assert (folder / f"{name}.cubin").stat().st_size > 0
    return (folder / f"{name}.ptx").read_text()


@pytest.mark.parametrize("name", INSTANCES)
def test_older_gpus_get_no_instruction_of_newer_ones(name: str, tmp_path: Path) -> None:
    ptx = compiled(name, "80", tmp_path)
    assert ".entry" in ptx
    assert not HOPPER.search(ptx)


def test_newer_gpus_get_them(tmp_path: Path) -> None:
    """Control: the pattern finds the instructions."""
    found = set(HOPPER.findall(compiled("norm_oneshot_push", "90", tmp_path)))
    assert {"griddepcontrol", "mbarrier", "st.async"} <= found
