"""collx.nn.TensorParallelRMSNorm compared with the modules that it replaces.

Sums with the residual must have equal bits. The fused norm sums a row in another order than a
model does, so it may differ by one rounding, and a quantized result by one step.
"""

from __future__ import annotations

import copy
import functools
from typing import Any, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import collx
from collx import nn

from ..attempt import attempt
from ..check import differences
from ..pool import on_ranks, some_stand_for_all
from ..posing import posing
from ..rank import Rank

COLS, ROWS = 96, 5
EPS = 1e-5

QUANTIZED: dict[str, dict[str, Any]] = {
    "fp8 row": {"kind": "fp8"},
    "e5m2 group": {"fp8_dtype": "e5m2", "scale_mode": "group", "quant_group_size": 32},
    "column ue8m0": {
        "scale_mode": "group",
        "quant_group_size": 16,
        "ue8m0": True,
        "scale_dtype": "float8_e8m0fnu",
        "scale_layout": "column",
    },
    "bounded": {"scale_ub": 0.5, "scale_dtype": "input"},
    "fp8 tensor": {"scale_mode": "tensor"},
    "int8 row": {"kind": "int8"},
    "int8 tensor": {"kind": "int8", "scale_mode": "tensor"},
}


@posing
class LlamaRMSNorm(torch.nn.Module):
    """The RMSNorm of Llama as transformers implements it."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        mean = wide.pow(2).mean(-1, keepdim=True)
        return self.weight * (wide * torch.rsqrt(mean + self.variance_epsilon)).to(x.dtype)


class Seen(TorchDispatchMode):
    """Records the names of collx's operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "collx":
            self.names.append(func._schema.name.removeprefix("collx::"))
        return func(*args, **(kwargs or {}))


