"""All operators of the tests, of all families. Tests of every operator use these names and
calls."""

from __future__ import annotations

import random
from typing import Any

from . import collectives, norms
from .calls import Call

NAMES = (*collectives.NAMES, *norms.NAMES)


def is_norm(op: str) -> bool:
    return op in norms.NAMES


def name_in_errors(op: str) -> str:
    """Returns the name of an operator in error messages: that of its packet in torch.ops.collx."""
    return op if is_norm(op) else collectives.OPS[op].packet


def algorithms_of(op: str) -> tuple[str, ...]:
    """Returns the algorithms of an operator, "auto" first."""
    return norms.algorithms_of(op) if is_norm(op) else ("auto", *collectives.OPS[op].algorithms)


def ways(*names: str) -> list[tuple[str, str]]:
    """Returns every (operator, algorithm) of these operators, or of all operators without names."""
    return [(op, way) for op in names or NAMES for way in algorithms_of(op)]


def kernels(*names: str) -> list[tuple[str, str]]:
    """Returns `ways` without the algorithm that runs the process group's own collectives."""
    return [(op, way) for op, way in ways(*names) if way != "fallback"]


def call_of(op: str, numel: int = 1000, world: int = 1, **fields: Any) -> Call:
    """Returns a valid call of an operator with about `numel` elements in the larger one of its
    tensors, for `world` ranks. Ignores fields that its family does not have."""
    if is_norm(op):
        cols = min(256, max(8, numel // 4))
        usual: dict[str, Any] = {"rows": max(1, numel // cols), "cols": cols, "dtype": "bfloat16"}
        usual["keep_norm"] = norms.quantizes(op)
        kind: Any = norms.Call
    else:
        share = world if op != "barrier" and collectives.OPS[op].widens else 1
        usual = {"shape": (-(-numel // share),)}
        kind = collectives.Call
    known = kind.__dataclass_fields__
    given = {name: value for name, value in fields.items() if name in known}
    made: Call = kind(op, **{**usual, **given})
    return made.legal()


def random_call(choose: random.Random, largest: int, world: int) -> Call:
    """Draws a call of any operator; one in five is a fused normalization. Ranks with the same
    `choose` draw the same call. `largest`: the maximum number of elements of the larger tensors."""
    if choose.random() < 0.2:
        return norms.random_call(choose, largest)
    return collectives.random_call(choose, largest, world)
