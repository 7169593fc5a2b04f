"""Rewritten patterns after a collective other than an RMS norm of an all-reduce: layer norms,
quantization, and norms of a reduce-scatter. The tests run the graphs as the pass leaves them."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.fx import Graph

import collx

from ..check import differences
from ..compiling import code_of, inductor, needs_compiler, through_pass
from ..pool import on_ranks
from ..rank import Rank
from ..rewriting import (
    COLS,
    E4M3,
    E5M2,
    EPS,
    INT8,
    WEIGHT,
    Results,
    by_row,
    group_of,
    passed,
    stored,
    tensor_of,
)

BIAS = torch.linspace(1.0, -1.0, COLS)
DTYPES = (torch.bfloat16, torch.float32)
SHAPES = ((4, COLS), (2, 3, COLS))


def _differ(what: object, found: Results, wanted: Results) -> list[str]:
    assert len(found) == len(wanted), what
    pairs = zip(found, wanted, strict=True)
    wrong = [(n, differences(a.cpu(), b.cpu())) for n, (a, b) in enumerate(pairs)]
    return [f"{what}: result {n}: {why}" for n, why in wrong if why]


def _far(what: object, found: Results, plain: Results, dtype: torch.dtype) -> list[str]:
    """Compares loosely: row sums and products may be computed in another order than the model's."""
    close = 1e-2 if dtype == torch.bfloat16 else 1e-5
    pairs = zip(found, plain, strict=True)
    wrong = [n for n, (a, b) in enumerate(pairs) if not torch.allclose(a, b, close, close)]
    return [f"{what}: result {n} is not what the model gives" for n in wrong]


def _added(y: Tensor, residual: Tensor, side: str) -> Tensor:
    return {"": y, "left": residual + y if side else y, "right": y + residual if side else y}[side]


def _layer_norm(rank: Rank, dtype: torch.dtype, bias: bool) -> nn.LayerNorm:
    norm = nn.LayerNorm(COLS, EPS, bias=bias, dtype=dtype)
    norm.weight.data.copy_(WEIGHT)
    norm.weight.data[3] = 0  # times a negative value, it is -0
    if bias:
        norm.bias.data.copy_(BIAS)
    return norm.to(rank.device)


@pytest.mark.worlds(2)
@on_ranks(deadline=500.0)
def test_layer_norms_become_one_operator(rank: Rank) -> list[str]:
    group, communicator = group_of(rank)
    wrong = []
    with communicator, torch.no_grad():
        for case in product(DTYPES, SHAPES, ("", "left", "right"), (True, False)):
            dtype, shape, side, has_bias = case
            norm = _layer_norm(rank, dtype, has_bias)
            x, residual = (tensor_of(rank, shape, dtype, own) for own in (True, False))

            def model(x: Tensor, residual: Tensor) -> Results:
                y = _added(functional.all_reduce(x, "sum", group), residual, side)  # noqa: B023
                return (norm(y), y) if side else (norm(y),)  # noqa: B023

            found, kept, left, _ = passed(model, x, residual)
            bias = norm.bias if has_bias else torch.full_like(norm.weight, -0.0)
            op = "allreduce_residual_layernorm" if side else "allreduce_layernorm"
            given = (x, residual) if side else (x,)
            options = (norm.weight, bias, EPS, communicator.name, "parity")
            wanted = getattr(torch.ops.collx, op)(*given, *options)
            wrong += [f"{case}: {kept}, {left}"] if (kept, left) != ([op], []) else []
            wrong += _differ(case, found, wanted if side else (wanted,))
            wrong += _far(case, found, model(x, residual), dtype)
    return wrong


class Quantize(NamedTuple):
    """A way to quantize, and the equivalent options of the operator."""

    model: Callable[[Tensor, Tensor], Results]
    """A function of y and a given scale. It returns q, and the scale if it computes one."""
    kind: str
    options: dict[str, Any]
    exact: bool = True
    """Whether the bits are equal; if not, rounding="fp32" is needed for the rewrite."""


