"""Tests that programs that select the collx backend by name compute the same results as on Gloo."""

from __future__ import annotations

import importlib
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import ProcessGroupAllocMixin

import collx
import collx.backend
from tests.common.pool import on_ranks
from tests.common.programs import run_program
from tests.common.rank import Rank

ROOT = Path(__file__).resolve().parents[2]
SIZES = ("--layers=2", "--width=32", "--tokens=16")
STEPS = 12


def _mesh(backend: str) -> DeviceMesh:
    return DeviceMesh.from_group(dist.new_group(backend=backend), "cpu")


def _used(mesh: DeviceMesh) -> bool:
    """Whether collx has executed calls of the mesh."""
    backend: Any = mesh.get_group()._get_backend(torch.device("cpu"))
    return backend.name() == "collx" and backend._get_sequence_number_for_group() > 0


@pytest.mark.worlds(2)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp", "tp"])
@on_ranks
def test_a_model_trains_to_the_same_bits(rank: Rank, parallel: str) -> None:
    """The sum of two values does not depend on their order, and its division by two is exact."""
    sys.path.insert(0, str(ROOT / "examples"))
    train = importlib.import_module("train")
    arguments = train.parse_arguments([f"--parallel={parallel}", *SIZES])
    found = {}
    for backend in ("gloo", "collx"):
        mesh = _mesh(backend)
        training = train.Training(arguments, mesh, rank.device)
        found[backend] = [training.step() for _ in range(STEPS)]
    assert _used(mesh)
    assert len(set(found["collx"])) == STEPS  # the parameters change
    assert found["collx"] == found["gloo"]


@pytest.mark.worlds(2)
@on_ranks
def test_fsdp_trains_to_the_same_bits_in_symmetric_memory(rank: Rank) -> None:
    sys.path.insert(0, str(ROOT / "examples"))
    train = importlib.import_module("train")
    arguments = train.parse_arguments(["--parallel=fsdp", *SIZES])
    mesh = _mesh("collx")
    ordinary = train.Training(arguments, mesh, rank.device)
    found: dict[str, Any] = {"ordinary": [ordinary.step() for _ in range(STEPS)]}

    first: list[Tensor] = []  # the buffers of the first step, kept alive
    places: list[int] = []
    allocate = ProcessGroupAllocMixin.allocate

    def noted(*given: Any, **named: Any) -> Tensor:
        made = allocate(*given, **named)
        places.append(made.data_ptr())
        if not found.get("symmetric"):
            first.append(made)
        return made

    symmetric = train.Training(arguments, mesh, rank.device)
    for module in symmetric.model.modules():
        if isinstance(module, FSDPModule):
            module.set_allocate_memory_from_process_group_for_comm(True)
    with mock.patch.object(ProcessGroupAllocMixin, "allocate", noted):
        found["symmetric"] = [symmetric.step()]
        first_step = len(places)
        found["symmetric"] += [symmetric.step() for _ in range(STEPS - 1)]
    assert len(places) == STEPS * first_step
    assert len(set(places[-4 * first_step :])) <= 2 * first_step  # memory is reused
    group = mesh.get_group()
    for buffer in first:
        part = torch.ones(buffer.numel() // 2, dtype=buffer.dtype)
        collx.allgather(part, group=group, algorithm="direct", out=buffer[: 2 * part.numel()])
    taken = collx.get(group).explain("allgather", first[0].numel(), output_symmetric=True)
    assert taken.executed_by == "direct"
    assert len(set(found["symmetric"])) == STEPS
    assert found["symmetric"] == found["ordinary"]


def test_the_example_trains() -> None:
    printed = run_program(ROOT / "examples" / "train.py", "--device=cpu", "--parallel=fsdp", *SIZES)
    losses = re.findall(r"^step +\d+  loss (\S+)$", printed, re.MULTILINE)
    assert len(losses) == STEPS
    assert float(losses[-1]) < float(losses[0])


@pytest.mark.skipif(
    find_spec("transformers") is None or find_spec("accelerate") is None,
    reason="transformers or accelerate is not installed",
)
def test_a_model_that_transformers_splits_generates_the_same_tokens(tmp_path: Path) -> None:
    found = {}
    for backend in ("collx", "gloo"):
        printed = run_program(ROOT / "tests" / "cpu" / "generated.py", backend, str(tmp_path))
        found[backend] = re.findall("^tokens .*$", printed, re.MULTILINE)
        assert printed.count(f"sums by {backend}:all_reduce\n") == 2
    assert len(found["collx"]) == 2
    assert found["collx"] == found["gloo"]


@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
def test_accelerate_uses_a_group_that_exists() -> None:
    printed = run_program(ROOT / "tests" / "cpu" / "accelerated.py")
    assert printed.count("trained on collx\n") == 2
