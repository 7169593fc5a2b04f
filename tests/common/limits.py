"""Limits in seconds that follow what this machine does at that moment.

LATENESS   A thread of the test process sleeps for `PERIOD` again and again, and keeps when it woke
           later than it had asked for. A limit grows by that, within its own interval alone: an
           error may come as late as a thread that has nothing to do but to wake up, and no later.
PACE       `timeout_now` asks how long a known handshake of the ranks takes now, compared with an
           idle machine. By that the timeout is longer, so that nobody exceeds it who is not meant
           to, and so is what follows it in that test.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .attempt import Attempt
    from .pool import Pool
    from .rank import Rank

# In seconds, on an idle machine.
SLACK = 1.0  # past its timeout every rank must know within that
AT_ONCE = 0.5  # for what waits for nobody
TIMEOUT = 1.0  # of communicators whose ranks are to wait in vain

PERIOD = 0.01
HANDSHAKES = 20
HANDSHAKE_S = 0.0025  # as long may each of them take on an idle machine

_pace = 1.0  # of the running test: how many times longer than that they took


class Heart:
    """Beats, and remembers which beats came late. Times are of time.monotonic(), which all
    processes of a machine share."""

    def __init__(self) -> None:
        self._late: deque[tuple[float, float]] = deque(maxlen=100_000)  # due, woken
        self._thread = threading.Thread(target=self._beat, daemon=True, name="heart")

    def start(self) -> None:
        self._thread.start()

    def _beat(self) -> None:
        while True:
            due = time.monotonic() + PERIOD
            time.sleep(PERIOD)
            self.record(due, time.monotonic())

    def record(self, due: float, woken: float) -> None:
        """A beat that was due at one moment and came at another."""
        self._late.append((due, woken))

    def late(self, start: float, end: float) -> float:
        """Seconds from `start` to `end` in which a beat was due and did not come."""
        beats = self._late.copy()
        return sum(max(0.0, min(woken, end) - max(due, start)) for due, woken in beats)


HEART = Heart()


def pace() -> float:
    """How many times longer than on an idle machine the ranks of the running test took to meet."""
    return _pace


def forget_pace() -> None:
    """Between tests."""
    global _pace
    _pace = 1.0


def overdue(found: Attempt, due: float, slack: float, heart: Heart = HEART) -> float:
    """Seconds by which an attempt ended too late: its end was due `due` seconds after its start,
    and `slack` later at the most, but for as long as the machine was late since then."""
    since, end = found.started + due, found.started + found.seconds
    return end - since - slack - heart.late(since, end)


def assert_in_time(found: Attempt, due: float = 0.0, slack: float = SLACK) -> None:
    """Fails if the attempt did not end when it had to. Without `due`: it had nothing to wait
    for."""
    slack *= _pace
    over = overdue(found, due, slack)
    assert over < 0, f"{over:.2f} s too late ({due:.2f} s + {slack:.2f} s were left): {found}"


def _handshakes(rank: Rank) -> float:
    started = time.monotonic()
    for _ in range(HANDSHAKES):
        rank.barrier()
    return (time.monotonic() - started) / HANDSHAKES


def timeout_now(pool: Pool, least: float = TIMEOUT) -> float:
    """A timeout for a communicator whose ranks do what they can in time, unless the test keeps
    them from it: `least` seconds, or longer on a machine that is busy now."""
    global _pace
    _pace = max(1.0, max(pool.run(_handshakes)) / HANDSHAKE_S)
    return least * _pace
