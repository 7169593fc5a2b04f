"""torch.compile in the ranks of a pool: its settings, and which calls its code makes."""

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

CALL = re.compile(r"torch\.ops\.collx\.(\w+)\.(\w+)\((.*)\)")


def require_compiler() -> None:
    if not shutil.which("cc") and not shutil.which("gcc"):
        pytest.skip("Inductor needs a C compiler, and there is none")


def _builds(isa: Any, code: str) -> bool:
    """Whether Inductor may use vector instructions that the CPU has: all but AMX, which some
    compilers do not know. Otherwise each process compiles programs that try them, and imports
    PyTorch for each, which takes longer than what is compiled here."""
    return "amx" not in isa._arch_flags


@contextmanager
def inductor() -> Iterator[None]:
    """Compiles every graph anew, and quickly: what compilers of C++ and Triton make of one source
    is kept, so that all but one of the ranks find it."""
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
    """For a program of its own: what `inductor` sets, but for the caches."""
    from torch._inductor import config, cpu_vec_isa

    cpu_vec_isa.VecISA.check_build = _builds  # type: ignore
    config.aot_inductor.precompile_headers = False  # for a single package


def calls_in(code: str) -> list[str]:
    """The operators of torch.ops.collx that code made by Inductor calls, in order, each with its
    `max_blocks` where it has one: tests give every call a number of its own."""
    found = []
    for op, _, arguments in CALL.findall(code):
        number = re.search(r"'auto', (\d+)", arguments)
        found.append(op + (f" {number.group(1)}" if number else ""))
    return found


def code_of(
    function: Callable[..., Any], *arguments: Any, backward: bool = False
) -> tuple[Any, list[list[str]]]:
    """What a compiled function returns, and the calls in the code of each of its graphs."""
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
    """A backend that runs the graph that `collx.compile.Pass`, or `made`, leaves, and appends it to
    `graphs`: quicker than Inductor, whose own passes go before it, and which would make code of
    it."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    import collx

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
    """The operators of collx that graphs call, in order, each with its overload if it has one."""
    return [
        str(op).removeprefix("collx.").removesuffix(".default")
        for op in _called(graphs)
        if getattr(op, "namespace", "") == "collx"
    ]


def others_in(graphs: list[Graph]) -> list[str]:
    """The other ops that graphs call, in order, without their overloads."""
    return [
        str(op.overloadpacket.__name__)
        for op in _called(graphs)
        if getattr(op, "namespace", "collx") != "collx"
    ]


def _called(graphs: list[Graph]) -> Iterator[Any]:
    """What graphs call, with an effect token or without."""
    for graph in graphs:
        for node in graph.nodes:
            yield node.args[1] if node.target is with_effects else node.target
