"""Tests that inconsistent table rows do not compile, and that the message states the error."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "csrc"
TABLES = "protocol/selection.h"


@dataclass(frozen=True)
class Rows:
    """Table rows, the file that must refuse them, and a part of the compiler's message, which is
    empty for consistent rows."""

    name: str
    text: str
    file: str = TABLES
    says: str = ""


STAR = (HERE / "star_rows.h").read_text()
ROWS = (
    Rows("an algorithm more", STAR),
    Rows("its body", STAR, "cpu/allreduce.cpp"),
    Rows("a collective more", (HERE / "everyone_rows.h").read_text()),
    Rows(
        "an algorithm of a name that there is",
        STAR.replace('"star"', '"oneshot_pull"'),
        says="is_table(kAlgorithms",
    ),
    Rows(
        "a collective of a name that there is",
        '#define COLLX_EXTRA_COLLECTIVES {.collective = Collective::count, .name = "gather"},',
        says="is_table(kCollectives",
    ),
    Rows(
        "an algorithm that is not at its value",
        STAR.replace("Algorithm::count", "Algorithm::direct"),
        says="is_table(kAlgorithms",
    ),
    Rows(
        "an algorithm without a body",
        STAR.replace("#define COLLX_EXTRA_CPU_ALLREDUCE", "#define NOTHING"),
        "cpu/allreduce.cpp",
        "are_complete(kBodies",
    ),
    Rows(
        "a selection of what the CPU lacks",
        "#define COLLX_EXTRA_SELECTION "
        "{only(staged), kReduce, cpu, all, 16, kAnySize, reduce_twostage},",
        says="names_what_there_is",
    ),
    Rows(
        "a selection of what the collective lacks",
        "#define COLLX_EXTRA_SELECTION {kAuto, kReduce, cpu, all, 16, kAnySize, pipelined},",
        says="names_what_there_is",
    ),
)


def said_by(compiler: Sequence[str], csrc: Path, file: str, text: str, where: Path) -> str:
    """Returns a compiler's output for a file with these rows, "" if it compiles."""
    rows = where / "rows.h"
    rows.write_text(text)
    command = [*compiler, "-std=c++20", "-I", str(csrc), "-include", str(rows)]
    done = subprocess.run(
        [*command, str(csrc / file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        cwd=where,
    )
    return done.stdout if done.returncode else ""


@pytest.fixture
def host() -> Sequence[str]:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    return ["g++", "-x", "c++", "-fsyntax-only"]


@pytest.mark.parametrize("rows", ROWS, ids=lambda rows: rows.name.replace(" ", "-"))
def test_rows_fit_or_do_not_compile(rows: Rows, host: Sequence[str], tmp_path: Path) -> None:
    said = said_by(host, CSRC, rows.file, rows.text, tmp_path)
    if rows.says:
        assert "static assertion failed" in said, said
        assert rows.says in said, said
    else:
        assert not said


def test_an_algorithm_without_a_kernel_does_not_compile(tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        pytest.skip("nvcc is not installed")
    said = said_by([nvcc, "-c", "-o", "allreduce.o"], CSRC, "cuda/allreduce.cu", STAR, tmp_path)
    assert "is_complete(DeviceKind::cuda" in said, said


def test_a_dtype_without_row_or_arithmetic_does_not_compile(
    host: Sequence[str], tmp_path: Path
) -> None:
    csrc = tmp_path / "csrc"
    shutil.copytree(CSRC, csrc)
    types = csrc / "protocol" / "types.h"
    bare = types.read_text().replace("  uint8,\n  count", "  uint8,\n  float8,\n  count")
    types.write_text(bare)
    assert "sizeof(kDTypes)" in said_by(host, csrc, TABLES, "", tmp_path)
    last = '{DType::uint8, "uint8", 1, true},'
    types.write_text(bare.replace(last, last + ' {DType::float8, "float8", 1, false},'))
    assert not said_by(host, csrc, TABLES, "", tmp_path)
    said = said_by(host, csrc, "cpu/simd/reduce_portable.cpp", "", tmp_path)
    assert "FormatOf" in said, said
    assert "float8" in said, said
