"""Tests the instructions of the kernels that use NVLink multicast: for every dtype, they have the
right width, scope and order. The kernels that tests run have none of these instructions.

No test machine may use multicast, so these tests replace running the kernels. In machine code, a
store to a multicast address and an addition there are ordinary instructions, so that they are
checked in the PTX. Loads are checked in both."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.common.nvcc import KERNELS as FOLDER
from tests.common.nvcc import nvcc
from tools.kernel_resources import code

LOAD = "multimem.ld_reduce.relaxed.sys.global.add"
STORE = "multimem.st.relaxed.sys.global.v4.f32"
SIGNAL = "multimem.red.release.sys.global.add.u64"
# The loads of 16 bytes for each dtype in PTX and in machine code, and the number of loads.
LOADS = {
    "float32": (f"{LOAD}.v4.f32", "LDGMC.E.ADD.F32x4.RN.STRONG.SYS", 1),
    "float16": (f"{LOAD}.acc::f32.v4.f16x2", "LDGMC.E.F32ADD.F16x8.RN.STRONG.SYS", 1),
    "bfloat16": (f"{LOAD}.acc::f32.v4.bf16x2", "LDGMC.E.F32ADD.BF16x8.RN.STRONG.SYS", 1),
    "int32": (f"{LOAD}.u32", "LDGMC.E.ADD.32.STRONG.SYS", 4),
    "int64": (f"{LOAD}.u64", "LDGMC.E.ADD.64.STRONG.SYS", 2),
}
DTYPES = (
    "float32",
    "float16",
    "bfloat16",
    "float64",
    "int32",
    "int64",
    "int8",
    "uint8",
)  # in the order of types.h


class Template(NamedTuple):
    """A kernel's template arguments, and the number of its loads, stores and barriers."""

    arguments: str
    loads: int
    stores: int
    barriers: int
    dtypes: tuple[str, ...] = tuple(LOADS)


KERNELS = {
    "allreduce_multimem_oneshot": Template("Reduce<DType::{dtype}>, {by}", 1, 0, 3),
    "allreduce_multimem_twoshot": Template("Reduce<DType::{dtype}>, {by}", 1, 1, 4),
    "allreduce_multimem_gather": Template("Reduce<DType::{dtype}>, 2, {by}", 0, 1, 4, DTYPES),
    "reducescatter_multimem": Template("Reduce<DType::{dtype}>, {by}", 2, 0, 3),
    "allgather_multimem": Template("{by}", 0, 2, 3, ("uint8",)),
    "norm_multimem_twoshot": Template(
        "Normalized<DType::{dtype}>, {by}", 2, 1, 4, ("float32", "float16", "bfloat16")
    ),
}
EACH = [(name, dtype) for name, template in KERNELS.items() for dtype in template.dtypes]
each = pytest.mark.parametrize(("name", "dtype"), EACH)
MULTIMEM = re.compile(r"\b(multimem\.[\w.:]+)")
LOAD_IN_CODE = re.compile(r"\b(LDGMC[\w.]*)")
ENTRY = re.compile(r"\.entry (\w+)\(")


Listings = dict[str, list[str]]  # the lines of kernels, by their names


class Compiled(NamedTuple):
    ptx: Listings
    code: Listings


def written(folder: Path) -> Path:
    """Writes a source with the kernels, and returns its path."""
    source = folder / "multimem.cu"
    made = [
        f"reinterpret_cast<const void*>({name}_kernel<{KERNELS[name].arguments}>)".format(
            dtype=dtype, by=by
        )
        for name, dtype in EACH
        for by in ("Switch", "Simulated")
    ]
    includes = "".join(f'#include "{FOLDER}/{name}.cuh"\n' for name in KERNELS)
    table = f"const void* kernels[] = {{\n{','.join(made)}}};"
    source.write_text(f"{includes}namespace collx::cuda {{\n{table}\n}}\n")
    return source


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """Returns the listings of the kernels, which the assembler accepts without a warning."""
    folder = tmp_path_factory.mktemp("multimem")
    source = written(folder)
    nvcc(source, "90", "-cubin", "--keep", f"--keep-dir={folder}")
    listed = code(source.with_suffix(".cubin"))
    return Compiled(ptx_of(folder), {name: lines for (_, name), lines in listed.items()})


def ptx_of(folder: Path) -> Listings:
    found: Listings = {}
    lines: list[str] = []
    for line in (folder / "multimem.ptx").read_text().splitlines():
        if match := ENTRY.search(line):
            lines = found.setdefault(match[1], [])
        lines.append(line)
    return found


def of_kernel(found: Listings, name: str, dtype: str, switch: str) -> str:
    number = DTYPES.index(dtype)
    (lines,) = (
        lines
        for mangled, lines in found.items()
        if f"{name}_kernel" in mangled
        and switch in mangled
        and (f"DTypeE{number}E" in mangled or "DTypeE" not in mangled)
    )
    return "\n".join(lines)


@each
def test_ptx_has_the_right_instructions(compiled: Compiled, name: str, dtype: str) -> None:
    assert len(compiled.ptx) == 2 * len(EACH)
    text = of_kernel(compiled.ptx, name, dtype, "Switch")
    used = Counter(MULTIMEM.findall(text))
    template = KERNELS[name]
    barriers = used.pop(SIGNAL)
    assert used.pop(STORE, 0) == template.stores
    if template.loads:
        load, _, count = LOADS[dtype]
        assert used.pop(load) == template.loads * count
    assert not used
    # Each barrier is followed by a fence between the different addresses of the same memory.
    assert barriers == text.count("fence.proxy.alias;") == template.barriers
    # Partial vectors are loaded element by element from the addresses of each rank.
    assert "ld.volatile.global" in text


@each
def test_machine_code_has_the_right_loads(compiled: Compiled, name: str, dtype: str) -> None:
    used = Counter(LOAD_IN_CODE.findall(of_kernel(compiled.code, name, dtype, "Switch")))
    if not KERNELS[name].loads:
        assert not used
        return
    _, load, count = LOADS[dtype]
    assert used == {load: KERNELS[name].loads * count}


@each
def test_what_tests_run_has_none_of_them(compiled: Compiled, name: str, dtype: str) -> None:
    text = of_kernel(compiled.ptx, name, dtype, "Simulated")
    assert "multimem." not in text
    assert "fence.proxy" not in text
    assert text.count("red.release.sys.global.add.u64") == KERNELS[name].barriers


@pytest.mark.parametrize(("architecture", "have"), [("80", False), ("90", True)])
def test_older_gpus_get_none_of_them(architecture: str, have: bool, tmp_path: Path) -> None:
    """Optimizations do not matter here and are disabled, because they take most of the time."""
    nvcc(written(tmp_path), architecture, "-ptx", "--Ofast-compile=max")
    found = ptx_of(tmp_path)
    assert len(found) == 2 * len(EACH)
    assert any("multimem." in line for lines in found.values() for line in lines) == have
