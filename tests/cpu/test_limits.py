"""Tests that time limits only depend on the load of the machine.

Delays of a thread that only has to wake up are added to a limit. The time that the product takes is
not added (test_an_error_that_comes_late_is_noticed)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import pytest

from tests.common.attempt import SCHEDULING, Attempt, attempt
from tests.common.limits import HANDSHAKE_S, TIMEOUT, Heart, overdue, pace, timeout_now
from tests.common.pool import Pool
from tests.common.rank import Rank

STOPPED_S = 0.5


@pytest.mark.parametrize(
    ("late", "over"),
    [
        ([], 2.0),
        ([(11.0, 12.5)], 0.5),
        ([(11.0, 12.0), (12.0, 13.5)], -0.5),
        ([(9.0, 12.0)], 1.0),  # a delay counts from the moment when the end was due
        ([(13.5, 20.0)], 1.5),  # until the end
        ([(0.0, 10.0), (14.0, 15.0)], 2.0),
    ],
)
def test_a_limit_grows_by_what_the_machine_was_late(
    late: list[tuple[float, float]], over: float
) -> None:
    """The end is due at 11, with a slack of 1, and comes at 14."""
    heart = Heart()
    for due, woken in late:
        heart.record(due, woken)
    found = Attempt("", "", seconds=4.0, started=10.0)
    assert overdue(found, due=1.0, slack=1.0, heart=heart) == pytest.approx(over)


def test_a_limit_grows_by_what_the_attempt_was_held_up() -> None:
    """The limit grows by the longer of the two threads' waits for a core, not by both."""
    heart = Heart()
    heart.record(11.0, 12.5)
    found = Attempt("", "", seconds=4.0, started=10.0, held_up=1.75)
    assert overdue(found, due=1.0, slack=1.0, heart=heart) == pytest.approx(0.25)


def _busy() -> None:
    ended = time.monotonic() + 0.5
    while time.monotonic() < ended:
        pass


def test_an_attempt_tells_how_long_others_had_its_core() -> None:
    """Two processes compete for one core. An attempt that sleeps does not compete."""
    if not SCHEDULING.exists():
        pytest.skip(f"this kernel has no {SCHEDULING}")
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    competitor = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        held_up = attempt(_busy).held_up
    finally:
        competitor.kill()
        competitor.wait()
        os.sched_setaffinity(0, cores)
    assert held_up > 0.1
    assert attempt(lambda: time.sleep(0.5)).held_up < held_up


def _stopped_meanwhile(rank: Rank) -> float:
    heart = Heart()
    heart.start()
    started = last = time.monotonic()
    rank.tell("beating")
    while (now := time.monotonic()) - last < STOPPED_S / 2:
        last = now
        time.sleep(0.01)
    time.sleep(0.1)  # until the next heartbeat
    return heart.late(started, time.monotonic())


@pytest.mark.worlds(1)
def test_a_heart_notices_that_its_process_does_not_run(pool: Pool) -> None:
    """A stopped process simulates one that does not get a core."""
    pool.kill()  # no message of another test remains in the store
    pool.submit(_stopped_meanwhile)
    pool.wait_for("beating")
    pool.signal(0, signal.SIGSTOP)
    time.sleep(STOPPED_S)
    pool.signal(0, signal.SIGCONT)
    (late,) = pool.collect()
    assert late > STOPPED_S / 2


def _after(seconds: float, function: Callable[[], None]) -> None:
    time.sleep(seconds)
    function()


def _slow_handshakes(rank: Rank, slow: bool) -> None:
    if slow:
        rank.barrier = partial(_after, 2 * HANDSHAKE_S, rank.barrier)  # type: ignore[method-assign]
    else:
        del rank.barrier


@pytest.mark.worlds(2)
def test_a_timeout_follows_what_the_ranks_take_to_meet(pool: Pool) -> None:
    assert timeout_now(pool) >= TIMEOUT
    pool.run(_slow_handshakes, True)
    try:
        assert timeout_now(pool, 3.0) > 6.0
        assert pace() > 2.0
    finally:
        pool.run(_slow_handshakes, False)
