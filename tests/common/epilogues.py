"""Epilogues that can be sent to the ranks: functions of this module, and calls of reductions with
them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn import functional as F

import collx
from collx import reference
from collx.epilogues import expression_of

from . import calls
from .calls import Data, Fields, Tensors
from .values import dtype_of, inputs_and_reference, make_values

Function = Callable[..., torch.Tensor]
Shape = tuple[int, ...]
FORMS = ("functional", "out", "python", "python_out", "alias", "onto_extra")
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
    """An epilogue: its dtypes, the number of extras, whether it takes coordinates, and whether its
    bits are equal to those of the function in float32."""

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


NARROWING = (positive, halved)  # their results have a dtype different from the sum

# "middle": constant along the second to last dimension. "mixed": a number, then a row.
LIES = ("full", "row", "column", "middle", "number", "strided", "mixed")
NEEDS_SYMMETRIC = {"pull_push": "both", "direct": "input"}


@dataclass(frozen=True, repr=False)
class Call(calls.Call):
    """A reduction with an epilogue.

    broadcast    the layout of the extras: one of LIES
    with_value   calls the operator of autograd, which also returns the reduced value
    form         also "alias": out= is the input; "onto_extra": out= is the first extra
    """

    case: int  # index into CASES
    op: str  # "allreduce", "reducescatter"
    dtype: str
    shape: Shape
    axis: int = 0
    broadcast: str = "full"
    with_value: bool = False
    style: str = "random"
    seed: int = 1
    form: str = field(default="functional", kw_only=True)

    def legal(self) -> Call:
        return _legal(self)

    def make_data(self, world: int) -> Data:
        case, inputs, values = CASES[self.case], _inputs(self, world), _reduced(self, world)
        extras = [extras_of(self, tuple(v.shape), rank) for rank, v in enumerate(values)]
        options: Fields = {"epilogue": case.function, "index": case.index}
        if self.op == "allreduce":
            results = [reference.allreduce(inputs, extras=own, **options) for own in extras]
        else:
            results = reference.reducescatter(inputs, axis=self.axis, extras=extras, **options)
        given = [
            {"input": source, **{f"extras_{n}": extra for n, extra in enumerate(own)}}
            for source, own in zip(inputs, extras, strict=True)
        ]
        # Copied to new tensors: some results of PyTorch without elements have other strides.
        results = [result.new_empty(result.shape).copy_(result) for result in results]
        both = zip(results, values, strict=True)
        return Data(given, [result[: 1 + self.with_value] for result in both])

    def outputs(self) -> tuple[str, ...]:
        return ("out", "value")[: 1 + self.with_value]

    def by_bytes(self, output: str, world: int, rank: int) -> bool:
        return False

    def shared(self, output: str) -> str:
        shared = {"alias": "input", "onto_extra": "extras_0"}
        return shared.get(self.form, "") if output == "out" else ""

    def overload(self, form: str) -> Callable[..., Any]:
        packet = getattr(torch.ops.collx, f"{self.op}_map" + "_with_value" * self.with_value)
        found: Callable[..., Any] = getattr(packet, {"functional": "default", "out": "out"}[form])
        return found

    def arguments(self, communicator: Any, tensors: Fields) -> Fields:
        case, dims = CASES[self.case], len(self.shape)
        dtype = tensors["input"].dtype
        text = expression_of(
            self.op, case.function, dtype, case.extras, dims if case.index else None
        )
        extras = [tensors[f"extras_{number}"] for number in range(case.extras)]
        if self.broadcast == "strided":
            extras = [torch.stack([extra, extra], -1)[..., 0] for extra in extras]
        given: Fields = {"input": tensors["input"], "reduce_op": "sum", "expression": text}
        given.update(extras=extras, group_name=communicator.name, algorithm=self.algorithm)
        if self.op == "reducescatter":
            given.update(group_size=communicator.world_size, axis=self.axis)
        return {**given, "max_blocks": self.max_blocks}

    def function_call(
        self, communicator: Any, given: Fields, outs: Tensors
    ) -> tuple[Callable[..., Any], Fields]:
        case, ours = CASES[self.case], ("expression", "group_name", "group_size")
        mine = {name: value for name, value in given.items() if name not in ours}
        mine.update(epilogue=case.function, index=case.index, group=communicator)
        if self.form == "python_out":
            mine["out"] = outs[0]
        return getattr(collx, self.op), mine

    def wrong_results(self, world: int, rank: int, results: Tensors) -> str:
        if CASES[self.case].exact:
            return super().wrong_results(world, rank, results)
        want, got = self.data(world).expected[rank][0], results[0].cpu()
        if got.dtype != want.dtype or got.shape != want.shape:
            return f"{got.dtype} {tuple(got.shape)} instead of {want.dtype} {tuple(want.shape)}"
        if not _close(got, self, world, rank):
            return "further off than documented"
        return super().wrong_results(world, rank, (want, *results[1:]))


def _legal(call: Call) -> Call:
    """Returns the closest valid call."""
    case = CASES[call.case]
    wide = ("full", "strided", "row", "middle") if len(call.shape) == 1 else ("full", "strided")
    if call.form == "onto_extra" and not (case.extras and call.broadcast in wide):
        call = replace(call, form="out")
    if call.form == "onto_extra" and call.broadcast == "strided":
        call = replace(call, broadcast="full", layout="spread")
    if call.form == "alias" and (call.op != "allreduce" or case.function in NARROWING):
        call = replace(call, form="out")
    # The output first contains the sums: it has their dtype and shares no memory with the extras.
    if call.algorithm == "pull_push" and (
        case.function in NARROWING or call.broadcast == "strided"
    ):
        call = replace(call, algorithm="auto")
    if needed := NEEDS_SYMMETRIC.get(call.algorithm):
        symmetric = "both" if call.symmetric in ("output", "both") else needed
        call = replace(call, symmetric=symmetric, layout="contiguous", with_value=False)
        if needed == "both":  # a new tensor is never symmetric
            given = {"functional": "out", "onto_extra": "out", "python": "python_out"}
            form = given.get(call.form, call.form)
            call = replace(call, form=form, output_layout="natural")
    if call.with_value:
        form = "functional" if call.form in ("functional", "python") else "out"
        call = replace(call, form=form, output_layout="natural")
    return call


def extras_of(call: Call, sizes: Shape, rank: int) -> list[torch.Tensor]:
    """Returns the extras of a rank. They differ between the ranks."""
    made = []
    for which in range(CASES[call.case].extras):
        lies = ("number", "row")[which % 2] if call.broadcast == "mixed" else call.broadcast
        shape = {
            "row": sizes[-1:],
            "column": (*sizes[:-1], 1),
            "middle": (*sizes[:-2], 1, *sizes[-1:])[-len(sizes) :],
            "number": (),
        }.get(lies, sizes)
        numel = int(torch.Size(shape).numel())
        made.append(
            make_values("random", call.dtype, numel, call.seed + 50 + which, rank).view(shape)
        )
    return made


def _reduced(call: Call, world: int) -> list[torch.Tensor]:
    """Returns the inputs of the function: each rank's part of the rounded sum."""
    inputs = _inputs(call, world)
    if call.op == "allreduce":
        return [reference.allreduce(inputs)] * world
    return reference.reducescatter(inputs, axis=call.axis)


