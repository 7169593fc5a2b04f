"""Gradients of the operators: each backward is the adjoint, or is refused by name.

Values are small integers in float64 (multiples of the number of ranks, because of avg), so
every sum below is exact and no tolerance is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import collx

from .. import norms
from ..attempt import assert_raised, attempt, ones, works
from ..calls import make, run_call
from ..check import differences
from ..collectives import OPS, Call
from ..operators import name_in_errors
from ..pool import Pool, on_ranks, some_stand_for_all
from ..rank import Rank
from ..shares import integers

_linear = partial(Call, form="functional", splits="uneven")

# Operators that are linear in the inputs of all ranks. All ranks get an equal part of 12 rows, but
# not of 11 or 13.
LINEAR = {
    "allreduce sum": _linear("allreduce", shape=(5, 3)),
    "allreduce avg": _linear("allreduce", shape=(5, 3), reduce_op="avg"),
    "reducescatter sum": _linear("reducescatter", shape=(12, 3)),
    "reducescatter sum uneven": _linear("reducescatter", shape=(13, 3)),
    "reducescatter sum of one row": _linear("reducescatter", shape=(1, 3)),
    "reducescatter sum of columns": _linear("reducescatter", shape=(3, 12), axis=1),
    "reducescatter sum of columns uneven": _linear("reducescatter", shape=(3, 11), axis=-1),
    "reducescatter sum in the middle uneven": _linear("reducescatter", shape=(2, 13, 3), axis=1),
    "reducescatter avg": _linear("reducescatter", shape=(12,), reduce_op="avg"),
    "reducescatter avg uneven": _linear("reducescatter", shape=(13,), axis=-1, reduce_op="avg"),
    "reducescatter avg of columns uneven": _linear(
        "reducescatter", shape=(2, 13), axis=1, reduce_op="avg"
    ),
    "allgather": _linear("allgather", shape=(2, 3)),
    "allgather with an even total": _linear("allgather", shape=(12, 3), uneven=True),
    "allgather uneven": _linear("allgather", shape=(13, 3), uneven=True),
    "allgather of one row": _linear("allgather", shape=(1, 3), uneven=True),
    "allgather of columns": _linear("allgather", shape=(3, 2), axis=1),
    "allgather of columns uneven": _linear("allgather", shape=(3, 11), axis=-1, uneven=True),
    "allgather in the middle uneven": _linear("allgather", shape=(2, 13, 3), axis=-2, uneven=True),
    "alltoall": _linear("alltoall", shape=(2, 3)),
    "alltoallv": _linear("alltoallv", shape=(2, 3)),
    "alltoallv with zeros": _linear("alltoallv", shape=(2, 3), splits="zeros"),
    "alltoallv.device_splits": _linear("alltoallv_device", shape=(2, 3), spare=3, unused=2),
    "alltoallv.device_splits with zeros": _linear(
        "alltoallv_device", shape=(2, 3), splits="zeros", spare=3, unused=2
    ),
}


def _make(rank: Rank, call: Call, source: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Makes a call with `source` as its input, or with a copy in place: autograd never allows
    writing to a leaf."""
    communicator = rank.communicator()
    target = source * 1 if call.form == "inplace" else source
    given = call.arguments(communicator, {**call.tensors(rank), "input": target})
    return make(communicator, call, given, ())


def _adjoint(rank: Rank, call: Call, symmetric: bool = False) -> str:
    """Compares the result with the reference, then checks by inner products that the backward is
    the adjoint of the forward. Returns the error, if any."""
    shapes = [given["input"].shape for given in call.data(rank.size).given]
    inputs = [integers(shape, 3 + r, rank.size) for r, shape in enumerate(shapes)]
    source = inputs[rank.rank].to(rank.device)
    if symmetric:
        memory = rank.communicator().empty(source.shape, dtype=source.dtype)
        source = memory.copy_(source)
    source.requires_grad_()
    results = _make(rank, call, source)
    assert [result.requires_grad for result in results] == [True, False][: len(results)]
    pairs = zip(results, OPS[call.op].expected(call, inputs)[rank.rank], strict=True)
    wrong = "".join(differences(result.detach().cpu(), want) for result, want in pairs)
    result = results[0]

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
    return ("auto", "twoshot_push" if LINEAR[what].op == "allreduce" else "staged", "fallback")


