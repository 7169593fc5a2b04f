"""Reductions with an epilogue: the function of the rounded sum in every algorithm, form and layout;
gradients; compiled code; refusals, also by fused normalizations."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import collx
from collx import epilogues, reference
from collx._extension import extension
from collx.epilogues import expression_of

from ..attempt import assert_raised, attempt, finish, ones, works
from ..calls import run_calls
from ..check import assert_none, differences
from ..compiling import inductor, needs_compiler
from ..epilogues import (
    CASES,
    LIES,
    Call,
    bias_relu,
    random_calls,
    scale_residual,
    smooth,
)
from ..expressions import (
    REAL,
    Apply,
    error_of_real,
    is_near_gelu,
    most_ulp,
    wrong_random_functions,
)
from ..opcheck import PASSED, opcheck
from ..pool import Pool, on_ranks
from ..rank import Rank

COUNT = {1: 60, 2: 200, 3: 60, 4: 60, 8: 20, 16: 10}
COUNT_SHARED = {1: 30, 2: 30, 3: 20, 4: 20, 8: 10}
Errors = dict[str, tuple[str, ...]]
PARTS = 4  # on a GPU, each call is compiled, and several processes run the tests


def algorithms(op: str) -> list[str]:
    return ["auto", *extension.algorithms(op)]


@pytest.mark.parametrize("which", range(len(CASES)), ids=[c.function.__name__ for c in CASES])
@pytest.mark.worlds(1, 2, 3)
def test_the_function_of_the_rounded_sum(pool: Pool, which: int) -> None:
    """Every dtype of a case, odd lengths, both operators; extras that differ between ranks."""
    calls = [
        Call(which, op, dtype, shape, axis, form="python")
        for dtype in CASES[which].dtypes
        for op, axis in (("allreduce", 0), ("reducescatter", 0), ("reducescatter", 1))
        for shape in ((5, 7), (1, 1), (0, 4), (33, 65))
    ]
    assert_none(pool.run(run_calls, calls[:: 6 if pool.takes_turns else 1]))


@pytest.mark.worlds(1, 2, 3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_whole_vectors_wherever_extras_lie(pool: Pool, dtype: str) -> None:
    """On GPUs each layout of the extras has its own kernel, with or without the reduced value."""
    calls = [
        Call(which, op, dtype, (6, 4, 64), broadcast=lies, with_value=with_value)
        for which, case in enumerate(CASES[:2])
        for lies in LIES
        for op, with_value in (("allreduce", False), ("reducescatter", True))
        if lies != "mixed" or case.extras > 1
    ]
    assert_none(pool.run(run_calls, calls[:: 3 if pool.takes_turns else 1]))


@pytest.mark.parametrize("part", range(PARTS))
def test_random_calls(pool: Pool, part: int) -> None:
    """Any function, algorithm, shape, dtype, form, and layout of the extras and results."""
    count = (COUNT_SHARED if pool.takes_turns else COUNT)[pool.size]
    assert_none(pool.run(run_calls, random_calls(count, 5, algorithms)[part::PARTS]))


@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize("shape", [(33, 65), (64, 128)])
@pytest.mark.parametrize("op", ["allreduce", "reducescatter"])
def test_symmetric_tensors(pool: Pool, op: str, shape: tuple[int, ...]) -> None:
    """Every algorithm on symmetric tensors: into another tensor, in place, and into a new tensor;
    also where peers would store into the output, which each rank must then finish itself."""
    calls = [
        Call(0, op, dtype, shape, algorithm=algorithm, form=form, symmetric=symmetric).legal()
        for dtype in ("float32", "bfloat16")
        for algorithm in extension.algorithms(op)
        for form, symmetric in (("python", "input"), ("python_out", "both"), ("alias", "both"))
    ]
    assert_none(pool.run(run_calls, calls))


@pytest.mark.worlds(1, 2, 4)
@on_ranks
def test_results_that_are_not_aligned(rank: Rank) -> list[str]:
    """The output and the value are contiguous but start at the second element of their memory."""
    name, wrong = rank.communicator().name, []
    text = expression_of("allreduce", bias_relu, torch.float32, 1)
    x, bias = ones(rank, 512).view(8, 64), ones(rank, 64) * -3
    want = torch.full((8, 64), float(rank.size))
    for off_out, off_value in ((0, 1), (1, 0), (1, 1)):
        out, value = (
            torch.empty(520, device=rank.device)[off:][:512].view(8, 64)
            for off in (off_out, off_value)
        )
        both = torch.ops.collx.allreduce_map_with_value.out
        both(x, "sum", text, [bias], name, out=out, value=value)
        wrong.append(differences(value.cpu(), want))
        wrong.append(differences(out.cpu(), torch.relu(want - 3)))
    return [each for each in wrong if each]


@pytest.mark.worlds(2)
@on_ranks
def test_an_extra_with_holes_does_not_overlap_a_symmetric_output(rank: Rank) -> list[str]:
    """An algorithm that needs a symmetric output stores the reduced elements there."""
    communicator = rank.communicator()
    x, out = (collx.empty(8, 64, dtype=torch.float32, group=communicator) for _ in range(2))
    extra = torch.arange(128.0, device=rank.device).expand(8, 128)[:, ::2]
    x.fill_(1)
    options: dict[str, Any] = {"epilogue": torch.add, "extras": (extra,), "group": communicator}
    collx.allreduce(x, out=out, algorithm="pull_push", **options)
    wrong = differences(out.cpu(), extra.cpu() + rank.size)
    return [wrong] if wrong else []


@pytest.mark.worlds(1, 2)
@on_ranks
def test_an_extra_that_is_a_repeated_row_of_the_output_is_read_before_it_is_written(
    rank: Rank,
) -> list[str]:
    x, out = ones(rank, 64).view(8, 8), torch.arange(64.0, device=rank.device).view(8, 8)
    row = out[:1].expand(8, 8)
    want = row.cpu() + rank.size
    collx.allreduce(x, out=out, epilogue=torch.add, extras=(row,), group=rank.communicator())
    wrong = differences(out.cpu(), want)
    return [wrong] if wrong else []


@pytest.mark.worlds(2)
@on_ranks
def test_checked_mode_lets_equal_epilogues_pass(rank: Rank) -> list[str]:
    """The extras, which differ between ranks, are not compared."""
    rank.communicator("checked-epilogues", check=True)
    found = run_calls(rank, random_calls(10, 8, algorithms), "checked-epilogues")
    rank.drop("checked-epilogues")
    return found


def _applied_by(rank: Rank) -> Apply:
    """Returns a function that applies an expression in an all-reduce. The maximum is always the
    first rank's value."""
    name = rank.communicator().name

    def apply(text: str, value: torch.Tensor, *extras: torch.Tensor) -> torch.Tensor:
        least: float = torch.iinfo(value.dtype).min if not value.is_floating_point() else -math.inf
        own = value if rank.rank == 0 else torch.full_like(value, least)
        on_device = [tensor.to(rank.device) for tensor in extras]
        made = torch.ops.collx.allreduce_map(own.to(rank.device), "max", text, on_device, name)
        return made.cpu()

    return apply


