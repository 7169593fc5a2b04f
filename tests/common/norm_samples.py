"""Calls of the fused normalizations out of all that exist: samples in which every pair of options
occurs, and random ones."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

from .norm_cases import (
    COLS,
    DTYPES,
    FORMS,
    OPS,
    ROUNDINGS,
    STYLES,
    Call,
    Fields,
    algorithms_of,
    legal,
    quantizes,
    scatters,
)

# How values are scaled, for the ops that quantize.
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

Factors = dict[str, Sequence[Any]]
Allowed = Callable[[Fields], bool]
Place = tuple[int, int]  # a factor and one of its values


def pairwise(factors: Factors, allowed: Allowed = lambda fields: True) -> list[Fields]:
    """Combinations of the factors' values in which every pair of values of two factors occurs that
    `allowed` lets stand, which is asked about pairs. The same list for the same factors."""
    names = list(factors)

    def may(a: Place, b: Place) -> bool:
        return allowed(
            {names[a[0]]: factors[names[a[0]]][a[1]], names[b[0]]: factors[names[b[0]]][b[1]]}
        )

    places = [[(f, v) for v in range(len(factors[name]))] for f, name in enumerate(names)]
    # In their order: a set would have another one in every process.
    left = {
        (a, b): None
        for first, second in itertools.combinations(places, 2)
        for a, b in itertools.product(first, second)
        if may(a, b)
    }
    found: list[Fields] = []

    def completed(chosen: list[Place], f: int) -> list[Place] | None:
        """With a value of each factor from `f` on; None if no choice is allowed."""
        if f == len(names):
            return chosen
        if any(place[0] == f for place in chosen):
            return completed(chosen, f + 1)
        fine = [c for c in places[f] if all(may(*_pair(c, o)) for o in chosen)]
        turn = len(found) % max(1, len(fine))  # equally good ones take turns
        fine = fine[turn:] + fine[:turn]
        fine.sort(key=lambda c: -sum(_pair(c, o) in left for o in chosen))
        tried = (completed([*chosen, c], f + 1) for c in fine)
        return next((all_of_them for all_of_them in tried if all_of_them), None)

    while left:
        pair = next(iter(left))
        chosen = completed(list(pair), 0)
        if chosen is None:
            del left[pair]
            continue
        for one, other in itertools.product(chosen, chosen):
            left.pop((one, other), None)
        found.append({names[f]: factors[names[f]][v] for f, v in sorted(chosen)})
    return found


def _pair(a: Place, b: Place) -> tuple[Place, Place]:
    return (a, b) if a < b else (b, a)


def sizes(largest: int) -> Allowed:
    """For `pairwise`: inputs of at most so many elements, and groups that divide their columns."""

    def allowed(fields: Fields) -> bool:
        if "rows" in fields and "cols" in fields:
            return bool(fields["rows"] * fields["cols"] <= largest)
        scale = fields.get("scale", {})
        if "cols" in fields and scale.get("scale_mode") == "group":
            return bool(fields["cols"] % scale["quant_group_size"] == 0)
        return True

    return allowed


def calls_of(op: str, combinations: Sequence[Fields], seed: int = 1) -> list[Call]:
    """The calls of these combinations; a value that is itself a dict stands for several fields."""
    calls = []
    for number, combination in enumerate(combinations):
        fields: Fields = {"seed": seed + number}
        for name, value in combination.items():
            fields.update(value if isinstance(value, dict) else {name: value})
        calls.append(legal(Call(op, **fields)))
    return calls


def modes_of(op: str) -> Factors:
    """What an op computes, as factors."""
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
    """How an op can be called. "updated": residual_out is the residual itself."""
    return (*FORMS, "updated") if "residual" in op else FORMS


def placements(op: str) -> Factors:
    """Where tensors lie, and how the call is made."""
    return {
        "algorithm": algorithms_of(op),
        "form": forms_of(op),
        "layout": ("contiguous", "sliced", "transposed", "spread"),
        "output_layout": ("natural", "transposed", "spread"),
        "input_offset": (0, 1, 5),
        "output_offset": (0, 3, 8),
        "folded": (False,) if scatters(op) else (False, True),
        "symmetric": (False, True),
        "max_blocks": (0, 1, 3),
    }


def random_call(choose: random.Random, largest: int) -> Call:
    """A call drawn from all that exist. The same on every rank that has the same `choose`;
    `largest` bounds the elements of its input."""
    op = choose.choice(OPS)
    cols = choose.choice([cols for cols in COLS if cols <= largest])
    rows = int(2 ** choose.uniform(0, (largest // cols).bit_length())) - choose.randrange(2)
    factors = {**modes_of(op), **placements(op), "style": STYLES}
    fields = {name: choose.choice(values) for name, values in factors.items()}
    fields.update(rows=min(rows, largest // cols), cols=cols)
    return calls_of(op, [fields], seed=choose.randrange(1, 1000))[0]
