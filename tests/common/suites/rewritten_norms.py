"""What stands behind a collective besides an RMS norm of an all-reduce, rewritten: layer norms,
quantization, and norms of a reduce-scatter. The graphs are run as the pass leaves them."""

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

from ..check import differences
from ..compiling import code_of, inductor, operators_in, require_compiler, through_pass
from ..pool import Pool
from ..rank import Rank

COLS, EPS = 64, 1e-5
WEIGHT = torch.linspace(-1.5, 2.5, COLS)
BIAS = torch.linspace(1.0, -1.0, COLS)
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
DTYPES = (torch.bfloat16, torch.float32)
SHAPES = ((4, COLS), (2, 3, COLS))
Results = tuple[Tensor, ...]


class Run(NamedTuple):
    """A model that was compiled and run."""

    results: Results
    operators: list[str]
    left: list[str]


def _passed(model: Callable[..., Results], *given: Tensor, **options: Any) -> Run:
    import collx

    before = dict(collx.compile.report().left)
    graphs: list[Graph] = []
    torch._dynamo.reset()
    results = torch.compile(model, fullgraph=True, backend=through_pass(graphs, **options))(*given)
    left = [why for why, n in collx.compile.report().left.items() if n != before.get(why)]
    return Run(results, operators_in(graphs), left)


def _group(rank: Rank) -> tuple[Any, Any]:
    group = rank.fresh_group()
    return group, rank.new_communicator("rewritten-norms", group)


def _tensor(rank: Rank, shape: tuple[int, ...], dtype: torch.dtype, own: bool) -> Tensor:
    """Values that are a rank's own, or equal on all."""
    numbers = torch.Generator().manual_seed(100 + rank.rank if own else 7)
    return torch.randn(shape, generator=numbers).to(rank.device, dtype)


def _differ(what: object, found: Results, wanted: Results) -> list[str]:
    assert len(found) == len(wanted), what
    pairs = zip(found, wanted, strict=True)
    wrong = [(n, differences(a.cpu(), b.cpu())) for n, (a, b) in enumerate(pairs)]
    return [f"{what}: result {n}: {why}" for n, why in wrong if why]


def _far(what: object, found: Results, plain: Results, dtype: torch.dtype) -> list[str]:
    """Sums of a row, and products, may be taken in another order than the model's."""
    close = 1e-2 if dtype == torch.bfloat16 else 1e-5
    pairs = zip(found, plain, strict=True)
    wrong = [n for n, (a, b) in enumerate(pairs) if not torch.allclose(a, b, close, close)]
    return [f"{what}: result {n} is not what the model gives" for n in wrong]


def _added(y: Tensor, residual: Tensor, side: str) -> Tensor:
    return {"": y, "left": residual + y if side else y, "right": y + residual if side else y}[side]


def _layer_norm(rank: Rank, dtype: torch.dtype, bias: bool) -> nn.LayerNorm:
    norm = nn.LayerNorm(COLS, EPS, bias=bias, dtype=dtype)
    norm.weight.data.copy_(WEIGHT)
    norm.weight.data[3] = 0  # times what is negative it is -0
    if bias:
        norm.bias.data.copy_(BIAS)
    return norm.to(rank.device)


def _layer_norms(rank: Rank) -> list[str]:
    group, communicator = _group(rank)
    wrong = []
    with communicator, torch.no_grad():
        for case in product(DTYPES, SHAPES, ("", "left", "right"), (True, False)):
            dtype, shape, side, has_bias = case
            norm = _layer_norm(rank, dtype, has_bias)
            x, residual = (_tensor(rank, shape, dtype, own) for own in (True, False))

            def model(x: Tensor, residual: Tensor) -> Results:
                y = _added(functional.all_reduce(x, "sum", group), residual, side)  # noqa: B023
                return (norm(y), y) if side else (norm(y),)  # noqa: B023

            found, kept, left = _passed(model, x, residual)
            bias = norm.bias if has_bias else torch.full_like(norm.weight, -0.0)
            op = "allreduce_residual_layernorm" if side else "allreduce_layernorm"
            given = (x, residual) if side else (x,)
            options = (norm.weight, bias, EPS, communicator.name, "parity")
            wanted = getattr(torch.ops.collx, op)(*given, *options)
            wrong += [f"{case}: {kept}, {left}"] if (kept, left) != ([op], []) else []
            wrong += _differ(case, found, wanted if side else (wanted,))
            wrong += _far(case, found, model(x, residual), dtype)
    return wrong


@pytest.mark.worlds(2)
def test_layer_norms_become_one_operator(pool: Pool) -> None:
    assert pool.run(_layer_norms, deadline=500.0) == [[], []]


