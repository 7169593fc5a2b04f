"""collx.nn, the functions of Megatron-LM, compared with layers that are not split.

Values are small integers in float64, so every sum below is exact and nothing needs a tolerance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from collx import nn

from ..check import differences
from ..pool import on_ranks, some_stand_for_all
from ..rank import Rank
from ..shares import integers, own_part


class Layer(NamedTuple):
    """A two-layer perceptron, whose sizes no number of ranks except one divides, and its input."""

    x: torch.Tensor  # [tokens, width]
    up: torch.Tensor  # [hidden, width]: split into rows, the column-parallel layer
    down: torch.Tensor  # [width, hidden]: split into columns, the row-parallel layer
    weights: torch.Tensor  # the gradient of the output


def whole_layer(rank: Rank) -> Layer:
    tokens, width, hidden = 13, 5, 17
    shapes = ((tokens, width), (hidden, width), (width, hidden), (tokens, width))
    return Layer(*(integers(shape, 20 + n).to(rank.device) for n, shape in enumerate(shapes)))


def unsplit(layer: Layer) -> tuple[torch.Tensor, Layer]:
    """Returns the output of the unsplit layer and the gradients of its tensors."""
    x, up, down = (tensor.clone().requires_grad_() for tensor in layer[:3])
    y = torch.relu((x * x) @ up.t()) @ down.t()
    y.backward(layer.weights)
    assert x.grad is not None
    assert up.grad is not None
    assert down.grad is not None
    return y.detach(), Layer(x.grad, up.grad, down.grad, layer.weights)


@pytest.mark.worlds(1, 2, 3, 4)
@pytest.mark.parametrize("way", ["tensor", "gathered between", "sequence"])
@on_ranks
def test_parallel_layers_have_the_gradients_of_the_unsplit_ones(rank: Rank, way: str) -> list[str]:
    """Hazard 29: Megatron-LM's functions around a column- and a row-parallel layer, uneven."""
    name = rank.communicator().name
    layer = whole_layer(rank)
    output, gradients = unsplit(layer)
    by_sequence = way == "sequence"
    x = own_part(layer.x, rank) if by_sequence else layer.x
    x, up, down = (
        tensor.clone().requires_grad_()
        for tensor in (x, own_part(layer.up, rank), own_part(layer.down, rank, 1))
    )
    if by_sequence:
        inner = nn.gather_from_sequence(x * x, name, total=len(layer.x))
        y = nn.scatter_to_sequence(torch.relu(inner @ up.t()) @ down.t(), name)
    else:
        inner = torch.relu(nn.copy_to_ranks(x * x, name) @ up.t())
        if way == "gathered between":
            # The input of a layer that is not parallel, split again for the next layer.
            whole = nn.gather_from_ranks(inner, name, total=layer.up.shape[0])
            inner = nn.split_to_ranks(whole * 1, name)
        y = nn.reduce_from_ranks(inner @ down.t(), name)
    weights = own_part(layer.weights, rank) if by_sequence else layer.weights
    y.backward(weights)
    pairs = [
        (y.detach(), own_part(output, rank) if by_sequence else output),
        (x.grad, own_part(gradients.x, rank) if by_sequence else gradients.x),
        (up.grad, own_part(gradients.up, rank)),
        (down.grad, own_part(gradients.down, rank, 1)),
    ]
    # Compare values, not bits: a sum of products that cancel may be -0 or +0, depending on order.
    return [
        f"{what} differs"
        for what, (got, want) in zip(("y", "x.grad", "up.grad", "down.grad"), pairs, strict=True)
        if got is None or not torch.equal(got, want)
    ]


@pytest.mark.worlds(1, 2, 3)
@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3])
@on_ranks
def test_any_axis_of_even_and_uneven_sizes(rank: Rank, axis: int) -> None:
    """Splitting and gathering is the identity, and its gradient too. Also axes shorter than the
    number of ranks."""
    communicator = rank.communicator()
    for size in (1, 2 * rank.size, 2 * rank.size + 1):
        shape = tuple(size if d == axis % 3 else 2 + d for d in range(3))
        values, weights = (integers(shape, seed).to(rank.device) for seed in (1, 2))
        x = values.clone().requires_grad_()
        part = nn.split_to_ranks(x, communicator, axis)
        assert part.is_contiguous()
        assert torch.equal(part, own_part(values, rank, axis))
        y = nn.gather_from_ranks(part, communicator, axis, shape[axis])
        y.backward(weights)
        assert x.grad is not None
        assert torch.equal(y, values)
        assert torch.equal(x.grad, weights)

        # Each rank adds its own gradient, so the result is their sum.
        mine = own_part(values, rank, axis).clone().requires_grad_()
        joined = nn.gather_from_sequence(mine, communicator, axis, shape[axis])
        divided = nn.scatter_to_sequence(joined * (rank.rank + 1), communicator, axis)
        divided.backward(own_part(weights, rank, axis))
        factor = sum(range(1, rank.size + 1))
        assert mine.grad is not None
        assert torch.equal(divided, own_part(values, rank, axis) * factor)
        assert torch.equal(mine.grad, own_part(weights, rank, axis) * factor)


