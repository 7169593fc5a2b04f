"""Epilogues as values that travel to the ranks: functions of this module, their data, and what they
should give."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from .values import dtype_of, inputs_and_reference, make_values

Function = Callable[..., torch.Tensor]
FLOATS = ("float32", "float16", "bfloat16", "float64")
INTEGERS = ("int32", "int64", "int8", "uint8")


def bias_relu(v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.relu(v + bias)


def scale_residual(v: torch.Tensor, scale: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    return v * scale + rest


def soft_cap(v: torch.Tensor) -> torch.Tensor:
    return 30 * torch.tanh(v / 30)


def causal(v: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    return torch.where(column <= row, v, -float("inf"))


def ranges(v: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    low, high = torch.minimum(v, other), torch.maximum(v, other)
    return torch.where((v > other) | (v != v), low.clamp(-1, 2), high.abs() - 1 / (other * 3))


def integers(v: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return torch.where(v >= other, v * 3 - other, -v + torch.minimum(v, other) // 7)


def steps(v: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    return v + (row // 2) * 10 + column % 3


def positive(v: torch.Tensor) -> torch.Tensor:
    return (v > 0).to(torch.int8)


def halved(v: torch.Tensor) -> torch.Tensor:
    return (v * 0.5).to(torch.float16)


def smooth(v: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return F.silu(v) * torch.sigmoid(gate) + F.gelu(v) - torch.erf(gate) * torch.exp(-v * v)


@dataclass(frozen=True)
class Case:
    """One epilogue: of which dtypes, with how many extras, whether with coordinates; and whether
    its bits are those of the function in float32."""

    function: Function
    dtypes: tuple[str, ...]
    extras: int = 0
    index: bool = False
    exact: bool = True


CASES = (
    Case(bias_relu, FLOATS, 1),
    Case(scale_residual, FLOATS, 2),
    Case(soft_cap, FLOATS, exact=False),
    Case(causal, FLOATS, index=True),
    Case(ranges, FLOATS, 1),
    Case(integers, INTEGERS, 1),
    Case(steps, INTEGERS, index=True),
    Case(positive, (*FLOATS, "int32"), 0),
    Case(halved, ("float32", "bfloat16")),
    Case(smooth, ("float32", "bfloat16"), 1, exact=False),
)


# "middle": the same along the last dimension but one. "mixed": a number, and then a row.
LIES = ("full", "row", "column", "middle", "number", "strided", "mixed")


@dataclass(frozen=True)
class Call:
    case: int  # of CASES
    op: str  # "allreduce", "reducescatter"
    dtype: str
    shape: tuple[int, ...]
    axis: int = 0
    algorithm: str = "auto"
    broadcast: str = "full"  # how the extras lie: one of LIES
    form: str = "functional"  # "out", "strided_out", "onto_extra", "with_value"
    seed: int = 1


def extras_of(call: Call, sizes: tuple[int, ...], rank: int) -> list[torch.Tensor]:
    """This rank's, which differ from the others'."""
    made = []
    for which in range(CASES[call.case].extras):
        lies = call.broadcast
        if lies == "mixed":
            lies = ("number", "row")[which % 2]
        shape = {
            "full": sizes,
            "strided": sizes,
            "row": sizes[-1:],
            "column": (*sizes[:-1], 1),
            "middle": (*sizes[:-2], 1, *sizes[-1:])[-len(sizes) :],
            "number": (),
        }[lies]
        numel = int(torch.Size(shape).numel())
        values = make_values("random", call.dtype, numel, call.seed + 50 + which, rank).view(shape)
        if lies == "strided":
            wide = values.new_zeros((*shape[:-1], 2 * shape[-1]))
            wide[..., ::2] = values
            values = wide[..., ::2]
        made.append(values)
    return made


def reduced(call: Call, world: int, rank: int) -> torch.Tensor:
    """What the function is applied to: the rank's part of the rounded sum."""
    from collx import reference

    inputs = _inputs(call, world)
    if call.op == "allreduce":
        return reference.allreduce(inputs)
    return reference.reducescatter(inputs, axis=call.axis)[rank]


def expected(call: Call, world: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's input; and its result."""
    from collx import reference

    case, inputs = CASES[call.case], _inputs(call, world)
    options: dict[str, Any] = {"epilogue": case.function, "index": case.index}
    if call.op == "allreduce":
        extras = extras_of(call, call.shape, rank)
        return inputs[rank], reference.allreduce(inputs, extras=extras, **options)
    sizes = [
        (*call.shape[: call.axis], count, *call.shape[call.axis + 1 :])
        for count in reference.parts(call.shape[call.axis], world)
    ]
    own = [extras_of(call, size, r) for r, size in enumerate(sizes)]
    return inputs[rank], reference.reducescatter(inputs, axis=call.axis, extras=own, **options)[
        rank
    ]


def _inputs(call: Call, world: int) -> list[torch.Tensor]:
    numel = int(torch.Size(call.shape).numel())
    inputs, _ = inputs_and_reference(world, "random", call.dtype, "sum", numel, call.seed)
    return [each.view(call.shape) for each in inputs]


def random_calls(count: int, seed: int, algorithms: Callable[[str], list[str]]) -> list[Call]:
    choose = random.Random(seed)
    calls = []
    for _ in range(count):
        case = choose.randrange(len(CASES))
        op = choose.choice(("allreduce", "reducescatter"))
        dims = 2 if CASES[case].index else choose.choice((1, 2, 3))
        shape = tuple(choose.choice((1, 3, 8, 37, 65)) for _ in range(dims))
        calls.append(
            Call(
                case,
                op,
                choose.choice(CASES[case].dtypes),
                shape,
                axis=choose.randrange(dims) if op == "reducescatter" else 0,
                algorithm=choose.choice(algorithms(op)),
                broadcast=choose.choice(LIES),
                form=choose.choice(
                    ("functional", "out", "strided_out", "onto_extra", "with_value")
                ),
                seed=choose.randrange(1, 1000),
            )
        )
    return calls


def close(got: torch.Tensor, call: Call, world: int, rank: int) -> bool:
    """To the function in float64: within what docs/guide/epilogues.md grants each of the few
    transcendental functions of a case, and the rounding to the dtype."""
    from collx import reference

    value = reduced(call, world, rank)
    extras = [extra.double() for extra in extras_of(call, tuple(value.shape), rank)]
    function = CASES[call.case].function
    exact = reference.allreduce([value.double()], epilogue=function, extras=extras)
    wide = got.double()
    unit = torch.finfo(dtype_of(call.dtype)).eps * exact.abs().clamp(min=1.0)
    bound = unit + 64 * torch.finfo(torch.float32).eps * exact.abs().clamp(min=1.0)
    return bool(((wide - exact).abs() <= bound).logical_or(wide.isnan() & exact.isnan()).all())