@pytest.mark.worlds(1, 2, 3, 4)
@pytest.mark.parametrize(
    ("what", "algorithm"), [(what, name) for what in LINEAR for name in _algorithms(what)]
)
def test_backward_is_the_adjoint(pool: Pool, what: str, algorithm: str) -> None:
    """Hazard 29: <v, F(u)> = <F*(v), u>, summed over the ranks, where F is the reference."""
    some_stand_for_all(pool, algorithm == "auto" and pool.size <= 3)
    call = replace(LINEAR[what], algorithm=algorithm)
    assert pool.run(_adjoint, call) == [""] * pool.size


@pytest.mark.worlds(1, 2, 3)
@pytest.mark.parametrize("what", ["reducescatter sum", "reducescatter avg of columns uneven"])
def test_backward_of_a_direct_call_needs_no_symmetric_gradient(pool: Pool, what: str) -> None:
    """Gradients are ordinary tensors, so the backward uses no algorithm that needs symmetric
    ones."""
    call = replace(LINEAR[what], algorithm="direct")
    assert pool.run(_adjoint, call, symmetric=True) == [""] * pool.size


# Refusals

_call = partial(Call, form="functional", shape=(12, 3))
NO_BACKWARD = {op: _call(op) for op in ("broadcast", "reduce", "gather", "scatter")}
NO_BACKWARD |= {f"{op}_": _call(op, form="inplace") for op in ("broadcast", "reduce")}
NO_BACKWARD |= {
    f"{op} {reduce_op}": _call(op, reduce_op=reduce_op)
    for op in ("allreduce", "reducescatter")
    for reduce_op in ("max", "min", "prod")
}
WITH_BACKWARD = {
    op: _call(op) for op in ("allreduce", "reducescatter", "allgather", "alltoall", "alltoallv")
}
WITH_BACKWARD |= {f"{op}_": _call(op, form="inplace") for op in ("allreduce", "alltoall")}
WITH_BACKWARD["alltoallv.device_splits"] = _call("alltoallv_device")


def _ones(rank: Rank, call: Call) -> torch.Tensor:
    return torch.ones_like(call.tensors(rank)["input"])


@pytest.mark.worlds(1, 2, 3)
@pytest.mark.parametrize("what", sorted(NO_BACKWARD))
@on_ranks
def test_gradients_that_do_not_exist_are_refused_by_name(rank: Rank, what: str) -> None:
    """Hazard 29: no operator silently lacks a backward, on root or elsewhere, in place or not."""
    call = NO_BACKWARD[what]
    words = (call.reduce_op, "sum", "avg") if call.reduce_op != "sum" else ()

    def made() -> torch.Tensor:
        return _make(rank, call, _ones(rank, call).requires_grad_())[0]

    found = attempt(lambda: made().sum().backward())
    assert not _make(rank, call, _ones(rank, call))[0].requires_grad
    with torch.no_grad():
        assert not made().requires_grad
    assert works(rank, rank.communicator())
    assert_raised(found, "NotImplementedError", f"collx.{call.op}", "backward", "accepted", *words)


@pytest.mark.worlds(2)
@pytest.mark.parametrize("what", sorted({*WITH_BACKWARD, *NO_BACKWARD}))
@on_ranks
def test_forward_mode_is_refused_by_name(rank: Rank, what: str) -> None:
    """Hazard 29: a tangent is not silently dropped."""
    call = {**WITH_BACKWARD, **NO_BACKWARD}[what]
    import torch.autograd.forward_ad as forward_ad

    with forward_ad.dual_level():
        dual = forward_ad.make_dual(_ones(rank, call), _ones(rank, call))
        found = attempt(lambda: _make(rank, call, dual))
    assert works(rank, rank.communicator())
    assert_raised(found, "NotImplementedError", f"collx.{name_in_errors(call.op)}", "tangent")


