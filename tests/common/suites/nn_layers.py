"""Split layers and the fused LayerNorm of collx.nn, compared with the modules they replace."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn as torch_nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from collx import nn

from ..attempt import assert_raised, attempt
from ..pool import on_ranks
from ..rank import Rank
from .products import overlapping

IN, HIDDEN, OUT = 12, 22, 10  # no tested world size but 1 and 2 divides HIDDEN


def _model(device: torch.device) -> tuple[torch_nn.Linear, torch_nn.Linear]:
    torch.manual_seed(7)
    made = torch_nn.Linear(IN, HIDDEN).double(), torch_nn.Linear(HIDDEN, OUT).double()
    return made[0].to(device), made[1].to(device)


@pytest.mark.worlds(1, 2, 3)
@pytest.mark.parametrize(
    ("gathered", "overlap"),
    [(False, False), (True, False), (False, True)],
    ids=["split", "gathered", "overlap"],
)
@on_ranks
def test_split_layers_compute_what_the_whole_ones_do(
    rank: Rank, gathered: bool, overlap: bool
) -> list[str]:
    """Compares outputs and gradients of a split pair of layers with those of the whole pair. With
    `overlap`, the sequence is split, too."""
    communicator = rank.communicator()
    first, second = _model(rank.device)
    column = nn.ColumnParallelLinear.from_module(
        first, group=communicator, gather_output=gathered, overlap=overlap
    )
    row = nn.RowParallelLinear.from_module(second, group=communicator, overlap=overlap)
    shape = (2 * rank.size, 3, IN) if overlap else (3, IN)
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    part = slice(2 * rank.rank, 2 * rank.rank + 2) if overlap else slice(None)
    mine = x[part].to(rank.device, copy=True).requires_grad_()
    whole = x.to(rank.device).requires_grad_()
    own = nn.shard_range(HIDDEN, rank.size, rank.rank)

    wanted = first(whole)
    with overlapping(overlap):
        hidden = column(mine)
    if gathered:
        pairs = {"gathered": (hidden, wanted)}
        hidden = hidden[..., own]
    else:
        pairs = {"hidden": (hidden, wanted[..., own])}
    expected = second(torch.relu(wanted))
    expected.square().sum().backward()
    with overlapping(overlap):
        y = row(torch.relu(hidden))
        y.square().sum().backward()
    assert whole.grad is not None
    pairs["output"] = (y, expected[part])
    # Each rank used only its part of a gathered output, so these gradients are not comparable.
    if not gathered:
        assert column.bias is not None
        pairs["input's gradient"] = (mine.grad, whole.grad[part])
        pairs["column's"] = (column.weight.grad, first.weight.grad[own])  # type: ignore
        pairs["column's bias"] = (column.bias.grad, first.bias.grad[own])  # type: ignore
    assert row.bias is not None
    pairs["row's"] = (row.weight.grad, second.weight.grad[:, own])  # type: ignore
    pairs["row's bias"] = (row.bias.grad, second.bias.grad)
    return [what for what, (a, b) in pairs.items() if not torch.allclose(a, b, 1e-9, 1e-9)]


@pytest.mark.worlds(1)
@on_ranks
def test_frozen_parameters_stay_frozen(rank: Rank) -> None:
    """The weights were frozen, but not the biases."""
    group = rank.communicator()
    linear, layer, rms = torch_nn.Linear(4, 4), torch_nn.LayerNorm(4), torch_nn.RMSNorm(4)
    for whole in (linear, layer, rms):
        whole.weight.requires_grad_(False)
    made = (
        nn.ColumnParallelLinear.from_module(linear, group=group),
        nn.RowParallelLinear.from_module(linear, group=group),
        nn.TensorParallelLayerNorm.from_module(layer, group=group),
        nn.TensorParallelRMSNorm.from_module(rms, group=group),
    )
    found = [(n, p.requires_grad) for module in made for n, p in module.named_parameters()]
    assert found == [*[("weight", False), ("bias", True)] * 3, ("weight", False)]


@pytest.mark.worlds(1, 2)
@on_ranks
def test_layers_follow_autocast(rank: Rank) -> list[str]:
    """Also products that overlap. The values are exact in bfloat16. Compares layers, eager and
    compiled, with the whole ones under autocast."""
    communicator = rank.communicator()
    whole = torch_nn.Linear(IN, IN * rank.size, device=rank.device)
    own = nn.shard_range(IN * rank.size, rank.size, rank.rank)
    back = torch_nn.Linear(IN * rank.size, OUT, device=rank.device)
    for parameter in (*whole.parameters(), *back.parameters()):
        torch_nn.init.constant_(parameter, 0.25)
    x = torch.ones(2 * rank.size, IN, device=rank.device)
    wrong = []
    for overlap in (False, True):
        column = nn.ColumnParallelLinear.from_module(whole, group=communicator, overlap=overlap)
        row = nn.RowParallelLinear.from_module(back, group=communicator, overlap=overlap)
        for dtype in (torch.float32, torch.bfloat16):
            given = x.to(dtype)
            with torch.autocast(rank.device.type, torch.bfloat16):
                hidden = whole(given)
                pairs = [(column, given, hidden[:, own]), (row, hidden[:, own], back(hidden))]
                for layer, argument, wanted in pairs:
                    for call in (layer, torch.compile(layer, fullgraph=True, backend="eager")):
                        part = slice(2 * rank.rank, 2 * rank.rank + 2) if overlap else slice(None)
                        y = call(argument[part] if layer is column else argument)
                        expected = wanted if layer is column else wanted[part]
                        if y.dtype != torch.bfloat16 or not torch.equal(y, expected):
                            wrong.append(f"{layer} of {dtype}, overlap={overlap}: {y.dtype}")
            y.float().sum().backward()
            assert row.weight.grad is not None
            assert row.weight.grad.dtype == torch.float32
    return wrong


@pytest.mark.worlds(1, 3)
@on_ranks
def test_layers_that_are_made_anew(rank: Rank) -> None:
    communicator = rank.communicator()
    column = nn.ColumnParallelLinear(IN, HIDDEN, False, group=communicator, device=rank.device)
    row = nn.RowParallelLinear(HIDDEN, OUT, group=communicator, dtype=torch.float64)
    heads = nn.ColumnParallelLinear(IN, HIDDEN, group=communicator, units=slice(4, 9))
    partial = nn.RowParallelLinear(HIDDEN, OUT, False, group=communicator, reduce=lambda y: y)
    own = len(range(HIDDEN)[nn.shard_range(HIDDEN, rank.size, rank.rank)])
    hidden = torch.ones(2, own)
    found = {
        "column": column.weight.shape == (own, IN) and column.bias is None,
        "row": row.weight.shape == (OUT, own) and row.weight.dtype == torch.float64,
        "units": heads.weight.shape == (5, IN) and heads(torch.ones(1, IN)).shape == (1, 5),
        "partial": torch.equal(partial(hidden), hidden @ partial.weight.t()),
        "state": set(row.state_dict()) == {"weight", "bias"},
        "text": f"out_features={own} of {HIDDEN}" in repr(column),
        "drawn": bool((column.weight.abs() <= IN**-0.5).all() and column.weight.std() > 0),
    }
    assert all(found.values()), found


@pytest.mark.worlds(1, 2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@on_ranks
def test_new_layers_are_parts_of_what_torch_draws(rank: Rank, dtype: torch.dtype) -> list[str]:
    """Draws layers from one seed, whole and split."""
    where: Any = {"device": rank.device, "dtype": dtype}
    torch.manual_seed(11)
    wholes = [torch_nn.Linear(IN, HIDDEN, **where), torch_nn.Linear(HIDDEN, OUT, **where)]
    after = torch.rand(3, device=rank.device)
    torch.manual_seed(11)
    communicator = rank.communicator()
    column = nn.ColumnParallelLinear(IN, HIDDEN, group=communicator, **where)
    row = nn.RowParallelLinear(HIDDEN, OUT, group=communicator, **where)
    own = nn.shard_range(HIDDEN, rank.size, rank.rank)
    pairs = {
        "column's": (column.weight, wholes[0].weight[own]),
        "column's bias": (column.bias, wholes[0].bias[own]),
        "row's": (row.weight, wholes[1].weight[:, own]),
        "row's bias": (row.bias, wholes[1].bias),
        "what is drawn next": (torch.rand(3, device=rank.device), after),
    }
    return [what for what, (a, b) in pairs.items() if a is None or not torch.equal(a, b)]


@pytest.mark.worlds(2, 3)
@on_ranks
def test_layers_that_fsdp_divides_are_drawn_as_whole_ones(rank: Rank) -> list[str]:
    """Creates layers on the meta device, divides them, and draws them, as large models do."""
    communicator = rank.communicator()
    mesh = DeviceMesh.from_group(dist.new_group(backend="gloo"), "cpu")
    wrong = []
    for kind, size in itertools.product((nn.ColumnParallelLinear, nn.RowParallelLinear), (12, 22)):
        # All ranks have the same part, because FSDP2 divides what is the same on all of its ranks.
        options: Any = {"group": communicator, "units": slice(2, 9)}
        torch.manual_seed(11)
        whole = kind(size, size, **options)
        made = kind(size, size, **options, device="meta")
        fully_shard(made, mesh=mesh)
        made.to_empty(device="cpu")
        torch.manual_seed(11)
        made.reset_parameters()
        for name, parameter in made.named_parameters():
            assert isinstance(parameter, DTensor)
            if not torch.equal(parameter.full_tensor(), whole.get_parameter(name)):
                wrong.append(f"{name} of {kind.__name__} of {size}")
    return wrong


@pytest.mark.worlds(1, 2)
@on_ranks
def test_a_layer_norm_without_a_bias_has_none(rank: Rank) -> list[str]:
    """Checks the state and the sign of zeros of the norm."""
    communicator = rank.communicator()
    whole = torch_nn.LayerNorm(8, bias=False).to(rank.device)
    taken = nn.TensorParallelLayerNorm.from_module(whole, group=communicator)
    again = nn.TensorParallelLayerNorm.from_module(taken, max_blocks=2)
    made = nn.TensorParallelLayerNorm(8, bias=False, group=communicator, device=rank.device)
    wrong = [repr(norm) for norm in (taken, again, made) if list(norm.state_dict()) != ["weight"]]
    made.load_state_dict(whole.state_dict())
    kept = (again.group, again.rounding, again.eps, again.weight is whole.weight)
    if kept != (communicator.name, "parity", whole.eps, True):
        wrong.append(f"kept: {kept}")
    # The zeros in the middle of the row become -0 by the sign of the weight.
    x = torch.tensor([[-2.0, -1, -1, 0, 0, 1, 1, 2]], device=rank.device) / rank.size
    with torch.no_grad():
        whole.weight.fill_(-1.0)
        for norm in (taken, again):
            y: Any = norm(x)
            wrong += [] if y[0, 3:5].signbit().all() else [f"{y} of {norm}"]
    trained: Any = taken(x.requires_grad_())
    trained.sum().backward()
    wrong += [] if whole.weight.grad is not None else ["no gradient"]
    return wrong


@pytest.mark.worlds(1, 2)
@pytest.mark.parametrize("rounding", ["fp32", "parity", "parity_weight"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@on_ranks
def test_a_fused_layer_norm_is_that_of_torch(
    rank: Rank, dtype: torch.dtype, rounding: str
) -> list[str]:
    """Compares the fused norm, with and without gradients, with the unfused one."""
    communicator = rank.communicator()
    torch.manual_seed(3)
    whole = torch_nn.LayerNorm(64, 1e-5)
    with torch.no_grad():
        whole.weight.uniform_(0.5, 1.5)
        whole.bias.normal_()
    whole = whole.to(rank.device, dtype)
    norm = nn.TensorParallelLayerNorm.from_module(whole, group=communicator, rounding=rounding)
    partials = [torch.randn(4, 64).to(rank.device, dtype) for _ in range(rank.size)]
    residual = torch.randn(4, 64).to(rank.device, dtype)
    with torch.no_grad():
        total = sum(partials[1:], partials[0].float()).to(dtype)
        wanted = whole(total + residual), total + residual
        fused: Any = norm(partials[rank.rank], residual)
        alone: Any = norm(partials[rank.rank])
    partial = partials[rank.rank].clone().requires_grad_()
    trained: Any = norm(partial, residual)
    trained[0].float().square().sum().backward()
    summed = total.clone().requires_grad_()
    whole(summed + residual).float().square().sum().backward()
    bound = {torch.float32: 1e-5, torch.bfloat16: 6e-2}[dtype]
    pairs = {
        "fused": (fused[0], wanted[0]),
        "sum": (fused[1], wanted[1]),
        "alone": (alone, whole(total)),
        "with gradients": (trained[0], wanted[0]),
        "gradient": (partial.grad, summed.grad),
    }
    return [
        what
        for what, (a, b) in pairs.items()
        if a is None or not torch.allclose(a.float(), b.float(), bound, bound)
    ]


class _OneDtype(TorchDispatchMode):
    """Refuses a layer norm of tensors with different dtypes, as PyTorch does on CUDA."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.native_layer_norm.default:
            assert len({each.dtype for each in args if isinstance(each, torch.Tensor)}) == 1
        return func(*args, **(kwargs or {}))


