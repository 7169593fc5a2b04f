"""Tests that C++ code creates communicators through the function that Python has registered."""

from __future__ import annotations

from pathlib import Path

import pytest

from collx._extension import library
from tests.common.commands import python

from .programs import compiled


def maker() -> Path:
    return compiled("makes_communicators.cpp", "-shared", "-fPIC", str(library))


LOADED = """
import torch
torch.ops.load_library({library!r})
torch.ops.load_library({maker!r})
make = torch.ops.makes_communicators.make
"""

WITH_PYTHON = """
import ctypes, threading
import torch.distributed as dist
import collx

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

assert make("0")
assert collx.get().name == "0"
x = torch.ones(4)
assert torch.equal(collx.allreduce(x), x)
collx.get().destroy()

thread = threading.Thread(target=lambda: make("0"))  # one that waits for Python's lock
thread.start()
thread.join()
assert collx.is_initialized()
try:
    make("0")
except ValueError as error:
    assert "exists already" in str(error), error
    print("refused")
collx.get().destroy()

with_lock = ctypes.PyDLL({maker!r}).make_with_lock
with_lock.restype = ctypes.c_bool
assert with_lock(b"0")
collx.get().destroy()

try:
    make("nowhere")
except ValueError as error:
    print(error)
"""

WITHOUT_PYTHON = """
import sys
try:
    make("0")
except RuntimeError as error:
    print(str(error).splitlines()[0])
assert "collx" not in sys.modules
"""


@pytest.mark.ahead(work=maker)
def test_cpp_makes_communicators_as_python_does(ahead: Path) -> None:
    """C++ also gets the errors of init. If collx was not imported in Python, the error says so."""
    files = {"library": str(library), "maker": str(ahead)}
    said = python((LOADED + WITH_PYTHON).format(**files)).splitlines()
    assert said == ["refused", "init: group: this process has no process group named 'nowhere'"]
    assert python((LOADED + WITHOUT_PYTHON).format(**files)).strip() == (
        'collx: a communicator for process group "0" cannot be created, since no factory is '
        "registered; import collx in Python first"
    )
