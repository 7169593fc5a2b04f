"""Models that call PyTorch's own collectives, compiled with backend="collx": which operators the
pass inserts, and that results remain those of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.fx import Graph

import collx

from ..check import differences
from ..compiling import code_of, inductor, needs_compiler, operators_in, through_pass
from ..pool import on_ranks
from ..rank import Rank
from ..rewriting import COLS, EPS, WEIGHT, group_of, tensor_of


class Llama(nn.Module):
    """The implementation of transformers' LlamaRMSNorm."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(COLS, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        variance = wide.pow(2).mean(-1, keepdim=True)
        return self.weight * (wide * torch.rsqrt(variance + EPS)).to(x.dtype)


class Gemma(Llama):
    """The implementation of transformers' GemmaRMSNorm."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normalized = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
        return (normalized * (1.0 + self.weight.float())).type_as(x)


class Case(NamedTuple):
    norm: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    residual: str
    """The side of the sum on which the residual is added; "": there is no residual."""

    def module(self) -> nn.Module:
        kinds: dict[str, Callable[[], nn.Module]] = {
            "torch": lambda: nn.RMSNorm(COLS, eps=EPS, dtype=self.dtype),
            "llama": lambda: Llama(self.dtype),
            "gemma": lambda: Gemma(self.dtype),
        }
        return kinds[self.norm]()


CASES = [
    Case(*values)
    for values in product(
        ("torch", "llama", "gemma"),
        (torch.bfloat16, torch.float32),
        ((4, COLS), (2, 3, COLS)),
        ("", "left", "right"),
    )
]


def _with_weight(rank: Rank, module: nn.Module) -> nn.Module:
    module.get_parameter("weight").data.copy_(WEIGHT)
    return module.to(rank.device)


@pytest.mark.worlds(2)
@needs_compiler
@on_ranks(deadline=500.0)
def test_norms_of_several_libraries_become_one_operator(rank: Rank) -> list[str]:
    """With the model's rounding points, whichever side an operand is on."""
    group, communicator = group_of(rank)
    wrong = []
    with communicator, torch.no_grad():
        for case in CASES:
            norm = _with_weight(rank, case.module())
            x, residual = (tensor_of(rank, case.shape, case.dtype, own) for own in (True, False))

            def model(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
                y = functional.all_reduce(x, "sum", group)
                if case.residual:  # noqa: B023
                    y = residual + y if case.residual == "left" else y + residual  # noqa: B023
                return norm(y), y if case.residual else residual  # noqa: B023

            with inductor():
                compiled = torch.compile(model, fullgraph=True, backend=collx.compile.backend)
                (out, total), kept = code_of(compiled, x, residual)
            op = "allreduce_residual_rmsnorm" if case.residual else "allreduce_rmsnorm"
            fused = getattr(torch.ops.collx, op).default
            given = [x, norm.weight, EPS, communicator.name, float(case.norm == "gemma")]
            rounded_twice = case.norm == "llama" or case.dtype == torch.float32
            given.append("parity_weight" if rounded_twice else "parity")
            if case.residual:
                given.insert(1, residual)
            wanted = fused(*given)
            wanted = wanted if case.residual else (wanted, residual)
            plain = model(x, residual)
            wrong += [f"{case}: {kept}"] if kept != [[op]] else []
            for found, as_op, as_model in zip((out, total), wanted, plain, strict=True):
                if differences(found.cpu(), as_op.cpu()):
                    wrong.append(f"{case}: not what the operator gives")
                # Row sums and products may be computed in another order.
                close = 1e-2 if case.dtype == torch.bfloat16 else 1e-5
                if not torch.allclose(found.float(), as_model.float(), close, close):
                    wrong.append(f"{case}: not what the model gives")
    return wrong


@pytest.mark.worlds(2)
@needs_compiler
@on_ranks(deadline=300.0)
def test_functional_collectives_become_operators(rank: Rank) -> None:
    group, communicator = group_of(rank)
    gathering = "_c10d_functional.all_gather_into_tensor.default"
    counts = collx.compile.report().collectives
    before = counts.get(gathering, 0)
    size = rank.size
    x = torch.arange(12.0 * size, device=rank.device).view(2 * size, 6) + rank.rank

    def model(x: Tensor) -> list[Tensor]:
        splits = [2] * size
        return [
            functional.all_reduce(x, "max", group),
            functional.reduce_scatter_tensor(x, "sum", 0, group),
            functional.all_gather_tensor(x, 0, group),
            functional.all_to_all_single(x, splits, splits, group),
            functional.broadcast(x, size - 1, group),
        ]

    with communicator, torch.no_grad(), inductor():
        compiled = torch.compile(model, fullgraph=True, backend=collx.compile.backend)
        results, kept = code_of(compiled, x)
        wanted = model(x)
    pairs = zip(results, wanted, strict=True)
    counted = counts[gathering] - before
    ops = ["allreduce", "reducescatter", "allgather", "alltoallv", "broadcast"]
    wrong = [differences(a.cpu(), b.cpu()) for a, b in pairs]
    assert wrong == [""] * 5
    assert kept == [ops]
    assert counted == 1


@pytest.mark.worlds(2)
@on_ranks(deadline=300.0)
def test_collectives_of_dynamic_shapes_become_operators(rank: Rank) -> None:
    """Compiles models whose sizes AOTAutograd reads from the collective that is not awaited yet."""
    group, communicator = group_of(rank)
    weight = torch.linspace(-1.0, 1.0, COLS * COLS, device=rank.device).view(COLS, COLS)
    norm = _with_weight(rank, Llama(torch.float32))

    def gathered(x: Tensor, _: Tensor) -> Tensor:
        return functional.all_gather_tensor(x, 0, group) @ weight

    def scattered(x: Tensor, residual: Tensor) -> Tensor:
        y = norm(functional.reduce_scatter_tensor(x @ weight, "sum", 0, group) + residual)
        return functional.all_gather_tensor(y, 0, group) @ weight

    found: list[Any] = []
    with communicator, torch.no_grad():
        for model in (gathered, scattered):
            graphs: list[Graph] = []
            collx.compile.report(reset=True)
            torch._dynamo.reset()
            backend = through_pass(graphs, overlap=True)
            compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
            close = []
            for rows, cols in ((2, 3), (5, 7)):
                x = tensor_of(rank, (rows * rank.size, cols, COLS), torch.float32, True)
                residual = tensor_of(rank, (rows, cols, COLS), torch.float32, False)
                wanted = model(x, residual)
                close.append(torch.allclose(compiled(x, residual), wanted, 1e-4, 1e-4))
            left = [why for why in collx.compile.report().left if why.startswith("_c10d")]
            found.append((operators_in(graphs), left, close))
    assert found[0] == (["allgather_matmul"], [], [True] * 2)
    # The fused norm accepts one dynamic dimension before the columns, and this one has two.
    assert found[1] == (["reducescatter", "allgather_matmul"], [], [True] * 2)


@contextmanager
def _waiting_for_several() -> Iterator[Any]:
    """Provides PyTorch's wait_tensors, which not every version has."""
    if hasattr(torch.ops._c10d_functional, "wait_tensors"):
        yield
        return
    wait = torch.ops._c10d_functional.wait_tensor
    library = torch.library.Library("_c10d_functional", "FRAGMENT")
    library.define("wait_tensors(Tensor[] inputs) -> Tensor[]")
    kernels: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {
        "CompositeExplicitAutograd": lambda given: [wait(x) for x in given],
        "Meta": lambda given: [torch.empty_like(x) for x in given],
    }
    for key, kernel in kernels.items():
        library.impl("wait_tensors", kernel, key)
    try:
        yield
    finally:
        library._destroy()


@pytest.mark.worlds(2)
@on_ranks(deadline=300.0)
def test_collectives_of_several_tensors_become_operators_of_each(rank: Rank) -> None:
    """Compares collectives of several tensors with one collective for each tensor."""
    group, communicator = group_of(rank)
    name, size = group.group_name, rank.size
    x = torch.arange(12.0 * size, device=rank.device).view(2 * size, 6) + rank.rank
    c10d = torch.ops._c10d_functional

    def model(x: Tensor) -> list[Tensor]:
        joined = c10d.all_reduce_coalesced([x, x + 1], "max", name)
        return [
            *functional.all_reduce_coalesced([x, x * 2], "sum", group),
            *functional.reduce_scatter_tensor_coalesced([x, x + 1], "sum", [0, 0], group),
            *functional.all_gather_into_tensor_coalesced([x, x * 3], group),
            *c10d.wait_tensors(joined),
        ]

    graphs: list[Graph] = []
    collx.compile.report(reset=True)
    with communicator, torch.no_grad(), _waiting_for_several():
        torch._dynamo.reset()
        results = torch.compile(model, fullgraph=True, backend=through_pass(graphs))(x)
        wanted = [
            *(collx.allreduce(each, "sum", communicator) for each in (x, x * 2)),
            *(collx.reducescatter(each, "sum", communicator) for each in (x, x + 1)),
            *(collx.allgather(each, communicator) for each in (x, x * 3)),
            *(collx.allreduce(each, "max", communicator) for each in (x, x + 1)),
        ]
    report = collx.compile.report()
    wrong = [differences(a.cpu(), b.cpu()) for a, b in zip(results, wanted, strict=True)]
    ops = operators_in(graphs)
    counts = report.collectives
    left = list(report.left)
    assert wrong == [""] * 8
    assert sorted(ops) == ["allgather"] * 2 + ["allreduce"] * 4 + ["reducescatter"] * 2
    assert counts == {
        "_c10d_functional.all_reduce_coalesced.default": 4,
        "_c10d_functional.reduce_scatter_tensor_coalesced.default": 2,
        "_c10d_functional.all_gather_into_tensor_coalesced.default": 2,
    }
    assert [why for why in left if why.startswith("_c10d")] == []


@pytest.mark.worlds(2)
@on_ranks(deadline=300.0)
def test_the_report_names_every_collective_that_stays(rank: Rank) -> None:
    """Several tensors without a communicator, one collective that is not awaited, and a kind that
    collx does not have."""
    group, communicator = group_of(rank)
    other = rank.fresh_group()
    c10d = torch.ops._c10d_functional
    # A kind of collective that collx will never have.
    library = torch.library.Library("_c10d_functional", "FRAGMENT")
    library.define("all_shuffle(Tensor input, str group_name) -> Tensor")
    library.impl("all_shuffle", lambda x, _: x.clone(), "CompositeExplicitAutograd")

    def model(x: Tensor) -> Any:
        several = functional.all_reduce_coalesced([x, x * 2], "sum", other)
        started = c10d.all_reduce(x, "sum", group.group_name)
        shuffled = c10d.wait_tensor(c10d.all_shuffle(x, group.group_name))
        return [*several, shuffled], started

    graphs: list[Graph] = []
    collx.compile.report(reset=True)
    try:
        with communicator, torch.no_grad():
            torch._dynamo.reset()
            x = torch.ones(4, device=rank.device)
            c10d.wait_tensor(
                torch.compile(model, fullgraph=True, backend=through_pass(graphs))(x)[1]
            )
    finally:
        library._destroy()
    assert operators_in(graphs) == []
    started, several, shuffled = sorted(collx.compile.report().left)
    assert "_c10d_functional.all_reduce_coalesced.default: group" in several
    assert "has no communicator" in several
    unawaited = "_c10d_functional.all_reduce.default: its result is not awaited"
    assert started.startswith(unawaited)
    assert shuffled.startswith("_c10d_functional.all_shuffle.default: collx has no operator")


class Seeing:
    """A program's own pass, which records the collectives that it sees."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, graph: Graph) -> None:
        targets = [str(node.target) for node in graph.nodes]
        self.seen += [name for name in targets if "all_reduce" in name or "allreduce" in name]


@pytest.mark.worlds(2)
@needs_compiler
@on_ranks(deadline=300.0)
def test_a_pass_of_the_programs_own_runs_before(rank: Rank) -> None:
    group, communicator = group_of(rank)
    norm = _with_weight(rank, Llama(torch.bfloat16))
    x = tensor_of(rank, (4, COLS), torch.bfloat16, True)

    def model(x: Tensor) -> Tensor:
        return norm(functional.all_reduce(x, "sum", group))

    for how in ("option", "global"):
        own = Seeing()
        options: Any = {"post_grad_custom_pre_pass": own} if how == "option" else None
        everywhere = {} if how == "option" else {"post_grad_custom_pre_pass": own}
        with communicator if how == "global" else nullcontext(), torch.no_grad(), inductor():
            from torch._inductor import config

            with config.patch(everywhere):
                compiled = torch.compile(model, backend=collx.compile.backend, options=options)
                _, kept = code_of(compiled, x)
        assert own.seen == ["_c10d_functional.all_reduce.default"]
        assert kept == [["allreduce_rmsnorm"]]


@pytest.mark.worlds(2)
@on_ranks(deadline=300.0)
def test_a_group_without_a_communicator_keeps_its_own_collectives(rank: Rank) -> None:
    group = rank.fresh_group()
    graphs: list[Graph] = []

    def model(x: Tensor) -> Tensor:
        return functional.all_reduce(x, "sum", group)

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, fullgraph=True, backend=through_pass(graphs))(
            torch.ones(4, device=rank.device)
        )
    kept = [str(node.target) for node in graphs[0].nodes]
    report = str(collx.compile.report())
    assert "_c10d_functional.all_reduce.default" in kept
    assert "has no communicator" in report


@pytest.mark.worlds(2)
@needs_compiler
@on_ranks(deadline=300.0)
def test_options_of_the_backend(rank: Rank) -> None:
    group, communicator = group_of(rank)
    norm = _with_weight(rank, Llama(torch.bfloat16))
    x = tensor_of(rank, (4, COLS), torch.bfloat16, True)

    def model(x: Tensor) -> Tensor:
        return norm(functional.all_reduce(x, "sum", group))

    found = []
    with communicator, torch.no_grad():
        ways: list[dict[str, Any]] = [{"collx.rounding": "fp32"}, {"collx.norms": False}]
        for options in ways:
            with inductor():
                compiled = torch.compile(model, backend=collx.compile.backend, options=options)
                result, kept = code_of(compiled, x)
            found.append(kept[0][0])
            if options.get("collx.norms", True):
                name = communicator.name
                exact = torch.ops.collx.allreduce_rmsnorm(x, norm.weight, EPS, name, 0.0, "fp32")
                found.append(differences(result.cpu(), exact.cpu()))
    assert found == ["allreduce_rmsnorm", "", "allreduce"]


def test_an_unknown_rounding_is_refused() -> None:
    with pytest.raises(ValueError, match="rounding: got 'parity'; accepted: model, fp32"):
        collx.compile.Pass(rounding="parity")
