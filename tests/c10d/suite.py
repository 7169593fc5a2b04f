"""Runs PyTorch's own tests of a distributed backend on "collx".

The tests are part of the wheel: torch.testing._internal.distributed.distributed_test. Each of them
starts its ranks and joins them. Here a process that has imported the tests forks the ranks, because
the import takes longer than most tests.
"""

from __future__ import annotations

import ast
import importlib.util
import multiprocessing
import os
import sys
import unittest
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch

from tests.common.pool import forking
from tests.common.rank import redirect_output
from tests.common.worlds import World, rank_environment

RANKS = 4  # some tests need exactly four
SECONDS = 90  # for a test; PyTorch has 300
SOURCE = (
    Path(torch.__file__).parent / "testing" / "_internal" / "distributed" / "distributed_test.py"
)


@cache
def _tests() -> list[ast.FunctionDef]:
    """Returns the definitions of the tests. Reading the source is faster than importing it."""
    tree = ast.parse(SOURCE.read_text())
    (base,) = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name == "_DistTestBase"
    )
    return [
        node
        for node in base.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]


def names() -> list[str]:
    return [test.name for test in _tests()]


def needing_gpus() -> list[str]:
    """Returns the names of the tests that PyTorch skips without a GPU for each rank."""
    skips = ("skip_if_lt_x_gpu", "skip_if_no_gpu")
    return [
        test.name
        for test in _tests()
        if any(ast.unparse(decorator).startswith(skips) for decorator in test.decorator_list)
    ]


class _Name(str):
    """The name "collx", which is equal to the names of PyTorch's CPU backends. PyTorch's tests are
    selected by conditions on BACKEND that only contain PyTorch's own backends."""

    def __eq__(self, value: object) -> bool:
        return value in ("collx", "gloo", "mpi")

    def __ne__(self, value: object) -> bool:
        return not self == value

    def __hash__(self) -> int:
        return hash("gloo")  # for conditions of the form BACKEND in {...}


@dataclass(frozen=True)
class Outcome:
    result: str  # "passed", "skipped" or "failed"
    text: str = ""


def _module() -> ModuleType:
    from torch.testing._internal import common_distributed

    import collx.backend  # noqa: F401

    common_distributed.TIMEOUT_DEFAULT = SECONDS
    os.environ.update(rank_environment(World("cpu", RANKS)), CUDA_VISIBLE_DEVICES="")
    os.environ.update(WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1")
    # With any other value, tests of subgroups are skipped for fewer than 8 ranks.
    os.environ["BACKEND"] = "mpi"
    spec = importlib.util.spec_from_file_location("collx_distributed_test", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # tests pickle its classes
    name = _Name("collx")
    common_distributed.DistTestCases.backend_feature["plugin"].add("collx")
    with mock.patch.object(os, "environ", {**os.environ, "BACKEND": name}):
        spec.loader.exec_module(module)
    module.PROFILING_SUPPORTED_BACKENDS.append(name)
    # The inner group records these events under its own name.
    module.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.clear()
    return module


def _case(module: ModuleType) -> type[unittest.TestCase]:
    class Case(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[name-defined]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

    Case.setUpClass()
    return Case


def _serve(connection: Connection, log: str) -> None:
    redirect_output(log)
    case = _case(_module())
    while True:
        try:
            name = connection.recv()
        except EOFError:
            return
        # PyTorch replaces a parametrized test with its instances.
        own = [name] if hasattr(case, name) else [n for n in dir(case) if n.startswith(f"{name}_")]
        result = unittest.TestSuite(map(case, own)).run(unittest.TestResult())
        failed = [text for _, text in result.failures + result.errors]
        skipped = [reason for _, reason in result.skipped]
        if failed:
            connection.send(Outcome("failed", "\n".join(failed)))
        elif skipped:
            connection.send(Outcome("skipped", skipped[0]))
        else:
            connection.send(Outcome("passed"))


class Suite:
    """A process that runs the tests one at a time."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "c10d.log"
        self._connection, there = forking().Pipe()
        self._process = forking().Process(target=_serve, args=(there, str(self._log)))
        self._process.start()
        there.close()

    def run(self, name: str) -> Outcome:
        start = self._log.stat().st_size if self._log.exists() else 0
        self._connection.send(name)
        outcome: Outcome = self._connection.recv()
        with self._log.open() as log:
            log.seek(start)
            printed = log.read()[-4000:]
        return Outcome(outcome.result, f"{outcome.text}\n{printed}")

    def close(self) -> None:
        self._connection.close()
        self._process.join()