def _by_maximum(y: Tensor, s: Tensor) -> Results:
    # As in vLLM, without its lower bound: the maximum over a dimension, then unsqueezed.
    largest, _ = y.abs().max(dim=-1)
    scale = largest.unsqueeze(-1).float() / 57344
    return stored((1.0 / scale) * y.float(), E5M2), scale


def _with_bound(y: Tensor, s: Tensor) -> Results:
    scale = y.abs().amax(-1, keepdim=True).float().clamp(min=1e-10) / 448
    return stored(y.float() * scale.reciprocal(), E4M3), scale


def _rounded_scale(y: Tensor, s: Tensor) -> Results:
    scale = (y.abs().amax(-1, keepdim=True) / 448).float()
    return stored(y.float() * scale.reciprocal(), E4M3), scale


def _as_torchao(y: Tensor, s: Tensor) -> Results:
    # torchao's float8 with a scale for each row, from quantization/quant_primitives.py:
    # scale = float32(max_abs / quant_max), q = clamp(float32(x) / scale).
    scale = (y.abs().amax(dim=(-1,), keepdim=True) / 448).to(torch.float32)
    return stored(y.to(torch.float32) / scale, E4M3), scale


QUANTIZED = {
    "row": Quantize(lambda y, s: by_row(y), "fp8", {}),
    "row, int8": Quantize(lambda y, s: by_row(y, INT8), "int8", {}),
    "row, e5m2": Quantize(_by_maximum, "fp8", {"fp8_dtype": "e5m2"}),
    "row, bounded": Quantize(_with_bound, "fp8", {"scale_mode": "group", "quant_group_size": COLS}),
    "row, scale in the dtype": Quantize(_rounded_scale, "fp8", {"scale_dtype": "input"}),
    "given": Quantize(lambda y, s: (stored(y.float() / s, E4M3),), "fp8", {}),
    "given, int8": Quantize(lambda y, s: (stored(y.float() / s, INT8),), "int8", {}),
    "torchao": Quantize(_as_torchao, "fp8", {"scale_dtype": "input"}, False),
    "given, inverted": Quantize(
        lambda y, s: (stored(y.float() * (1 / s), E4M3),), "fp8", {}, False
    ),
}


class QuantizedCase(NamedTuple):
    how: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    residual: str

    @property
    def keep_norm(self) -> bool:
        """Whether the model also returns the norm: in half of the cases of each kind."""
        return (self.residual == "") == (len(self.shape) == 2)


QUANTIZED_CASES = [
    QuantizedCase(how, dtype, shape, residual)
    for how, (dtype, shape), residual in product(
        QUANTIZED, zip(DTYPES, SHAPES, strict=True), ("", "left")
    )
]


def _rms_norm(rank: Rank, dtype: torch.dtype) -> nn.RMSNorm:
    norm = nn.RMSNorm(COLS, eps=EPS, dtype=dtype)
    norm.weight.data.copy_(WEIGHT)
    return norm.to(rank.device)


