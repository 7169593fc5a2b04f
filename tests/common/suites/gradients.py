"""Gradients of the operators: each backward is the adjoint, or is refused by name.

Values are small integers in float64 (multiples of the number of ranks, because of avg), so
every sum below is exact and no tolerance is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

import collx
from collx import reference

from .. import collectives, norms
from ..attempt import Attempt, attempt, ones, works
from ..calls import make, run_call
from ..check import differences
from ..pool import Pool, some_stand_for_all
from ..rank import Rank
from ..shares import CAPACITY, UNSENT, integers, parts, received, splits

Shape = tuple[int, ...]
Tensors = list[torch.Tensor]


class Call(NamedTuple):
    """The arguments of an operator besides its tensor."""

    world: int
    rank: int
    name: str
    algorithm: str

    @property
    def options(self) -> tuple[str, int]:
        """The last arguments of each operator."""
        return self.algorithm, 0


@dataclass(frozen=True)
class Linear:
    """An operator that is linear in the inputs of all ranks."""

    shapes: Callable[[int], list[Shape]]  # of all ranks' inputs, by the number of ranks
    apply: Callable[[Call, torch.Tensor], torch.Tensor]
    expected: Callable[[Tensors], Tensors]  # the reference


def _allreduce(reduce_op: str) -> Linear:
    def expected(inputs: Tensors) -> Tensors:
        return [reference.allreduce(inputs, reduce_op)] * len(inputs)

    return Linear(
        lambda world: [(5, 3)] * world,
        lambda call, x: torch.ops.collx.allreduce(x, reduce_op, call.name, *call.options),
        expected,
    )


def _reducescatter(reduce_op: str, shape: Callable[[int], Shape], axis: int) -> Linear:
    def expected(inputs: Tensors) -> Tensors:
        return reference.reducescatter(inputs, reduce_op, axis)

    return Linear(
        lambda world: [shape(world)] * world,
        lambda call, x: torch.ops.collx.reducescatter(
            x, reduce_op, call.world, call.name, axis, *call.options
        ),
        expected,
    )


def _allgather(shape: Callable[[int], Shape], axis: int, with_total: bool) -> Linear:
    """`shape` returns the shape of the result."""

    def shapes(world: int) -> list[Shape]:
        whole = list(shape(world))
        sizes = parts(whole[axis], world)
        assert with_total or len(set(sizes)) == 1
        return [tuple({axis % len(whole): n}.get(d, m) for d, m in enumerate(whole)) for n in sizes]

    def apply(call: Call, x: torch.Tensor) -> torch.Tensor:
        total = shape(call.world)[axis] if with_total else None
        result: torch.Tensor = torch.ops.collx.allgather(
            x, call.world, call.name, axis, total, *call.options
        )
        return result

    def expected(inputs: Tensors) -> Tensors:
        return reference.allgather(inputs, axis)

    return Linear(shapes, apply, expected)


def _alltoall() -> Linear:
    def expected(inputs: Tensors) -> Tensors:
        return reference.alltoall(inputs)

    return Linear(
        lambda world: [(2 * world, 3)] * world,
        lambda call, x: torch.ops.collx.alltoall(x, call.world, call.name, *call.options),
        expected,
    )


def _alltoallv() -> Linear:
    def expected(inputs: Tensors) -> Tensors:
        return reference.alltoallv(inputs, [splits(len(inputs), r) for r in range(len(inputs))])

    return Linear(
        lambda world: [(sum(splits(world, rank)), 3) for rank in range(world)],
        lambda call, x: torch.ops.collx.alltoallv(
            x,
            received(call.world, call.rank),
            splits(call.world, call.rank),
            call.name,
            *call.options,
        ),
        expected,
    )


def _device_splits() -> Linear:
    def apply(call: Call, x: torch.Tensor) -> torch.Tensor:
        sent = torch.tensor(splits(call.world, call.rank), device=x.device)
        result, got = torch.ops.collx.alltoallv.device_splits(
            x, sent, CAPACITY * call.world, call.name, *call.options
        )
        assert not got.requires_grad
        assert got.tolist() == received(call.world, call.rank)
        assert isinstance(result, torch.Tensor)
        return result

    def expected(inputs: Tensors) -> Tensors:
        world = len(inputs)
        sent = [splits(world, rank) for rank in range(world)]
        rows = [tensor[: sum(s)] for tensor, s in zip(inputs, sent, strict=True)]
        results = []
        for result in reference.alltoallv(rows, sent):
            padded = result.new_zeros(CAPACITY * world, *result.shape[1:])
            padded[: len(result)] = result
            results.append(padded)
        return results

    return Linear(
        lambda world: [(sum(splits(world, rank)) + UNSENT, 3) for rank in range(world)],
        apply,
        expected,
    )


LINEAR: dict[str, Linear] = {
    "allreduce sum": _allreduce("sum"),
    "allreduce avg": _allreduce("avg"),
    "reducescatter sum": _reducescatter("sum", lambda w: (2 * w, 3), 0),
    "reducescatter sum uneven": _reducescatter("sum", lambda w: (2 * w + 1, 3), 0),
    "reducescatter sum of one row": _reducescatter("sum", lambda w: (1, 3), 0),
    "reducescatter sum of columns": _reducescatter("sum", lambda w: (3, 2 * w), 1),
    "reducescatter sum of columns uneven": _reducescatter("sum", lambda w: (3, 3 * w - 1), -1),
    "reducescatter sum in the middle uneven": _reducescatter("sum", lambda w: (2, w + 1, 3), 1),
    "reducescatter avg": _reducescatter("avg", lambda w: (2 * w,), 0),
    "reducescatter avg uneven": _reducescatter("avg", lambda w: (2 * w + 1,), -1),
    "reducescatter avg of columns uneven": _reducescatter("avg", lambda w: (2, 2 * w + 1), 1),
    "allgather": _allgather(lambda w: (2 * w, 3), 0, False),
    "allgather with an even total": _allgather(lambda w: (2 * w, 3), 0, True),
    "allgather uneven": _allgather(lambda w: (2 * w + 1, 3), 0, True),
    "allgather of one row": _allgather(lambda w: (1, 3), 0, True),
    "allgather of columns": _allgather(lambda w: (3, 2 * w), 1, False),
    "allgather of columns uneven": _allgather(lambda w: (3, 3 * w - 1), -1, True),
    "allgather in the middle uneven": _allgather(lambda w: (2, w + 1, 3), -2, True),
    "alltoall": _alltoall(),
    "alltoallv": _alltoallv(),
    "alltoallv.device_splits": _device_splits(),
}


def _adjoint(rank: Rank, what: str, algorithm: str, symmetric: bool = False) -> str:
    """Compares the result with the reference, then checks by inner products that the backward is
    the adjoint of the forward. Returns the error, if any."""
    communicator = rank.communicator()
    operator = LINEAR[what]
    call = Call(rank.size, rank.rank, communicator.name, algorithm)
    shapes = operator.shapes(rank.size)
    inputs = [integers(shape, 3 + r, rank.size) for r, shape in enumerate(shapes)]
    source = inputs[rank.rank].to(rank.device)
    if symmetric:
        source = communicator.empty(source.shape, dtype=source.dtype).copy_(source)
    source.requires_grad_()
    result = operator.apply(call, source)
    wrong = differences(result.detach().cpu(), operator.expected(inputs)[rank.rank])

    # With more than one dimension this gradient is not contiguous.
    weights = integers(tuple(reversed(result.shape)), 100 + rank.rank, rank.size)
    weights = weights.permute(*reversed(range(weights.dim()))).to(rank.device)
    result.backward(weights)
    assert source.grad is not None
    own = float((weights * result).sum()), float((source.grad * source).sum())
    forward, backward = (sum(products) for products in zip(*rank.gather(own), strict=True))
    if forward != backward or forward == 0:
        wrong = wrong or f"<v, F(u)> is {forward}, <F*(v), u> is {backward}"
    return wrong


def _algorithms(what: str) -> tuple[str, ...]:
    return ("auto", "twoshot_push" if "allreduce" in what else "staged", "fallback")


@pytest.mark.worlds(1, 2, 3, 4)
@pytest.mark.parametrize(
    ("what", "algorithm"), [(what, name) for what in LINEAR for name in _algorithms(what)]
)
def test_backward_is_the_adjoint(pool: Pool, what: str, algorithm: str) -> None:
    """Hazard 29: <v, F(u)> = <F*(v), u>, summed over the ranks, where F is the reference."""
    some_stand_for_all(pool, algorithm == "auto" and pool.size <= 3)
    assert pool.run(_adjoint, what, algorithm) == [""] * pool.size


@pytest.mark.worlds(1, 2, 3)
@pytest.mark.parametrize("what", ["reducescatter sum", "reducescatter avg of columns uneven"])
def test_backward_of_a_direct_call_needs_no_symmetric_gradient(pool: Pool, what: str) -> None:
    """Gradients are ordinary tensors, so the backward uses no algorithm that needs symmetric
    ones."""
    assert pool.run(_adjoint, what, "direct", symmetric=True) == [""] * pool.size


# Refusals

ROWS = 2  # times the number of ranks


def _in_place(op: Any, tensor: torch.Tensor, *arguments: Any) -> torch.Tensor:
    target = tensor * 1  # autograd never allows writing to a leaf in place
    op(target, *arguments)
    return target


Made = Callable[[torch.Tensor, int, str], torch.Tensor]

# Calls without a backward, and words of the refusal.
NO_BACKWARD: dict[str, tuple[Made, tuple[str, ...]]] = {
    "broadcast": (lambda x, world, name: torch.ops.collx.broadcast(x, 0, name), ()),
    "broadcast_": (lambda x, world, name: _in_place(torch.ops.collx.broadcast_, x, 0, name), ()),
    "reduce": (lambda x, world, name: torch.ops.collx.reduce(x, "sum", 0, name), ()),
    "reduce_": (lambda x, world, name: _in_place(torch.ops.collx.reduce_, x, "sum", 0, name), ()),
    "gather": (lambda x, world, name: torch.ops.collx.gather(x, 0, world, name), ()),
    "scatter": (lambda x, world, name: torch.ops.collx.scatter(x, 0, world, name), ()),
}
for _reduce_op in ("max", "min", "prod"):
    NO_BACKWARD[f"allreduce {_reduce_op}"] = (
        lambda x, world, name, op=_reduce_op: torch.ops.collx.allreduce(x, op, name),  # type: ignore[misc]
        (_reduce_op, "sum", "avg"),
    )
    NO_BACKWARD[f"reducescatter {_reduce_op}"] = (
        lambda x, world, name, op=_reduce_op: torch.ops.collx.reducescatter(x, op, world, name),  # type: ignore[misc]
        (_reduce_op, "sum", "avg"),
    )

WITH_BACKWARD: dict[str, Made] = {
    "allreduce": lambda x, world, name: torch.ops.collx.allreduce(x, "sum", name),
    "allreduce_": lambda x, world, name: _in_place(torch.ops.collx.allreduce_, x, "sum", name),
    "reducescatter": lambda x, world, name: torch.ops.collx.reducescatter(x, "sum", world, name),
    "allgather": lambda x, world, name: torch.ops.collx.allgather(x, world, name),
    "alltoall": lambda x, world, name: torch.ops.collx.alltoall(x, world, name),
    "alltoall_": lambda x, world, name: _in_place(torch.ops.collx.alltoall_, x, world, name),
    "alltoallv": lambda x, world, name: torch.ops.collx.alltoallv(
        x, [ROWS] * world, [ROWS] * world, name
    ),
    "alltoallv.device_splits": lambda x, world, name: torch.ops.collx.alltoallv.device_splits(
        x, torch.full((world,), ROWS, device=x.device), ROWS * world, name
    )[0],
}


def _rows(rank: Rank) -> torch.Tensor:
    return ones(rank, ROWS * rank.size * 3).view(ROWS * rank.size, 3)


def _refused_backward(rank: Rank, what: str) -> Attempt:
    communicator = rank.communicator()
    made = NO_BACKWARD[what][0]

    def forward_and_backward() -> None:
        made(_rows(rank).requires_grad_(), rank.size, communicator.name).sum().backward()

    found = attempt(forward_and_backward)
    assert not made(_rows(rank), rank.size, communicator.name).requires_grad
    with torch.no_grad():
        assert not made(_rows(rank).requires_grad_(), rank.size, communicator.name).requires_grad
    assert works(rank, communicator)
    return found


@pytest.mark.worlds(1, 2, 3)
@pytest.mark.parametrize("what", sorted(NO_BACKWARD))
def test_gradients_that_do_not_exist_are_refused_by_name(pool: Pool, what: str) -> None:
    """Hazard 29: no operator silently lacks a backward, on root or elsewhere, in place or not."""
    op = what.split()[0].removesuffix("_")
    for found in pool.run(_refused_backward, what):
        assert found.error == "NotImplementedError", found
        for word in (f"collx.{op}", "backward", "accepted", *NO_BACKWARD[what][1]):
            assert word in found.message, found


def _tangent(rank: Rank, what: str) -> Attempt:
    import torch.autograd.forward_ad as forward_ad

    communicator = rank.communicator()
    made = WITH_BACKWARD[what] if what in WITH_BACKWARD else NO_BACKWARD[what][0]
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(_rows(rank), _rows(rank))
        found = attempt(lambda: made(dual, rank.size, communicator.name))
    assert works(rank, communicator)
    return found


@pytest.mark.worlds(2)
@pytest.mark.parametrize("what", sorted({*WITH_BACKWARD, *NO_BACKWARD}))
def test_forward_mode_is_refused_by_name(pool: Pool, what: str) -> None:
    """Hazard 29: a tangent is not silently dropped."""
    op = what.split()[0].split(".")[0].removesuffix("_")
    for found in pool.run(_tangent, what):
        assert found.error == "NotImplementedError", found
        assert f"collx.{op}" in found.message, found
        assert "tangent" in found.message, found


def _in_place_gradients(rank: Rank, op: str) -> str:
    name = rank.communicator().name
    weights = integers((ROWS * rank.size, 3), rank.rank).to(rank.device)
    gradients = []
    for what in (op, f"{op}_"):
        source = _rows(rank).double().requires_grad_()
        WITH_BACKWARD[what](source, rank.size, name).backward(weights)
        assert source.grad is not None
        gradients.append(source.grad.cpu())
    return differences(gradients[1], gradients[0])


@pytest.mark.worlds(1, 2, 3)
@pytest.mark.parametrize("op", ["allreduce", "alltoall"])
def test_gradients_in_place(pool: Pool, op: str) -> None:
    """The in-place form has the same gradient as the functional form."""
    assert pool.run(_in_place_gradients, op) == [""] * pool.size


def _bits(rank: Rank, reduce_op: str, compiled: bool) -> str:
    """The backward of a call is the same call on the gradients."""
    call = collectives.Call("allreduce", reduce_op=reduce_op, shape=(100,), style="random")
    name = rank.communicator().name

    def layer(tensor: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.collx.allreduce(tensor, reduce_op, name)
        return result

    torch._dynamo.reset()
    function = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    source = ones(rank, 100).requires_grad_()
    function(source).backward(call.tensors(rank)["input"])
    assert source.grad is not None
    return call.wrong_results(rank.size, rank.rank, (source.grad,))


@pytest.mark.worlds(1, 2, 3)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("reduce_op", ["sum", "avg"])
def test_gradients_of_a_reduction_have_its_bits(pool: Pool, reduce_op: str, compiled: bool) -> None:
    """Hazard 29: the backward of sum is the sum and of avg the avg, also in a traced graph."""
    assert pool.run(_bits, reduce_op, compiled) == [""] * pool.size


def _refused_by_a_norm(rank: Rank, op: str) -> dict[str, Attempt]:
    import torch.autograd.forward_ad as forward_ad

    communicator = rank.communicator()
    call = norms.Call(op, "float32", 4, 128, form="functional")
    given = call.tensors(rank)
    found = {}

    def run(tensors: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        return make(communicator, call, call.arguments(communicator, tensors), ())

    def backward(tensors: dict[str, Any]) -> None:
        wide = [result.float().sum() for result in run(tensors) if result.is_floating_point()]
        torch.stack(wide).sum().backward()

    for name in given:
        asked = {**given, name: given[name].clone().requires_grad_()}
        found[name] = attempt(lambda: backward(asked))  # noqa: B023
        with torch.no_grad():
            assert not any(result.requires_grad for result in run(asked))
    assert not any(result.requires_grad for result in run(given))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(given["input"], given["input"])
        found["tangent"] = attempt(lambda: run({**given, "input": dual}))
    assert run_call(rank, communicator, call) == ""
    return found


@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize("op", norms.NAMES)
def test_gradients_of_the_norms_are_refused_by_name(pool: Pool, op: str) -> None:
    """Hazard 29: no operator silently lacks a backward, whichever argument requires grad; forward
    mode drops no tangent."""
    for found in pool.run(_refused_by_a_norm, op):
        assert {"input", "weight", "tangent"} <= set(found)
        for name, result in found.items():
            assert result.error == "NotImplementedError", (name, result)
            assert op in result.message, (name, result)


COMPILED = (
    "allreduce avg",
    "reducescatter avg uneven",
    "allgather uneven",
    "alltoall",
    "alltoallv",
    "alltoallv.device_splits",
)


def _compiled_backward(rank: Rank) -> dict[str, Attempt]:
    """Compares the backward of each operator under compiled autograd, run twice, with the eager
    one. The second run reuses the graph."""
    import torch._dynamo.compiled_autograd as compiled_autograd

    enable: Any = getattr(compiled_autograd, "_enable", None) or compiled_autograd.enable  # type: ignore[attr-defined]
    communicator = rank.communicator()
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        what: lambda x, operator=LINEAR[what]: operator.apply(  # type: ignore[misc]
            Call(rank.size, rank.rank, communicator.name, "auto"), x
        )
        for what in COMPILED
    }
    shapes = {what: LINEAR[what].shapes(rank.size)[rank.rank] for what in COMPILED}
    functions["epilogue"] = lambda x: collx.allreduce(
        x, group=communicator, epilogue=lambda v, e: v * v + e, extras=[x.detach()]
    )
    shapes["epilogue"] = (4, 3)
    found = {}
    for what, function in functions.items():
        source = integers(shapes[what], 3 + rank.rank, rank.size).to(rank.device)
        graphs: list[Any] = []

        def gradient() -> torch.Tensor:
            leaf = source.clone().requires_grad_()  # noqa: B023
            (function(leaf) ** 2).sum().backward()  # noqa: B023
            assert leaf.grad is not None
            return leaf.grad

        def compiler(graph: Any) -> Any:
            graphs.append(graph)  # noqa: B023
            return torch.compile(graph, backend="eager")

        def check() -> None:
            wanted = gradient()
            for _ in range(2):
                with enable(compiler):
                    assert torch.equal(gradient(), wanted)
            assert len(graphs) == 1  # noqa: B023

        found[what] = attempt(check)
    assert works(rank, communicator)
    return found


@pytest.mark.worlds(2)
def test_compiled_autograd_gives_the_same_gradients(pool: Pool) -> None:
    for found in pool.run(_compiled_backward):
        assert len(found) == len(COMPILED) + 1
        for what, result in found.items():
            assert not result.error, (what, result)