def expected(call: Call, world: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the input of a rank and its expected result."""
    data = call.data(world)
    return data.given[rank]["input"], data.expected[rank][0]


def _inputs(call: Call, world: int) -> list[torch.Tensor]:
    numel = int(torch.Size(call.shape).numel())
    inputs, _ = inputs_and_reference(world, call.style, call.dtype, "sum", numel, call.seed)
    return [each.view(call.shape) for each in inputs]


def random_calls(count: int, seed: int, algorithms: Callable[[str], list[str]]) -> list[Call]:
    """Draws calls of any function with any algorithm, shape, dtype, layout of the extras, and
    form."""
    choose = random.Random(seed)
    made = []
    for _ in range(count):
        case = choose.randrange(len(CASES))
        op = choose.choice(("allreduce", "reducescatter"))
        dims = 2 if CASES[case].index else choose.choice((1, 2, 3))
        made.append(
            Call(
                case,
                op,
                choose.choice(CASES[case].dtypes),
                shape=tuple(choose.choice((1, 3, 8, 37, 65)) for _ in range(dims)),
                axis=choose.randrange(dims) if op == "reducescatter" else 0,
                algorithm=choose.choice(algorithms(op)),
                broadcast=choose.choice(LIES),
                with_value=choose.random() < 0.2,
                form=choose.choice(FORMS),
                input_offset=choose.choice((0, 0, 1)),
                output_offset=choose.choice((0, 0, 1)),
                output_layout=choose.choice(("natural", "natural", "spread")),
                seed=choose.randrange(1, 1000),
            ).legal()
        )
    return made


def _close(got: torch.Tensor, call: Call, world: int, rank: int) -> bool:
    """Whether a result is close to the function in float64. The tolerance is the error of each
    transcendental function of a case in docs/guide/epilogues.md, and the rounding to the dtype."""
    value = _reduced(call, world)[rank]
    extras = [extra.double() for extra in extras_of(call, tuple(value.shape), rank)]
    function = CASES[call.case].function
    exact = reference.allreduce([value.double()], epilogue=function, extras=extras)
    wide = got.double()
    unit = torch.finfo(dtype_of(call.dtype)).eps * exact.abs().clamp(min=1.0)
    bound = unit + 64 * torch.finfo(torch.float32).eps * exact.abs().clamp(min=1.0)
    return bool(((wide - exact).abs() <= bound).logical_or(wide.isnan() & exact.isnan()).all())
