"""Transforms of torch.func: each one either works or refuses the operator by name. The tests take
the operators from the schemas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import collx

from ..attempt import assert_raised, attempt, works
from ..overloads import (
    all_overloads,
    arguments_for,
    name_in_errors,
    writing_overloads,
    written_by,
)
from ..pool import on_ranks
from ..rank import Rank
from ..values import unequal
from .nn_norm import Seen

REVERSE: dict[str, Callable[[Callable[..., Any], torch.Tensor], torch.Tensor]] = {
    "grad": lambda f, x: torch.func.grad(f)(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.tensor(1.0, device=x.device))[0],
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
}
WITH_DERIVATIVE = {
    f"collx.{name}"
    for name in (
        "allgather.default",
        "allreduce.default",
        "allreduce_.default",
        "allreduce_map.default",
        "allreduce_map_with_value.default",
        "alltoall.default",
        "alltoall_.default",
        "alltoallv.default",
        "alltoallv.device_splits",
        "epilogue.default",
        "reducescatter.default",
        "reducescatter_map.default",
        "reducescatter_map_with_value.default",
    )
}
# PyTorch's loop over a batch does not support lists of tensors.
NOT_BATCHED = tuple(
    f"collx.{name}.default"
    for name in (
        "allreduce_map",
        "allreduce_map_with_value",
        "reducescatter_map",
        "reducescatter_map_with_value",
        "epilogue",
    )
)


def _first(overload: Any) -> str:
    return str(overload._schema.arguments[0].name)


def _functional() -> list[Any]:
    return [
        overload
        for overload in all_overloads()
        if not written_by(overload) and overload is not torch.ops.collx.barrier.default
    ]


@pytest.mark.worlds(2)
@pytest.mark.parametrize("transform", sorted(REVERSE))
@on_ranks
def test_torch_func_differentiates_what_autograd_does(rank: Rank, transform: str) -> None:
    """Every overload: the same bits as autograd, or a refusal by name, before anything is
    launched."""
    communicator = rank.communicator()
    derivatives = set()
    for overload in all_overloads():
        if overload is torch.ops.collx.barrier.default:
            continue
        call = arguments_for(rank, communicator.name, overload)
        first = _first(overload)

        def function(x: torch.Tensor) -> torch.Tensor:
            given = {**call, first: x * 1}  # noqa: B023
            result = overload(**given)  # noqa: B023
            if result is None:
                result = given[first]  # noqa: B023
            result = result[0] if isinstance(result, tuple) else result
            return (result.float() ** 2).sum()

        gradients: list[torch.Tensor] = []

        def by_autograd() -> None:
            leaf = call[first].clone().requires_grad_()  # noqa: B023
            gradients.extend(torch.autograd.grad(function(leaf), leaf))  # noqa: B023

        refused = attempt(by_autograd).error
        transformed = attempt(
            lambda: gradients.append(REVERSE[transform](function, call[first]))  # noqa: B023
        )
        if not refused:
            assert not transformed.error, (overload, transformed)
            assert not bool(unequal(gradients[0], gradients[1]).any()), overload
            derivatives.add(str(overload))
            continue
        # The forms with out= state that they have no derivative at all.
        assert transformed.error in ("NotImplementedError", "RuntimeError"), (overload, transformed)
        assert f"collx.{name_in_errors(overload)}: " in transformed.message, (overload, transformed)
        assert "accepted" in transformed.message.lower(), (overload, transformed)
    assert works(rank, communicator)
    assert derivatives == WITH_DERIVATIVE


@pytest.mark.worlds(2)
@on_ranks
def test_nested_transforms_differentiate_an_epilogue_twice(rank: Rank) -> None:
    communicator = rank.communicator()

    def function(x: torch.Tensor) -> torch.Tensor:
        cubes = collx.allreduce(x, group=communicator, epilogue=lambda v: v * v * v)
        return cubes.sum()

    leaf = torch.arange(6.0, device=rank.device).requires_grad_()
    (first,) = torch.autograd.grad(function(leaf), leaf, create_graph=True)
    (wanted,) = torch.autograd.grad(first.sum(), leaf)
    nested = torch.func.grad(lambda x: torch.func.grad(function)(x).sum())(leaf.detach())
    assert not bool(unequal(nested, wanted).any())


@pytest.mark.worlds(2)
@on_ranks
def test_tensors_without_derivative_go_through(rank: Rank) -> None:
    """Calls on tensors that are constant for the transform are allowed."""
    name = rank.communicator().name
    kept = torch.full((3,), 2.0, device=rank.device)

    def function(x: torch.Tensor) -> torch.Tensor:
        total = torch.ops.collx.allreduce(kept, "sum", name)
        torch.ops.collx.broadcast_(total, 0, name)
        return (x * total).sum()

    gradient = torch.func.grad(function)(torch.ones(3, device=rank.device))
    assert (gradient == 2.0 * rank.size).all()


@pytest.mark.worlds(2)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@on_ranks
def test_vmap_calls_a_functional_form_for_each_element(rank: Rank) -> None:
    """Except for the operators that take a list of tensors."""
    communicator = rank.communicator()
    for overload in _functional():
        call = arguments_for(rank, communicator.name, overload)
        first = _first(overload)
        batch = torch.stack([call[first], call[first] + 1])

        def function(x: torch.Tensor) -> Any:
            return overload(**{**call, first: x})  # noqa: B023

        def check() -> None:
            results = torch.func.vmap(function)(batch)  # noqa: B023
            results = results if isinstance(results, tuple) else (results,)
            for number, x in enumerate(batch):  # noqa: B023
                single = function(x)
                single = single if isinstance(single, tuple) else (single,)
                for got, want in zip(results, single, strict=True):
                    assert not bool(unequal(got[number], want).any())

        if str(overload) in NOT_BATCHED:
            words = (f"collx.{name_in_errors(overload)}: ", "vmap")
            assert_raised(attempt(check), "NotImplementedError", *words)
        else:
            check()
    assert works(rank, communicator)


@pytest.mark.worlds(2)
@on_ranks
def test_vmap_of_an_elementwise_collective_is_one_collective(rank: Rank) -> None:
    """Counts the collectives, below all transforms, for a batch of three, with one and with two
    levels of vmap."""
    name = rank.communicator().name
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "allreduce": lambda x: torch.ops.collx.allreduce(x, "sum", name),
        "broadcast": lambda x: torch.ops.collx.broadcast(x, 1, name),
        "reduce": lambda x: torch.ops.collx.reduce(x, "max", 1, name),
        "gradient": torch.func.grad(lambda x: torch.ops.collx.allreduce(x * x, "sum", name).sum()),
    }
    batch = torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(rank.rank))
    batch = batch.to(rank.device)
    found = {}
    for key, function in functions.items():
        with Seen() as seen_once:
            once = torch.func.vmap(function, in_dims=1, out_dims=1)(batch)
        with Seen() as seen_twice:
            twice = torch.func.vmap(torch.func.vmap(function))(batch)
        found[key] = len(seen_once.names), len(seen_twice.names)
        for i, row in enumerate(batch):
            for j, x in enumerate(row):
                single = function(x)
                assert not bool(unequal(twice[i, j], single).any()), key
                assert not bool(unequal(once[i, j], single).any()), key
    gradient = found.pop("gradient")
    assert gradient == (2, 2)  # the function, and its backward
    assert set(found.values()) == {(1, 1)}, found


@pytest.mark.worlds(2)
@on_ranks
def test_vmap_of_a_form_that_writes_is_refused_by_name(rank: Rank) -> None:
    communicator = rank.communicator()
    for overload in writing_overloads():
        call = arguments_for(rank, communicator.name, overload)
        first = _first(overload)

        def function(x: torch.Tensor) -> torch.Tensor:
            overload(**{**call, first: x})  # noqa: B023
            return x

        batch = torch.stack([call[first]] * 2)
        refused = attempt(lambda: torch.func.vmap(function)(batch))  # noqa: B023
        words = (f"collx.{name_in_errors(overload)}: ", "vmap")
        assert_raised(refused, "NotImplementedError", *words)
    assert works(rank, communicator)
