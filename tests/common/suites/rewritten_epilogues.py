"""Pointwise ops after a reduction, which `collx.compile.Pass(epilogues=True)` fuses as an epilogue:
which ops it fuses, that the bits remain those of eager PyTorch, and which ops it does not fuse."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.fx import Graph
from torch.nn import functional as F

import collx
from collx import reference

from ..check import differences
from ..compiling import (
    code_of,
    inductor,
    needs_compiler,
    operators_in,
    others_in,
    through_pass,
)
from ..pool import on_ranks
from ..rank import Rank
from ..rewriting import COLS, EPS, WEIGHT, Results, group_of, passed, tensor_of

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Model = Callable[[Tensor, Tensor, Tensor], Any]
MAP = ["allreduce_map"]


def reduced_by(how: str, group: Any, name: str, x: Tensor) -> Tensor:
    """Reduces by PyTorch's collective or by the operator itself."""
    if how == "functional":
        return functional.all_reduce(x, "sum", group)
    return torch.ops.collx.allreduce(x, "sum", name)


def _of_epilogues(left: list[str]) -> str:
    return "".join(why for why in left if why.startswith("epilogue: "))


def _results(found: Any) -> Results:
    return found if isinstance(found, tuple) else (found,)


def _gated(y: Tensor) -> Tensor:
    return torch.where(y > 0.125, y, y * 0.3)


# Functions of the sum `y`, a bias `b` and a residual `r`. Each becomes one operator.
CHAINS: dict[str, Model] = {
    "bias": lambda y, b, r: y + b,
    "bias, activation": lambda y, b, r: torch.relu(y + b),
    "bias on the left": lambda y, b, r: b + y,
    "scale, residual": lambda y, b, r: r + y * 0.3,
    "bias, residual, scale": lambda y, b, r: ((y + b) + r) * 0.3,
    "by a tensor": lambda y, b, r: r - y * b,
    "an extra twice": lambda y, b, r: (y + r) * r,
    "a column": lambda y, b, r: y * r[..., :1],
    "strided": lambda y, b, r: y + r.transpose(0, 1).contiguous().transpose(0, 1),
    "range": lambda y, b, r: torch.minimum((-y).clamp(-0.7, 0.7), b).abs(),
    "a choice": lambda y, b, r: _gated(y + b),
    "masked": lambda y, b, r: y.masked_fill(y < b, -1.0),
    "in place": lambda y, b, r: y.add_(b).relu_(),
    "a branch that joins": lambda y, b, r: torch.relu(y) * (y + b),
    "square": lambda y, b, r: y**2 + b,
    "to another dtype": lambda y, b, r: (y + b > 0).to(torch.int8),
    "comparison": lambda y, b, r: y + b > r,
}
# Functions within a few units in the last place of float32, or with their own rounding in PyTorch.
NEAR: dict[str, Model] = {
    "gelu": lambda y, b, r: F.gelu(y + b),
    "gelu by tanh": lambda y, b, r: F.gelu(y + b, approximate="tanh"),
    "silu": lambda y, b, r: F.silu(y) * r,
    "sigmoid": lambda y, b, r: torch.sigmoid(y + b),
    "soft cap": lambda y, b, r: 30 * torch.tanh(y / 30),
    "widened operands": lambda y, b, r: torch.addcmul(b, y, r),
}


