"""Every argument that an operator writes gets a new version, so that autograd finds out that a
tensor it has saved is no longer the same. The operators and what they write are taken from the
schemas: a new one is tested as soon as it is there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from ..attempt import attempt, works
from ..pool import Pool
from ..rank import Rank

COLS = 256
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "grad": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


def _written(overload: Any) -> list[str]:
    return [
        argument.name
        for argument in overload._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def _overloads() -> list[Any]:
    """What writes an argument."""
    import collx  # noqa: F401

    found = []
    for full in sorted(torch._C._dispatch_get_all_op_names()):
        if not full.startswith("collx::"):
            continue
        name, _, overload = full.removeprefix("collx::").partition(".")
        found.append(getattr(getattr(torch.ops.collx, name), overload or "default"))
    return [overload for overload in found if _written(overload)]


def _given(rank: Rank, group_name: str, overload: Any) -> dict[str, Any]:
    """What is read, and what is written in place: everything that has no default."""
    name = str(overload)
    rows = 2 * rank.size
    norm = "norm" in name
    own = 2 if "reducescatter" in name else rows

    def tensor(*shape: int) -> torch.Tensor:
        return torch.ones(shape, device=rank.device)

    splits: Any = [2] * rank.size
    values = {
        "input": tensor(rows, COLS),
        "residual": tensor(own, COLS),
        "weight": tensor(COLS),
        "bias": tensor(COLS),
        "eps": 1e-6,
        "reduce_op": "sum",
        "expression": "value.float32;neg.float32 0",
        "extras": [],
        "root": 0,
        "group_size": rank.size,
        "group_name": group_name,
        "output_splits": splits,
        "input_splits": torch.tensor(splits, device=rank.device) if "device" in name else splits,
        "capacity": rows,
    }
    return {
        argument.name: values[argument.name]
        for argument in overload._schema.arguments
        if not argument.has_default_value() and not (argument.kwarg_only and argument.is_out)
    } | ({"scale_mode": "row"} if norm and "8" in name else {})


def _call_of(rank: Rank, group_name: str, overload: Any) -> dict[str, Any]:
    """All arguments: for those of the forms with out=, what the functional form has returned."""
    given = _given(rank, group_name, overload)
    outs = [name for name in _written(overload) if name not in given]
    if outs:
        sibling = overload._overloadname.removesuffix("out").removesuffix("_") or "default"
        results = getattr(overload._overloadpacket, sibling)(**given)
        results = results if isinstance(results, tuple) else (results,)
        given.update(zip(outs, results, strict=True))
    return given


def _bumps_of_pytorch(rank: Rank) -> int:
    """By how much PyTorch's own operators raise the version in the mode that is on."""
    with torch.inference_mode(False):
        tensor = torch.ones(3, device=rank.device)
        before = tensor._version
    torch.add(tensor, 1, out=tensor)
    return tensor._version - before


def _versions(rank: Rank, mode: str) -> dict[str, str]:
    communicator = rank.communicator()
    wrong = {}
    for overload in _overloads():
        call = _call_of(rank, communicator.name, overload)
        tensors = {k: v for k, v in call.items() if isinstance(v, torch.Tensor)}
        before = {name: tensor._version for name, tensor in tensors.items()}
        with MODES[mode]():
            expected = _bumps_of_pytorch(rank)
            assert overload(**call) is None
        assert expected == 1
        for name, tensor in tensors.items():
            want = expected if name in _written(overload) else 0
            if tensor._version - before[name] != want:
                wrong[f"{overload}: {name}"] = f"{tensor._version - before[name]} for {want}"
    return wrong


@pytest.mark.worlds(1, 2)
@pytest.mark.parametrize("mode", sorted(MODES))
def test_what_is_written_gets_a_new_version(pool: Pool, mode: str) -> None:
    """Hazard 34: each argument that the schema calls written, once, as PyTorch's operators do it in
    that mode; and no other."""
    for wrong in pool.run(_versions, mode):
        assert not wrong, wrong


class _Keep(torch.autograd.Function):
    """The identity, which saves another tensor."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(kept)
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        assert len(context.saved_tensors) == 1
        return gradients[0], None


def _saved(rank: Rank) -> dict[str, str]:
    communicator = rank.communicator()
    found = {}
    for overload in _overloads():
        call = _call_of(rank, communicator.name, overload)
        for name in _written(overload):
            x = torch.ones(3, requires_grad=True)
            kept: Any = _Keep.apply(x, call[name])
            kept.sum().backward(retain_graph=True)
            overload(**call)
            result = attempt(kept.sum().backward)
            found[f"{overload}: {name}"] = f"{result.error} {result.message}"
    return found


@pytest.mark.worlds(2)
def test_a_saved_tensor_that_is_written_is_noticed(pool: Pool) -> None:
    """Hazard 34: the backward raises, instead of using what has been overwritten."""
    for found in pool.run(_saved):
        assert len(found) > 30
        for name, result in found.items():
            assert result.startswith("RuntimeError"), (name, result)
            assert "modified by an inplace operation" in result, (name, result)


def _inference_tensors(rank: Rank) -> dict[str, Any]:
    communicator = rank.communicator()
    found = {}
    for overload in _overloads():
        with torch.inference_mode():
            call = _call_of(rank, communicator.name, overload)
            assert all(call[name].is_inference() for name in _written(overload))
            assert overload(**call) is None
        before = {name: call[name].clone() for name in _written(overload)}
        found[str(overload)] = attempt(lambda: overload(**call))  # noqa: B023
        for name, tensor in before.items():
            assert tensor.view(torch.uint8).equal(call[name].view(torch.uint8)), overload
    assert works(rank, communicator)
    return found


@pytest.mark.worlds(2)
def test_inference_tensors_are_written_in_inference_mode_alone(pool: Pool) -> None:
    """As in PyTorch, but refused by name and before anything is launched."""
    for found in pool.run(_inference_tensors):
        for name, result in found.items():
            assert result.error == "RuntimeError", (name, result)
            assert name.removeprefix("collx.").split(".")[0].removesuffix("_") in result.message
            assert "torch.inference_mode()" in result.message, (name, result)