@pytest.mark.worlds(2)
@on_ranks(deadline=500.0)
def test_quantization_behind_a_norm_becomes_part_of_it(rank: Rank) -> list[str]:
    """q and scale have the bits that the model computes from the operator's norm, if the model
    multiplies by the inverse of a row's scale or divides by a given scale."""
    group, communicator = group_of(rank)
    scale = torch.tensor([0.0123], device=rank.device)
    wrong = []
    with communicator, torch.no_grad():
        for case in QUANTIZED_CASES:
            how = QUANTIZED[case.how]
            norm = _rms_norm(rank, case.dtype)
            x, residual = (tensor_of(rank, case.shape, case.dtype, own) for own in (True, False))
            if case.how == "row, bounded":
                x[0], residual[0] = 0, 0

            def model(x: Tensor, residual: Tensor) -> Results:
                reduced = functional.all_reduce(x, "sum", group)
                total = _added(reduced, residual, case.residual)  # noqa: B023
                y = norm(total)  # noqa: B023
                results = how.model(y, scale)  # noqa: B023
                results += (total,) if case.residual else ()  # noqa: B023
                return (*results, y) if case.keep_norm else results  # noqa: B023

            op = f"allreduce{'_residual' if case.residual else ''}_rmsnorm_{how.kind}"
            rounding = "parity" if case.dtype == torch.bfloat16 else "parity_weight"
            rounding = rounding if how.exact else "fp32"
            given = (x, residual) if case.residual else (x,)
            options = {"rounding": rounding, **how.options}
            if case.how.startswith("given"):
                options |= {"scale_mode": "tensor", "scale": scale}
            q, s, *others = getattr(torch.ops.collx, op).keep_norm(
                *given, norm.weight, EPS, communicator.name, **options
            )
            s = s if s.dim() == q.dim() else s.unsqueeze(-1)
            scales = () if case.how.startswith("given") else (s.float(),)
            others = others if case.keep_norm else others[:-1]

            names = [f"{op}.keep_norm" if case.keep_norm else op]
            found, kept, left, _ = passed(
                model, x, residual, rounding="model" if how.exact else "fp32"
            )
            wrong += [f"{case}: {kept}, {left}"] if (kept, left) != (names, []) else []
            wrong += _differ(case, found, (q, *scales, *others))
            plain = model(x, residual)
            # Both dequantize to the normalized tensor, each within half a step of e5m2.
            near = found[0].float() * (found[1] if scales else scale)
            wanted = plain[0].float() * (plain[1] if scales else scale)
            if not torch.allclose(near, wanted, 0.25, 0.02):
                wrong.append(f"{case}: not what the model gives")
            if not how.exact:
                _, kept, left, _ = passed(model, x, residual)
                wrong += [f"{case}: {kept}"] if kept != [op.removesuffix("_fp8")] else []
                wrong += [] if "which no operator does" in "".join(left) else [f"{case}: {left}"]
            elif case.keep_norm:
                # The model's own formula for the operator's norm: all bits are equal. Run it on the
                # CPU: on GPUs eager PyTorch divides by a number by multiplying by its inverse.
                by_hand = how.model(found[-1].cpu(), scale.cpu())
                wrong += _differ(f"{case}, by hand", (q, *scales), by_hand)
    return wrong


@pytest.mark.worlds(2)
@on_ranks(deadline=500.0)
def test_norms_of_a_reduce_scatter_become_one_operator(rank: Rank) -> list[str]:
    """Of matrices, and of tensors that DTensor scatters along the sequence of a batch."""
    group, communicator = group_of(rank)
    size, wrong = rank.size, []
    with communicator, torch.no_grad():
        for case in product(DTYPES, (0, 1), (2, 3), ("left", "right"), (False, True)):
            dtype, axis, dims, side, quantizes = case
            if axis == 1 and dims == 2:
                continue
            norm = _rms_norm(rank, dtype)
            shape = [3, 2, COLS][-dims:]
            residual = tensor_of(rank, (*shape,), dtype, True)
            shape[axis] *= size
            x = tensor_of(rank, (*shape,), dtype, True)

            def model(x: Tensor, residual: Tensor) -> Results:
                reduced = functional.reduce_scatter_tensor(x, "sum", axis, group)  # noqa: B023
                total = _added(reduced, residual, side)  # noqa: B023
                y = norm(total)  # noqa: B023
                return (*by_row(y), total) if quantizes else (y, total)  # noqa: B023

            op = "reducescatter_residual_rmsnorm" + ("_fp8" if quantizes else "")
            rounding = "parity" if dtype == torch.bfloat16 else "parity_weight"
            rows = torch.cat(x.chunk(size, axis)).reshape(-1, COLS)
            given = (rows, residual.reshape(-1, COLS), norm.weight, EPS, communicator.name)
            y, *rest = getattr(torch.ops.collx, op)(*given, rounding=rounding)
            scales = (rest[0].reshape(*residual.shape[:-1], 1),) if quantizes else ()
            wanted = (y.view(residual.shape), *scales, rest[-1].view(residual.shape))
            found, kept, left, _ = passed(model, x, residual)
            wrong += [f"{case}: {kept}, {left}"] if (kept, left) != ([op], []) else []
            wrong += _differ(case, found, wanted)
            wrong += [] if quantizes else _far(case, found, model(x, residual), dtype)
    return wrong


