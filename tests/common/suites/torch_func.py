"""Transforms of torch.func: what they can do with the operators works, and what they cannot is
refused by name. The operators are taken from the schemas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ..attempt import Attempt, attempt, works
from ..overloads import (
    all_overloads,
    arguments_for,
    name_in_errors,
    writing_overloads,
    written_by,
)
from ..pool import Pool
from ..rank import Rank
from ..values import unequal

REVERSE: dict[str, Callable[[Callable[..., Any], torch.Tensor], Any]] = {
    "grad": lambda f, x: torch.func.grad(f)(x),
    "vjp": lambda f, x: torch.func.vjp(f, x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
}
# PyTorch's loop over a batch takes no lists of tensors.
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


def _differentiated(rank: Rank, transform: str) -> dict[str, Attempt]:
    communicator = rank.communicator()
    found = {}
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
            return (result[0] if isinstance(result, tuple) else result).float().sum()

        found[str(overload)] = attempt(
            lambda: REVERSE[transform](function, call[first])  # noqa: B023
        )
    assert works(rank, communicator)
    return found


@pytest.mark.worlds(2)
@pytest.mark.parametrize("transform", sorted(REVERSE))
def test_a_derivative_by_torch_func_is_refused_by_name(pool: Pool, transform: str) -> None:
    """Every overload, before anything is launched."""
    for found in pool.run(_differentiated, transform):
        for overload, result in found.items():
            # The forms with out= say that they have no derivative at all.
            assert result.error in ("NotImplementedError", "RuntimeError"), (overload, result)
            assert f"collx.{name_in_errors(overload)}: " in result.message, (overload, result)
            assert "accepted" in result.message.lower(), (overload, result)


def _without_derivative(rank: Rank) -> bool:
    """What is constant for a transform is no business of its."""
    name = rank.communicator().name
    kept = torch.full((3,), 2.0, device=rank.device)

    def function(x: torch.Tensor) -> torch.Tensor:
        total = torch.ops.collx.allreduce(kept, "sum", name)
        torch.ops.collx.broadcast_(total, 0, name)
        return (x * total).sum()

    gradient = torch.func.grad(function)(torch.ones(3, device=rank.device))
    return bool((gradient == 2.0 * rank.size).all())


@pytest.mark.worlds(2)
def test_tensors_without_derivative_go_through(pool: Pool) -> None:
    assert all(pool.run(_without_derivative))


def _batched(rank: Rank) -> dict[str, Attempt]:
    communicator = rank.communicator()
    found = {}
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

        found[str(overload)] = attempt(check)
    assert works(rank, communicator)
    return found


@pytest.mark.worlds(2)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_calls_a_functional_form_for_each_element(pool: Pool) -> None:
    """But for those that take a list of tensors."""
    for found in pool.run(_batched):
        for overload, result in found.items():
            if overload in NOT_BATCHED:
                assert result.error == "NotImplementedError", (overload, result)
                assert f"collx.{name_in_errors(overload)}: " in result.message, (overload, result)
                assert "vmap" in result.message, (overload, result)
            else:
                assert not result.error, (overload, result)


def _batched_writes(rank: Rank) -> dict[str, Attempt]:
    communicator = rank.communicator()
    found = {}
    for overload in writing_overloads():
        call = arguments_for(rank, communicator.name, overload)
        first = _first(overload)

        def function(x: torch.Tensor) -> torch.Tensor:
            overload(**{**call, first: x})  # noqa: B023
            return x

        found[str(overload)] = attempt(
            lambda: torch.func.vmap(function)(torch.stack([call[first]] * 2))  # noqa: B023
        )
    assert works(rank, communicator)
    return found


@pytest.mark.worlds(2)
def test_vmap_of_a_form_that_writes_is_refused_by_name(pool: Pool) -> None:
    for found in pool.run(_batched_writes):
        for overload, result in found.items():
            assert result.error == "NotImplementedError", (overload, result)
            assert f"collx.{name_in_errors(overload)}: " in result.message, (overload, result)
            assert "vmap" in result.message, (overload, result)
