"""Lanes: random calls of several rings, and ranks that fail in the middle of a call."""

from __future__ import annotations

import random
import signal
from dataclasses import replace
from typing import Any

import pytest
import torch

import collx
from tests.common.attempt import Attempt, assert_raised, attempt, call_until_failure, finish, ones
from tests.common.check import assert_none
from tests.common.collectives import NAMES, OPS, SPLITS, SYMMETRIC, Call, random_call
from tests.common.failures import assert_lost_rank_is_named
from tests.common.operators import call_of
from tests.common.pool import Pool, on_ranks
from tests.common.rank import Rank
from tests.common.suites.fuzz import make_calls
from tests.common.suites.skew import delay, overwritten
from tests.common.worlds import seed_from_environment

WORLDS = pytest.mark.worlds(2, 3, 4, 5, 6, 7, 8)
# Slots of 1 KiB, the smallest size: two ranks have 8 lanes.
PAYLOAD_BYTES = 512 << 10
LARGEST = 60_000  # elements; with 4 bytes each, more than three rings in all lanes of two ranks
CALLS = {2: 400, 3: 200, 4: 150, 5: 100, 6: 80, 7: 60, 8: 50}
MOVES = tuple(name for name in NAMES if name != "reduce_to_everyone")


def by_lanes(op: str) -> str:
    return "twoshot_lanes" if op == "allreduce" else "lanes"