class Quantize(NamedTuple):
    """A way to quantize, and the options of the operator that does the same."""

    model: Callable[[Tensor, Tensor], Results]
    """Of y and a scale that it may use: q, and a scale if it makes one."""
    kind: str
    options: dict[str, Any]
    exact: bool = True
    """Whether that gives the same bits: else it is asked for by rounding="fp32"."""


def _stored(scaled: Tensor, dtype: torch.dtype) -> Tensor:
    limit = 127 if dtype == INT8 else torch.finfo(dtype).max
    scaled = torch.round(scaled) if dtype == INT8 else scaled
    return scaled.clamp(-limit, limit).to(dtype)


def _by_row(y: Tensor, dtype: torch.dtype = E4M3) -> Results:
    scale = y.abs().amax(-1, keepdim=True).float() / (127 if dtype == INT8 else 448)
    return _stored(y.float() * scale.reciprocal(), dtype), scale


def _by_maximum(y: Tensor, s: Tensor) -> Results:
    # As vLLM without its lower bound: the maximum of a dimension, which is put back.
    largest, _ = y.abs().max(dim=-1)
    scale = largest.unsqueeze(-1).float() / 57344
    return _stored((1.0 / scale) * y.float(), E5M2), scale


def _with_bound(y: Tensor, s: Tensor) -> Results:
    scale = y.abs().amax(-1, keepdim=True).float().clamp(min=1e-10) / 448
    return _stored(y.float() * scale.reciprocal(), E4M3), scale


def _rounded_scale(y: Tensor, s: Tensor) -> Results:
    scale = (y.abs().amax(-1, keepdim=True) / 448).float()
    return _stored(y.float() * scale.reciprocal(), E4M3), scale


def _as_torchao(y: Tensor, s: Tensor) -> Results:
    # torchao's float8 with a scale for each row, from quantization/quant_primitives.py:
    # scale = float32(max_abs / quant_max), q = clamp(float32(x) / scale).
    scale = (y.abs().amax(dim=(-1,), keepdim=True) / 448).to(torch.float32)
    return _stored(y.to(torch.float32) / scale, E4M3), scale


QUANTIZED = {
    "row": Quantize(lambda y, s: _by_row(y), "fp8", {}),
    "row, int8": Quantize(lambda y, s: _by_row(y, INT8), "int8", {}),
    "row, e5m2": Quantize(_by_maximum, "fp8", {"fp8_dtype": "e5m2"}),
    "row, bounded": Quantize(_with_bound, "fp8", {"scale_mode": "group", "quant_group_size": COLS}),
    "row, scale in the dtype": Quantize(_rounded_scale, "fp8", {"scale_dtype": "input"}),
    "given": Quantize(lambda y, s: (_stored(y.float() / s, E4M3),), "fp8", {}),
    "given, int8": Quantize(lambda y, s: (_stored(y.float() / s, INT8),), "int8", {}),
    "torchao": Quantize(_as_torchao, "fp8", {"scale_dtype": "input"}, False),
    "given, inverted": Quantize(
        lambda y, s: (_stored(y.float() * (1 / s), E4M3),), "fp8", {}, False
    ),
}


class QuantizedCase(NamedTuple):
    how: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    residual: str

    @property
    def keep_norm(self) -> bool:
        """Whether the model returns the norm, too: in half of the cases of each kind."""
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


def _quantizations(rank: Rank) -> list[str]:
    group, communicator = _group(rank)
    scale = torch.tensor([0.0123], device=rank.device)
    wrong = []
    with communicator, torch.no_grad():
        for case in QUANTIZED_CASES:
            how = QUANTIZED[case.how]
            norm = _rms_norm(rank, case.dtype)
            x, residual = (_tensor(rank, case.shape, case.dtype, own) for own in (True, False))
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
            found, kept, left = _passed(
                model, x, residual, rounding="model" if how.exact else "fp32"
            )
            wrong += [f"{case}: {kept}, {left}"] if (kept, left) != (names, []) else []
            wrong += _differ(case, found, (q, *scales, *others))
            plain = model(x, residual)
            # Both are the normalized tensor, to half a step of e5m2 each.
            near = found[0].float() * (found[1] if scales else scale)
            wanted = plain[0].float() * (plain[1] if scales else scale)
            if not torch.allclose(near, wanted, 0.25, 0.02):
                wrong.append(f"{case}: not what the model gives")
            if not how.exact:
                _, kept, left = _passed(model, x, residual)
                wrong += [f"{case}: {kept}"] if kept != [op.removesuffix("_fp8")] else []
                wrong += [] if "which no operator does" in "".join(left) else [f"{case}: {left}"]
            elif case.keep_norm:
                # The model's own formula, of the operator's norm: no bit differs. On the CPU: on
                # GPUs eager PyTorch divides by a number as it multiplies by its inverse.
                by_hand = how.model(found[-1].cpu(), scale.cpu())
                wrong += _differ(f"{case}, by hand", (q, *scales), by_hand)
    return wrong