def random(shape: tuple[int, ...], seed: int, rank: Rank, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(rank.device, dtype)


def tensors(rank: Rank, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns this rank's summand and the residual, which is the same on all ranks."""
    shape = (2, ROWS, COLS)
    return random(shape, 10 + rank.rank, rank, dtype), random(shape, 1, rank, dtype)


def norm_like(kind: str, rank: Rank, dtype: torch.dtype) -> torch.nn.Module:
    make: Any = LlamaRMSNorm if kind == "llama" else torch.nn.RMSNorm
    norm: torch.nn.Module = make(COLS, eps=EPS if kind != "default eps" else None)
    with torch.no_grad():
        norm.get_parameter("weight").copy_(1 + random((COLS,), 2, rank, dtype) / 4)
    return norm.to(rank.device, dtype)


def near(got: torch.Tensor, want: torch.Tensor, roundings: int) -> bool:
    """Returns whether values are equal up to the given number of roundings in the last place."""
    step = roundings * max(torch.finfo(want.dtype).eps, 2.0**-20)
    return bool(torch.allclose(got.double(), want.double(), rtol=step, atol=1e-30))


@pytest.mark.worlds(1, 2, 3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["torch", "default eps", "llama"])
@on_ranks
def test_it_stands_in_for_allreduce_residual_and_norm(
    rank: Rank, kind: str, dtype: torch.dtype
) -> None:
    """The residual has the same bits; each kind of norm keeps its own rounding points."""
    some_stand_for_all(rank, dtype == torch.bfloat16)
    norm, communicator = norm_like(kind, rank, dtype), rank.communicator()
    fused = nn.TensorParallelRMSNorm.from_module(norm, group=communicator)
    partial, residual = tensors(rank, dtype)
    with torch.no_grad():
        total = collx.allreduce(partial, "sum", communicator)
        assert near(fused(partial), norm(total), 2)
        y, kept = fused(partial, residual)
        assert differences(kept, total + residual) == ""
        assert near(y, norm(total + residual), 2)


@pytest.mark.worlds(1, 2, 3)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("rounding", ["fp32", "parity", "parity_weight"])
@on_ranks
def test_fused_and_unfused_agree(rank: Rank, rounding: str, offset: float) -> list[str]:
    """With every rounding and weight offset."""
    some_stand_for_all(rank, rank.size == 2)
    communicator = rank.communicator()
    partial, residual = tensors(rank, torch.bfloat16)
    weight = random((COLS,), 2, rank, torch.bfloat16)
    module = nn.TensorParallelRMSNorm(
        COLS, EPS, group=communicator, rounding=rounding, weight_offset=offset
    )
    module.weight = torch.nn.Parameter(weight)
    found = []
    with torch.no_grad():
        for added in (None, residual):
            want: Any = nn.unfused_rmsnorm(
                partial,
                added,
                weight,
                EPS,
                communicator,
                rounding=rounding,
                weight_offset=offset,
            )
            got: Any = module(partial, added)
            if added is not None:
                found += [text for text in [differences(got[1], want[1])] if text]
                got, want = got[0], want[0]
            if not near(got, want, 2):
                found.append(f"differs with residual {added is not None}")
    return found


@pytest.mark.worlds(1, 2, 3)
@pytest.mark.parametrize("form", list(QUANTIZED))
@on_ranks
def test_quantized_results_agree(rank: Rank, form: str) -> list[str]:
    """Equal shapes, dtypes and layouts; values within one step of their format."""
    some_stand_for_all(rank, rank.size == 2)
    communicator = rank.communicator()
    partial, residual = tensors(rank, torch.bfloat16)
    how = collx.Quantization(**QUANTIZED[form])
    scale = torch.tensor([0.03], device=rank.device) if how.scale_mode == "tensor" else None
    options: dict[str, Any] = {"quantization": how, "scale": scale, "keep_norm": True}
    module = nn.TensorParallelRMSNorm(COLS, EPS, group=communicator, **options)
    module.to(rank.device, torch.bfloat16)  # the given scale stays float32
    with torch.no_grad():
        got: Any = module(partial, residual)
        want: Any = nn.unfused_rmsnorm(
            partial, residual, module.weight, EPS, communicator, **options
        )
        without: Any = nn.TensorParallelRMSNorm.from_module(
            module, group=communicator, rounding="fp32", quantization=how, scale=scale
        )(partial)
    found = []
    for name, one, other in zip(("q", "scale", "residual", "norm"), got, want, strict=True):
        alike = (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
        found += [] if alike else [f"{name}: another shape, dtype or layout"]
    widths = how.quant_group_size if how.scale_mode == "group" else COLS
    read, expected = (
        q.float() * scales.float().expand(*q.shape[:-1], -1).repeat_interleave(widths, -1)
        if how.scale_mode == "group"
        else q.float() * (scales.float() if scale is not None else scales.float().unsqueeze(-1))
        for q, scales in ((got[0], got[1]), (want[0], want[1]))
    )
    step = 0.26 if how.fp8_dtype == "e5m2" else 0.13
    smallest = 1.01 * want[1].float().max().item() if how.kind == "int8" else 1e-3
    if not torch.allclose(read, expected, rtol=step, atol=smallest):
        found.append("quantized values differ")
    if differences(got[2], want[2]):
        found.append("residual differs")
    if not near(got[3], want[3], 2):
        found.append("norm differs")
    return found if len(without) == 2 else [*found, "results without a residual"]


@pytest.mark.worlds(1, 2, 3)
@on_ranks
def test_it_trains_as_the_unsplit_norm(rank: Rank) -> list[str]:
    """Gradients of the summand, the residual and the weight."""
    shape = (ROWS, COLS)
    seeds = range(10, 10 + rank.size)
    parts = [random(shape, seed, rank, torch.float64) for seed in seeds]
    residual, downstream = (random(shape, seed, rank, torch.float64) for seed in (1, 3))

    module = nn.TensorParallelRMSNorm(COLS, EPS, group=rank.communicator(), dtype=torch.float64)
    module.to(rank.device)
    mine = parts[rank.rank].clone().requires_grad_()
    added = residual.clone().requires_grad_()
    y, kept = module(mine, added)
    ((y + kept) * downstream).sum().backward()

    norm = torch.nn.RMSNorm(COLS, EPS, device=rank.device, dtype=torch.float64)
    whole = torch.stack(parts).requires_grad_()
    other = residual.clone().requires_grad_()
    total = whole.sum(0) + other
    ((norm(total) + total) * downstream).sum().backward()
    assert whole.grad is not None
    pairs = {
        "y": (y, norm(total)),
        "partial": (mine.grad, whole.grad[rank.rank]),
        "residual": (added.grad, other.grad),
        "weight": (module.weight.grad, norm.weight.grad),
    }
    return [
        name
        for name, (got, want) in pairs.items()
        if got is None or want is None or not torch.allclose(got, want, rtol=1e-6, atol=1e-9)
    ]


@pytest.mark.worlds(2)
@on_ranks
def test_it_is_one_operator_where_no_gradients_are_asked_for(rank: Rank) -> None:
    """With gradients, it is the differentiable all-reduce."""
    module = nn.TensorParallelRMSNorm(COLS, group=rank.communicator(), dtype=torch.bfloat16)
    module.to(rank.device)
    partial, residual = tensors(rank, torch.bfloat16)
    found = {}

    def call(what: str, *arguments: torch.Tensor) -> None:
        with Seen() as seen:
            module(*arguments)
        found[what] = seen.names

    call("training", partial, residual)
    with torch.no_grad():
        call("no_grad", partial, residual)
    with torch.inference_mode():
        call("inference_mode", partial)
    module.requires_grad_(False)
    call("frozen", partial, residual)
    call("frozen, gradients of the input", partial.requires_grad_(), residual)
    fused = ["allreduce_residual_rmsnorm"]
    expected = {
        "training": ["allreduce"],
        "no_grad": fused,
        "inference_mode": ["allreduce_rmsnorm"],
        "frozen": fused,
        "frozen, gradients of the input": ["allreduce"],
    }
    assert found == expected


def _bits(pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    one, other = (t.view(torch.uint8) if t.element_size() == 1 else t for t in pair)
    return one, other


@pytest.mark.worlds(2)
@on_ranks
def test_it_compiles_into_one_graph(rank: Rank) -> list[str]:
    """It has the same bits as eager, without a graph break."""
    module = nn.TensorParallelRMSNorm(
        COLS, EPS, group=rank.communicator(), quantization="fp8", dtype=torch.bfloat16
    ).to(rank.device)
    partial, residual = tensors(rank, torch.bfloat16)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        pairs = list(zip(compiled(partial, residual), module(partial, residual), strict=True))
    return [text for text in (differences(*_bits(pair)) for pair in pairs) if text]


@pytest.mark.worlds(1)
@on_ranks
def test_it_shares_the_weight_and_has_the_state_of_a_norm(rank: Rank) -> list[str]:
    """from_module, state_dict, reset_parameters, extra_repr."""
    norm = torch.nn.RMSNorm(COLS, EPS)
    made = nn.TensorParallelRMSNorm.from_module(norm.eval(), quantization="int8")
    state = copy.deepcopy(made).state_dict()
    norm.load_state_dict(state)
    made.load_state_dict(norm.state_dict())
    gemma = nn.TensorParallelRMSNorm(COLS, weight_offset=1.0)
    options: dict[str, Any] = {
        "eps": None,
        "group": "mine",
        "weight_offset": 0.5,
        "rounding": "parity_weight",
        "quantization": collx.Quantization("fp8", scale_mode="tensor"),
        "keep_norm": True,
        "algorithm": "oneshot_push",
        "max_blocks": 3,
    }
    first = nn.TensorParallelRMSNorm(COLS, scale=torch.ones(1), **options)
    again = nn.TensorParallelRMSNorm.from_module(first)
    other = nn.TensorParallelRMSNorm.from_module(first, quantization="int8")
    good = {
        "parameter": made.weight is norm.weight,
        "eps": made.eps == EPS,
        "rounding": made.rounding == "parity",
        "mode": not made.training,
        "llama": nn.TensorParallelRMSNorm.from_module(LlamaRMSNorm(4, EPS)).rounding
        == "parity_weight",
        "state": list(state) == ["weight"],
        "options": all(getattr(again, name) == value for name, value in options.items()),
        "its weight": again.weight is first.weight,
        "its scale": again.scale is first.scale,
        "another quantization": (other.scale, other.keep_norm, other.group)
        == (None, False, "mine"),
        "offset": bool((gemma.weight == 0).all()),
        "text": "eps=1e-05, rounding='parity', quantization='int8' by row" in repr(made),
    }
    return [what for what, fine in good.items() if not fine]


@pytest.mark.worlds(1)
@on_ranks
def test_from_module_and_to_empty_take_a_device_and_a_dtype(rank: Rank) -> list[str]:
    """Moves norms to other devices and dtypes, as copies and in place."""
    how = collx.Quantization(scale_mode="tensor")
    norm = nn.TensorParallelRMSNorm(COLS, quantization=how, scale=torch.ones(1))
    layer = torch.nn.LayerNorm(COLS).requires_grad_(False)
    there: dict[str, Any] = {"device": "meta", "dtype": torch.bfloat16}
    copies = (
        nn.TensorParallelRMSNorm.from_module(norm, **there),
        nn.TensorParallelLayerNorm.from_module(layer, **there),
    )
    same = nn.TensorParallelLayerNorm.from_module(layer, device="cpu", dtype=torch.float32)
    again = copy.deepcopy(norm).to("meta").to_empty(device="cpu").to(torch.bfloat16)
    assert copies[0].scale is not None
    assert again.scale is not None
    good = {
        "copies": all(
            p.is_meta and p.dtype == torch.bfloat16 for made in copies for p in made.parameters()
        ),
        "scale": copies[0].scale.is_meta and copies[0].scale.dtype == torch.float32,
        "originals": all(p.device.type == "cpu" for p in (*norm.parameters(), *layer.parameters())),
        "frozen": not any(p.requires_grad for p in copies[1].parameters()),
        "shared": same.weight is layer.weight and same.bias is layer.bias,
        "emptied": again.scale.device.type == "cpu" and again.scale.dtype == torch.float32,
    }
    return [what for what, fine in good.items() if not fine]


@pytest.mark.worlds(1)
@on_ranks
def test_options_that_do_not_fit_are_refused_by_name(rank: Rank) -> list[str]:
    scale, fp8 = torch.ones(1), cast(Any, torch.float8_e4m3fn)
    attempts: list[tuple[type[Exception], str, Any]] = [
        (ValueError, "rounding", lambda: nn.TensorParallelRMSNorm(4, rounding="half")),
        (ValueError, "keep_norm", lambda: nn.TensorParallelRMSNorm(4, keep_norm=True)),
        (ValueError, "kind", lambda: nn.TensorParallelRMSNorm(4, quantization="fp4")),
        (TypeError, "float8", lambda: nn.TensorParallelRMSNorm(4, quantization=fp8)),
        (ValueError, "scale_mode", lambda: collx.Quantization(scale_mode="column")),
        (ValueError, "scale", lambda: nn.TensorParallelRMSNorm(4, scale=scale)),
    ]
    found = []
    for error, word, action in attempts:
        try:
            action()
            found.append(f"{word}: accepted")
        except error as reason:
            if word not in str(reason):
                found.append(f"{word}: {reason}")
    return found


@pytest.mark.worlds(1)
@on_ranks
def test_both_paths_refuse_a_residual_of_another_shape_or_dtype(rank: Rank) -> None:
    """Fused, and with gradients."""
    partial = torch.ones(4, 8, dtype=torch.bfloat16, device=rank.device)
    for kind in (nn.TensorParallelRMSNorm, nn.TensorParallelLayerNorm):
        norm = kind(8, group=rank.communicator(), dtype=torch.bfloat16, device=rank.device)
        for residual in (partial.float(), partial[0], partial[:1], partial.expand(2, 4, 8)):
            call = functools.partial(norm, partial, residual)
            fused, trained = attempt(torch.no_grad()(call)), attempt(call)
            assert trained.error == fused.error, trained
            assert trained.error in ("ValueError", "TypeError"), trained
            assert "residual: got" in trained.message, trained