def lane_calls(seed: int, count: int, world: int) -> list[Call]:
    """Returns calls drawn from a seed: two in three use lanes, and others change other counters and
    slots. One in three is an all-reduce."""
    choose = random.Random(seed)
    calls = []
    for _ in range(count):
        reduction = choose.random() < 0.33
        largest, ops = (LARGEST, ("allreduce",)) if reduction else (LARGEST // 2, MOVES)
        call = random_call(choose, largest, world, ops)
        if choose.random() < 0.67:
            call = replace(call, algorithm=by_lanes(call.op)).legal()
        calls.append(call)
    return calls


def _random_calls(rank: Rank, seed: int, count: int) -> list[str]:
    communicator = rank.communicator("lanes", payload_bytes=PAYLOAD_BYTES)
    calls = lane_calls(seed, count, rank.size)
    return make_calls(rank, communicator, seed, calls, lambda ms: delay(rank, ms))


@WORLDS
def test_random_calls_on_lanes(pool: Pool) -> None:
    """Lengths from one chunk to more than three rings, ordinary and symmetric tensors, numbers of
    lanes that change between calls, calls through slots in between, and late ranks."""
    seed, count = seed_from_environment(), 20 if pool.takes_turns else CALLS[pool.size]
    assert_none(pool.run(_random_calls, seed, count, deadline=60.0 + count / 20))


def test_random_calls_reach_all_that_lanes_have() -> None:
    """The control of the test above."""
    drawn = [c for c in lane_calls(1, 8000, 2) if c.algorithm == by_lanes(c.op)]
    assert {c.op for c in drawn} == set(MOVES)
    for op in MOVES:
        calls = [c for c in drawn if c.op == op]
        if OPS[op].reduces:
            assert len({(c.dtype, c.reduce_op) for c in calls}) >= 30
        assert {c.symmetric for c in calls} == set(SYMMETRIC)
        assert {c.max_blocks for c in calls} >= {0, 1, 2, 3}
        assert any(c.output_offset % 2 for c in calls)
        assert {c.root % 2 for c in calls} == {0, 1}
    assert {c.splits for c in drawn if c.op == "alltoallv"} == set(SPLITS)


@pytest.mark.worlds(2, 4)
@pytest.mark.parametrize("symmetric", [False, True])
def test_inputs_of_several_rings_may_be_overwritten_at_once(pool: Pool, symmetric: bool) -> None:
    where = "both" if symmetric else "none"
    call = call_of("allreduce", 60_001, algorithm="twoshot_lanes", symmetric=where, style="random")
    rounds = 3 if pool.takes_turns else 12
    options: dict[str, Any] = {"key": "lanes", "payload_bytes": PAYLOAD_BYTES}
    assert_none(pool.run(overwritten, call, rounds, (0, 1, 5), **options))


def _long_and_short(rank: Rank, seed: int, count: int) -> list[str]:
    communicator = rank.communicator("lanes", payload_bytes=PAYLOAD_BYTES)
    choose = random.Random(seed)
    ranks = range(rank.size)
    wrong = []
    for number in range(count):
        # Half of the calls have only short messages, whose kernel is another one.
        lengths = choose.choice(((0, 1, 90), (0, 1, 90, 3_000, 20_001)))
        rows = [[choose.choice(lengths) for _ in ranks] for _ in ranks]
        width = choose.choice((1, 3, 8))
        dtype = choose.choice((torch.uint8, torch.bfloat16, torch.int64))
        spare, blocks = choose.choice((0, 7, 5_000)), choose.choice((0, 1, 5))
        if choose.randrange(2 * rank.size) == rank.rank:
            delay(rank, 0.3)
        values = torch.arange(max(map(sum, rows)) * width, device=rank.device).view(-1, width)
        sent = [((values[: sum(rows[r])] * (r + 3)) % 127).to(dtype) for r in ranks]
        arriving = [rows[r][rank.rank] for r in ranks]
        result, arrived = collx.alltoallv(
            sent[rank.rank],
            group=communicator,
            device_splits=torch.tensor(rows[rank.rank], device=rank.device),
            capacity=sum(arriving) + spare,
            max_blocks=blocks,
        )
        parts = [sent[r].split(rows[r])[rank.rank] for r in ranks]
        wanted = torch.cat([*parts, result.new_zeros(spare, width)])
        if not torch.equal(result, wanted) or arrived.tolist() != arriving:
            wrong.append(f"call {number}: {rows} rows of {width} {dtype}, {spare} spare")
    return wrong


@WORLDS
def test_splits_on_the_device_of_long_and_short_messages(pool: Pool) -> None:
    """Between two ranks, long messages use lanes and short messages use channels, independently in
    each direction."""
    seed, count = seed_from_environment(), 20 if pool.takes_turns else CALLS[pool.size]
    assert_none(pool.run(_long_and_short, seed, count, deadline=60.0 + count / 20))


@pytest.mark.worlds(2)
@on_ranks
def test_long_messages_of_splits_that_do_not_fit_are_refused(rank: Rank, timeout: float) -> None:
    """The kernel that moves long messages accesses nothing if the exchange of counts failed."""
    communicator = rank.new_communicator(
        "lanes-refuse", rank.fresh_group(), call_timeout=timeout, payload_bytes=PAYLOAD_BYTES
    )
    source = torch.ones(40_000, 8, dtype=torch.uint8, device=rank.device)
    rows = 40_000 if rank.rank == 0 else 100
    splits = torch.full((rank.size,), rows, device=rank.device)

    def once() -> None:
        collx.alltoallv(source, group=communicator, device_splits=splits, capacity=80_000)
        finish(communicator)

    found = attempt(once)
    communicator.destroy()  # later tests of this pool may require a single communicator
    assert_raised(found, "CollectiveMismatch", "80000")


def _large_until_failure(rank: Rank, timeout: float, captured: bool, symmetric: bool) -> Attempt:
    communicator = rank.communicator("lanes-fail", group=rank.fresh_group(), call_timeout=timeout)
    numel = (1 if rank.world.shared else 16) << 20
    source = ones(rank, numel)
    out = communicator.empty((numel,)) if symmetric else torch.empty_like(source)

    def call() -> None:
        torch.ops.collx.allreduce.out(source, "sum", communicator.name, "twoshot_lanes", 0, out=out)

    call()
    finish(communicator)
    graph: Any = torch.cuda.CUDAGraph()
    if captured:
        with torch.cuda.graph(graph):
            for _ in range(3):
                call()

    def once() -> None:
        graph.replay() if captured else call()
        finish(communicator)

    return call_until_failure(rank, once)


@pytest.mark.alone  # ranks are killed
@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_failure_of_a_rank_within_a_large_call_is_named(
    pool: Pool, how: signal.Signals, captured: bool, symmetric: bool
) -> None:
    """Calls of 64 MiB one after another, so that the signal arrives in the middle of one."""
    stopped = how == signal.SIGSTOP
    assert_lost_rank_is_named(
        *(pool, how, _large_until_failure, captured, symmetric),
        words=r"lane \d+, of allreduce",
        resumed=("CollectiveTimeout", "CommunicatorPoisoned") if stopped else (),
    )
    pool.kill()


@pytest.mark.alone  # waits for timeouts
@pytest.mark.worlds(2)
@pytest.mark.parametrize(("numel", "max_blocks"), [(100_000, 0), (1_000_000, 8)])
@on_ranks
def test_ranks_that_make_different_calls_are_told_so_without_a_check(
    rank: Rank, numel: int, max_blocks: int, timeout: float
) -> None:
    """The fingerprint is stored next to the words of each lane, even if calls are not checked."""
    communicator = rank.new_communicator("lanes-differ", rank.fresh_group(), call_timeout=timeout)
    source = ones(rank, numel if rank.rank == 0 else 3 * numel)

    def once() -> None:
        out = torch.empty_like(source)
        arguments = ("sum", communicator.name, "twoshot_lanes", max_blocks)
        torch.ops.collx.allreduce.out(source, *arguments, out=out)
        finish(communicator)

    found = attempt(once)
    communicator.destroy()
    errors = rank.gather(found.error)
    assert all(errors)
    assert "CollectiveMismatch" in errors
