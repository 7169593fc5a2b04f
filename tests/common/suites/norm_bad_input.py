"""Bad input to the fused normalizations: one clear error that names op, argument, what was given
and what is accepted, on every rank, before anything is launched; and the communicator works on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ..attempt import Attempt, attempt, finish, works
from ..norm_cases import OPS, Call, Fields, outputs_of, quantizes, scatters
from ..norm_check import arguments_of, overload, run_norm, tensors_of
from ..pool import Pool
from ..rank import Rank

FP8 = tuple(op for op in OPS if op.endswith("fp8"))
QUANTIZING = tuple(op for op in OPS if quantizes(op))
RESIDUAL = tuple(op for op in OPS if "residual" in op)
SCATTERING = tuple(op for op in OPS if scatters(op))
LAYER = tuple(op for op in OPS if "layernorm" in op)
RMS = tuple(op for op in OPS if op not in LAYER)

VALUE, TYPE = ("ValueError",), ("TypeError",)
EITHER = (*VALUE, *TYPE)
NOWHERE = "no such group"
COLS = 128


@dataclass
class Given:
    """A call that would be right, for a row of the table to spoil."""

    rank: Rank
    op: str
    arguments: Fields
    outs: Fields

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self.arguments[name] if name in self.arguments else self.outs[name]
        return tensor

    def one(self, count: int = 1, **options: Any) -> torch.Tensor:
        return torch.ones(count, device=self.rank.device, **options)

    def elsewhere(self) -> torch.device:
        return torch.device("cpu" if self.rank.device.type == "cuda" else "meta")

    def first_out(self) -> str:
        return next(iter(self.outs))


def _given(rank: Rank, op: str) -> Given:
    call = Call(op, "float32", 2 * rank.size, COLS, keep_norm=False)
    tensors = tensors_of(call, rank.size, rank.rank, rank.device)
    arguments = arguments_of(call, rank.communicator().name, tensors)
    results = overload(op, False, False)(**arguments)
    outs = (results,) if isinstance(results, torch.Tensor) else results
    return Given(rank, op, arguments, dict(zip(outputs_of(op), outs, strict=True)))


def _all_outs(given: Given, change: Callable[[torch.Tensor], torch.Tensor]) -> Fields:
    """All outputs, the first of them another."""
    first = given.first_out()
    return {**given.outs, first: change(given[first])}


def _of_input(given: Given, shape: tuple[int, ...]) -> Fields:
    return {"input": torch.ones(shape, device=given.rank.device)}


@dataclass(frozen=True)
class Wrong:
    """A row: which ops it concerns, what is changed (arguments and outputs by name), the class of
    the error, and words of its message."""

    ops: tuple[str, ...]
    change: Callable[[Given], Fields]
    classes: tuple[str, ...]
    words: tuple[str, ...]
    out: bool = False


def _option(ops: tuple[str, ...], words: tuple[str, ...], **options: Any) -> Wrong:
    """A value that is refused whatever the tensors are."""
    return Wrong(ops, lambda given: options, VALUE, words)


TENSOR = {"scale_mode": "tensor"}
GROUP = {"scale_mode": "group"}

WRONG: dict[str, Wrong] = {
    "weight too long": Wrong(OPS, lambda g: {"weight": g.one(COLS + 1)}, VALUE, ("weight", "129")),
    "weight of two dimensions": Wrong(
        OPS, lambda g: {"weight": g["weight"].view(1, -1)}, VALUE, ("weight",)
    ),
    "weight of another dtype": Wrong(
        OPS, lambda g: {"weight": g["weight"].double()}, TYPE, ("weight: got dtype float64",)
    ),
    "weight elsewhere": Wrong(
        OPS,
        lambda g: {"weight": g["weight"].to(g.elsewhere())},
        (*VALUE, "NotImplementedError"),
        ("weight: got a tensor on",),
    ),
    "bias too short": Wrong(LAYER, lambda g: {"bias": g.one(COLS - 1)}, VALUE, ("bias", "127")),
    "bias of two dimensions": Wrong(
        LAYER, lambda g: {"bias": g["bias"].view(-1, 1)}, VALUE, ("bias",)
    ),
    "bias of another dtype": Wrong(LAYER, lambda g: {"bias": g["bias"].half()}, TYPE, ("bias",)),
    "input of one dimension": Wrong(OPS, lambda g: _of_input(g, (COLS,)), VALUE, ("input",)),
    "input without columns": Wrong(OPS, lambda g: _of_input(g, (4, 0)), VALUE, ("input",)),
    "input of integers": Wrong(
        OPS, lambda g: {"input": g["input"].int()}, TYPE, ("input", "int32", "bfloat16")
    ),
    "input of float64": Wrong(OPS, lambda g: {"input": g["input"].double()}, TYPE, ("input",)),
    "input of three dimensions": Wrong(
        SCATTERING, lambda g: {"input": g["input"][None]}, VALUE, ("input",)
    ),
    "sparse input": Wrong(
        OPS,
        lambda g: {"input": g["input"].to_sparse()},
        (*EITHER, "NotImplementedError"),
        ("parse",),
    ),
    "residual with a row too few": Wrong(
        RESIDUAL, lambda g: {"residual": g["residual"][1:]}, VALUE, ("residual",)
    ),
    "residual of another width": Wrong(
        RESIDUAL, lambda g: {"residual": g["residual"][:, 1:]}, VALUE, ("residual",)
    ),
    "residual of one dimension more": Wrong(
        RESIDUAL, lambda g: {"residual": g["residual"][None]}, VALUE, ("residual",)
    ),
    "residual of another dtype": Wrong(
        RESIDUAL, lambda g: {"residual": g["residual"].half()}, TYPE, ("residual",)
    ),
    "unknown rounding": _option(OPS, ("rounding", "exact", "parity"), rounding="exact"),
    "negative eps": _option(OPS, ("eps",), eps=-1e-9),
    "eps that is no number": _option(OPS, ("eps", "nan"), eps=math.nan),
    "infinite weight_offset": _option(RMS, ("weight_offset", "inf"), weight_offset=math.inf),
    "weight_offset that is no number": _option(
        RMS, ("weight_offset", "nan"), weight_offset=math.nan
    ),
    "unknown fp8_dtype": _option(FP8, ("fp8_dtype", "e3m4", "e4m3fn"), fp8_dtype="e3m4"),
    "unknown scale_mode": _option(QUANTIZING, ("scale_mode", "block", "row"), scale_mode="block"),
    "unknown scale_dtype": _option(
        QUANTIZING, ("scale_dtype", "half", "float8_e8m0fnu"), scale_dtype="half"
    ),
    "unknown scale_layout": _option(
        QUANTIZING, ("scale_layout", "tiled", "column"), **GROUP, scale_layout="tiled"
    ),
    "negative scale_ub": _option(QUANTIZING, ("scale_ub",), scale_ub=-0.5),
    "scale_ub that is no number": _option(QUANTIZING, ("scale_ub", "nan"), scale_ub=math.nan),
    "tensor without a scale": _option(QUANTIZING, ("scale",), **TENSOR),
    "scale of a row": Wrong(QUANTIZING, lambda g: {"scale": g.one()}, VALUE, ("scale", "tensor")),
    "scale of a group": Wrong(
        QUANTIZING, lambda g: {**GROUP, "scale": g.one()}, VALUE, ("scale", "tensor")
    ),
    "scale of two elements": Wrong(
        QUANTIZING, lambda g: {**TENSOR, "scale": g.one(2)}, VALUE, ("scale",)
    ),
    "scale of another dtype": Wrong(
        QUANTIZING,
        lambda g: {**TENSOR, "scale": g.one(dtype=torch.float16)},
        TYPE,
        ("scale", "float32"),
    ),
    "scale elsewhere": Wrong(
        QUANTIZING,
        lambda g: {**TENSOR, "scale": g.one().to(g.elsewhere())},
        (*VALUE, "NotImplementedError"),
        ("scale: got a tensor on",),
    ),
    "scale_ub with a scale": Wrong(
        QUANTIZING, lambda g: {**TENSOR, "scale": g.one(), "scale_ub": 1.0}, VALUE, ("scale_ub",)
    ),
    "ue8m0 with a scale": Wrong(
        QUANTIZING, lambda g: {**TENSOR, "scale": g.one(), "ue8m0": True}, VALUE, ("ue8m0",)
    ),
    "scale_dtype with a scale": Wrong(
        QUANTIZING,
        lambda g: {**TENSOR, "scale": g.one(), "scale_dtype": "input"},
        VALUE,
        ("scale_dtype",),
    ),
    **{
        f"quant_group_size {size}": _option(
            QUANTIZING, ("quant_group_size", str(size)), **GROUP, quant_group_size=size
        )
        for size in (0, -16, 8, 48, 8192)
    },
    "quant_group_size that does not divide": _option(
        QUANTIZING, ("quant_group_size", "256", "128"), **GROUP, quant_group_size=256
    ),
    "columns of scales without groups": _option(
        QUANTIZING, ("scale_layout", "column", "group"), scale_layout="column"
    ),
    "powers of two that are none": _option(
        QUANTIZING, ("float8_e8m0fnu", "ue8m0"), scale_dtype="float8_e8m0fnu"
    ),
    "unknown algorithm": _option(OPS, ("algorithm", "ring", "auto", "fallback"), algorithm="ring"),
    "algorithm without a normalization": _option(OPS, ("algorithm",), algorithm="pull_push"),
    "algorithm of an all-reduce": _option(
        SCATTERING, ("algorithm", "oneshot_push", "staged"), algorithm="oneshot_push"
    ),
    "algorithm of a reducescatter": _option(
        tuple(op for op in OPS if not scatters(op)),
        ("algorithm", "staged", "twoshot_push"),
        algorithm="staged",
    ),
    "negative max_blocks": _option(OPS, ("max_blocks", "-1"), max_blocks=-1),
    "unknown communicator": _option(OPS, (NOWHERE, "collx.init"), group_name=NOWHERE),
    "output with a row too few": Wrong(
        OPS, lambda g: _all_outs(g, lambda out: out[:-1]), VALUE, ("out: got",), True
    ),
    "output of another dtype": Wrong(
        OPS,
        lambda g: _all_outs(g, lambda out: torch.empty_like(out, dtype=torch.int32)),
        TYPE,
        ("out: got dtype int32",),
        True,
    ),
    "output elsewhere": Wrong(
        OPS,
        lambda g: _all_outs(g, lambda out: torch.empty_like(out, device=g.elsewhere())),
        (*VALUE, "NotImplementedError"),
        ("out: got a tensor on",),
        True,
    ),
    "output that overlaps itself": Wrong(
        OPS,
        lambda g: _all_outs(g, lambda out: out[:1, :1].expand(out.shape)),
        VALUE,
        ("out: got strides", "location"),
        True,
    ),
    "output that is the input": Wrong(
        ("allreduce_rmsnorm", "allreduce_residual_rmsnorm", "allreduce_layernorm"),
        lambda g: _all_outs(g, lambda out: g["input"]),
        VALUE,
        ("out: overlaps",),
        True,
    ),
    "outputs that are one": Wrong(
        ("allreduce_residual_rmsnorm", "reducescatter_residual_rmsnorm"),
        lambda g: {**g.outs, "residual_out": g["out"]},
        VALUE,
        ("out: overlaps",),
        True,
    ),
    "residual_out beside the residual": Wrong(
        RESIDUAL,
        lambda g: _beside(g, g["residual"]),
        VALUE,
        ("residual_out", "overlap"),
        True,
    ),
    "scales of another shape": Wrong(
        QUANTIZING,
        lambda g: {**g.outs, "scale_out": g.one(3 * g.rank.size + 1)},
        VALUE,
        ("scale_out",),
        True,
    ),
    "scales of another dtype": Wrong(
        QUANTIZING,
        lambda g: {**g.outs, "scale_out": g["scale_out"].half()},
        TYPE,
        ("scale_out",),
        True,
    ),
}


def _beside(given: Given, residual: torch.Tensor) -> Fields:
    """The residual and its result in one piece of memory, one row apart."""
    rows = residual.shape[0]
    memory = torch.ones((rows + 1, COLS), device=given.rank.device)
    return {**given.outs, "residual": memory[:rows], "residual_out": memory[1:]}


def _refused(rank: Rank, what: str) -> dict[str, Attempt]:
    row = WRONG[what]
    communicator = rank.communicator()
    found = {}
    for op in row.ops:
        given = _given(rank, op)
        arguments = {**given.arguments, **row.change(given)}
        function = overload(op, False, row.out)
        found[op] = attempt(lambda: function(**arguments))  # noqa: B023
        communicator.raise_if_failed()
    finish(communicator)
    assert works(rank, communicator)
    assert run_norm(rank, communicator, Call(row.ops[-1], rows=3)) == ""
    return found


@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize("what", sorted(WRONG))
def test_a_wrong_argument_of_a_norm_is_refused_by_name(pool: Pool, what: str) -> None:
    """A class for each kind of mistake; raised before anything is launched, so all ranks go on."""
    row = WRONG[what]
    for found in pool.run(_refused, what):
        assert set(found) == set(row.ops)
        for op, result in found.items():
            assert result.error in row.classes, (op, result)
            text = result.message.lower()
            for word in (op, *row.words):
                assert word.lower() in text, (op, word, result.message)


def _one_refused(rank: Rank) -> tuple[Attempt, str]:
    """One rank alone is refused, and makes the right call then: the others have waited for it."""
    communicator = rank.communicator()
    call = Call("allreduce_residual_rmsnorm_fp8", rows=5, seed=3)
    refused = Attempt("", "", 0.0)
    if rank.rank == 0:
        tensors = tensors_of(call, rank.size, rank.rank, rank.device)
        given = arguments_of(call, communicator.name, tensors)
        wrong = {**given, "eps": -1.0}
        refused = attempt(lambda: overload(call.op, False, False)(**wrong))
    return refused, run_norm(rank, communicator, call)


@pytest.mark.worlds(2, 3)
def test_a_refusal_on_one_rank_keeps_it_in_step(pool: Pool) -> None:
    """Nothing was launched or counted."""
    results = pool.run(_one_refused)
    assert results[0][0].error == "ValueError"
    assert [wrong for _, wrong in results] == [""] * pool.size
