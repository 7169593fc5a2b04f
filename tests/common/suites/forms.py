"""The operator as PyTorch sees it: its forms, opcheck, gradients, compiled graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ..attempt import Attempt, attempt, ones
from ..check import differences
from ..compiling import inductor, require_compiler
from ..opcheck import PASSED, opcheck
from ..pool import Pool
from ..rank import Rank
from ..values import inputs_and_reference, make_values


def _forms_agree(rank: Rank) -> list[str]:
    import collx

    communicator = rank.communicator()
    name = communicator.name
    inputs, expected = inputs_and_reference(rank.size, "random", "float32", "sum", 999, 5)
    source = inputs[rank.rank].to(rank.device)
    ops = torch.ops.collx
    functional = ops.allreduce(source, "sum", name)
    out = torch.empty_like(source)
    nothing = ops.allreduce.out(source, "sum", name, out=out)
    inplace = source.clone()
    nothing_either = ops.allreduce_(inplace, "sum", name)
    assert nothing is None
    assert nothing_either is None
    assert functional.data_ptr() != source.data_ptr()
    thin = collx.allreduce(source, group=communicator)
    given = torch.empty_like(source)
    assert collx.allreduce(source, "sum", name, out=given) is given
    same = source.clone()
    assert collx.allreduce_(same, "sum", name) is same
    results = [functional, out, inplace, thin, given, same]
    return [differences(result.cpu(), expected) for result in results]


@pytest.mark.worlds(1, 2, 3, 4)
def test_functional_out_and_inplace_agree(pool: Pool) -> None:
    """Three forms, and the thin functions with defaults filled in, give the same bits."""
    for found in pool.run(_forms_agree):
        assert found == [""] * 6


def _aliases(rank: Rank) -> bool:
    communicator = rank.communicator()
    tensors = [
        ones(rank, 10),
        ones(rank, 10)[2:],
        ones(rank, 0),
        communicator.empty((10,)).fill_(1),
    ]
    fresh = []
    for tensor in tensors:
        result = torch.ops.collx.allreduce(tensor, "sum", communicator.name)
        fresh.append(result._base is None and result.untyped_storage() is not None)
        same = result.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        fresh.append(tensor.numel() == 0 or not same)
    return all(fresh)


@pytest.mark.worlds(1, 2)
def test_functional_result_never_aliases_the_input(pool: Pool) -> None:
    """Hazard 25: also with one rank, where the all-reduce is the identity."""
    assert all(pool.run(_aliases))


def _opcheck(rank: Rank, op: str, dtype: str, layout: str, gradients: bool) -> dict[str, str]:
    name = rank.communicator().name
    source = make_values("random", dtype, 24, 1, rank.rank).view(4, 6).to(rank.device)
    source = source.t() if layout == "transposed" else source
    source.requires_grad_(gradients)
    arguments: tuple[Any, ...] = (source, "sum", name)
    options = {"out": torch.empty_like(source)} if op == "out" else {}
    overload = {
        "functional": torch.ops.collx.allreduce.default,
        "out": torch.ops.collx.allreduce.out,
        "inplace": torch.ops.collx.allreduce_.default,
    }[op]
    return opcheck(rank, overload, arguments, options)


@pytest.mark.worlds(1, 2)
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize(
    ("op", "dtype", "gradients"),
    [
        ("functional", "float32", True),
        ("functional", "bfloat16", False),
        ("functional", "int8", False),
        ("out", "float32", False),
        ("inplace", "float32", False),
        ("inplace", "uint8", False),
    ],
)
def test_opcheck_passes_in_lockstep(
    pool: Pool, op: str, dtype: str, gradients: bool, layout: str
) -> None:
    """Hazard 25: schema, autograd registration, exact Meta kernel, dynamic shapes."""
    for found in pool.run(_opcheck, op, dtype, layout, gradients):
        assert found == PASSED


def _meta(rank: Rank) -> bool:
    from torch._subclasses.fake_tensor import FakeTensorMode

    name = rank.communicator().name
    layouts = [torch.empty(4, 6), torch.empty(4, 6).t(), torch.empty(9)[::2], torch.empty(())]
    layouts += [torch.empty(0, 3), torch.empty(2, 3, 4).permute(2, 0, 1)]
    for dtype in (torch.float32, torch.int64, torch.bfloat16):
        for layout in layouts:
            source = layout.to(rank.device, dtype).zero_()
            real = torch.ops.collx.allreduce(source, "max", name)
            with FakeTensorMode() as mode:
                fake_input = mode.from_tensor(source)
                fake = torch.ops.collx.allreduce(fake_input, "max", name)
            kinds = [(t.shape, t.stride(), t.dtype, t.device) for t in (real, fake)]
            if kinds[0] != kinds[1]:
                raise AssertionError(f"{kinds[0]} is not {kinds[1]}")
    return True


@pytest.mark.worlds(2)
def test_meta_kernel_is_exact(pool: Pool) -> None:
    """Hazard 25: shape, strides, dtype and device of the result are known without running."""
    assert all(pool.run(_meta))


def _gradient(rank: Rank, reduce_op: str) -> str:
    name = rank.communicator().name
    weights, expected = inputs_and_reference(rank.size, "random", "float32", reduce_op, 100, 6)
    source = ones(rank, 100).requires_grad_()
    result = torch.ops.collx.allreduce(source, reduce_op, name)
    result.backward(weights[rank.rank].to(rank.device))
    assert source.grad is not None
    return differences(source.grad.cpu(), expected)


@pytest.mark.worlds(1, 2, 3)
@pytest.mark.parametrize("reduce_op", ["sum", "avg"])
def test_gradient_is_the_allreduce_of_the_gradients(pool: Pool, reduce_op: str) -> None:
    """Hazard 29: backward of sum is the sum, of avg the avg, bit for bit."""
    assert pool.run(_gradient, reduce_op) == [""] * pool.size


def _refused_gradient(rank: Rank, reduce_op: str) -> Attempt:
    name = rank.communicator().name

    def forward_and_backward() -> None:
        source = ones(rank, 100).requires_grad_()
        torch.ops.collx.allreduce(source, reduce_op, name).sum().backward()

    found = attempt(forward_and_backward)
    without = torch.ops.collx.allreduce(ones(rank, 100), reduce_op, name)
    assert not without.requires_grad
    return found


@pytest.mark.worlds(2)
@pytest.mark.parametrize("reduce_op", ["max", "min", "prod"])
def test_gradients_that_do_not_exist_are_refused_by_name(pool: Pool, reduce_op: str) -> None:
    """Hazard 29: no silent absence of autograd."""
    for found in pool.run(_refused_gradient, reduce_op):
        assert found.error == "NotImplementedError", found
        assert reduce_op in found.message
        assert "allreduce" in found.message


def _compiled(rank: Rank, backend: str) -> str:
    name = rank.communicator().name

    def layer(tensor: torch.Tensor) -> torch.Tensor:
        reduced: torch.Tensor = torch.ops.collx.allreduce(tensor * 2, "sum", name)
        return reduced + 1

    inputs, _ = inputs_and_reference(rank.size, "random", "float32", "sum", 256, 8)
    source = inputs[rank.rank].to(rank.device)
    with inductor():
        first = torch.compile(layer, fullgraph=True, backend=backend)(source)
    return differences(first.cpu(), layer(source).cpu())


@pytest.mark.worlds(2)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiles_into_one_graph(pool: Pool, backend: str) -> None:
    """The functional op needs no graph break and gives the same bits compiled."""
    if backend == "inductor":
        require_compiler()
    assert pool.run(_compiled, backend) == ["", ""]


def _compiled_training(rank: Rank) -> str:
    name = rank.communicator().name
    weights, expected = inputs_and_reference(rank.size, "random", "float32", "sum", 64, 9)
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(tensor: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.collx.allreduce(tensor, "sum", name)
        return result

    source = ones(rank, 64).requires_grad_()
    layer(source).backward(weights[rank.rank].to(rank.device))
    assert source.grad is not None
    return differences(source.grad.cpu(), expected)


@pytest.mark.worlds(2)
def test_gradient_is_right_when_compiled(pool: Pool) -> None:
    """Hazard 29: the backward formula survives tracing."""
    assert pool.run(_compiled_training) == ["", ""]