@pytest.mark.worlds(1, 2)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@on_ranks
def test_a_layer_norm_with_float32_weights_is_trained(
    rank: Rank, dtype: torch.dtype, bias: bool, autocast: bool
) -> list[str]:
    """The results have the dtype of the input, and are those of the fused norm."""
    torch.manual_seed(3)
    norm = nn.TensorParallelLayerNorm(64, bias=bias, group=rank.communicator(), rounding="parity")
    for parameter in norm.parameters():
        torch_nn.init.uniform_(parameter, 0.5, 1.5)
    norm.to(rank.device)
    partial, residual = torch.randn(2, 4, 64).to(rank.device, dtype)
    wrong = []
    with torch.autocast(rank.device.type, torch.bfloat16, enabled=autocast):
        for added in ((), (residual,)):
            with torch.no_grad():
                fused: Any = norm(partial, *added)
            with _OneDtype():
                trained: Any = norm(partial, *added)
            pairs = zip(trained, fused, strict=True) if added else [(trained, fused)]
            for one, other in pairs:
                if one.dtype != dtype or not torch.allclose(one, other, 0.02, 1e-3):
                    wrong.append(f"{one} instead of {other}")
            (trained[0] if added else trained).sum().backward()
    wrong += [str(p) for p in norm.parameters() if p.grad is None or p.grad.dtype != torch.float32]
    return wrong


