"""torch.compile in the ranks of a pool: its settings, and the calls in the generated code."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch._higher_order_ops.effects import with_effects
from torch.fx import Graph, GraphModule

import collx

CALL = re.compile(r"torch\.ops\.collx\.(\w+)\.(\w+)\((.*)\)")

needs_compiler = pytest.mark.skipif(
    not shutil.which("cc") and not shutil.which("gcc"),
    reason="Inductor needs a C compiler, and there is none",
)


def _builds(isa: Any, code: str) -> bool:
    """Whether Inductor may use vector instructions that the CPU supports: all except AMX, which
    some compilers do not support. Without this function, each process compiles test programs and
    imports PyTorch for each, which takes longer than the compilations of the tests."""
    return "amx" not in isa._arch_flags


@contextmanager
def inductor() -> Iterator[None]:
    """Compiles every graph again, and quickly: the results of the compilers for C++ and Triton are
    cached, so only one of the ranks compiles a source."""
    from torch._dynamo import config as dynamo
    from torch._functorch import config as functorch
    from torch._inductor import config, cpu_vec_isa

    torch._dynamo.reset()
    with (
        config.patch({"fx_graph_cache": False, "fx_graph_remote_cache": False}),
        functorch.patch(enable_autograd_cache=False),
        dynamo.patch(automatic_dynamic_local_pgo=False),
        mock.patch.object(cpu_vec_isa.VecISA, "check_build", _builds),
    ):
        yield
    torch._dynamo.reset()


def quicken() -> None:
    """Applies the settings of `inductor`, except for the caches, in a separate program."""
    from torch._inductor import config, cpu_vec_isa

    cpu_vec_isa.VecISA.check_build = _builds  # type: ignore
    config.aot_inductor.precompile_headers = False  # for a single package


def calls_in(code: str) -> list[str]:
    """Returns the operators of torch.ops.collx that code of Inductor calls, in order. Each includes
    its `max_blocks` if it has one, by which tests identify a call."""
    found = []
    for op, _, arguments in CALL.findall(code):
        number = re.search(r"'auto', (\d+)", arguments)
        found.append(op + (f" {number.group(1)}" if number else ""))
    return found


def code_of(
    function: Callable[..., Any], *arguments: Any, backward: bool = False
) -> tuple[Any, list[list[str]]]:
    """Returns the result of a compiled function, and the calls in the code of each graph."""
    from torch._inductor.utils import run_and_get_code

    def run() -> Any:
        result = function(*arguments)
        if backward:
            sum(tensor.sum() for tensor in result).backward()
        return result

    result, codes = run_and_get_code(run)
    return result, [calls_in(code) for code in codes]


def through_pass(
    graphs: list[Graph], made: Callable[..., Any] | None = None, **options: Any
) -> Callable[..., Any]:
    """Returns a backend that runs the graph after `collx.compile.Pass` or `made`, and appends it to
    `graphs`. The preceding passes of Inductor are applied. It is faster than Inductor because it
    generates no code."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    def passed(module: GraphModule, _: Any) -> Callable[..., Any]:
        module = joint_graph_passes(module)
        (made or collx.compile.Pass)(**options)(module.graph)
        module.recompile()
        graphs.append(module.graph)
        return module.forward

    backend: Callable[..., Any] = aot_autograd(
        fw_compiler=passed, decompositions=select_decomp_table()
    )
    return backend


def operators_in(graphs: list[Graph]) -> list[str]:
    """Returns the operators of collx that graphs call, in order, each with its overload, if any."""
    return [
        str(op).removeprefix("collx.").removesuffix(".default")
        for op in _called(graphs)
        if getattr(op, "namespace", "") == "collx"
    ]


def others_in(graphs: list[Graph]) -> list[str]:
    """Returns the other ops that graphs call, in order, without their overloads."""
    return [
        str(op.overloadpacket.__name__)
        for op in _called(graphs)
        if getattr(op, "namespace", "collx") != "collx"
    ]


def _called(graphs: list[Graph]) -> Iterator[Any]:
    """Yields the ops that graphs call, with or without an effect token."""
    for graph in graphs:
        for node in graph.nodes:
            yield node.args[1] if node.target is with_effects else node.target
