"""Ranks out of step: what each op promises about its tensors when it has completed in stream order,
and sequences of ops of which some leave pairs of ranks without a word to each other."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from ..attempt import finish
from ..check import arenas_of, assert_none
from ..family_cases import (
    IN_PLACE,
    NEEDS_SYMMETRIC,
    NEW,
    OPS,
    ROOTED,
    WITH_SPLITS,
    Call,
    data_of,
    legal,
    ways,
)
from ..family_check import Prepared, Tensors, all_differences, arguments_of, make, run_call
from ..pool import Pool, some_stand_for_all
from ..rank import Rank
from ..regions import BORDERS, past_the_wrap, run_on_poison
from ..sampling import every
from .skew import delay

SLICE = 1 << 16  # of an arena, for each call of a sequence
ROOM = 1 << 18  # for an input, and for an output, that calls share
WRITTEN = 85  # what inputs are overwritten with
AFTERWARDS = 33  # what outputs are overwritten with

# Every algorithm on ordinary tensors where it takes them, and on symmetric ones where that makes
# a difference.
TENSORS = [
    (op, algorithm, symmetric)
    for op, algorithm in ways()
    for symmetric in (False, True)
    if algorithm != "fallback"
    and (symmetric or algorithm not in NEEDS_SYMMETRIC)
    and not (symmetric and OPS[op].peers == "none")
]
DIRECTLY = [(op, algorithm) for op, algorithm in ways() if algorithm != "fallback"]


def _cut(memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The front of `memory` as a tensor like another."""
    return memory[: like.numel() * like.element_size()].view(like.dtype).view(like.shape)


def _overwritten(rank: Rank, call: Call, rounds: int) -> list[str]:
    communicator = rank.communicator()
    # Of splits and roots there are several; all share the same memory.
    calls = [replace(call, seed=number, root=number) for number in range(3)]
    data = [data_of(one, rank.size) for one in calls]
    memory = [torch.empty(ROOM, dtype=torch.uint8, device=rank.device) for _ in range(2)]
    if call.symmetric != "none":
        arenas = arenas_of(rank, communicator)
        memory = [arenas.input[:ROOM], arenas.output[:ROOM]]
    inputs = [values[rank.rank].to(rank.device) for values, _ in data]
    sources = [_cut(memory[0], values) for values in inputs]
    givens = [
        arguments_of(communicator, one, source) for one, source in zip(calls, sources, strict=True)
    ]
    kept: list[tuple[Tensors, int]] = []
    for number in range(rounds):
        which = number % 3
        source, expected = sources[which], data[which][1][rank.rank]
        counts = tuple(torch.empty_like(like, device=rank.device) for like in expected[1:])
        outs = (_cut(memory[1], expected[0]), *counts)
        late = number % (2 * rank.size)
        if late == rank.rank:  # its producer is slow
            delay(rank, 3.0)
        source.copy_(inputs[which])
        memory[1].fill_(WRITTEN)
        if late == rank.size + rank.rank:  # the producer is not, but the call comes late
            delay(rank, 3.0)
        results = make(communicator, calls[which], givens[which], outs)
        if call.form not in IN_PLACE:
            # At once, in stream order: a peer that still reads it would read this.
            memory[0].fill_(WRITTEN)
        kept.append((tuple(result.clone() for result in results), which))
        memory[1].fill_(AFTERWARDS)
        if call.form in IN_PLACE:
            memory[0].fill_(AFTERWARDS)
    finish(communicator)
    rank.barrier()
    found = [
        all_differences(calls[which], rank.size, rank.rank, results, data[which][1][rank.rank])
        for results, which in kept
    ]
    final = memory[0] if call.form in IN_PLACE else memory[1]
    if bool((final != AFTERWARDS).any()):
        found.append("an output was written to after the call had completed")
    return [f"{number}: {wrong}" for number, wrong in enumerate(found) if wrong]