@pytest.mark.worlds(2)
@needs_compiler
@on_ranks(deadline=300.0)
def test_in_code_of_inductor(rank: Rank) -> list[str]:
    group, communicator = group_of(rank)
    norm, layer = _rms_norm(rank, torch.bfloat16), _layer_norm(rank, torch.bfloat16, False)
    x, residual = (tensor_of(rank, (4, COLS), torch.bfloat16, own) for own in (True, False))
    scale = torch.tensor([0.0123], device=rank.device)

    def model(x: Tensor, residual: Tensor) -> Results:
        first = layer(functional.all_reduce(x, "sum", group))
        # Inductor drops the rounding of a value that is widened at once.
        second = norm(residual + functional.all_reduce(2 * x, "sum", group)).float()
        static = norm(residual + functional.all_reduce(3 * x, "sum", group)).float() / scale
        return first, by_row(second, INT8)[0], static.clamp(-448, 448).to(E4M3)

    with communicator, torch.no_grad(), inductor():
        compiled = torch.compile(model, fullgraph=True, backend=collx.compile.backend)
        found, kept = code_of(compiled, x, residual)
        name, ops = communicator.name, torch.ops.collx
        bias = torch.full_like(layer.weight, -0.0)
        options = (norm.weight, EPS, name, 0.0)
        parity: dict[str, Any] = {"rounding": "parity"}
        wanted = (
            ops.allreduce_layernorm(x, layer.weight, bias, EPS, name, "parity"),
            ops.allreduce_residual_rmsnorm_int8(2 * x, residual, *options, **parity)[0],
            ops.allreduce_residual_rmsnorm_fp8(
                3 * x, residual, *options, scale_mode="tensor", scale=scale, **parity
            )[0],
        )
    names = ["allreduce_layernorm", *(f"allreduce_residual_rmsnorm_{k}" for k in ("int8", "fp8"))]
    return _differ("generated", found, wanted) + ([] if kept == [names] else [str(kept)])


@pytest.mark.worlds(2)
@on_ranks(deadline=300.0)
def test_a_large_model_is_rewritten_sooner_than_traced(rank: Rank) -> None:
    """The limit is 2 s, or the time for tracing on a machine where that is longer. Both are the CPU
    time of this process only."""
    group, communicator = group_of(rank)
    weight = WEIGHT.bfloat16().to(rank.device)
    x = tensor_of(rank, (4, COLS), torch.bfloat16, True)
    began, ran = [0.0], [0.0, 0.0]

    def model(x: Tensor) -> Tensor:
        total = y = x
        for _ in range(64):  # two in each of 32 layers
            total = total + functional.all_reduce(y, "sum", group)
            y = nn.functional.rms_norm(total, (COLS,), weight, EPS)
        return y

    class Timed(collx.compile.Pass):
        def __call__(self, graph: Graph) -> None:
            ran[0] = time.process_time()
            super().__call__(graph)
            ran[1] = time.process_time()

    with communicator, torch.no_grad():
        for _ in range(2):  # the first iteration imports modules
            collx.compile.report().norms.clear()
            torch._dynamo.reset()
            began[0] = time.process_time()
            torch.compile(model, fullgraph=True, backend=through_pass([], made=Timed))(x)
        norms = dict(collx.compile.report().norms)
    seconds, traced = ran[1] - ran[0], ran[0] - began[0]
    assert norms == {"allreduce_residual_rmsnorm, parity": 64}
    assert seconds < max(2.0, traced), f"{seconds:.2f} s, behind {traced:.2f} s of tracing"