@pytest.mark.worlds(2)
@pytest.mark.parametrize("how", ["functional", "operator"])
@pytest.mark.parametrize("shape", [(4, COLS), (2, 3, COLS)], ids=["matrix", "batch"])
@pytest.mark.parametrize(
    "cross", [False, pytest.param(True, marks=pytest.mark.full)], ids=["in turn", "cross"]
)
@on_ranks(deadline=500.0)
def test_a_chain_becomes_one_operator_with_the_bits_of_the_model(
    rank: Rank, how: str, shape: tuple[int, ...], cross: bool
) -> list[str]:
    """No pointwise op is left, and each is rounded as in eager PyTorch. Each of the four forms
    tests a chain with one dtype; together they cover all three dtypes. "cross" tests all dtypes in
    each form."""
    group, communicator = group_of(rank)
    wrong = []
    chains = {**CHAINS, **NEAR}
    chosen = list(product(DTYPES, chains.items()))
    if not cross:
        turn = len(shape) + 2 * (how == "operator")
        chosen = [(DTYPES[(turn + i) % 3], chain) for i, chain in enumerate(chains.items())]
    with communicator, torch.no_grad():
        for dtype, (what, chain) in chosen:
            x, residual = (tensor_of(rank, shape, dtype, True) for _ in range(2))
            bias = tensor_of(rank, (COLS,), dtype, False)
            source = x.clone()

            def model(x: Tensor, bias: Tensor, residual: Tensor) -> Results:
                y = reduced_by(how, group, communicator.name, x)
                return _results(chain(y, bias, residual))  # noqa: B023

            found, kept, left, others = passed(model, x, bias, residual, epilogues=True)
            # The ops that create an extra are not fused.
            makes = {"a column": {"slice"}, "strided": {"permute", "clone"}}
            if kept != MAP or set(others) != makes.get(what, set()) or _of_epilogues(left):
                wrong.append(f"{what}, {dtype}: {kept}, {others}, {left}")
            total = torch.ops.collx.allreduce(source, "sum", communicator.name)
            wanted = _results(chain(total, bias, residual))
            for got, want in zip(found, wanted, strict=True):
                if what in CHAINS:
                    why = differences(got.cpu(), want.cpu())
                else:
                    eps = torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5
                    close = torch.allclose(got, want, eps, eps)
                    why = "" if close and got.dtype == want.dtype else "far off"
                wrong += [f"{what}, {dtype}: {why}"] if why else []
    return wrong


class Ends(NamedTuple):
    """A model that is fused in part or not at all."""

    model: Model
    operators: list[str]
    others: list[str]
    why: str = ""
    """Words of the report; "" for none."""


def _behind(y: Tensor, b: Tensor, r: Tensor) -> Tensor:
    return y + torch.sin(r)  # in a graph, sin comes after the sum


def _many(y: Tensor, b: Tensor, r: Tensor) -> Tensor:
    for n in range(10):
        y = y + r[n % 4, n]
    return y


ENDS: dict[str, Ends] = {
    "another op": Ends(lambda y, b, r: torch.sin(y + b) * 2, MAP, ["sin", "mul"]),
    "another op at once": Ends(lambda y, b, r: torch.sin(y) + b, ["allreduce"], ["sin", "add"]),
    "another op of what is between": Ends(
        lambda y, b, r: (torch.relu(a := y + b) * 2, torch.sin(a)),
        MAP,
        ["relu", "mul", "sin"],
        "the results of add, mul are used elsewhere",
    ),
    "used twice": Ends(
        lambda y, b, r: (a := y + b, torch.relu(a)),
        MAP,
        ["relu"],
        "the results of add, relu are used elsewhere",
    ),
    "the sum is used": Ends(
        lambda y, b, r: (y, torch.relu(y + b)),
        ["allreduce"],
        ["add", "relu"],
        "the results of the sum, relu are used elsewhere",
    ),
    "a reduction": Ends(lambda y, b, r: torch.relu(y).sum(-1) * 2, MAP, ["sum", "mul"]),
    "a larger operand": Ends(
        lambda y, b, r: torch.relu(y) + r.expand(3, 4, COLS),
        MAP,
        ["expand", "add"],
        "add: its result has another shape or device than the sum",
    ),
    "an operand of another dtype": Ends(
        lambda y, b, r: torch.relu(y) + b.float().sin(),
        MAP,
        ["convert_element_type", "sin", "add"],
        "add: its operand has dtype torch.float32, and the sum torch.bfloat16",
    ),
    "a wider operand without dimensions": Ends(
        lambda y, b, r: torch.relu(y) + torch.full((), 0.1234567, device=y.device),
        MAP,
        ["full", "add"],
        "add: its operand without dimensions has another dtype",
    ),
    "a mask": Ends(
        lambda y, b, r: torch.relu(y).masked_fill(r > 0, 7.0),
        MAP,
        ["gt", "full", "where"],
        "where: its operand has dtype torch.bool",
    ),
    "alpha": Ends(
        lambda y, b, r: torch.add(torch.relu(y), b, alpha=2), MAP, ["add"], "add: add with alpha=2"
    ),
    "a power": Ends(lambda y, b, r: torch.relu(y) ** 5, MAP, ["pow"], "pow with exponent 5"),
    "nine extras": Ends(_many, MAP, ["select", "add"], "add: it needs more than 8 extras"),
    "a wider result": Ends(lambda y, b, r: (y + b).float(), MAP, ["convert_element_type"]),
    "a wider result, used": Ends(lambda y, b, r: (y + b).float() * 2, MAP, []),
    "an extra behind the sum": Ends(_behind, MAP, ["sin"]),
    "nothing": Ends(lambda y, b, r: y, ["allreduce"], []),
}


