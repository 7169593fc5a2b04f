"""Every argument that an operator writes gets a new version, so that autograd detects that a saved
tensor has changed. The tests take the operators and their written arguments from the schemas, so a
new operator is tested as soon as it is registered."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ..attempt import assert_raised, attempt, works
from ..overloads import MODES, arguments_for, name_in_errors, writing_overloads, written_by
from ..pool import on_ranks
from ..rank import Rank


def _bumps_of_pytorch(rank: Rank) -> int:
    """Returns the version increment of PyTorch's own operators in the current mode."""
    with torch.inference_mode(False):
        tensor = torch.ones(3, device=rank.device)
        before = tensor._version
    torch.add(tensor, 1, out=tensor)
    return tensor._version - before


@pytest.mark.worlds(1, 2)
@pytest.mark.parametrize("mode", sorted(MODES))
@on_ranks
def test_what_is_written_gets_a_new_version(rank: Rank, mode: str) -> None:
    """Hazard 34: the version of each argument that the schema marks as written increases by one, as
    with PyTorch's operators in that mode; no other version changes."""
    communicator = rank.communicator()
    wrong = {}
    for overload in writing_overloads():
        call = arguments_for(rank, communicator.name, overload)
        tensors = {k: v for k, v in call.items() if isinstance(v, torch.Tensor)}
        before = {name: tensor._version for name, tensor in tensors.items()}
        with MODES[mode]():
            expected = _bumps_of_pytorch(rank)
            assert overload(**call) is None
        assert expected == 1
        for name, tensor in tensors.items():
            want = expected if name in written_by(overload) else 0
            if tensor._version - before[name] != want:
                wrong[f"{overload}: {name}"] = f"{tensor._version - before[name]} for {want}"
    assert not wrong, wrong


class _Keep(torch.autograd.Function):
    """The identity function, which saves another tensor."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(kept)
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        assert len(context.saved_tensors) == 1
        return gradients[0], None


@pytest.mark.worlds(2)
@on_ranks
def test_a_saved_tensor_that_is_written_is_noticed(rank: Rank) -> None:
    """Hazard 34: backward raises an error instead of using the overwritten tensor."""
    communicator = rank.communicator()
    count = 0
    for overload in writing_overloads():
        call = arguments_for(rank, communicator.name, overload)
        for name in written_by(overload):
            x = torch.ones(3, requires_grad=True)
            kept: Any = _Keep.apply(x, call[name])
            kept.sum().backward(retain_graph=True)
            overload(**call)
            words = "modified by an inplace operation"
            assert_raised(attempt(kept.sum().backward), "RuntimeError", words)
            count += 1
    assert count > 30


@pytest.mark.worlds(2)
@on_ranks
def test_inference_tensors_are_written_in_inference_mode_alone(rank: Rank) -> None:
    """As in PyTorch, but refused by name and before anything is launched."""
    communicator = rank.communicator()
    for overload in writing_overloads():
        with torch.inference_mode():
            call = arguments_for(rank, communicator.name, overload)
            assert all(call[name].is_inference() for name in written_by(overload))
            assert overload(**call) is None
        before = {name: call[name].clone() for name in written_by(overload)}
        refused = attempt(lambda: overload(**call))  # noqa: B023
        words = (name_in_errors(overload), "torch.inference_mode()")
        assert_raised(refused, "RuntimeError", *words)
        for name, tensor in before.items():
            assert tensor.view(torch.uint8).equal(call[name].view(torch.uint8)), overload
    assert works(rank, communicator)
