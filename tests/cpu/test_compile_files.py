"""Tests of compiled code that outlives its process: the cache on disk and AOTInductor packages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.common import interpreters
from tests.common.compiling import needs_compiler
from tests.common.pool import compiler

pytestmark = needs_compiler

START = """
import json, sys
import torch
import torch.distributed as dist, torch.distributed._functional_collectives as functional
import collx
from tests.common.compiling import quicken

quicken()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.set_grad_enabled(False)
comm = collx.init(device="cpu", name="files", payload_bytes=4 << 20, timeout=600)
x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
norm = torch.nn.RMSNorm(64, eps=1e-5, dtype=torch.bfloat16)
"""

CACHED = (
    START
    + """
from torch._dynamo.utils import counters

def model(x):
    collx.reduce(x, "sum", 0, "files")  # has a token
    return norm(functional.all_reduce(x, "sum", dist.group.WORLD))

compiled = torch.compile(model, backend=collx.compile.backend, options=json.loads(sys.argv[1]))
result = compiled(x)
print(json.dumps({
    "hits": counters["inductor"]["fxgraph_cache_hit"],
    "rewritten": sum(collx.compile.report().norms.values()),
    "norm": [float(v) for v in result[0, :4]],
}))
"""
)

PACKAGED = (
    START
    + """
import os, tempfile

class Model(torch.nn.Module):
    def forward(self, x):
        torch.ops.collx.reduce(x, "sum", 0, "files")
        out, total = torch.ops.collx.allreduce_residual_rmsnorm(x, x, norm.weight, 1e-5, "files")
        return out, torch.ops.collx.allgather(total, 1, "files")

path = os.path.join(tempfile.mkdtemp(), "model.pt2")
torch._inductor.aoti_compile_and_package(torch.export.export(Model(), (x,)), package_path=path)
loaded = torch._inductor.aoti_load_package(path)
same = all(torch.equal(a, b) for a, b in zip(loaded(x), Model()(x), strict=True))
comm.destroy()
try:
    loaded(x)
except RuntimeError as error:  # PyTorch 2.15; the wrapper of 2.11 prints it and goes on
    print(error)
print(json.dumps({"same": same}))
"""
)


# The five rows are divided into parts of unequal size, so that the ranks have different graphs.
RANKS = """
import json, sys
import torch
import torch.distributed as dist
import collx
from tests.common.compiling import quicken
from torch._dynamo.utils import counters

quicken()
meeting, way, rank, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
torch.set_grad_enabled(False)
if way == "bundled":  # what PyTorch caches with tokens and without a word of collx
    torch._functorch.config.bundled_autograd_cache = True
if way == "marked":
    marked = {"torch.ops.higher_order.with_effects": "1"}
    torch._inductor.config.unsafe_marked_cacheable_functions = marked
backend = "collx" if way == "collx" else "inductor"
weight = torch.linspace(-1, 1, 8)

@torch.compile(backend=backend, fullgraph=True)
def plain(x):
    return collx.reducescatter(x + 1, "sum", "ranks") * 2

@torch.compile(backend=backend, fullgraph=True)
def fused(x):
    rest = collx.reducescatter(x, "max", "ranks")
    return collx.reducescatter_rmsnorm(x, rest, weight, 1e-5, "ranks")

comm = collx.init(device="cpu", name="ranks", payload_bytes=4 << 20, timeout=600)
x = torch.randn(5, 8, generator=torch.Generator().manual_seed(rank))
part = collx.reducescatter(x + 1, "sum", "ranks") * 2
rest = collx.reducescatter(x, "max", "ranks")
wanted = [part, *collx.reducescatter_rmsnorm(x, rest, weight, 1e-5, "ranks")]
found = [plain(x), *fused(x)]
print(json.dumps({
    "hits": counters["inductor"]["fxgraph_cache_hit"]
    + counters["aot_autograd"]["autograd_cache_hit"],
    "rows": [len(part), *(len(each) for each in found)],
    "same": all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)),
}))
"""


def said(program: str, arguments: list[tuple[str, ...]], **settings: str) -> list[Any]:
    """Returns the last line that each process of a Python program prints, parsed as JSON."""
    modules = (*interpreters.IMPORTED, *compiler())
    found = []
    for code, output in interpreters.run(program, arguments, settings, 480, modules):
        assert code == 0, output
        found.append(json.loads(output.splitlines()[-1]) | {"output": output})
    return found


@pytest.mark.parametrize(
    ("way", "size"),
    [("collx", 2), ("bundled", 2), ("marked", 2)]
    + [pytest.param(way, 3, marks=pytest.mark.full) for way in ("collx", "marked")],
)
def test_a_rank_never_gets_the_graph_of_another(tmp_path: Path, way: str, size: int) -> None:
    cold, warm = (
        said(
            RANKS,
            [(f"{tmp_path}/{run}", way, str(rank), str(size)) for rank in range(size)],
            TORCHINDUCTOR_CACHE_DIR=f"{tmp_path}/cache",
        )
        for run in range(2)
    )
    for rank in range(size):
        rows = 5 // size + (rank < 5 % size)
        for found in (cold[rank], warm[rank]):
            assert found["same"]
            assert set(found["rows"]) == {rows}
        assert cold[rank]["hits"] == 0
        assert warm[rank]["hits"] >= 2  # on its own graphs


def test_the_cache_serves_the_next_process_and_tells_options_apart(tmp_path: Path) -> None:
    ways: tuple[dict[str, str], ...] = ({}, {}, {"collx.rounding": "fp32"})
    [first], [again], [otherwise] = (
        said(CACHED, [(json.dumps(way),)], TORCHINDUCTOR_CACHE_DIR=str(tmp_path)) for way in ways
    )
    assert (first["hits"], first["rewritten"]) == (0, 1)
    assert (again["hits"], again["rewritten"]) == (1, 0)
    assert (otherwise["hits"], otherwise["rewritten"]) == (0, 1)
    assert first["norm"] == again["norm"]


def test_a_package_of_aot_inductor_runs_and_names_a_missing_communicator() -> None:
    [found] = said(PACKAGED, [()])
    assert found["same"]
    assert 'collx.reduce: group_name: this process has no communicator "files"' in found["output"]
