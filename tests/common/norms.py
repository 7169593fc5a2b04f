"""Calls of the fused normalizations, their data and expected results, and samples of calls.

weights    "same": weight and bias in the input's dtype; "float32"
style      "random" (many magnitudes, so that the order of sums matters); "bits" (any pattern);
           "rows" (all kinds of rows that are special for a norm or a scale); "ones" (all bits
           set: NaN throughout); "constant" (the sum is +-1, so y is the gain, with the maximum
           LARGEST); "minus" (the sum and y are -1 throughout); "tiny" (scales have no reciprocal)
folded     the input has three dimensions
epilogue   one of EPILOGUES, or none
lies       how its extras broadcast: "full", "row", "column", "number"
form       also "updated": residual_out is the residual itself
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import collx
from collx import reference
from collx._extension import extension
from collx.epilogues import expression_of

from . import calls
from .calls import Data, Fields, Tensors
from .epilogues import Case, bias_relu, causal, ranges, scale_residual
from .sampling import Allowed, Factors
from .values import dtype_of, make_values

NAMES = (
    "allreduce_rmsnorm",
    "allreduce_residual_rmsnorm",
    "allreduce_layernorm",
    "allreduce_residual_layernorm",
    "allreduce_rmsnorm_fp8",
    "allreduce_residual_rmsnorm_fp8",
    "allreduce_rmsnorm_int8",
    "allreduce_residual_rmsnorm_int8",
    "reducescatter_residual_rmsnorm",
    "reducescatter_residual_rmsnorm_fp8",
)
DTYPES = ("float32", "float16", "bfloat16")
ROUNDINGS = ("fp32", "parity", "parity_weight")
STYLES = ("random", "rows", "bits", "ones")
FORMS = ("functional", "out", "python", "python_out")
ROWS = (0, 1, 2, 7, 64, 513)
COLS = (1, 8, 100, 384, 4096, 8192, 16384, 20000)
EPILOGUES = {
    case.function.__name__: case
    for case in (
        Case(bias_relu, DTYPES, 1),
        Case(scale_residual, DTYPES, 2),
        Case(ranges, DTYPES, 1),
        Case(causal, DTYPES, index=True),
    )
}
LIES = ("full", "row", "column", "number")
LARGEST = 2.5  # magnitude of a gain with style "constant"
TINY = 1e-38


def quantizes(op: str) -> bool:
    return op.endswith(("fp8", "int8"))


def family_of(op: str) -> str:
    """Returns the name of the Python function that calls an operator."""
    return op.replace("_residual", "").removesuffix("_fp8").removesuffix("_int8")


def scatters(op: str) -> bool:
    return op.startswith("reducescatter")


def algorithms_of(op: str) -> tuple[str, ...]:
    return ("auto", *extension.algorithms(op))


def outputs_of(op: str, keep_norm: bool = False) -> tuple[str, ...]:
    """Returns the names of the outputs, in the order of the results."""
    names: tuple[str, ...] = ("q_out", "scale_out") if quantizes(op) else ("out",)
    names += ("residual_out",) if "residual" in op else ()
    return (*names, "norm_out") if keep_norm else names


@dataclass(frozen=True, repr=False)
class Call(calls.Call):
    """A call of a fused normalization."""

    op: str
    dtype: str = "bfloat16"
    rows: int = 7
    cols: int = 384
    folded: bool = False
    weights: str = "same"
    eps: float = 1e-6
    weight_offset: float = 0.0
    rounding: str = "fp32"
    scale_ub: float | None = None
    fp8_dtype: str = "e4m3fn"
    scale_mode: str = "row"
    given: float = 0.03125  # the scale with scale_mode "tensor"
    quant_group_size: int = 128
    ue8m0: bool = False
    scale_dtype: str = "float32"
    scale_layout: str = "row"
    keep_norm: bool = False
    epilogue: str = ""
    lies: str = "row"
    style: str = "random"
    seed: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        if not self.folded:
            return self.rows, self.cols
        first = next((d for d in (5, 3, 2, 7, 19) if self.rows % d == 0), 1)
        return first, self.rows // first, self.cols

    def legal(self) -> Call:
        return _legal(self)

    def make_data(self, world: int) -> Data:
        return _make_data(self, world)

    def is_large(self, world: int) -> bool:
        return self.rows * self.cols * world > 1 << 20  # elements

    def outputs(self) -> tuple[str, ...]:
        return outputs_of(self.op, self.keep_norm)

    def by_bytes(self, output: str, world: int, rank: int) -> bool:
        return output in ("q_out", "scale_out")

    def shared(self, output: str) -> str:
        return "residual" if self.form == "updated" and output == "residual_out" else ""

    def overload(self, form: str) -> Callable[..., Any]:
        names = {"functional": "default", "out": "out"}
        if self.keep_norm:
            names = {"functional": "keep_norm", "out": "keep_norm_out"}
        found: Callable[..., Any] = getattr(getattr(torch.ops.collx, self.op), names[form])
        return found

    def arguments(self, communicator: Any, tensors: Fields) -> Fields:
        given: Fields = {**tensors, "eps": self.eps, "group_name": communicator.name}
        if self.epilogue:
            extras = [given.pop(name) for name in tensors if name.startswith("extras_")]
            given.update(expression=_expression(self), extras=extras)
        if "layernorm" not in self.op:
            given["weight_offset"] = self.weight_offset
        if quantizes(self.op):
            given.update(scale_options(self))
        given["rounding"] = self.rounding
        return {**given, "algorithm": self.algorithm, "max_blocks": self.max_blocks}

    def function_call(
        self, communicator: Any, given: Fields, outs: Tensors
    ) -> tuple[Callable[..., Any], Fields]:
        scaled = scale_options(self) if quantizes(self.op) else {}
        mine = {k: v for k, v in given.items() if k != "group_name" and k not in scaled}
        if self.epilogue:
            case = EPILOGUES[self.epilogue]
            del mine["expression"]
            mine.update(epilogue=case.function, index=case.index)
        if scaled:
            kind = self.op.rpartition("_")[2]
            mine["quantization"] = collx.Quantization(kind, **scaled)
            mine["keep_norm"] = self.keep_norm
        if self.form != "python":
            mine["out"] = outs[0] if len(outs) == 1 else outs
        return getattr(collx, family_of(self.op)), {**mine, "group": communicator}


_UNSCALED: Fields = {
    "scale_ub": None,
    "fp8_dtype": "e4m3fn",
    "scale_mode": "row",
    "ue8m0": False,
    "scale_dtype": "float32",
    "scale_layout": "row",
    "keep_norm": False,
}


def _legal(call: Call) -> Call:
    """Returns the closest valid call."""
    if not quantizes(call.op):
        call = replace(call, **_UNSCALED)
    if call.op.endswith("int8"):
        call = replace(call, fp8_dtype="e4m3fn")
    if "layernorm" in call.op:
        call = replace(call, weight_offset=0.0)
    if call.scale_mode == "group" and call.cols % call.quant_group_size != 0:
        call = replace(call, scale_mode="row")
    if call.scale_mode == "tensor":
        call = replace(call, scale_ub=None, ue8m0=False, scale_dtype="float32")
    if call.scale_mode != "group":
        call = replace(call, scale_layout="row")
    if call.scale_dtype == "float8_e8m0fnu":
        call = replace(call, ue8m0=True)
    if scatters(call.op):
        call = replace(call, folded=False)
    if call.epilogue and EPILOGUES[call.epilogue].index:  # coordinates of rows and columns
        call = replace(call, folded=False)
    if call.algorithm not in algorithms_of(call.op):
        call = replace(call, algorithm="auto")
    if call.form == "updated" and "residual" not in call.op:
        call = replace(call, form="out")
    return call


def scale_options(call: Call) -> Fields:
    """Returns the options of an op that quantizes, without the scale itself."""
    names = ["scale_ub", "scale_mode", "quant_group_size", "ue8m0", "scale_dtype", "scale_layout"]
    names += ["fp8_dtype"] if call.op.endswith("fp8") else []
    return {name: getattr(call, name) for name in names}


def _of_many_magnitudes(dtype: str, numel: int, seed: int, rank: int) -> torch.Tensor:
    powers = make_values("bits", "uint8", numel, seed, rank) % 14
    values = make_values("random", dtype, numel, seed, rank)
    return (values.double() * 2.0 ** (powers.double() - 7)).to(values.dtype)


def _rows_of_all_kinds(call: Call, rank: int, world: int) -> torch.Tensor:
    """Returns rows of ordinary values, zeros, infinity or NaN at one position of one rank,
    subnormals, values whose squares or sums overflow, special values throughout, one value among
    zeros."""
    dtype = dtype_of(call.dtype)
    info, cols = torch.finfo(dtype), call.cols
    numel = call.rows * cols
    values = _of_many_magnitudes(call.dtype, numel, call.seed, rank).view(call.rows, cols)
    special = make_values("special", call.dtype, numel, call.seed, rank).view(call.rows, cols)
    mine = rank == call.seed % world
    place = call.seed * 31 % cols
    for row in range(call.rows):
        kind = (row + call.seed) % 9
        if kind == 1:
            values[row] *= 0  # zeros of both signs
        elif kind in (2, 3) and mine:
            values[row, place] = math.inf if kind == 2 else math.nan
        elif kind == 4:
            values[row] = (values[row].sign().double() * info.tiny * (1 + row % 3) / 5).to(dtype)
        elif kind == 5:
            values[row] = values[row].sign() * (info.max / 2)
        elif kind == 6:
            values[row] = special[row]
        elif kind == 7:
            values[row] *= 0
            values[row, place] = 1.5
    return values.view(-1)


def _input(call: Call, rank: int, world: int) -> torch.Tensor:
    numel = call.rows * call.cols
    if call.style == "rows":
        return _rows_of_all_kinds(call, rank, world)
    if call.style in ("constant", "minus"):
        mine = rank == call.seed % world
        ones = torch.full((numel,), -1.0 if mine else 0.0, dtype=dtype_of(call.dtype))
        if call.style == "minus":
            return ones
        return ones * make_values("random", call.dtype, numel, call.seed, 0).sign()
    if call.style in ("random", "tiny"):
        return _of_many_magnitudes(call.dtype, numel, call.seed, rank)
    return make_values(call.style, call.dtype, numel, call.seed, rank)


def _vector(call: Call, which: int) -> torch.Tensor:
    dtype = call.dtype if call.weights == "same" else "float32"
    if call.style == "minus":
        return torch.ones(call.cols, dtype=dtype_of(dtype))
    style = "bits" if call.style == "bits" else "random"
    vector = make_values(style, dtype, call.cols, call.seed + 100 * which, 0)
    if call.style == "constant":
        vector = vector.clamp(-2.0, 2.0)
        vector[call.seed % call.cols] = -LARGEST
    if call.style == "tiny":
        vector = (vector.double() * TINY).to(vector.dtype)
    return vector


def _extras(call: Call, sizes: tuple[int, ...], seed: int) -> list[torch.Tensor]:
    """Returns the extras for results with these sizes."""
    by_name = {"full": sizes, "row": sizes[-1:], "column": (*sizes[:-1], 1), "number": ()}
    shape = torch.Size(by_name[call.lies])
    count = EPILOGUES[call.epilogue].extras if call.epilogue else 0
    made = []
    for which in range(count):
        values = make_values("random", call.dtype, shape.numel(), seed + which, 0)
        made.append(values.view(shape))
    return made


def _make_data(call: Call, world: int) -> Data:
    inputs = [_input(call, rank, world).view(call.shape) for rank in range(world)]
    residuals = None
    if "residual" in call.op:
        style = {"rows": "special", "constant": "zeros", "minus": "zeros"}
        style_here = style.get(call.style, "random" if call.style == "tiny" else call.style)
        numel = call.rows * call.cols
        if style_here == "zeros":
            residual = torch.zeros(numel, dtype=dtype_of(call.dtype))
        else:
            residual = make_values(style_here, call.dtype, numel, call.seed + 500, 0)
            if call.style == "rows":  # so that most rows keep their kind
                kept = torch.arange(call.rows).repeat_interleave(call.cols) % 4 != 3
                residual = residual.masked_fill(kept, 0.25)
        residuals = [residual.view(call.shape)] * world
        if scatters(call.op):
            residuals = list(residuals[0].split(reference.parts(call.rows, world)))
    weight = _vector(call, 1)
    bias = _vector(call, 2) if "layernorm" in call.op else None
    scale = torch.tensor([call.given]) if call.scale_mode == "tensor" else None
    own = [residuals[rank] if residuals else inputs[rank] for rank in range(world)]
    extras = [
        _extras(call, tuple(like.shape), call.seed + 900 + (scatters(call.op) and 7 * rank))
        for rank, like in enumerate(own)
    ]
    given: list[Fields] = []
    for rank in range(world):
        mine = {
            "input": inputs[rank],
            "weight": weight,
            "residual": residuals[rank] if residuals else None,
            "bias": bias,
            "scale": scale,
            **{f"extras_{number}": extra for number, extra in enumerate(extras[rank])},
        }
        given.append({name: tensor for name, tensor in mine.items() if tensor is not None})
    return Data(given, _expected(call, inputs, residuals, weight, bias, scale, extras))


def _expected(
    call: Call,
    inputs: list[torch.Tensor],
    residuals: list[torch.Tensor] | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    extras: list[list[torch.Tensor]],
) -> list[Tensors]:
    given: Fields = {"weight": weight, "eps": call.eps, "rounding": call.rounding}
    if bias is not None:
        given["bias"] = bias
    else:
        given["weight_offset"] = call.weight_offset
    if quantizes(call.op):
        given.update(scale_options(call), scale=scale, keep_norm=call.keep_norm)
    if call.epilogue:
        case = EPILOGUES[call.epilogue]
        given.update(epilogue=case.function, index=case.index)
        given["extras"] = extras if scatters(call.op) else extras[0]
    function = getattr(reference, call.op)
    if scatters(call.op):
        results: list[Tensors] = function(inputs, residuals, **given)
        return results
    result = function(inputs, *(residuals[:1] if residuals else ()), **given)
    return [result if isinstance(result, tuple) else (result,)] * len(inputs)


def _expression(call: Call) -> str:
    case, dims = EPILOGUES[call.epilogue], len(call.shape)
    return expression_of(
        call.op, case.function, dtype_of(call.dtype), case.extras, dims if case.index else None
    )


# Options of the scales, for the ops that quantize.
SCALES: tuple[Fields, ...] = (
    {},
    {"scale_ub": 0.7},
    {"scale_dtype": "input"},
    {"ue8m0": True},
    {"scale_dtype": "float8_e8m0fnu", "ue8m0": True},
    {"scale_mode": "tensor"},
    {"scale_mode": "group", "quant_group_size": 16},
    {"scale_mode": "group", "quant_group_size": 32, "scale_layout": "column", "scale_ub": 0.7},
    {
        "scale_mode": "group",
        "quant_group_size": 128,
        "scale_dtype": "input",
        "scale_layout": "column",
    },
    {
        "scale_mode": "group",
        "quant_group_size": 128,
        "scale_dtype": "float8_e8m0fnu",
        "ue8m0": True,
    },
    {"scale_mode": "group", "quant_group_size": 4096, "ue8m0": True, "scale_layout": "column"},
)


def sizes(largest: int) -> Allowed:
    """Returns a filter for `pairwise`: inputs of at most `largest` elements, and groups that divide
    the columns."""

    def allowed(fields: Fields) -> bool:
        if "rows" in fields and "cols" in fields:
            return bool(fields["rows"] * fields["cols"] <= largest)
        scale = fields.get("scale", {})
        if "cols" in fields and scale.get("scale_mode") == "group":
            return bool(fields["cols"] % scale["quant_group_size"] == 0)
        return True

    return allowed


def calls_of(op: str, combinations: Sequence[Fields], seed: int = 1) -> list[Call]:
    """Returns the calls of these combinations. A value that is a dict contains several fields."""
    found = []
    for number, combination in enumerate(combinations):
        fields: Fields = {"seed": seed + number}
        for name, value in combination.items():
            fields.update(value if isinstance(value, dict) else {name: value})
        found.append(Call(op, **fields).legal())
    return found


def modes_of(op: str) -> Factors:
    """Returns the factors of an op that determine its results."""
    factors: Factors = {
        "dtype": DTYPES,
        "rounding": ROUNDINGS,
        "weights": ("same", "float32"),
        "eps": (1e-6, 0.0, 0.01),
    }
    if "layernorm" not in op:
        factors["weight_offset"] = (0.0, 1.0, 0.3)
    if quantizes(op):
        factors["scale"] = SCALES
        factors["keep_norm"] = (False, True)
    if op.endswith("fp8"):
        factors["fp8_dtype"] = ("e4m3fn", "e5m2")
    return factors


def forms_of(op: str) -> tuple[str, ...]:
    """Returns the forms of an op. "updated": residual_out is the residual itself."""
    return (*FORMS, "updated") if "residual" in op else FORMS


def placements(op: str) -> Factors:
    """Returns the factors of the placement of tensors and the form of the call."""
    return {
        "algorithm": algorithms_of(op),
        "form": forms_of(op),
        "layout": ("contiguous", "sliced", "transposed", "spread"),
        "output_layout": ("natural", "transposed", "spread"),
        "input_offset": (0, 1, 5),
        "output_offset": (0, 3, 8),
        "folded": (False,) if scatters(op) else (False, True),
        "symmetric": ("none", "input"),
        "max_blocks": (0, 1, 3),
    }


def random_call(choose: random.Random, largest: int) -> Call:
    """Draws a valid call. Ranks with the same `choose` draw the same call. `largest`: the maximum
    number of elements of the input."""
    op = choose.choice(NAMES)
    cols = choose.choice([cols for cols in COLS if cols <= largest])
    rows = int(2 ** choose.uniform(0, (largest // cols).bit_length())) - choose.randrange(2)
    factors = {**modes_of(op), **placements(op), "style": STYLES}
    fields = {name: choose.choice(values) for name, values in factors.items()}
    fields.update(rows=min(rows, largest // cols), cols=cols)
    return calls_of(op, [fields], seed=choose.randrange(1, 1000))[0]