@pytest.mark.worlds(2)
def test_quantization_behind_a_norm_becomes_part_of_it(pool: Pool) -> None:
    """q and scale are to the bit what the model makes of the operator's norm, where the model
    multiplies by the inverse of a row's scale, or divides by a given one."""
    assert pool.run(_quantizations, deadline=500.0) == [[], []]


def _scattered(rank: Rank) -> list[str]:
    group, communicator = _group(rank)
    size, wrong = rank.size, []
    with communicator, torch.no_grad():
        for case in product(DTYPES, (0, 1), (2, 3), ("left", "right"), (False, True)):
            dtype, axis, dims, side, quantizes = case
            if axis == 1 and dims == 2:
                continue
            norm = _rms_norm(rank, dtype)
            shape = [3, 2, COLS][-dims:]
            residual = _tensor(rank, (*shape,), dtype, True)
            shape[axis] *= size
            x = _tensor(rank, (*shape,), dtype, True)

            def model(x: Tensor, residual: Tensor) -> Results:
                reduced = functional.reduce_scatter_tensor(x, "sum", axis, group)  # noqa: B023
                total = _added(reduced, residual, side)  # noqa: B023
                y = norm(total)  # noqa: B023
                return (*_by_row(y), total) if quantizes else (y, total)  # noqa: B023

            op = "reducescatter_residual_rmsnorm" + ("_fp8" if quantizes else "")
            rounding = "parity" if dtype == torch.bfloat16 else "parity_weight"
            rows = torch.cat(x.chunk(size, axis)).reshape(-1, COLS)
            given = (rows, residual.reshape(-1, COLS), norm.weight, EPS, communicator.name)
            y, *rest = getattr(torch.ops.collx, op)(*given, rounding=rounding)
            scales = (rest[0].reshape(*residual.shape[:-1], 1),) if quantizes else ()
            wanted = (y.view(residual.shape), *scales, rest[-1].view(residual.shape))
            found, kept, left = _passed(model, x, residual)
            wrong += [f"{case}: {kept}, {left}"] if (kept, left) != ([op], []) else []
            wrong += _differ(case, found, wanted)
            wrong += [] if quantizes else _far(case, found, model(x, residual), dtype)
    return wrong


@pytest.mark.worlds(2)
def test_norms_of_a_reduce_scatter_become_one_operator(pool: Pool) -> None:
    """Of matrices, and of what DTensor scatters along the sequence of a batch."""
    assert pool.run(_scattered, deadline=500.0) == [[], []]


def _generated(rank: Rank) -> list[str]:
    import collx

    group, communicator = _group(rank)
    norm, layer = _rms_norm(rank, torch.bfloat16), _layer_norm(rank, torch.bfloat16, False)
    x, residual = (_tensor(rank, (4, COLS), torch.bfloat16, own) for own in (True, False))
    scale = torch.tensor([0.0123], device=rank.device)

    def model(x: Tensor, residual: Tensor) -> Results:
        first = layer(functional.all_reduce(x, "sum", group))
        # Inductor drops the rounding of what is widened at once.
        second = norm(residual + functional.all_reduce(2 * x, "sum", group)).float()
        static = norm(residual + functional.all_reduce(3 * x, "sum", group)).float() / scale
        return first, _by_row(second, INT8)[0], static.clamp(-448, 448).to(E4M3)

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
def test_in_code_of_inductor(pool: Pool) -> None:
    require_compiler()
    assert pool.run(_generated, deadline=300.0) == [[], []]


class Nearly(NamedTuple):
    """What is nearly rewritten; the operators that it becomes, and what the report says."""

    model: Callable[..., Any]
    """Of the sum, a tensor of its shape and dtype, a weight and a scale."""
    operators: list[str]
    why: str
    scatters: bool = False


def _layer(y: Tensor, w: Tensor, dim: int = -1, correction: int = 0) -> tuple[Tensor, Tensor]:
    wide = y.float()
    variance, mean = torch.var_mean(wide, dim, correction=correction, keepdim=True)
    return ((wide - mean) * torch.rsqrt(variance + EPS) * w).to(y.dtype), mean


