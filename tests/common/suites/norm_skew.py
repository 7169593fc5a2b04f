"""Ranks out of step: what a fused normalization promises about its tensors when it has completed in
stream order, and sequences of them and of other collectives without a pause."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from .. import family_check
from ..attempt import finish
from ..check import arenas_of, assert_none
from ..family_cases import Call as FamilyCall
from ..norm_cases import OPS, Call, data_of, legal, outputs_of, quantizes, ways
from ..norm_check import Prepared, arguments_of, make, run_norm, tensors_of, wrong_results
from ..pool import Pool, some_stand_for_all
from ..rank import Rank
from ..regions import BORDERS, past_the_wrap, run_on_poison
from ..sampling import every
from .skew import delay

pytestmark = pytest.mark.alone  # clusters of blocks

SLICE = 1 << 17  # of an arena, for each call of a sequence
WRITTEN = 85  # what inputs are overwritten with
AFTERWARDS = 33  # what outputs are overwritten with

# All that differ in what they pass on; every algorithm of theirs.
MANY = (
    "allreduce_layernorm",
    "allreduce_residual_rmsnorm",
    "allreduce_residual_rmsnorm_fp8",
    "reducescatter_residual_rmsnorm_fp8",
)
DIRECTLY = [(op, algorithm) for op, algorithm in ways(*MANY) if algorithm != "fallback"]
# Peers read a symmetric input in place where they pull.
TENSORS = [(op, algorithm, False) for op, algorithm in DIRECTLY]
TENSORS += [(op, algorithm, True) for op, algorithm in DIRECTLY if "pull" in algorithm]


def _fill(tensor: torch.Tensor, byte: int) -> None:
    tensor.view(torch.uint8).fill_(byte)


class Repeated:
    """A call on tensors that stay where they are, with other values in each round."""

    def __init__(self, rank: Rank, communicator: Any, call: Call, variants: int) -> None:
        self.call, self._communicator = call, communicator
        self._calls = [replace(call, seed=number + 1) for number in range(variants)]
        self._values = [tensors_of(c, rank.size, rank.rank, rank.device) for c in self._calls]
        self.expected = [data_of(c, rank.size).expected[rank.rank] for c in self._calls]
        tensors = {name: torch.empty_like(tensor) for name, tensor in self._values[0].items()}
        if call.symmetric:
            memory = arenas_of(rank, communicator).input
            like = tensors["input"]
            nbytes = like.numel() * like.element_size()
            tensors["input"] = memory[:nbytes].view(like.dtype).view(like.shape)
        self._tensors = tensors
        self.outs = tuple(torch.empty_like(t, device=rank.device) for t in self.expected[0])
        self._given = arguments_of(call, communicator.name, tensors)

    def fill(self, which: int) -> None:
        """Puts other values into place, and junk where the results will be."""
        for name, tensor in self._tensors.items():
            tensor.copy_(self._values[which][name])
        for out in self.outs:
            _fill(out, WRITTEN)

    def make(self) -> None:
        make(self._communicator, self.call, self._given, self.outs)

    def spoil(self) -> None:
        """Overwrites what the call has read."""
        for tensor in self._tensors.values():
            _fill(tensor, WRITTEN)


def _overwritten(rank: Rank, call: Call, rounds: int) -> list[str]:
    communicator = rank.communicator()
    repeated = Repeated(rank, communicator, call, 3)
    kept = []
    for number in range(rounds):
        late = number % (2 * rank.size)
        if late == rank.rank:  # its producer is slow
            delay(rank, 3.0)
        repeated.fill(number % 3)
        if late == rank.size + rank.rank:  # the producer is not, but the call comes late
            delay(rank, 3.0)
        repeated.make()
        repeated.spoil()  # at once, in stream order: a peer that still reads it would read this
        kept.append(tuple(out.clone() for out in repeated.outs))
        for out in repeated.outs:
            _fill(out, AFTERWARDS)
    finish(communicator)
    rank.barrier()
    found = [
        wrong_results(call, results, repeated.expected[number % 3])
        for number, results in enumerate(kept)
    ]
    if any(bool((out.view(torch.uint8) != AFTERWARDS).any()) for out in repeated.outs):
        found.append("an output was written to after the call had completed")
    return [f"{number}: {wrong}" for number, wrong in enumerate(found) if wrong]


@pytest.mark.worlds(2, 3, 4, 8)
@pytest.mark.parametrize(("op", "algorithm", "symmetric"), TENSORS)
def test_tensors_of_a_norm_are_free_when_the_call_has_completed(
    pool: Pool, op: str, algorithm: str, symmetric: bool
) -> None:
    """Hazard 11: each rank in turn is milliseconds late, before or after its input is made; input,
    residual and weights are overwritten and outputs reused at once."""
    some_stand_for_all(pool, pool.size == 2 or (algorithm == "auto" and not symmetric))
    for rows in (3, 40):
        call = Call(op, rows=rows, cols=512, algorithm=algorithm, keep_norm=quantizes(op))
        call = legal(replace(call, symmetric=symmetric))
        assert_none(pool.run(_overwritten, call, pool.size if pool.takes_turns else 2 * pool.size))


Step = Call | FamilyCall


def _prepared(rank: Rank, communicator: Any, step: Step, at: int) -> Any:
    if isinstance(step, FamilyCall):
        return family_check.Prepared(rank, communicator, step, at)
    return Prepared(rank, communicator, step, at)


def _in_a_row(rank: Rank, steps: list[Step], key: str) -> list[str]:
    """Makes all calls in a row, some rank being late; nobody waits in between."""
    communicator = rank.small_communicator() if key == "small" else rank.communicator()
    found = []
    for late in sorted({0, rank.size - 1}):
        prepared = [
            _prepared(rank, communicator, replace(step, seed=late + 1), SLICE * at)
            for at, step in enumerate(steps)
        ]
        rank.synchronize()
        rank.barrier()
        if late == rank.rank:
            delay(rank, 3.0)
        results = [one.make() for one in prepared]
        finish(communicator)
        for number, (one, result) in enumerate(zip(prepared, results, strict=True)):
            wrong = one.wrong(result)
            found += [f"rank {late} late, call {number}: {one.call}: {wrong}"] if wrong else []
    return found[:5]


def _other(op: str, numel: int) -> FamilyCall:
    return FamilyCall(op, "int32", (numel,), style="armed", form="out")


@pytest.mark.worlds(2, 3, 4, 8)
@pytest.mark.parametrize("key", ["default", "small"])
@pytest.mark.parametrize(("op", "algorithm"), DIRECTLY)
def test_a_fast_rank_does_not_overrun_a_slow_one_in_norms(
    pool: Pool, op: str, algorithm: str, key: str
) -> None:
    """Hazards 4 and 14: rows of other widths and numbers between all-reduces, without a wait."""
    some_stand_for_all(pool, pool.size == 2 and algorithm == "auto")
    wide = 700 if key == "small" else 3000
    norms = [
        Call(op, dtype, rows, cols, algorithm=algorithm, style="rows")
        for dtype, rows, cols in (
            ("bfloat16", 5, wide),
            ("float32", 1, 8),
            ("float16", 17, wide // 5),
        )
    ]
    steps: list[Step] = [_other("allreduce", 300), *norms, _other("allreduce", 300)]
    assert_none(pool.run(_in_a_row, steps, key))


@pytest.mark.worlds(2, 3, 4, 8)
@pytest.mark.parametrize("backwards", [False, True], ids=["forwards", "backwards"])
def test_all_norms_follow_each_other(pool: Pool, backwards: bool) -> None:
    """Hazards 4 and 14: every op by every algorithm, with other collectives of the same slots."""
    steps: list[Step] = []
    for number, (op, algorithm) in enumerate(ways()):
        if algorithm == "fallback":
            continue
        rows, cols = ((3, 384), (20, 64), (1, 2000))[number % 3]
        steps.append(Call(op, rows=rows, cols=cols, algorithm=algorithm, style="rows"))
        if number % 5 == 0:
            name = ("allreduce", "reducescatter", "broadcast", "allgather")[number // 5 % 4]
            steps.append(_other(name, 200))
    steps = every(steps, 6 if pool.takes_turns else 1)
    assert_none(pool.run(_in_a_row, steps[::-1] if backwards else steps, "default"))


def _past_the_wrap(rank: Rank, border: int, rounds: int, calls: list[Call]) -> list[str]:
    varied = (replace(call, seed=number % 3 + 1) for number in range(rounds) for call in calls)
    return past_the_wrap(rank, border, rounds, varied, run_norm)


@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize("border", BORDERS, ids=["unsigned", "signed"])
def test_counters_of_the_norms_survive_the_wrap_around(pool: Pool, border: int) -> None:
    """Hazards 3 and 4: epochs that start just before 2^32 (and 2^31)."""
    calls = every(
        [Call(op, rows=4, cols=256, algorithm=algorithm) for op, algorithm in DIRECTLY],
        4 if pool.takes_turns else 1,
    )
    assert_none(pool.run(_past_the_wrap, border, 3 if pool.takes_turns else 8, calls))


@pytest.mark.worlds(2, 3, 4)
def test_nothing_of_a_norm_is_read_before_it_has_arrived(pool: Pool) -> None:
    """Hazard 20: staging and results hold NaN before each call, and outputs do."""
    calls = [
        Call(op, rows=10, cols=384, algorithm=algorithm, keep_norm=quantizes(op))
        for op, algorithm in ways()
        if algorithm != "fallback"
    ]
    assert_none(pool.run(run_on_poison, every(calls, 6 if pool.takes_turns else 1), run_norm))


def test_every_kind_of_output_is_among_those_that_are_reused() -> None:
    names = {name for op in MANY for name in outputs_of(op, quantizes(op))}
    assert names == {"out", "q_out", "scale_out", "residual_out", "norm_out"}
    assert set(MANY) <= set(OPS)
