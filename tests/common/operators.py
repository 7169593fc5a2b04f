"""All operators of the tests, whatever their family: a test that is about each of them takes its
names and calls from here."""

from __future__ import annotations

import random
from typing import Any

from . import collectives, norms
from .calls import Call

NAMES = (*collectives.NAMES, *norms.NAMES)


def is_norm(op: str) -> bool:
    return op in norms.NAMES


def name_in_errors(op: str) -> str:
    """The name of an operator in its messages: that of its packet in torch.ops.collx."""
    return op if is_norm(op) else collectives.OPS[op].packet


def algorithms_of(op: str) -> tuple[str, ...]:
    """The algorithms of an operator, "auto" first."""
    return norms.algorithms_of(op) if is_norm(op) else ("auto", *collectives.OPS[op].algorithms)


def ways(*names: str) -> list[tuple[str, str]]:
    """Every (operator, algorithm) of these operators; of all of them without names."""
    return [(op, way) for op in names or NAMES for way in algorithms_of(op)]


def kernels(*names: str) -> list[tuple[str, str]]:
    """The same without the algorithm that runs the process group's own collectives."""
    return [(op, way) for op, way in ways(*names) if way != "fallback"]


def call_of(op: str, numel: int = 1000, world: int = 1, **fields: Any) -> Call:
    """A legal call of an operator, with about so many elements in the larger one of its tensors in
    a world of so many ranks. Fields that its family does not have are left out."""
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
    """A call of any operator; one in five is a fused normalization. The same on every rank that has
    the same `choose`; `largest` bounds the elements of the larger tensors."""
    if choose.random() < 0.2:
        return norms.random_call(choose, largest)
    return collectives.random_call(choose, largest, world)
