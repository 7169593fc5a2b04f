"""Ranks out of step: inputs overwritten at once, counters that wrap, slow ranks, changing calls."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from ..attempt import finish
from ..check import assert_none, differences
from ..family_cases import OPS, Call, legal
from ..family_check import run_call, run_calls
from ..pool import Pool
from ..rank import Rank
from ..regions import BORDERS, past_the_wrap, run_on_poison
from ..sampling import every
from ..values import inputs_and_reference

CYCLES_PER_MILLISECOND = 1_500_000


def delay(rank: Rank, milliseconds: float) -> None:
    """Holds this rank back: its stream on CUDA, the process itself on CPU."""
    if rank.device.type == "cuda":
        torch.cuda._sleep(int(milliseconds * CYCLES_PER_MILLISECOND))
    else:
        time.sleep(milliseconds / 1000)


def overwritten(
    rank: Rank,
    algorithm: str,
    numel: int,
    rounds: int,
    symmetric: bool,
    blocks: tuple[int, ...] = (0,),
    key: str = "default",
    **options: Any,
) -> list[str]:
    """A job: overwrites inputs and outputs right after each call, with late ranks. `blocks`:
    values of max_blocks, one after the other. `key`, `options`: of the communicator."""
    communicator = rank.communicator(key, **options)
    make = communicator.empty if symmetric else (lambda s: torch.empty(s, device=rank.device))
    source, out = make((numel,)), make((numel,))
    kept = []
    for number in range(rounds):
        inputs, expected = inputs_and_reference(
            rank.size, "random", "float32", "sum", numel, number % 3
        )
        mine = inputs[rank.rank].to(rank.device)
        source.copy_(mine)
        out.fill_(float("nan"))
        if rank.rank == number % rank.size:
            delay(rank, 3.0)
        torch.ops.collx.allreduce.out(
            source, "sum", communicator.name, algorithm, blocks[number % len(blocks)], out=out
        )
        # At once, in stream order: a peer that still reads it would read this.
        source.fill_(float("nan"))
        kept.append((out.clone(), expected))
        out.fill_(-7.0)
    finish(communicator)
    return [found for result, expected in kept if (found := differences(result.cpu(), expected))]


WAYS = [(name, symmetric) for name in OPS["allreduce"].algorithms for symmetric in (False, True)]
WAYS = [way for way in WAYS if way[0] != "fallback" and way != ("pull_push", False)]


@pytest.mark.worlds(2, 3, 4, 8)
@pytest.mark.parametrize(("algorithm", "symmetric"), WAYS)
def test_input_may_be_overwritten_at_once(pool: Pool, algorithm: str, symmetric: bool) -> None:
    """Hazard 11: each rank in turn is milliseconds late, inputs are overwritten and outputs
    reused as soon as the call has completed in stream order."""
    rounds = 6 if pool.takes_turns else 24
    for numel in (1000,) if pool.takes_turns else (7, 1000, 50_000):
        assert_none(pool.run(overwritten, algorithm, numel, rounds, symmetric))


def _call(numel: int, algorithm: str, seed: int = 1, dtype: str = "float32") -> Call:
    return Call("allreduce", dtype, (numel,), algorithm, style="random", seed=seed)


THROUGH_REGIONS = ("oneshot_push", "twoshot_push", "oneshot_pull", "twoshot_pull", "twoshot_lanes")


def _alternating(rank: Rank, rounds: int) -> list[str]:
    communicator = rank.communicator()
    sizes = (5, 4000, 1, 0, 60_000, 300, 257)
    algorithms = (*THROUGH_REGIONS, "auto")
    found = []
    for number in range(rounds):
        call = Call(
            "allreduce",
            dtype=("float32", "int8", "bfloat16", "float64")[number % 4],
            shape=(sizes[number % len(sizes)],),
            algorithm=algorithms[number % len(algorithms)],
            style=("random", "ones", "bits")[number % 3],
            max_blocks=(0, 1, 3)[number % 3],
            seed=number % 4,
        )
        if number % 17 == rank.rank:
            delay(rank, 1.0)
        wrong = run_call(rank, communicator, legal(call))
        if wrong:
            found.append(f"call {number}: {call}: {wrong}")
    return found


def test_calls_of_changing_size_dtype_and_algorithm_follow_each_other(pool: Pool) -> None:
    """Hazards 2, 4 and 14: tiles, slots and counters of consecutive calls do not meet."""
    assert_none(pool.run(_alternating, 30 if pool.takes_turns else 210))


def _past_the_wrap(rank: Rank, border: int, rounds: int) -> list[str]:
    calls = [
        _call(700, algorithm, number % 5, dtype)
        for number in range(rounds)
        for dtype in ("float32", "int32")
        for algorithm in THROUGH_REGIONS
    ]
    return past_the_wrap(rank, border, rounds, calls, run_call)


@pytest.mark.worlds(2, 3, 4)
@pytest.mark.parametrize("border", BORDERS, ids=["unsigned", "signed"])
def test_epochs_survive_the_wrap_around(pool: Pool, border: int) -> None:
    """Hazards 3 and 4: counters that start just before 2^32 (and 2^31) go on past it."""
    assert_none(pool.run(_past_the_wrap, border, 3 if pool.takes_turns else 150))


@pytest.mark.worlds(2, 3, 4)
def test_nothing_is_read_before_it_has_arrived(pool: Pool) -> None:
    """Hazard 20: staging and results hold NaN before each call (slots are armed with it)."""
    algorithms = ("oneshot_pull", "twoshot_pull", "oneshot_push", "twoshot_push")
    calls = [_call(3000, algorithm) for algorithm in algorithms] * (3 if pool.takes_turns else 15)
    assert_none(pool.run(run_on_poison, calls, run_call))


@pytest.mark.worlds(8, 16)
def test_ranks_that_outnumber_the_cores_make_progress(pool: Pool) -> None:
    """Hazard 23: many calls in a row without a pause."""
    calls = [_call(64, "auto", seed % 3) for seed in range(200)]
    assert_none(pool.run(run_calls, every(calls, 10 if pool.takes_turns else 1), deadline=200.0))