def _rms(y: Tensor, w: Tensor) -> Tensor:
    return nn.functional.rms_norm(y, (COLS,), w, EPS)


def _unweighted(y: Tensor) -> Tensor:
    wide = y.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)


def _with_scale(y: Tensor, scale: Tensor, dtype: torch.dtype = E4M3, limit: float = 448) -> Results:
    return (y.float() * scale.reciprocal()).clamp(-limit, limit).to(dtype), scale


def _largest(y: Tensor, dim: int = -1) -> Tensor:
    return y.abs().amax(dim, keepdim=True).float()


NO_NORM, NORM, RESIDUAL = ["allreduce"], ["allreduce_rmsnorm"], ["allreduce_residual_rmsnorm"]
NEARLY = {
    # Layer norms.
    "variance of a sample": Nearly(
        lambda y, r, w, s: _layer(y + r, w, correction=1)[0], NO_NORM, "corrected for a sample"
    ),
    "layer norm of columns": Nearly(
        lambda y, r, w, s: _layer(y + r, w, 0)[0], NO_NORM, "variance is over dimensions [0]"
    ),
    "the mean is used": Nearly(
        lambda y, r, w, s: _layer(y + r, w), NO_NORM, "the mean has other uses"
    ),
    "a matrix of biases": Nearly(
        lambda y, r, w, s: (_layer((y + r).float(), w)[0] + r.float()).to(r.dtype),
        NO_NORM,
        "is not rounded to the dtype of the sum, or no vector added",
    ),
    "the sum is used": Nearly(lambda y, r, w, s: (_layer(y, w)[0], 2 * y), NO_NORM, "other uses"),
    "a weight made of the sum": Nearly(
        lambda y, r, w, s: _layer(n := y + r, w * n[0])[0], NO_NORM, "computed behind the sum"
    ),
    "an offset": Nearly(
        lambda y, r, w, s: _layer(y + r, 1 + w)[0], NO_NORM, "added to the weight of a layer norm"
    ),
    # RMS norms.
    "a rounded offset": Nearly(
        lambda y, r, w, s: _rms(y, 1 + w), NO_NORM, "weight and offset are added in the dtype"
    ),
    "another offset": Nearly(
        lambda y, r, w, s: _rms(y.float(), 0.1 + w.float()).bfloat16(), NO_NORM, "is no value of"
    ),
    "a wide weight of what is rounded": Nearly(
        lambda y, r, w, s: (_unweighted(y).bfloat16() * w.float()).bfloat16(),
        NO_NORM,
        "multiplied by a weight in torch.float32",
    ),
    # Scales of rows.
    "scales of columns": Nearly(
        lambda y, r, w, s: _with_scale(n := _rms(y + r, w), _largest(n, 0) / 448),
        RESIDUAL,
        "the scales are not those of rows",
    ),
    "one scale of all": Nearly(
        lambda y, r, w, s: _with_scale(n := _rms(y + r, w), n.abs().amax().float() / 448),
        RESIDUAL,
        "the scales are not those of rows",
    ),
    "another least magnitude": Nearly(
        lambda y, r, w, s: _with_scale(n := _rms(y, w), _largest(n).clamp(min=1e-12) / 448),
        NORM,
        "the least largest magnitude is 1e-12",
    ),
    "a least scale": Nearly(
        lambda y, r, w, s: _with_scale(n := _rms(y, w), (_largest(n) / 448).clamp(min=1e-10)),
        NORM,
        "the least scale is 1e-10",
    ),
    "another limit": Nearly(
        lambda y, r, w, s: _with_scale(n := _rms(y, w), _largest(n) / 240, limit=240),
        NORM,
        "not largest magnitudes divided by 448",
    ),
    "another clamp": Nearly(
        lambda y, r, w, s: _with_scale(n := _rms(y, w), _largest(n) / 448, limit=240),
        NORM,
        "it is clamped to",
    ),
    "another float8": Nearly(
        lambda y, r, w, s: _with_scale(n := _rms(y, w), _largest(n) / 240, torch.float8_e4m3fnuz),
        NORM,
        "it is quantized to torch.float8_e4m3fnuz",
    ),
    "int8 that is cut off": Nearly(
        lambda y, r, w, s: _with_scale(n := _rms(y, w), _largest(n) / 127, INT8, 127),
        NORM,
        "it is cut off, not rounded",
    ),
    "multiplied by the scale": Nearly(
        lambda y, r, w, s: (_rms(y, w).float() * s).clamp(-448, 448).to(E4M3),
        NORM,
        "no inverse of a scale",
    ),
    # Given scales.
    "scales of all columns": Nearly(
        lambda y, r, w, s: _stored(_rms(y, w).float() / w.float(), E4M3), NORM, "is no row's"
    ),
    "a given scale of another dtype": Nearly(
        lambda y, r, w, s: _stored(_rms(y, w) / s.bfloat16(), E4M3),
        NORM,
        "it is scaled in torch.bfloat16",
    ),
    "a scale made of the sum": Nearly(
        lambda y, r, w, s: _stored(_rms(n := y + r, w).float() / n[:1, :1].float(), E4M3),
        RESIDUAL,
        "the scale is computed behind the sum",
    ),
    "int8 down to -128": Nearly(
        lambda y, r, w, s: torch.round(_rms(y, w).float() / s).clamp(-128, 127).to(INT8),
        NORM,
        "it is clamped to",
    ),
    # Behind a reduce-scatter.
    "scattered, no residual": Nearly(
        lambda y, r, w, s: _rms(y, w),
        ["reducescatter"],
        "there is no reducescatter_rmsnorm",
        True,
    ),
    "scattered, layer norm": Nearly(
        lambda y, r, w, s: _layer(y + r, w)[0],
        ["reducescatter"],
        "there is no reducescatter_residual_layernorm",
        True,
    ),
    "scattered, int8": Nearly(
        lambda y, r, w, s: _by_row(_rms(y + r, w), INT8),
        ["reducescatter_residual_rmsnorm"],
        "there is no reducescatter_residual_rmsnorm_int8",
        True,
    ),
    "scattered, another residual": Nearly(
        lambda y, r, w, s: _rms(y + r[0], w), ["reducescatter"], "", True
    ),
}