@pytest.mark.worlds(1)
@on_ranks
def test_what_a_layer_cannot_be_made_of_is_refused_by_name(rank: Rank) -> None:
    norm: Any = nn.TensorParallelLayerNorm
    column: Any = nn.ColumnParallelLinear
    row: Any = nn.RowParallelLinear
    whole, part = torch_nn.Linear(4, 4), slice(0, 2)

    def refused(error: str, words: str, function: Any, *args: Any, **kwargs: Any) -> None:
        assert_raised(attempt(lambda: function(*args, **kwargs)), error, words)

    full = "RowParallelLinear.from_module: full: got a"
    refused("TypeError", f"{full} ReLU", row.from_module, torch_nn.ReLU())
    parts = column.from_module(whole, units=part), row.from_module(whole, units=part)
    refused("TypeError", f"{full} ColumnParallelLinear", row.from_module, parts[0])
    refused("TypeError", "from_module: full: got a RowParallelLinear", column.from_module, parts[1])
    refused("ValueError", "shard_range: rank: got 2; accepted: 0 to 1", nn.shard_range, 7, 2, 2)
    refused("TypeError", "torch.nn.LayerNorm", norm.from_module, torch_nn.RMSNorm(4))
    refused("TypeError", "last dimension", norm.from_module, torch_nn.LayerNorm([4, 4]))
    refused("ValueError", "parity_weight", norm, 4, rounding="half")
    refused("ValueError", "gather_output", column, 4, 4, units=part, gather_output=True)
    refused("ValueError", "collx.init", column, 4, 4, group="nobody")
    units = "ParallelLinear: units: got slice"
    refused("ValueError", f"Column{units}(0, 8, 2)", column, 4, 8, units=slice(0, 8, 2))
    refused("ValueError", f"Row{units}(5, 2, None)", row, 8, 4, units=slice(5, 2))