@pytest.mark.worlds(2)
@on_ranks(deadline=500.0)
def test_a_chain_ends_where_another_op_or_another_user_begins(rank: Rank) -> list[str]:
    """The report gives the reason if the chain was nearly longer."""
    group, communicator = group_of(rank)
    x, residual = (tensor_of(rank, (4, COLS), torch.bfloat16, own) for own in (True, False))
    bias = tensor_of(rank, (COLS,), torch.bfloat16, False)
    wrong = []
    with communicator, torch.no_grad():
        for what, ends in ENDS.items():

            def model(x: Tensor, bias: Tensor, residual: Tensor) -> Results:
                y = functional.all_reduce(x, "sum", group)
                return _results(ends.model(y, bias, residual))  # noqa: B023

            found, kept, left, others = passed(model, x, bias, residual, epilogues=True)
            told = ends.why in "".join(left) if ends.why else not left
            # Extras may be computed from one another in any number of steps.
            if (kept, sorted(set(others))) != (
                ends.operators,
                sorted(set(ends.others)),
            ) or not told:
                wrong.append(f"{what}: {kept}, {others}, {left}")
            total = torch.ops.collx.allreduce(x, "sum", communicator.name)
            wanted = _results(ends.model(total, bias, residual))
            for got, want in zip(found, wanted, strict=True):
                why = differences(got.cpu(), want.cpu())
                wrong += [f"{what}: {why}"] if why else []
    return wrong


@pytest.mark.worlds(2)
@pytest.mark.parametrize("how", ["functional", "operator"])
@on_ranks(deadline=300.0)
def test_what_one_chain_makes_is_reduced_by_the_next(rank: Rank, how: str) -> None:
    group, communicator = group_of(rank)
    name = communicator.name
    x, residual = (tensor_of(rank, (4, COLS), torch.bfloat16, own) for own in (True, False))

    def model(x: Tensor, residual: Tensor, how: str) -> Tensor:
        for scale in (0.5, 0.25, 0.125):
            x = torch.relu(reduced_by(how, group, name, x) * scale + residual)
        return x

    with communicator, torch.no_grad():
        (found,), kept, _, others = passed(
            lambda x, residual: (model(x, residual, how),), x, residual, epilogues=True
        )
        wanted = model(x, residual, "operator")
    assert (kept, others, differences(found.cpu(), wanted.cpu())) == (MAP * 3, [], "")