@pytest.mark.worlds(1, 2, 3)
@on_ranks
def test_pairs_work_without_gradients(rank: Rank) -> None:
    """Under torch.no_grad, only the values are computed."""
    name = rank.communicator().name
    size = rank.size
    x = integers((2 * size, 3), 1).to(rank.device).requires_grad_()
    found = []
    with torch.no_grad():
        results = {
            nn.copy_to_ranks(x, name): x,
            nn.reduce_from_ranks(x, name): x * size,
            nn.gather_from_ranks(x, name): torch.cat([x] * size, 1),
            nn.split_to_ranks(x, name, 0): own_part(x, rank),
            nn.gather_from_sequence(x, name): torch.cat([x] * size),
            nn.scatter_to_sequence(x, name): own_part(x * size, rank),
        }
    for result, expected in results.items():
        found.append(torch.equal(result, expected) and not result.requires_grad)
    assert found == [True] * 6


@pytest.mark.worlds(1, 2, 3)
@on_ranks
def test_gradients_of_gradients_are_right(rank: Rank) -> None:
    """The backward of each function is the other function of its pair, so it has a backward too."""
    name = rank.communicator().name
    weights = integers((rank.size, 4), 1).to(rank.device)
    values = integers((4,), 2).to(rank.device)

    def of(function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        x = values.clone().requires_grad_()
        (first,) = torch.autograd.grad((function(x) ** 2).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad((first * values).sum(), x)
        return second

    def split(x: torch.Tensor) -> torch.Tensor:
        shared = nn.copy_to_ranks(x, name)
        return nn.reduce_from_ranks(shared * shared * weights[rank.rank], name)

    assert torch.equal(of(split), of(lambda x: x * x * weights.sum(0)))


@pytest.mark.worlds(1, 2, 3)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@on_ranks
def test_torch_func_transforms_each_function(rank: Rank) -> None:
    """Compares transforms of each function with autograd, for a batch of three."""
    name = rank.communicator().name
    size = 2 * rank.size + 1
    whole, part = (
        integers((3, 4, size), 1).to(rank.device),
        own_part(integers((3, 4, size), 2), rank, 2),
    )
    part = part.to(rank.device)
    functions: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]] = {
        "copy_to_ranks": (lambda x: nn.copy_to_ranks(x, name), whole),
        "reduce_from_ranks": (lambda x: nn.reduce_from_ranks(x, name), whole),
        "gather_from_ranks": (lambda x: nn.gather_from_ranks(x, name, total=size), part),
        "split_to_ranks": (lambda x: nn.split_to_ranks(x, name), whole),
        "gather_from_sequence": (lambda x: nn.gather_from_sequence(x, name, 1, size), part),
        "scatter_to_sequence": (lambda x: nn.scatter_to_sequence(x, name, 1), whole),
    }
    found = {}
    for what, (function, batch) in functions.items():

        def loss(x: torch.Tensor) -> torch.Tensor:
            return (function(x * x) ** 2).sum()  # noqa: B023

        wanted: list[torch.Tensor] = []
        for x in batch:
            leaf = x.clone().requires_grad_()
            wanted += torch.autograd.grad(loss(leaf), leaf)
        found[what] = [
            torch.equal(torch.func.vmap(function)(batch), torch.stack([*map(function, batch)])),
            torch.equal(torch.func.grad(loss)(batch[0]), wanted[0]),
            torch.equal(torch.func.vmap(torch.func.grad(loss))(batch), torch.stack(wanted)),
        ]
    assert len(found) == 6
    assert {what for what, same in found.items() if not all(same)} == set(), found


@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize("way", ["static", "dynamic", "group"])
@on_ranks
def test_pairs_compile_into_one_graph(rank: Rank, way: str) -> None:
    """Compiled forward and backward passes return the same bits, without a graph break. The name
    of a process group's communicator is a constant, for which Dynamo can make no guard."""
    some_stand_for_all(rank, rank.size == 2)
    group: Any = rank.communicator().name
    if way == "group":
        group = rank.fresh_group()
        own = rank.new_communicator(None, group)
    layer = whole_layer(rank)
    up, down = own_part(layer.up, rank), own_part(layer.down, rank, 1)

    def function(x: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(nn.copy_to_ranks(x, group) @ up.t())
        whole = nn.gather_from_ranks(inner, group, total=layer.up.shape[0])
        y = nn.reduce_from_ranks(nn.split_to_ranks(whole, group) @ down.t(), group)
        part = nn.split_to_ranks(y, group, 0)
        again = nn.gather_from_sequence(part * 2, group, total=y.shape[0])
        return nn.scatter_to_sequence(again @ layer.down[:, :5], group)

    torch._dynamo.reset()
    compiled = torch.compile(
        function, fullgraph=True, backend="aot_eager", dynamic=way == "dynamic"
    )
    found = []
    for tokens in (13, 11):
        results = []
        for made in (function, compiled):
            x = layer.x[:tokens].clone().requires_grad_()
            y = made(x)
            y.backward(own_part(layer.weights[:tokens], rank))
            assert x.grad is not None
            results.append((y.detach().cpu(), x.grad.cpu()))
        for got, want in zip(results[1], results[0], strict=True):
            found.append(differences(got, want))
    if way == "group":
        own.destroy()
    assert found == [""] * 4