def _near_misses(rank: Rank) -> list[str]:
    group, communicator = _group(rank)
    wrong = []
    weight = WEIGHT.bfloat16().to(rank.device)
    scale = torch.tensor([0.0123], device=rank.device)
    with communicator, torch.no_grad():
        for what, nearly in NEARLY.items():
            rows = 4 * rank.size if nearly.scatters else 4
            x = _tensor(rank, (rows, COLS), torch.bfloat16, True)
            residual = _tensor(rank, (4, COLS), torch.bfloat16, False)

            def model(x: Tensor, residual: Tensor) -> Any:
                if nearly.scatters:  # noqa: B023
                    y = functional.reduce_scatter_tensor(x, "sum", 0, group)
                else:
                    y = functional.all_reduce(x, "sum", group)
                return nearly.model(y, residual, weight, scale)  # noqa: B023

            _, kept, left = _passed(model, x, residual)
            if kept != nearly.operators or nearly.why not in "".join(left):
                wrong.append(f"{what}: {kept}, {left}")
    return wrong


@pytest.mark.worlds(2)
def test_what_is_nearly_rewritten_stays_and_is_told(pool: Pool) -> None:
    assert pool.run(_near_misses, deadline=300.0) == [[], []]


def _many_layers(rank: Rank) -> tuple[float, float, dict[str, int]]:
    """The seconds that the pass takes for a model, and those of all that comes before it, both of
    this process alone."""
    import collx

    group, communicator = _group(rank)
    weight = WEIGHT.bfloat16().to(rank.device)
    x = _tensor(rank, (4, COLS), torch.bfloat16, True)
    began, passed = [0.0], [0.0, 0.0]

    def model(x: Tensor) -> Tensor:
        total = y = x
        for _ in range(64):  # two in each of 32 layers
            total = total + functional.all_reduce(y, "sum", group)
            y = _rms(total, weight)
        return y

    class Timed(collx.compile.Pass):
        def __call__(self, graph: Graph) -> None:
            passed[0] = time.process_time()
            super().__call__(graph)
            passed[1] = time.process_time()

    with communicator, torch.no_grad():
        for _ in range(2):  # the first one imports
            collx.compile.report().norms.clear()
            torch._dynamo.reset()
            began[0] = time.process_time()
            torch.compile(model, fullgraph=True, backend=through_pass([], made=Timed))(x)
        norms = dict(collx.compile.report().norms)
    return passed[1] - passed[0], passed[0] - began[0], norms


@pytest.mark.worlds(2)
def test_a_large_model_is_rewritten_sooner_than_traced(pool: Pool) -> None:
    """2 s, or what tracing takes, where a machine is so slow that this is more."""
    for seconds, traced, norms in pool.run(_many_layers, deadline=300.0):
        assert norms == {"allreduce_residual_rmsnorm, parity": 64}
        assert seconds < max(2.0, traced), f"{seconds:.2f} s, behind {traced:.2f} s of tracing"