@pytest.mark.worlds(2, 3, 4, 8)
@pytest.mark.parametrize(("op", "algorithm", "symmetric"), TENSORS)
def test_tensors_are_free_when_the_call_has_completed(
    pool: Pool, op: str, algorithm: str, symmetric: bool
) -> None:
    """Hazard 11: each rank in turn is milliseconds late, before or after its input is made; inputs
    are overwritten and outputs reused at once."""
    some_stand_for_all(pool, pool.size == 2 or (algorithm == "auto" and not symmetric))
    share = pool.size if OPS[op].widens else 1
    numels = (1000,) if pool.takes_turns else (1000, 24_000)
    for dtype, numel in zip(("float32", "int32"), numels, strict=False):
        style = "random" if OPS[op].reduces else "bits"
        shape = (-(-numel // share),)
        call = Call(op, dtype, shape, algorithm, style=style, splits="uneven", spare=5)
        call = legal(replace(call, symmetric="both" if symmetric else "none"))
        rounds = pool.size if pool.takes_turns else 2 * pool.size
        assert_none(pool.run(_overwritten, call, rounds))


@pytest.mark.worlds(2, 4)
@pytest.mark.parametrize("op", [op for op in NEW if "inplace" in OPS[op].forms])
def test_a_tensor_changed_in_place_is_final(pool: Pool, op: str) -> None:
    """Hazard 11 in the forms that work on one tensor."""
    for form in ("inplace", "alias"):
        call = Call(op, "float32", (600,), form=form, style="random")
        assert_none(pool.run(_overwritten, call, 2 if pool.takes_turns else 2 * pool.size))


def _in_a_row(rank: Rank, calls: list[Call], key: str) -> list[str]:
    """Makes all calls in a row, some rank being late; nobody waits in between."""
    communicator = rank.small_communicator() if key == "small" else rank.communicator()
    found = []
    for late in sorted({0, rank.size // 2, rank.size - 1} if rank.size < 8 else {0, 5}):
        prepared = [
            Prepared(rank, communicator, replace(call, seed=late + 1), SLICE * at)
            for at, call in enumerate(calls)
        ]
        rank.synchronize()
        rank.barrier()
        if late == rank.rank:
            delay(rank, 3.0)
        results = []
        for one in prepared:
            results.append(one.make())
            if one.call.form not in IN_PLACE:
                one.source.view.fill_(WRITTEN)
        finish(communicator)
        for number, (one, result) in enumerate(zip(prepared, results, strict=True)):
            wrong = one.wrong(result, input_kept=False)
            found += [f"rank {late} late, call {number}: {one.call}: {wrong}"] if wrong else []
    return found[:5]


def _call(op: str, algorithm: str, numel: int, world: int, **fields: object) -> Call:
    """A call of a sequence: of integers, so that words of all patterns travel."""
    share = world if OPS[op].widens else 1
    call = Call(op, "int32", (max(1, numel // share),), algorithm, style="armed")
    return legal(replace(call, **{"splits": "zeros", "spare": 3, **fields}))  # type: ignore[arg-type]


@pytest.mark.worlds(2, 3, 4, 8)
@pytest.mark.parametrize("key", ["default", "small"])
@pytest.mark.parametrize(("op", "algorithm"), DIRECTLY)
def test_a_fast_rank_does_not_overrun_a_slow_one(
    pool: Pool, op: str, algorithm: str, key: str
) -> None:
    """Hazards 4 and 14: an op three times between all-reduces, with no wait between them. Where
    some pair exchanges nothing in it, two slots alone would be overwritten before they are read."""
    some_stand_for_all(pool, pool.size == 2 or (algorithm == "auto" and key == "small"))
    largest = 500 if key == "small" else 3000
    allreduce = _call("allreduce", "auto", 300, pool.size)
    three = [_call(op, algorithm, numel, pool.size) for numel in (largest, 7, largest // 2)]
    assert_none(pool.run(_in_a_row, [allreduce, *three, allreduce], key))


@pytest.mark.worlds(2, 3, 4)
@pytest.mark.parametrize("op", [*ROOTED, *WITH_SPLITS])
def test_roots_and_splits_change_from_call_to_call(pool: Pool, op: str) -> None:
    """Hazard 14: who sends to whom differs in every call, and is nobody in some."""
    splits = ("one_sends", "nobody", "one_receives", "wild", "zeros")
    calls = [
        _call(op, "auto", numel, pool.size, root=root, splits=splits[number % len(splits)])
        for number, (root, numel) in enumerate(
            ((0, 900), (1, 40), (0, 900), (2, 900), (2, 1), (1, 900))
        )
    ]
    assert_none(pool.run(_in_a_row, calls[:3] if pool.takes_turns else calls, "default"))


@pytest.mark.worlds(2, 3, 4, 8)
@pytest.mark.parametrize("backwards", [False, True], ids=["forwards", "backwards"])
def test_all_ops_follow_each_other(pool: Pool, backwards: bool) -> None:
    """Hazards 4 and 14: every op by every algorithm, one behind the other without a pause."""
    calls = [
        _call(op, algorithm, (700, 90, 5)[number % 3], pool.size, root=number)
        for number, (op, algorithm) in enumerate(DIRECTLY)
    ]
    calls = every(calls, 3 if pool.takes_turns else 1)
    assert_none(pool.run(_in_a_row, calls[::-1] if backwards else calls, "default"))


def _past_the_wrap(rank: Rank, border: int, rounds: int, calls: list[Call]) -> list[str]:
    varied = (
        replace(call, seed=number % 3 + 1, root=number)
        for number in range(rounds)
        for call in calls
    )
    return past_the_wrap(rank, border, rounds, varied, run_call)


@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize("border", BORDERS, ids=["unsigned", "signed"])
def test_counters_of_the_family_survive_the_wrap_around(pool: Pool, border: int) -> None:
    """Hazards 3 and 4: epochs, and uses of channels, that start just before 2^32 (and 2^31)."""
    calls = every(
        [_call(op, algorithm, 300, pool.size) for op, algorithm in DIRECTLY],
        3 if pool.takes_turns else 1,
    )
    assert_none(pool.run(_past_the_wrap, border, 3 if pool.takes_turns else 12, calls))


@pytest.mark.worlds(2, 3, 4)
def test_nothing_of_the_family_is_read_before_it_has_arrived(pool: Pool) -> None:
    """Hazard 20: staging and results hold NaN before each call, and outputs do."""
    calls = [_call(op, algorithm, 3000, pool.size) for op, algorithm in DIRECTLY]
    assert_none(pool.run(run_on_poison, every(calls, 4 if pool.takes_turns else 1), run_call))


def _in_barrier(rank: Rank, late: int) -> tuple[float, float]:
    """When this rank came, and when it left."""
    communicator = rank.communicator()
    torch.ops.collx.barrier(communicator.name)
    rank.synchronize()
    rank.barrier()
    if rank.rank == late:
        delay(rank, 200.0)
        rank.synchronize()
    came = time.monotonic()
    torch.ops.collx.barrier(communicator.name)
    finish(communicator)
    return came, time.monotonic()


@pytest.mark.worlds(2, 3, 4)
def test_a_barrier_ends_when_the_last_rank_has_come(pool: Pool) -> None:
    """Whoever is late, everybody waits for it."""
    for late in (0, pool.size - 1):
        times = pool.run(_in_barrier, late)
        assert min(left for _, left in times) >= times[late][0], times