@pytest.mark.worlds(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64", "int32", "uint8"])
@pytest.mark.parametrize("count", [20, pytest.param(60, marks=pytest.mark.full)])
@on_ranks
def test_random_functions_have_the_bits_of_the_function(
    rank: Rank, dtype: str, count: int
) -> list[str]:
    """Functions of up to 25 ops, computed in the wide type and rounded once: the first functions
    of tests/cpu/test_expressions.py. On CUDA each one is compiled to a kernel."""
    count = min(count, 8) if rank.device.type == "cuda" else count
    return wrong_random_functions(_applied_by(rank), getattr(torch, dtype), count)


@pytest.mark.worlds(2)
@on_ranks
def test_transcendental_functions_are_within_their_bounds(rank: Rank) -> list[str]:
    apply, wrong = _applied_by(rank), []
    for dtype in (torch.float32, torch.float64):
        for name in REAL:
            error = error_of_real(apply, name, dtype)
            if error > most_ulp(dtype):
                wrong.append(f"{name} of {dtype}: {error}")
    wrong += [f"gelu, {a}" for a in ("none", "tanh") if not is_near_gelu(apply, a)]
    return wrong


@pytest.mark.worlds(2)
@on_ranks
def test_a_function_that_is_written_alike_is_traced_once(rank: Rank) -> None:
    """Each evaluation of a lambda creates a new object, but only a different closure value makes
    another function."""
    communicator = rank.communicator()
    x = ones(rank, 9)
    total = collx.allreduce(x, group=communicator).cpu()
    before = len(epilogues._texts)
    for factor in (2.0, 2.0, 3.0):
        y = collx.allreduce(x, epilogue=lambda v: v * factor, group=communicator)  # noqa: B023
        assert differences(y.cpu(), total * factor) == ""
    assert len(epilogues._texts) - before == 2


@pytest.mark.worlds(2)
@on_ranks
def test_replaced_code_is_traced_again(rank: Rank) -> None:
    """Reloaders replace the code of a function in place. Replaces the code of a function and a
    builtin after the first calls. Numbers as extras are looked up in Python, and others in C++."""
    x, names = ones(rank, 9), dict[str, Any]()
    communicator = rank.communicator()
    total = collx.allreduce(x, group=communicator) + 5
    for extras in ((), (2.0,)):
        names.clear()
        builtin = eval("lambda v, *n: abs(v + 5)", names)

        def coded(v: torch.Tensor, *n: float) -> torch.Tensor:
            return torch.relu(v + 5)

        def check(f: Any, wanted: torch.Tensor) -> None:
            y = collx.allreduce(x, epilogue=f, extras=extras, group=communicator)  # noqa: B023
            assert differences(y.cpu(), wanted.cpu()) == ""

        check(builtin, total.abs())
        check(coded, total.relu())
        names["abs"] = torch.neg
        coded.__code__ = (lambda v, *n: -v - 5).__code__
        check(builtin, -total)
        check(coded, -total)


@pytest.mark.worlds(1, 2)
@on_ranks
def test_the_default_dtype_is_part_of_a_function(rank: Rank) -> None:
    """It is the dtype of a quotient of integers."""
    group = rank.communicator()
    total = torch.tensor([2**24 + 1])  # which float32 cannot represent
    x = (total if rank.rank == 0 else total * 0).to(rank.device)
    functions = (lambda v: v / 1, lambda v, factor=1: v / factor)  # looked up in two ways
    for f in functions * 2:
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            try:
                y = collx.allreduce(x, group=group, epilogue=f).cpu()
                assert differences(y, f(total).to(torch.int64)) == ""
            finally:
                torch.set_default_dtype(torch.float32)


@pytest.mark.worlds(1, 2)
@on_ranks
def test_numbers_that_change_make_no_new_epilogue(rank: Rank) -> None:
    """The numbers are arguments of the same kernel and may differ between ranks. Calls every
    function that takes an epilogue, with a number that changes."""

    def f(v: torch.Tensor, by: float, bias: torch.Tensor, times: int) -> torch.Tensor:
        return v * (1 - by) + bias * times

    def check(got: Any, want: Any) -> None:
        assert differences(got.detach().cpu(), want) == ""

    x, bias, group = ones(rank, 32).view(2, 16), ones(rank, 1), rank.communicator()
    inputs, weight = [torch.ones(2, 16)] * rank.size, torch.ones(16)
    before = len(epilogues._texts)
    for by in (0.25, 0.5):
        given: dict[str, Any] = {"epilogue": f, "extras": (by, bias, 2), "group": group}
        once: dict[str, Any] = {"epilogue": f, "extras": (by, torch.ones(1), 2)}
        each: dict[str, Any] = {"epilogue": f, "extras": [once["extras"]] * rank.size}
        own = x.clone().requires_grad_()
        y = collx.allreduce(own, **given)
        y.sum().backward()
        check(y, reference.allreduce(inputs, **once))
        check(own.grad, torch.full((2, 16), (1 - by) * rank.size))
        scattered = reference.reducescatter(inputs, axis=1, **each)[rank.rank]
        check(collx.reducescatter(x, axis=1, **given), scattered)
        normalized = reference.allreduce_rmsnorm(inputs, weight, 1e-6, **once)
        check(collx.allreduce_rmsnorm(x, ones(rank, 16), 1e-6, **given), normalized)
    own_number = rank.rank / 4
    y = collx.allreduce(x, group=group, epilogue=f, extras=(own_number, bias, 2))
    check(y, torch.full((2, 16), rank.size * (1 - own_number) + 2))
    assert len(epilogues._texts) - before == 1


def _taken_gradients(*tensors: torch.Tensor) -> list[torch.Tensor]:
    taken = []
    for tensor in tensors:
        assert tensor.grad is not None
        taken.append(tensor.grad.cpu())
        tensor.grad = None
    return taken


@pytest.mark.worlds(1, 2, 3)
@pytest.mark.parametrize("op", ["allreduce", "reducescatter"])
@on_ranks
def test_gradients_are_those_of_the_two_steps(rank: Rank, op: str) -> None:
    """Gradients of the input, through the reduction, and of the extras."""
    communicator = rank.communicator()
    shape = (4, 6)
    source = ones(rank, 24).view(shape) * (rank.rank + 1) / 7
    own = collx.reducescatter(source, group=communicator) if op == "reducescatter" else source
    gate = (torch.arange(own.numel(), device=rank.device).view(own.shape) - 5.0) / 9

    def gradients(fused: bool) -> list[torch.Tensor]:
        x, g = source.clone().requires_grad_(), gate.clone().requires_grad_()
        function = getattr(collx, op)
        if fused:
            y = function(x, group=communicator, epilogue=smooth, extras=(g,))
        else:
            y = smooth(function(x, group=communicator), g)
        (y * torch.linspace(0, 1, y.numel(), device=y.device).view_as(y)).sum().backward()
        return _taken_gradients(x, g)

    pairs = zip(gradients(True), gradients(False), strict=True)
    found = ["" if torch.allclose(a, b, 1e-5, 1e-6) else f"{a} instead of {b}" for a, b in pairs]
    assert found == ["", ""]


@pytest.mark.worlds(2)
@needs_compiler
@on_ranks
def test_compiled_code_gives_the_same(rank: Rank) -> None:
    """In one graph, with and without gradients; the function's text is a constant of the graph."""
    communicator = rank.communicator()
    name = communicator.name
    x, bias = ones(rank, 24).view(4, 6) * (rank.rank + 1), ones(rank, 6) * -3

    def model(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        y = collx.allreduce(x * 2, group=name, epilogue=bias_relu, extras=(bias,)) + 1
        return collx.reducescatter(
            y, group=name, epilogue=lambda v, n: v.clamp(max=5.0) * n, extras=(0.5,)
        )

    want = model(x, bias).cpu()
    with inductor():
        compiled = torch.compile(model, fullgraph=True)
        found = [differences(compiled(x, bias).cpu(), want)]
        x.requires_grad_()
        bias.requires_grad_()
        trained = compiled(x, bias)
        found.append(differences(trained.detach().cpu(), want))
        trained.sum().backward()
        got = _taken_gradients(x, bias)
        model(x, bias).sum().backward()
        wanted = _taken_gradients(x, bias)
    assert found + [differences(g, w) for g, w in zip(got, wanted, strict=True)] == [""] * 4


_global = 1.0


def _by_global(v: torch.Tensor) -> torch.Tensor:
    return torch.relu(v * (1 + _global))


def _times(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda v: v * factor + torch.tensor(factor) / 2


@pytest.mark.worlds(2)
@needs_compiler
@on_ranks
def test_compiled_code_follows_the_numbers_that_a_function_reads(rank: Rank) -> None:
    """A function that the graph creates breaks the graph if its number has changed, and
    fullgraph=True refuses it."""
    global _global
    name = rank.communicator().name
    x, weight = ones(rank, 24).view(4, 6) * (rank.rank + 1), ones(rank, 6)

    def model(x: torch.Tensor, k: float, f: Any) -> Any:
        y = collx.allreduce(x, group=name, epilogue=f)
        z = collx.allreduce_rmsnorm(y, weight, 1e-6, name, epilogue=f)
        assert isinstance(z, torch.Tensor)
        return collx.reducescatter(z, group=name, epilogue=f)

    def own(x: torch.Tensor, k: float, f: Any) -> Any:
        return collx.allreduce(x, group=name, epilogue=lambda v: v * k)

    wrong = []
    for function, fullgraph in ((model, True), (own, False)):
        with inductor():
            compiled = torch.compile(function, fullgraph=fullgraph)
            for _global in (2.0, 3.0, 5.0, 2.0):
                for f in (_times(_global), _by_global, partial(torch.mul, other=2.0)):
                    got = compiled(x, _global, f)
                    wrong.append(differences(got.cpu(), function(x, _global, f).cpu()))
    with inductor():
        compiled = torch.compile(own, fullgraph=True)
        compiled(x, 2.0, None)
        refused = attempt(lambda: compiled(x, 3.0, None))
    assert wrong == [""] * 24
    assert "epilogue: reads a value that is not a constant of the graph" in refused.message


@pytest.mark.worlds(1)
@on_ranks
def test_the_operators_pass_opcheck(rank: Rank) -> None:
    name = rank.communicator().name
    x, bias = ones(rank, 12).view(3, 4), ones(rank, 4)
    text = expression_of("allreduce", bias_relu, torch.float32, 1)
    ops, norm = torch.ops.collx, {"expression": text, "extras": [bias]}
    wide = expression_of("allreduce", lambda v: v.to(torch.float64), torch.float32)
    found = [
        opcheck(rank, ops.allreduce_map.default, (x, "sum", text, [bias], name)),
        opcheck(
            rank, ops.allreduce_map.default, (x.clone().requires_grad_(), "sum", text, [bias], name)
        ),
        opcheck(rank, ops.allreduce_map.default, (x, "sum", wide, [], name)),
        opcheck(rank, ops.reducescatter_map.default, (x, "sum", text, [bias], rank.size, name)),
        opcheck(rank, ops.epilogue.default, (x, text, [bias])),
        opcheck(rank, ops.allreduce_map_with_value.default, (x, "sum", wide, [], name)),
        opcheck(rank, ops.allreduce_rmsnorm.default, (x, bias, 1e-6, name), norm),
        opcheck(rank, ops.allreduce_rmsnorm_fp8.default, (x, bias, 1e-6, name), norm),
    ]
    assert found == [PASSED] * 8


def _call(rank: Rank, op: str, communicator: Any, **options: Any) -> Any:
    x = ones(rank, 12).view(3, 4)
    if op == "allreduce":
        return collx.allreduce(x, group=communicator, **options)
    return collx.allreduce_rmsnorm(x, ones(rank, 4), 1e-6, communicator, **options)


@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize("epilogues", [True, False])
@pytest.mark.parametrize("op", ["allreduce", "allreduce_rmsnorm"])
@on_ranks
def test_ranks_with_different_epilogues_are_a_mismatch(
    rank: Rank, op: str, epilogues: bool
) -> None:
    """In checked mode; also if some ranks have no epilogue."""
    name = f"other-{op}-{epilogues}"
    communicator = rank.new_communicator(name, check=True, timeout=10.0)
    factor = float(rank.rank)
    options: dict[str, Any] = {"epilogue": lambda v: v * factor} if epilogues else {}
    if not epilogues and rank.rank == 0:
        options = {"epilogue": lambda v: v}

    def call() -> None:
        _call(rank, op, communicator, **options)
        finish(communicator)

    attempted = attempt(call)
    communicator.destroy()
    assert_raised(attempted, "CollectiveMismatch", "with epilogue ")


@pytest.mark.worlds(2)
@pytest.mark.parametrize("which", ["extras[0]", "out", "a part of out"])
@on_ranks
def test_the_value_shares_no_memory(rank: Rank, which: str) -> None:
    """The value is stored before the epilogue has read the extras, and before the output."""
    communicator, memory = rank.communicator(), ones(rank, 12)
    x, extra, out = ones(rank, 8), ones(rank, 8), torch.empty(8, device=rank.device)
    value = {"extras[0]": extra, "out": out, "a part of out": memory[4:]}[which]
    if which == "a part of out":
        out = memory[:8]
    text = "value.float32;extra.float32 0;add.float32 0 1"
    call = torch.ops.collx.allreduce_map_with_value.out
    attempted = attempt(
        lambda: call(x, "sum", text, [extra], communicator.name, out=out, value=value)
    )
    well = works(rank, communicator)
    assert attempted.error == "ValueError", attempted
    words = ("value", "overlaps", which.removeprefix("a part of "))
    assert all(word in attempted.message for word in words), attempted
    assert well


# The error and words of its message, of both operators, of an all-reduce and of a norm.
OF_BOTH: Errors = {
    "a random op": ("TypeError", "rand_like", "accepted", "tanh"),
    "shape": ("ValueError", "extras[0]", "[5]", "[3, 4]"),
    "dtype": ("TypeError", "extras[0]", "Double", "Float"),
    "one of two extras": ("TypeError", "epilogue"),
    "too few": ("TypeError", "epilogue"),
    "no function": ("ValueError", "extras", "without epilogue="),
    "no function, but index": ("ValueError", "index", "without epilogue="),
}
OF_ALLREDUCE: Errors = {
    "control flow": ("TypeError", "epilogue", "control flow"),
    "reduction": ("TypeError", "sum", "accepted"),
    "another op": ("TypeError", "softplus", "accepted"),
    "a tensor it holds": ("TypeError", "epilogue", "extras="),
    "two results": ("TypeError", "result", "one tensor"),
    "a name": ("TypeError", "got str", "a function"),
    "in place": ("TypeError", "relu_", "accepted"),
    "device": ("ValueError", "extras[0]", "accepted"),
    "no number": ("TypeError", "extras[0]", "str", "float"),
    "a single tensor": ("TypeError", "extras:", "Tensor", "sequence"),
    "a single number": ("TypeError", "extras:", "float", "sequence"),
    "a long integer": ("ValueError", "extras[0]", "9007199254740993", "2**53"),
    "out": ("TypeError", "out", "float32", "int8"),
}
OF_NORM: Errors = {
    "another dtype": ("TypeError", "expression", "float64", "float32"),
    "a gradient": ("NotImplementedError", "automatic differentiation"),
    "an extra as out": ("ValueError", "extras", "overlaps out", "results"),
}
REFUSED = {
    (op, which): error
    for op, own in (("allreduce", OF_ALLREDUCE), ("allreduce_rmsnorm", OF_NORM))
    for which, error in {**OF_BOTH, **own}.items()
}


@pytest.mark.worlds(2)
@pytest.mark.parametrize(("op", "which"), sorted(REFUSED))
@on_ranks
def test_bad_input_is_refused_by_name(rank: Rank, op: str, which: str) -> None:
    """On every rank before anything is launched; the communicator remains usable."""
    communicator = rank.communicator()
    x = ones(rank, 12).view(3, 4)
    elsewhere = torch.device("cpu" if rank.device.type == "cuda" else "meta")
    calls: dict[str, dict[str, Any]] = {
        "control flow": {"epilogue": lambda v: v if v.amax() > 0 else -v},
        "a random op": {"epilogue": lambda v: v + torch.rand_like(v)},
        "reduction": {"epilogue": lambda v: v - v.sum()},
        "another op": {"epilogue": lambda v: torch.nn.functional.softplus(v)},
        "a tensor it holds": {"epilogue": lambda v: v + x},
        "two results": {"epilogue": lambda v: (v, v)},
        "a name": {"epilogue": "relu"},
        "no function": {"extras": (ones(rank, 4),)},
        "no function, but index": {"index": True},
        "in place": {"epilogue": lambda v: v.relu_()},
        "shape": {"epilogue": bias_relu, "extras": (ones(rank, 5),)},
        "dtype": {"epilogue": bias_relu, "extras": (ones(rank, 4, torch.float64),)},
        "device": {"epilogue": bias_relu, "extras": (torch.ones(4, device=elsewhere),)},
        "no number": {"epilogue": bias_relu, "extras": ("1",)},
        "a single tensor": {"epilogue": bias_relu, "extras": ones(rank, 4)},
        "a single number": {"epilogue": bias_relu, "extras": 0.0},
        "a long integer": {"epilogue": bias_relu, "extras": (2**53 + 1,)},
        "one of two extras": {"epilogue": scale_residual, "extras": (ones(rank, 4),)},
        "too few": {"epilogue": bias_relu},
        "a gradient": {"epilogue": bias_relu, "extras": (ones(rank, 4).requires_grad_(),)},
        "an extra as out": {"epilogue": bias_relu, "extras": (x,), "out": x},
        "another dtype": {"epilogue": lambda v: v.to(torch.float64)},
        "out": {"epilogue": lambda v: v.to(torch.int8), "out": torch.empty_like(x)},
    }
    attempted = attempt(lambda: _call(rank, op, communicator, **calls[which]))
    kind, *words = REFUSED[op, which]
    well = works(rank, communicator)
    assert_raised(attempted, kind, f"collx.{op}", *words)
    assert well


@pytest.mark.worlds(2)
@pytest.mark.parametrize(
    ("which", "kind", "words"),
    [
        ("good", "", ()),
        ("strided out", "", ()),
        ("a norm", "", ()),
        ("another function", "TypeError", ("allgather", "collx.allreduce")),
        ("no epilogue", "ValueError", ("epilogue: got None",)),
        ("extras", "ValueError", ("extras[0]", "[5]")),
        ("one rank's extras", "InitError", ("rank 0", "extras[0]")),
    ],
)
@on_ranks
def test_warm_up_meets_all_ranks_and_calls_nothing(
    rank: Rank, which: str, kind: str, words: tuple[str, ...]
) -> None:
    """All ranks raise an error if one rank refuses; the communicator remains usable."""
    communicator = rank.communicator()
    x, bias = ones(rank, 12).view(3, 4), ones(rank, 4)
    given: dict[str, Any] = {"epilogue": bias_relu, "extras": (bias,), "group": communicator}
    function: Any = collx.allreduce
    if which == "another function":
        function = collx.allgather
    elif which == "no epilogue":
        del given["epilogue"]
    elif which == "extras" or (which == "one rank's extras" and rank.rank == 0):
        given["extras"] = (ones(rank, 5),)
    outs: list[torch.Tensor] = [torch.full_like(x, 77)]
    if which == "strided out":
        outs[0] = torch.full((3, 8), 77.0, device=rank.device)[:, ::2]
    if which in ("good", "strided out"):
        given["out"] = outs[0]
    elif which == "a norm":
        function = collx.allreduce_rmsnorm
        outs += [ones(rank, 1) * 77]
        outs[0] = outs[0].to(torch.float8_e4m3fn)
        scale = collx.Quantization("fp8", scale_mode="tensor")
        given.update(weight=bias, eps=0.0, quantization=scale, scale=ones(rank, 1), out=outs)
    before = communicator.stats().calls, communicator._native.calls
    attempted = attempt(lambda: collx.warm_up(function, x, **given))
    assert (communicator.stats().calls, communicator._native.calls) == before
    for out in outs:  # nothing was computed
        assert bool((out.cpu().float() == torch.tensor(77.0).to(out.dtype).float()).all())
    well = works(rank, communicator)
    assert_raised(attempted, kind, *words)
    assert well
