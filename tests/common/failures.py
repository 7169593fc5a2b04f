"""Calls that fail during other calls: makes them, and checks their errors. Loses ranks."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from typing import Any

import torch

from .attempt import Attempt, finish
from .calls import Call, Fields, Prepared
from .limits import assert_in_time, timeout_now
from .operators import call_of
from .pool import Pool
from .rank import Rank

ROOT = 0


def small_call(op: str, world: int, **fields: Any) -> Call:
    """Returns a call of 1000 elements or of 7 rows. `fields` replace the defaults."""
    usual: Fields = {"style": "random", "root": ROOT, "rows": 7, "cols": 256}
    return call_of(op, 1000, world, **{**usual, **fields})


def repeated(rank: Rank, communicator: Any, call: Call) -> Callable[[], None]:
    """Returns a function that makes a call, always on the same tensors, and waits for its end.
    Collective: all ranks have prepared their tensors before one makes the call."""
    prepared = None if call.op == "barrier" else Prepared(rank, communicator, call)
    rank.barrier()

    def run() -> None:
        if prepared is None:
            torch.ops.collx.barrier(communicator.name)
        else:
            prepared.make()
        finish(communicator)

    return run


def assert_named(result: Attempt, error: str, *words: str) -> None:
    """Fails if an attempt did not end with an error of this class that contains all words."""
    assert result.error == error, result
    assert "RuntimeError" in result.bases
    for word in words:
        assert word in result.message, (word, result.message)


def assert_lost_rank_is_named(
    pool: Pool,
    number: signal.Signals,
    job: Callable[..., Attempt],
    *arguments: Any,
    words: str = "",
    resumed: tuple[str, ...] = (),
) -> None:
    """Kills or stops the last rank while all ranks run `job(rank, timeout, *arguments)`, which
    returns `call_until_failure`. The others must name the rank in time. `words`: a pattern in their
    messages. `resumed`: the errors that a stopped rank may raise when it continues. By default, it
    does not continue, and the pool is killed."""
    victim = pool.size - 1
    pool.kill()  # removes keys of other tests from the store
    timeout = timeout_now(pool)
    pool.submit(job, timeout, *arguments)
    pool.wait_for("calling")
    pool.signal(victim, number)
    try:
        for survivor in pool.collect(range(victim)):
            assert_named(survivor, "CollectiveTimeout", f"rank {victim}")
            assert re.search(words, survivor.message), survivor
            assert_in_time(survivor, timeout)
        if resumed:
            pool.signal(victim, signal.SIGCONT)
            (stopped,) = pool.collect([victim])
            assert stopped.error in resumed, stopped
    finally:
        if not resumed:
            pool.kill()
