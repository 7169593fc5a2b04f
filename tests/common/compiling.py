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

# For a program of its own: what `inductor` below sets, but for the caches.
QUICKLY = """
from torch._inductor import config as inductor_config, cpu_vec_isa
inductor_config.cpp_cache_precompile_headers = False
inductor_config.cpp.vec_isa_ok = True
has = set(cpu_vec_isa.x86_isa_checker())
known = [isa for isa in cpu_vec_isa.supported_vec_isa_list if set(str(isa).split()) <= has]
if known:
    cpu_vec_isa.valid_vec_isa_list = lambda: known
"""


def require_compiler() -> None:
    if not shutil.which("cc") and not shutil.which("gcc"):
        pytest.skip("Inductor needs a C compiler, and there is none")


@contextmanager
def _trusted_instructions() -> Iterator[None]:
    """Inductor takes the vector instructions that the CPU names. Otherwise each process compiles
    and loads programs that try them, which takes longer than all that is compiled here."""
    from torch._inductor import cpu_vec_isa

    has = cpu_vec_isa.x86_isa_checker()  # of another CPU it knows none
    known = [i for i in cpu_vec_isa.supported_vec_isa_list if set(str(i).split()) <= set(has)]
    if not known:
        yield
        return
    with mock.patch.object(cpu_vec_isa, "valid_vec_isa_list", return_value=known):
        yield


@contextmanager
def inductor() -> Iterator[None]:
    """Compiles anew, and quickly: nothing is taken from caches or left in them."""
    from torch._inductor import config

    quick = {
        "force_disable_caches": True,
        "cpp_cache_precompile_headers": False,  # takes longer than all that is compiled here
        "cpp.vec_isa_ok": True,
    }
    torch._dynamo.reset()
    with config.patch(quick), _trusted_instructions():
        yield
    torch._dynamo.reset()


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
