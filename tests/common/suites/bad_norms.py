"""Bad input to the fused normalizations: arguments that only they have. See bad_input.py."""

from __future__ import annotations

import math

import pytest

from ..calls import Fields
from ..norms import NAMES as NORMS
from ..norms import quantizes, scatters
from ..pool import Pool
from ..refusals import COLS, Given, Wrong, assert_all_refused, dtype, value

QUANTIZING = tuple(op for op in NORMS if quantizes(op))
FP8 = tuple(op for op in NORMS if op.endswith("fp8"))
RESIDUAL = tuple(op for op in NORMS if "residual" in op)
SCATTERING = tuple(op for op in NORMS if scatters(op))
LAYER = tuple(op for op in NORMS if "layernorm" in op)
RMS = tuple(op for op in NORMS if op not in LAYER)
TENSOR: Fields = {"scale_mode": "tensor", "scale": lambda g: g.one()}
GROUP: Fields = {"scale_mode": "group"}


def _beside(given: Given) -> Fields:
    """The residual and its result share memory, one row apart."""
    rows = given["residual"].shape[0]
    memory = given.one((rows + 1) * COLS).view(-1, COLS)
    return {"residual": memory[:rows], "residual_out": memory[1:]}


OF_VALUES: dict[str, Wrong] = {
    "weight too long": value(NORMS, "weight", "129", weight=lambda g: g.one(COLS + 1)),
    "weight of two dimensions": value(NORMS, "weight", weight=lambda g: g["weight"].view(1, -1)),
    "weight of another dtype": dtype(
        NORMS, "weight: got dtype float64", weight=lambda g: g["weight"].double()
    ),
    "weight elsewhere": value(
        NORMS, "weight: got a tensor on", weight=lambda g: g.elsewhere("weight")
    ),
    "bias too short": value(LAYER, "bias", "127", bias=lambda g: g.one(COLS - 1)),
    "bias of two dimensions": value(LAYER, "bias", bias=lambda g: g["bias"].view(-1, 1)),
    "bias of another dtype": dtype(LAYER, "bias", bias=lambda g: g["bias"].half()),
    "input of one dimension": value(NORMS, "input", input=lambda g: g.one(COLS)),
    "input without columns": value(NORMS, "input", input=lambda g: g.input.new_empty((4, 0))),
    "input of integers": dtype(NORMS, "input", "int32", "bfloat16", input=lambda g: g.input.int()),
    "input of float64": dtype(NORMS, "input", input=lambda g: g.input.double()),
    "input of three dimensions": value(SCATTERING, "input", input=lambda g: g.input[None]),
    "residual with a row too few": value(
        RESIDUAL, "residual", residual=lambda g: g["residual"][1:]
    ),
    "residual of another width": value(
        RESIDUAL, "residual", residual=lambda g: g["residual"][:, 1:]
    ),
    "residual of one dimension more": value(
        RESIDUAL, "residual", residual=lambda g: g["residual"][None]
    ),
    "residual of another dtype": dtype(
        RESIDUAL, "residual", residual=lambda g: g["residual"].half()
    ),
    "unknown rounding": value(NORMS, "rounding", "exact", "parity", rounding="exact"),
    "negative eps": value(NORMS, "eps", eps=-1e-9),
    "eps that is no number": value(NORMS, "eps", "nan", eps=math.nan),
    "infinite weight_offset": value(RMS, "weight_offset", "inf", weight_offset=math.inf),
    "weight_offset that is no number": value(RMS, "weight_offset", "nan", weight_offset=math.nan),
    "unknown fp8_dtype": value(FP8, "fp8_dtype", "e3m4", "e4m3fn", fp8_dtype="e3m4"),
    "outputs that are one": value(
        tuple(op for op in RESIDUAL if op not in QUANTIZING),
        "{out}: overlaps",
        form="out",
        residual_out=lambda g: g["out"],
    ),
    "residual_out beside the residual": value(
        RESIDUAL, "residual_out", "overlap", form="out", several=_beside
    ),
}

OF_SCALES: dict[str, Wrong] = {
    "unknown scale_mode": value(QUANTIZING, "scale_mode", "block", "row", scale_mode="block"),
    "unknown scale_dtype": value(
        QUANTIZING, "scale_dtype", "half", "float8_e8m0fnu", scale_dtype="half"
    ),
    "unknown scale_layout": value(
        QUANTIZING, "scale_layout", "tiled", "column", **GROUP, scale_layout="tiled"
    ),
    "negative scale_ub": value(QUANTIZING, "scale_ub", scale_ub=-0.5),
    "scale_ub that is no number": value(QUANTIZING, "scale_ub", "nan", scale_ub=math.nan),
    "tensor without a scale": value(QUANTIZING, "scale", scale_mode="tensor"),
    "scale of a row": value(QUANTIZING, "scale", "tensor", scale=lambda g: g.one()),
    "scale of a group": value(QUANTIZING, "scale", "tensor", **GROUP, scale=lambda g: g.one()),
    "scale of two elements": value(QUANTIZING, "scale", **{**TENSOR, "scale": lambda g: g.one(2)}),
    "scale of another dtype": dtype(
        QUANTIZING, "scale", "float32", **{**TENSOR, "scale": lambda g: g.one().half()}
    ),
    "scale elsewhere": value(
        QUANTIZING,
        "scale: got a tensor on",
        **{**TENSOR, "scale": lambda g: g.elsewhere("weight")[:1]},
    ),
    "scale_ub with a scale": value(QUANTIZING, "scale_ub", **TENSOR, scale_ub=1.0),
    "ue8m0 with a scale": value(QUANTIZING, "ue8m0", **TENSOR, ue8m0=True),
    "scale_dtype with a scale": value(QUANTIZING, "scale_dtype", **TENSOR, scale_dtype="input"),
    **{
        f"quant_group_size {size}": value(
            QUANTIZING, "quant_group_size", str(size), **GROUP, quant_group_size=size
        )
        for size in (0, -16, 8, 48, 8192)
    },
    "quant_group_size that does not divide": value(
        QUANTIZING, "quant_group_size", "256", "128", **GROUP, quant_group_size=256
    ),
    "columns of scales without groups": value(
        QUANTIZING, "scale_layout", "column", "group", scale_layout="column"
    ),
    "powers of two that are none": value(
        QUANTIZING, "float8_e8m0fnu", "ue8m0", scale_dtype="float8_e8m0fnu"
    ),
    "scales of another shape": value(
        QUANTIZING, "scale_out", form="out", scale_out=lambda g: g.one(3 * g.world + 1)
    ),
    "scales of another dtype": dtype(
        QUANTIZING, "scale_out", form="out", scale_out=lambda g: g["scale_out"].half()
    ),
}

WRONG = {**OF_VALUES, **OF_SCALES}


@pytest.mark.worlds(1, 2, 3)
@pytest.mark.parametrize("what", sorted(WRONG))
def test_a_wrong_argument_of_a_norm_is_refused_by_name(pool: Pool, what: str) -> None:
    """Each kind of mistake raises one error before anything is launched, so all ranks continue."""
    assert_all_refused(pool, __name__, what)
