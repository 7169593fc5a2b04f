"""Time limits in seconds that adapt to the load of the machine.

LATENESS   A thread of the test process repeatedly sleeps for `PERIOD`, and records when it wakes up
           late. A limit is extended by the lateness within its own interval, or by the time for
           which the kernel did not run the attempt's own thread.
PACE       `timeout_now` measures how much longer a known handshake of the ranks takes than on an
           idle machine. It extends the timeout by this factor, so that only ranks that should
           exceed the timeout do, and also the later limits of the test.
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
SLACK = 1.0  # after the timeout, every rank must raise within this time
AT_ONCE = 0.5  # for calls that do not wait for another rank
TIMEOUT = 1.0  # of communicators whose ranks wait for a missing rank

PERIOD = 0.01
HANDSHAKES = 20
HANDSHAKE_S = 0.0025  # maximum duration of each handshake on an idle machine

_pace = 1.0  # duration of the handshakes in the running test, relative to an idle machine


class Heart:
    """Beats periodically, and records late beats. Times are those of time.monotonic(), which all
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
        """Records the due time of a beat and its actual time."""
        self._late.append((due, woken))

    def late(self, start: float, end: float) -> float:
        """Returns the seconds from `start` to `end` in which a beat was overdue."""
        beats = self._late.copy()
        return sum(max(0.0, min(woken, end) - max(due, start)) for due, woken in beats)


HEART = Heart()


def pace() -> float:
    """Returns the duration of handshakes in the running test, relative to an idle machine."""
    return _pace


def forget_pace() -> None:
    """Resets the pace between tests."""
    global _pace
    _pace = 1.0


def overdue(found: Attempt, due: float, slack: float, heart: Heart = HEART) -> float:
    """Returns the seconds by which an attempt ended too late. Its end was due `due` seconds after
    its start, with a tolerance of `slack`. The time for which the machine did not run the thread of
    the attempt, or the sleeping thread of this process, does not count."""
    since, end = found.started + due, found.started + found.seconds
    return end - since - slack - max(found.held_up, heart.late(since, end))


def assert_in_time(found: Attempt, due: float = 0.0, slack: float = SLACK) -> None:
    """Fails if the attempt ended too late. Without `due`, it did not have to wait."""
    slack *= _pace
    over = overdue(found, due, slack)
    assert over < 0, f"{over:.2f} s too late ({due:.2f} s + {slack:.2f} s were left): {found}"


def _handshakes(rank: Rank) -> float:
    started = time.monotonic()
    for _ in range(HANDSHAKES):
        rank.barrier()
    return (time.monotonic() - started) / HANDSHAKES


def timeout_now(pool: Pool, least: float = TIMEOUT) -> float:
    """Returns a timeout for a communicator that ranks only exceed if the test delays them: `least`
    seconds, or longer on a busy machine."""
    global _pace
    _pace = max(1.0, max(pool.run(_handshakes)) / HANDSHAKE_S)
    return least * _pace
