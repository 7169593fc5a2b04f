"""Tests that the operator library loads without Python, and that the extension module links to
it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from collx._extension import extension, library
from tests.common.commands import python, run

from .programs import compiled

REFUSAL = (
    'collx.allreduce: group_name: this process has no communicator "model"; existing: none. '
    "collx.init creates communicators, and destroy removes them"
)


def dynamic_section(file: str | Path) -> str:
    if shutil.which("readelf") is None:
        pytest.skip("readelf is not installed")
    return run("readelf", "--dynamic", "--wide", file).stdout


def test_the_library_needs_no_python() -> None:
    needed = dynamic_section(library)
    assert "libtorch_cpu.so" in needed
    assert "python" not in needed


def test_the_module_finds_the_library_beside_itself() -> None:
    section = dynamic_section(extension.__file__)
    assert "[libcollx.so]" in section
    assert "[$ORIGIN]" in section
    assert "libtorch_python.so" in section


@pytest.mark.ahead(work=lambda: compiled("without_python.cpp"))
def test_a_cpp_process_calls_an_operator_and_is_refused_by_name(ahead: Path) -> None:
    assert run(ahead, library).stdout.splitlines() == [REFUSAL, "without Python"]


def test_load_library_alone_has_the_operators(tmp_path: Path) -> None:
    program = f"""
import sys, torch
torch.ops.load_library({str(library)!r})
assert torch.ops.collx.allreduce.default(
    torch.ones(4, device="meta"), "sum", "model").shape == (4,)
try:
    torch.ops.collx.allreduce(torch.ones(4), "sum", "model")
except ValueError as error:
    print(error)
assert "collx" not in sys.modules
"""
    assert python(program, path=tmp_path).strip() == REFUSAL


def test_collx_is_imported_after_its_library_was_loaded() -> None:
    program = f"""
import torch
torch.ops.load_library({str(library)!r})
import collx
print(collx.is_initialized())
"""
    assert python(program).strip() == "False"


END_OF_INTERPRETER = """
import threading, time
import torch.distributed as dist, torch.distributed._symmetric_memory as symm_mem
import torch, collx

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
tensor = symm_mem.empty(4, device=torch.device("cpu"))
handle = symm_mem.rendezvous(tensor, dist.group.WORLD)

class Slow:  # holds the interpreter's end up until the wait below is over
    def __del__(self, sleep=time.sleep):
        sleep(2)

slow = Slow()
wait = lambda: handle.wait_signal(0, 0, 1000)
threading.Thread(target=wait, daemon=True).start()
print("main has ended", flush=True)
"""


def test_a_wait_that_outlasts_the_interpreter_does_not_end_the_process_badly() -> None:
    # Before Python 3.14, the thread is unwound when it requests the GIL. A destructor did that.
    assert python(END_OF_INTERPRETER).strip() == "main has ended"
