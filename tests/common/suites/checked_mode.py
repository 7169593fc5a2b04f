"""Checked mode: all ranks name calls that differ between ranks, and allowed differences within one
call pass."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import pytest
import torch

from ..attempt import Attempt, attempt
from ..calls import Call, Fields, run_calls
from ..check import assert_none
from ..collectives import NAMES as COLLECTIVES
from ..collectives import OPS, REDUCING, ROOTED, WITH_AXIS, WITH_SPLITS
from ..failures import assert_named, repeated, small_call
from ..limits import TIMEOUT, assert_in_time, timeout_now
from ..norms import NAMES as NORMS
from ..norms import quantizes
from ..operators import NAMES, algorithms_of, call_of, is_norm, name_in_errors
from ..pool import Pool, some_stand_for_all
from ..rank import Rank
from ..sampling import every

pytestmark = pytest.mark.alone  # errors must be raised in time

ENOUGH = 10.0  # a timeout that no call should reach
SHOWN = re.compile(r"rank (\d+) (called .*), but rank (\d+) (called .*) \(communicator ")
NEW = tuple(op for op in COLLECTIVES if op != "allreduce")


@dataclass(frozen=True)
class Different:
    """Calls that differ between ranks: the operators, the usual fields, the last rank's changes to
    them, and words of the message besides the operator. Of the calls in the message, only that of
    the last rank contains the last one of the words."""

    ops: tuple[str, ...]
    usual: Fields
    other: Fields
    words: tuple[str, ...]


FP8 = "allreduce_residual_rmsnorm_fp8"
NORMS_HERE = (FP8, *(op for op in NORMS if op != FP8))
QUANTIZING = tuple(op for op in NORMS_HERE if quantizes(op))
STAGED = tuple(op for op in (*NEW, *NORMS) if "staged" in algorithms_of(op))
SHOTS = tuple(op for op in ("allreduce", *NORMS_HERE) if "twoshot_pull" in algorithms_of(op))
ALL = (*COLLECTIVES, *NORMS_HERE)
PULLED: Fields = {"algorithm": "oneshot_pull", "form": "out"}
NEXT = math.nextafter(1e-6, 1.0) + 1e-13  # a few floats further: six digits show no difference

DIFFERENT = {
    "root": Different(ROOTED, {"root": 0}, {"root": 1}, ("root 0", "root 1")),
    "axis": Different(WITH_AXIS, {"axis": 0}, {"axis": 1}, ("axis 0", "axis 1")),
    "shape": Different(COLLECTIVES, {"shape": (12, 7)}, {"shape": (12, 9)}, (", 7]", ", 9]")),
    "shape in the fallback": Different(
        COLLECTIVES,
        {"shape": (12, 7), "algorithm": "fallback"},
        {"shape": (12, 9)},
        (", 7]", ", 9]"),
    ),
    "shape of equal size": Different(
        ("allreduce",), {"shape": (4, 6)}, {"shape": (6, 4)}, ("[4, 6]", "[6, 4]")
    ),
    "dimensions": Different(
        ("allreduce",), {"shape": (1,) * 9}, {"shape": (1,) * 10}, ("in 9 dim", "in 10 dim")
    ),
    "last dimension": Different(
        ("allreduce",),
        {"shape": (1,) * 8 + (4,)},
        {"shape": (1,) * 8 + (6,)},
        ("4 elements", "6 elements"),
    ),
    "dtype": Different(COLLECTIVES, {"dtype": "float32"}, {"dtype": "int32"}, ("float32", "int32")),
    "reduce op": Different(REDUCING, {"reduce_op": "sum"}, {"reduce_op": "max"}, ("sum", "max")),
    "signs": Different(
        ("broadcast",), {"dtype": "int16"}, {"dtype": "uint16"}, (" int16", " uint16")
    ),
    "average": Different(("allreduce",), {}, {"reduce_op": "avg"}, ("sum", "avg")),
    "max_blocks": Different(
        ALL, {"max_blocks": 1}, {"max_blocks": 2}, ("max_blocks=1", "max_blocks=2")
    ),
    "algorithm": Different(
        SHOTS,
        {"algorithm": "oneshot_push"},
        {"algorithm": "twoshot_pull"},
        ("oneshot_push", "twoshot_pull"),
    ),
    "max_blocks or the default": Different(
        ("allreduce", FP8), {}, {"max_blocks": 7}, ("max_blocks=7",)
    ),
    "algorithm of two steps": Different(
        ("allreduce", FP8),
        {"algorithm": "twoshot_push"},
        {"algorithm": "twoshot_pull"},
        ("twoshot_push", "twoshot_pull"),
    ),
    "algorithm of a broadcast": Different(
        ("broadcast",),
        {"algorithm": "onestage"},
        {"algorithm": "twostage"},
        ("onestage", "twostage"),
    ),
    "staged or the fallback": Different(
        STAGED, {"algorithm": "staged"}, {"algorithm": "fallback"}, ("staged", "fallback")
    ),
    # Hazards 5 and 16: all ranks must agree on whether an argument is symmetric.
    "symmetric input": Different(
        ("allreduce",),
        {**PULLED, "symmetric": "output"},
        {"symmetric": "both"},
        ("symmetric input",),
    ),
    "place of a symmetric input": Different(
        ("allreduce",),
        {**PULLED, "algorithm": "twoshot_pull", "symmetric": "both"},
        {"input_offset": 4},
        ("byte 256", "byte 272"),
    ),
    "operator": Different(NEW, {}, {"op": "allreduce"}, ("called allreduce(",)),
    "operator instead of allreduce": Different(
        ("allreduce", *NORMS_HERE), {}, {"op": "broadcast"}, ("called broadcast(",)
    ),
    "operator of a norm": Different(
        tuple(op for op in NORMS_HERE if op != "allreduce_rmsnorm_fp8"),
        {},
        {"op": "allreduce_rmsnorm_fp8"},
        ("called allreduce_rmsnorm_fp8(",),
    ),
    # The inputs of two ranks have the same shape.
    "gather or scatter": Different(
        ("gather",), {}, {"op": "scatter", "shape": (6, 12)}, ("called scatter(",)
    ),
    "barrier": Different(ALL, {}, {"op": "barrier"}, ("called barrier",)),
    "rows": Different(NORMS_HERE, {}, {"rows": 9}, ("[7, ", "[9, ")),
    "columns": Different(NORMS_HERE, {}, {"cols": 512}, (", 256]", ", 512]")),
    "dtype of a norm": Different(NORMS_HERE, {}, {"dtype": "float16"}, ("bfloat16", " float16")),
    # Every rounding keeps this eps unchanged.
    "rounding": Different(
        NORMS_HERE, {"eps": 0.5}, {"rounding": "parity"}, ("rounding fp32", "rounding parity")
    ),
    "eps": Different(NORMS_HERE, {"eps": 0.25}, {"eps": 0.5}, ("eps 0.25", "eps 0.5")),
    "digits of eps": Different(
        (FP8,),
        {"eps": 1e-6, "rounding": "parity"},
        {"eps": NEXT},
        ("eps 1e-06", "eps 1.0000001e-06"),
    ),
    "weight": Different((FP8,), {}, {"weights": "float32"}, ("weight of float32",)),
    "weight_offset": Different((FP8,), {}, {"weight_offset": 1.0}, ("weight_offset 1",)),
    "scales": Different(
        QUANTIZING, {}, {"scale_mode": "group"}, ("scale_mode row", "scale_mode group")
    ),
    "groups": Different(
        (FP8,),
        {"scale_mode": "group"},
        {"quant_group_size": 64},
        ("quant_group_size 128", "quant_group_size 64"),
    ),
    "scale_ub": Different((FP8,), {}, {"scale_ub": 0.5}, ("scale_ub inf", "scale_ub 0.5")),
    "ue8m0": Different((FP8,), {}, {"ue8m0": True}, ("ue8m0 0", "ue8m0 1")),
    "scale dtype": Different((FP8,), {}, {"scale_dtype": "input"}, ("scale_dtype bfloat16",)),
    "layout of scales": Different(
        (FP8,), {"scale_mode": "group"}, {"scale_layout": "column"}, ("scale_layout column",)
    ),
    "fp8 format": Different(
        tuple(op for op in QUANTIZING if op.endswith("fp8")),
        {},
        {"fp8_dtype": "e5m2"},
        ("e4m3fn", "e5m2"),
    ),
    "one result more": Different(
        QUANTIZING, {"keep_norm": False}, {"keep_norm": True}, ("keep_norm",)
    ),
    "epilogue": Different(
        (FP8, "allreduce_layernorm", "reducescatter_residual_rmsnorm"),
        {},
        {"epilogue": "bias_relu"},
        ("with epilogue ",),
    ),
}
# The rows tested where ranks share a GPU.
STANDING = ("root", "operator", "rows", "rounding", "scale dtype", "one result more")


def test_every_option_of_a_norm_differs_in_a_row() -> None:
    schema = getattr(torch.ops.collx, FP8).default._schema
    tensors = {"input", "residual", "weight", "scale", "group_name"}
    of_rank = {"extras", "numbers"}  # their values may differ between ranks
    options = {argument.name for argument in schema.arguments} - tensors - of_rank
    varied = {field for row in DIFFERENT.values() if FP8 in row.ops for field in row.other}
    assert "epilogue" in varied
    assert options <= {"expression", *varied}


def _operators_here(pool: Pool, what: str) -> tuple[str, ...]:
    """Returns the operators of a row to test in this world. Each one needs an init."""
    ops = DIFFERENT[what].ops
    if pool.takes_turns and not (pool.size == 2 and what in STANDING):
        return tuple(op for op in ops if op == "allreduce")
    if pool.takes_turns or pool.size > 2:
        return ops[:3]
    if pool.world.device == "cuda":
        return tuple(op for number, op in enumerate(ops) if number % 3 < 2)
    return ops


def _other_call(rank: Rank, what: str, ops: tuple[str, ...], timeout: float) -> dict[str, Attempt]:
    row, answers = DIFFERENT[what], {}
    for op in ops:
        communicator = rank.new_communicator(
            "differs", rank.fresh_group(), call_timeout=timeout, check=True
        )
        usual: Fields = {"shape": (12, 12), "form": "functional", **row.usual}
        other: Fields = {**usual, **row.other}
        calls = [small_call(fields.pop("op", op), rank.size, **fields) for fields in (usual, other)]
        runs = [repeated(rank, communicator, call) for call in calls]
        for run in runs:  # each call is valid if all ranks make it
            run()
        rank.barrier()  # from here on, a rank may learn of a peer's failure at any time
        found = attempt(runs[rank.rank == rank.size - 1])
        rank.barrier()
        # A rank may have left the call before the others noticed the mismatch.
        answers[op] = found if found.error else attempt(communicator.raise_if_failed)
        rank.arenas.pop(communicator.name, None)
        communicator.destroy()
    return answers


@pytest.mark.worlds(2, 3, 4)
@pytest.mark.parametrize("what", sorted(DIFFERENT))
def test_checked_mode_names_both_sides_of_a_mismatch(pool: Pool, what: str) -> None:
    """Hazards 5 and 14: one rank makes another call. Every rank raises at once, and the message
    shows both calls and how they differ. The comparison covers everything that changes results."""
    ops = _operators_here(pool, what)
    some_stand_for_all(pool, bool(ops))
    for answers in pool.run(_other_call, what, ops, timeout_now(pool, ENOUGH)):
        assert tuple(answers) == ops
        for op, found in answers.items():
            words = (f"called {name_in_errors(op)}(", *DIFFERENT[what].words)
            assert_named(found, "CollectiveMismatch", *words)
            assert_in_time(found, TIMEOUT)
            shown = SHOWN.search(found.message)
            assert shown is not None, found
            calls = {int(shown[1]): shown[2], int(shown[3]): shown[4]}
            last = calls.pop(pool.size - 1)
            assert words[-1] in last, found
            for call in calls.values():
                assert words[-1] not in call, found


def _alike(op: str) -> list[Call]:
    """Returns calls whose tensors may differ between ranks: parts, splits, and, if no peer
    accesses the tensor, its strides and position in symmetric memory. Some ranks have no rows."""
    if is_norm(op):
        return [
            call_of(op, rows=rows, cols=256, algorithm=way, form=form)
            for way in algorithms_of(op)
            for rows, form in ((1, "functional"), (4, "out"), (0, "out"))
        ]
    own: list[Fields] = [
        {},
        {"symmetric": "both"},
        {"symmetric": "both", "form": "part" if "part" in OPS[op].forms else "out"},
        # The output is contiguous only on ranks that get at most one row.
        {"symmetric": "both", "layout": "spread", "output_layout": "spread"},
    ]
    if op == "allgather":
        for axis in (0, 7, 8, 9):
            shape = tuple(7 if d == axis else 3 if d == 5 else 1 for d in range(10))
            own.append({"shape": shape, "axis": axis, "symmetric": "output"})
    usual: Fields = {"dtype": "int32", "shape": (1, 3), "uneven": True}
    return [
        call_of(op, algorithm=way, splits=splits, **{**usual, **fields})
        for way in algorithms_of(op)
        for splits in (("uneven", "one_receives", "zeros") if op in WITH_SPLITS else ("even",))
        for fields in own
    ]


def _checked(rank: Rank, calls: list[Call]) -> list[str]:
    rank.communicator("checked", check=True)
    return run_calls(rank, calls, "checked")


@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize("op", NAMES)
def test_checked_mode_passes_what_belongs_to_one_call(pool: Pool, op: str) -> None:
    """The negative control, for every algorithm."""
    standing = pool.size == 2 and op in ("allgather", "alltoallv")
    some_stand_for_all(pool, standing or is_norm(op))
    calls = _alike(op)
    some = pool.takes_turns and is_norm(op)
    assert_none(pool.run(_checked, every(calls, 6) if some else calls))