@pytest.mark.worlds(1, 2, 3)
@pytest.mark.parametrize("op", ["allreduce", "alltoall"])
@on_ranks
def test_gradients_in_place(rank: Rank, op: str) -> str:
    """The in-place form has the same gradient as the functional form."""
    gradients = []
    for what in (op, f"{op}_"):
        call = WITH_BACKWARD[what]
        source = _ones(rank, call).double().requires_grad_()
        weights = integers(source.shape, rank.rank).to(rank.device)
        _make(rank, call, source)[0].backward(weights)
        assert source.grad is not None
        gradients.append(source.grad.cpu())
    return differences(gradients[1], gradients[0])


@pytest.mark.worlds(1, 2, 3)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("reduce_op", ["sum", "avg"])
@on_ranks
def test_gradients_of_a_reduction_have_its_bits(rank: Rank, reduce_op: str, compiled: bool) -> str:
    """Hazard 29: the backward of sum is the sum and of avg the avg, also in a traced graph. The
    backward of a call is the same call on the gradients."""
    call = Call("allreduce", reduce_op=reduce_op, shape=(100,), style="random")
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


@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize("op", norms.NAMES)
@on_ranks
def test_gradients_of_the_norms_are_refused_by_name(rank: Rank, op: str) -> None:
    """Hazard 29: no operator silently lacks a backward, whichever argument requires grad; forward
    mode drops no tangent."""
    import torch.autograd.forward_ad as forward_ad

    communicator = rank.communicator()
    call = norms.Call(op, "float32", 4, 128, form="functional")
    given = call.tensors(rank)

    def run(tensors: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        return make(communicator, call, call.arguments(communicator, tensors), ())

    def backward(tensors: dict[str, Any]) -> None:
        wide = [result.float().sum() for result in run(tensors) if result.is_floating_point()]
        torch.stack(wide).sum().backward()

    for name in given:
        asked = {**given, name: given[name].clone().requires_grad_()}
        refused = attempt(lambda: backward(asked))  # noqa: B023
        assert_raised(refused, "NotImplementedError", op)
        with torch.no_grad():
            assert not any(result.requires_grad for result in run(asked))
    assert not any(result.requires_grad for result in run(given))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(given["input"], given["input"])
        refused = attempt(lambda: run({**given, "input": dual}))
        assert_raised(refused, "NotImplementedError", op)
    assert run_call(rank, communicator, call) == ""
    assert {"input", "weight"} <= set(given)


COMPILED = (
    "allreduce avg",
    "reducescatter avg uneven",
    "allgather uneven",
    "alltoall",
    "alltoallv",
    "alltoallv.device_splits",
)


@pytest.mark.worlds(2)
@on_ranks
def test_compiled_autograd_gives_the_same_gradients(rank: Rank) -> None:
    """Compares the backward of each operator under compiled autograd, run twice, with the eager
    one. The second run reuses the graph."""
    import torch._dynamo.compiled_autograd as compiled_autograd

    enable: Any = getattr(compiled_autograd, "_enable", None) or compiled_autograd.enable  # type: ignore[attr-defined]
    communicator = rank.communicator()
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        what: lambda x, call=LINEAR[what]: _make(rank, call, x)[0]  # type: ignore[misc]
        for what in COMPILED
    }
    shapes = {what: LINEAR[what].tensors(rank)["input"].shape for what in COMPILED}
    functions["epilogue"] = lambda x: collx.allreduce(
        x, group=communicator, epilogue=lambda v, e: v * v + e, extras=[x.detach()]
    )
    shapes["epilogue"] = (4, 3)
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

        wanted = gradient()
        for _ in range(2):
            with enable(compiler):
                assert torch.equal(gradient(), wanted), what
        assert len(graphs) == 1, what
    assert works(rank, communicator)