@pytest.mark.worlds(2)
@on_ranks(deadline=300.0)
def test_norms_go_first_and_no_collective_passes_by_another(rank: Rank) -> None:
    """Runs models with other reductions than one all-reduce, and with other options."""
    group, communicator = group_of(rank)
    dtype = torch.bfloat16
    x, residual = (tensor_of(rank, (4, COLS), dtype, own) for own in (True, False))
    bias, weight = tensor_of(rank, (COLS,), dtype, False), WEIGHT.to(rank.device, dtype)
    small = tensor_of(rank, (4 // rank.size, COLS), dtype, True)

    def reduced(x: Tensor, reduce_op: str = "sum") -> Tensor:
        return functional.all_reduce(x, reduce_op, group)

    def two(first: Tensor, second: Tensor) -> Tensor:
        return torch.relu(first) + second * 2

    def norm(y: Tensor) -> Tensor:
        return nn.functional.rms_norm(y, (COLS,), weight, EPS)

    def scattered(x: Tensor) -> Tensor:
        return torch.relu(functional.reduce_scatter_tensor(x, "sum", 0, group) + small)

    def layers(x: Tensor) -> Results:
        total = residual + reduced(x)  # followed by the norm
        return norm(total), torch.relu(reduced(2 * x) + bias), total

    models: dict[str, tuple[Callable[[Tensor], Any], dict[str, Any]]] = {
        "no option": (lambda x: torch.relu(reduced(x) + bias), {"epilogues": False}),
        "by default": (lambda x: torch.relu(reduced(x) + bias), {}),
        "maximum": (lambda x: reduced(x, "max") + bias, {"epilogues": True}),
        "integers": (lambda x: (reduced((8 * x).int()) * 3 - 1).clamp(max=9), {"epilogues": True}),
        "halved": (lambda x: reduced((8 * x).int()) / 2, {"epilogues": True}),
        "two sums": (lambda x: two(reduced(x), reduced(3 * x)), {"epilogues": True}),
        "a norm": (layers, {"epilogues": True}),
        "no norms": (layers, {"epilogues": True, "norms": False}),
        "scattered": (scattered, {"epilogues": True}),
    }
    found = {}
    with communicator, torch.no_grad():
        for what, (model, options) in models.items():
            results, kept, left, others = passed(lambda x: _results(model(x)), x, **options)  # noqa: B023
            wanted = _results(model(x))
            close = torch.allclose if "norm" in what else torch.equal
            same = all(close(a, b) for a, b in zip(results, wanted, strict=True))
            wrong = "" if same else f"{results} instead of {wanted}"
            found[what] = (kept, others, _of_epilogues(left), wrong)
    untouched = (["allreduce"], ["add", "relu"], "", "")
    assert found["no option"] == found["by default"] == untouched
    assert found["maximum"] == (MAP, [], "", "")
    given = ["mul", "convert_element_type"]
    assert found["integers"] == found["halved"] == (MAP, given, "", "")
    # The remaining op computes an input. The first sum would have to wait for the second.
    behind = "epilogue: add: its operand is computed after another collective"
    assert found["two sums"] == (MAP * 2, ["mul"], behind, "")
    kept, *_, wrong = found["a norm"]
    assert (kept, wrong) == (["allreduce_residual_rmsnorm", "allreduce_map"], "")
    kept, *_, wrong = found["no norms"]
    assert (kept, wrong) == (MAP * 2, "")
    assert found["scattered"] == (["reducescatter_map"], [], "", "")


@pytest.mark.worlds(2)
@on_ranks(deadline=300.0)
def test_rounding_fp32_rounds_once(rank: Rank) -> list[str]:
    group, communicator = group_of(rank)
    wrong = []
    with communicator, torch.no_grad():
        for dtype in (torch.bfloat16, torch.float16):
            x, residual = (tensor_of(rank, (8, COLS), dtype, True) for _ in range(2))
            bias = tensor_of(rank, (COLS,), dtype, False)

            def chain(y: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
                return torch.relu((y + bias) * 0.3 + residual)

            def model(x: Tensor, *given: Tensor) -> Results:
                return (chain(functional.all_reduce(x, "sum", group), *given),)

            given = (bias, residual)
            (found,), kept, *_ = passed(model, x, *given, epilogues=True, rounding="fp32")
            total = torch.ops.collx.allreduce(x, "sum", communicator.name)
            once = reference.allreduce([total], epilogue=chain, extras=given)
            wrong += [] if kept == MAP else [f"{dtype}: {kept}"]
            wrong += [f"{dtype}: {why}" for why in (differences(found.cpu(), once.cpu()),) if why]
            # The control: the two roundings differ.
            wrong += (
                [] if differences(once.cpu(), chain(total, *given).cpu()) else [f"{dtype}: same"]
            )
    return wrong


@pytest.mark.worlds(2)
@pytest.mark.parametrize("how", ["functional", "operator"])
@on_ranks(deadline=300.0)
def test_dynamic_shapes_are_fused_in_one_graph(rank: Rank, how: str) -> None:
    """The graph is not specialized to the sizes seen first."""
    group, communicator = group_of(rank)
    graphs: list[Graph] = []
    wrong = []

    def chain(y: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return torch.relu(y + bias) + residual

    def model(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return chain(reduced_by(how, group, communicator.name, x), bias, residual)

    torch._dynamo.reset()
    backend = through_pass(graphs, epilogues=True)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    with communicator, torch.no_grad():
        for rows, cols in ((4, COLS), (7, COLS), (5, 2 * COLS)):
            x, residual = (tensor_of(rank, (rows, cols), torch.bfloat16, o) for o in (True, False))
            bias = tensor_of(rank, (cols,), torch.bfloat16, False)
            total = torch.ops.collx.allreduce(x, "sum", communicator.name)
            wanted = chain(total, bias, residual)
            wrong.append(differences(compiled(x, bias, residual).cpu(), wanted.cpu()))
    called = [operators_in(graphs), others_in(graphs)]
    assert wrong == [""] * 3
    assert called == [MAP, []]


@pytest.mark.worlds(2)
@on_ranks(deadline=300.0)
def test_a_size_as_operand_ends_a_chain(rank: Rank) -> None:
    """An operand with another symbolic number of rows than the sum might have one row, or not
    match."""
    group, communicator = group_of(rank)
    graphs: list[Graph] = []

    def model(x: Tensor, other: Tensor) -> Tensor:
        y = torch.relu(functional.all_reduce(x, "sum", group))
        return y * x.shape[0] + other[: x.shape[0]].sin()

    torch._dynamo.reset()
    backend = through_pass(graphs, epilogues=True)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    x, other = (tensor_of(rank, (rows, COLS), torch.float32, False) for rows in (4, 9))
    with communicator, torch.no_grad():
        wanted = model(x, other)
        assert torch.allclose(compiled(x, other), wanted)
    assert operators_in(graphs) == MAP
    assert "mul" in others_in(graphs)


@pytest.mark.worlds(2)
@on_ranks(deadline=300.0)
def test_a_chain_that_is_too_long_for_an_epilogue_is_fused_in_part(rank: Rank) -> None:
    group, communicator = group_of(rank)
    x = tensor_of(rank, (4, COLS), torch.bfloat16, True)

    def chain(y: Tensor) -> Tensor:
        for n in range(100):
            y = y * (0.9 + n / 500)
        return y

    def model(x: Tensor) -> Results:
        return (chain(functional.all_reduce(x, "sum", group)),)

    with communicator, torch.no_grad():
        (found,), kept, _, others = passed(model, x, epilogues=True)
        wanted = chain(torch.ops.collx.allreduce(x, "sum", communicator.name))
    assert kept == MAP
    assert differences(found.cpu(), wanted.cpu()) == ""
    assert 0 < len(others) < 50


@pytest.mark.worlds(2)
@needs_compiler
@on_ranks(deadline=500.0)
def test_in_code_of_inductor(rank: Rank) -> None:
    """Both reductions are fused; one of them is called as an operator, with its token."""
    group, communicator = group_of(rank)
    name = communicator.name
    x = tensor_of(rank, (4, COLS), torch.bfloat16, True)
    bias = tensor_of(rank, (COLS,), torch.bfloat16, False)

    def model(x: Tensor, bias: Tensor) -> Tensor:
        y = torch.relu(functional.all_reduce(x * 2, "sum", group) + bias)
        z = collx.allreduce(torch.sin(y), group=name)
        return (z + y) * 0.5

    def gradients(function: Callable[..., Tensor]) -> Results:
        given = [t.detach().clone().requires_grad_() for t in (x, bias)]
        result = function(*given)
        result.sum().backward()
        return (result.detach(), *(t.grad for t in given if t.grad is not None))

    def plain(x: Tensor, bias: Tensor) -> Tensor:
        y = torch.relu(collx.allreduce(x * 2, group=name) + bias)
        return (collx.allreduce(torch.sin(y), group=name) + y) * 0.5

    options: dict[str, Any] = {"collx.epilogues": True}
    with communicator, inductor():
        compiled = torch.compile(model, backend=collx.compile.backend, options=options)
        with torch.no_grad():
            result, kept = code_of(compiled, x, bias)
            assert torch.allclose(result, plain(x, bias), 2e-2, 2e-2)
        torch._dynamo.reset()
        pairs = zip(gradients(compiled), gradients(plain), strict=True)
        assert all(torch.allclose(a, b, 5e-2, 5e-2) for a, b in pairs)
    assert kept[0] == MAP * 2
