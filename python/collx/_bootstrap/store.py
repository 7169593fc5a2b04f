"""Agreement between the ranks of a communicator, through the process group's store.

A ballot is a sequence of votes. In each vote every rank casts the result of a local step, success
with a value or failure with a cause, and all ranks get one verdict: the first that any of them
reaches is fixed by a compare-and-set in the store. So a rank that timed out and one whose
peer came a moment later still do the same.

Ballots under one name are numbered attempts. The store holds the number of the attempt that is
open: a rank that begins joins that one, however often it or its peers have begun before. An attempt
closes for good before its first verdict is fixed. A rank that comes later therefore begins the next
attempt, and no rank of an old attempt can meet ranks of a new one: all keys of an attempt have its
number.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

__all__ = ["LEFT", "Ballot", "VoteError", "bounded", "cause_of"]

T = TypeVar("T")

_OPEN = "open"  # key of the number of the open attempt

# The causes of a rank that did not vote, has left, or is at another step start with these.
ABSENT = "no answer"
LEFT = "left the communicator"
APART = "is at"

# A rank whose step has failed by a timeout grants its peers this much to notice the same.
_LEAST_PATIENCE = 0.4

# The store answers within milliseconds unless its host has died or been stopped, or the machine is
# overloaded. After the limit of the ranks, it has this much more time.
_STORE_GRACE = 0.9


class VoteError(Exception):
    """A vote that did not pass: the same `failures` (rank to cause) on all ranks; or the store
    failed, which each rank only detects for itself."""

    def __init__(
        self, step: str, failures: dict[int, str], world_size: int, *, store_failed: bool = False
    ) -> None:
        self.step = step
        self.failures = failures
        self.store_failed = store_failed
        self.absent = self._ranks(ABSENT)
        """Ranks that did not vote in time."""
        self.left = self._ranks(LEFT)
        """Ranks that do not vote any more."""
        self.apart = bool(self._ranks(APART))
        """Whether nothing failed, but the ranks are at different steps."""
        classes = {cause.partition(":")[0] for cause in failures.values()}
        self.everywhere = (
            len(failures) == world_size and len(classes) == 1 and not (self.absent or self.left)
        )
        """Whether the step failed on every rank with an exception of the same class."""
        super().__init__("; ".join(f"rank {r}: {cause}" for r, cause in sorted(failures.items())))

    def _ranks(self, beginning: str) -> list[int]:
        return sorted(r for r, cause in self.failures.items() if cause.startswith(beginning))


class Ballot:
    """The votes of one communicator, from its init to its destruction.

    Joins the open attempt under `name`. Waits are bounded by `timeout` seconds. Raises whatever the
    store raises, TimeoutError if it does not answer.
    """

    def __init__(
        self, store: dist.Store, name: str, rank: int, world_size: int, timeout: float
    ) -> None:
        self._attempts = dist.PrefixStore(f"collx/{name}", store)
        self._rank = rank
        self._world_size = world_size
        self.timeout = timeout
        self.broken = False
        """Whether the store has failed, so that it is not used any more."""
        self._number = 0
        self._attempt, self._store = bounded(self._join, timeout + _STORE_GRACE, "store")

    def _join(self) -> tuple[int, dist.Store]:
        while True:
            attempt = int(self._attempts.compare_set(_OPEN, "", "0"))
            store = dist.PrefixStore(str(attempt), self._attempts)
            if store.add(f"joined/{self._rank}", 1) == 1:
                return attempt, store
            # This rank was in this attempt before and gave it up without a verdict, as when its
            # store did not answer. Its old ballot may stand there, so the attempt must not succeed.
            self._close(attempt)
            failed = json.dumps({self._rank: f"{LEFT}: it began again"})
            store.compare_set(self._key(0, "verdict"), "", failed)

    def _close(self, attempt: int) -> None:
        self._attempts.compare_set(_OPEN, str(attempt), str(attempt + 1))

    def vote(
        self, step: str, value: Any = None, error: str | None = None, spent: float = 0.0
    ) -> list[Any]:
        """Casts `value` (anything that JSON holds), or a failure, and returns the values of all
        ranks. VoteError, the same on every rank, if one failed, did not come, or is at another
        step. `spent` seconds of the timeout have gone to the step itself."""
        patience = max(self.timeout - spent, _LEAST_PATIENCE)
        number = self._number
        self._number += 1
        ballot = json.dumps({"step": step, "value": value, "error": error})
        try:
            ballots, failures = bounded(
                lambda: self._decide(number, ballot, patience), patience + _STORE_GRACE, "vote"
            )
        except Exception as reason:
            self.broken = True
            # No agreement is possible without the store; every rank finds out by itself.
            failed = {self._rank: f"the store failed: {reason}"}
            raise VoteError(step, failed, self._world_size, store_failed=True) from reason
        if failures:
            raise VoteError(step, failures, self._world_size)
        return [json.loads(text)["value"] for text in ballots]

    def take(self, step: str, run: Callable[[], Any]) -> list[Any]:
        """Takes a local step and votes on what came of it: returns what `run` returned on all
        ranks, anything that JSON holds. Whatever `run` raises is a failure in that vote, so no
        rank is left a number behind; VoteError then has this rank's own exception as its cause."""
        value, own, started = None, None, time.monotonic()
        try:
            value = run()
        except Exception as reason:
            own = reason.with_traceback(None)  # whose frames would hold memory, in a cycle
        except BaseException as reason:
            self.cast(f"{LEFT}: {type(reason).__name__}")
            raise
        error = None if own is None else cause_of(own)
        try:
            return self.vote(step, value, error, spent=time.monotonic() - started)
        except VoteError as verdict:
            if own is not None:
                raise verdict from own
            raise

    def cast(self, error: str) -> None:
        """Casts a failure in the next vote, whichever it is, and waits for no rank."""
        ballot = json.dumps({"step": None, "value": None, "error": error})
        if self.broken:
            return
        with contextlib.suppress(Exception):  # The store and the peers may no longer exist.
            bounded(
                lambda: self._store.set(self._key(self._number, self._rank), ballot),
                _STORE_GRACE,
                "store",
            )

    def leave(self) -> None:
        """Ends this rank's part. The last rank to leave removes what the votes left behind."""
        if self.broken:
            return
        with contextlib.suppress(Exception):  # A store that no longer exists keeps no keys.
            bounded(self._leave, self.timeout, "store")

    def _leave(self) -> None:
        self._close(self._attempt)  # This rank may leave without having seen a verdict.
        if self._store.add("left", 1) == self._world_size:
            for number in range(max(0, self._number - 2), self._number + 1):
                for rank in range(self._world_size):
                    self._store.delete_key(self._key(number, rank))
                self._store.delete_key(self._key(number, "verdict"))
            for rank in range(self._world_size):
                self._store.delete_key(f"joined/{rank}")
            self._store.delete_key("left")

    def _key(self, number: int, owner: int | str) -> str:
        return f"{number}/{owner}"

    def _keys(self, number: int) -> list[str]:
        return [self._key(number, rank) for rank in range(self._world_size)]

    def _decide(
        self, number: int, ballot: str, patience: float
    ) -> tuple[list[str], dict[int, str]]:
        store = self._store
        store.set(self._key(number, self._rank), ballot)
        ballots = self._collect(number, patience)
        failures = self._judge(ballots)
        if number == 0:
            self._close(self._attempt)  # before there is a verdict that a late rank could miss
        verdict = store.compare_set(self._key(number, "verdict"), "", json.dumps(failures))
        agreed = {int(rank): str(cause) for rank, cause in json.loads(verdict).items()}
        if not agreed and None in ballots:
            # A verdict without failures was reached on all ballots, so all of them are there by
            # now, even if this rank's own patience ended a moment before.
            ballots = [store.get(key).decode() for key in self._keys(number)]
        if None not in ballots:
            self._forget(number - 1)
        return [text or "" for text in ballots], agreed

    def _collect(self, number: int, patience: float) -> list[str | None]:
        store, keys = self._store, self._keys(number)
        # The missing ranks are found below. A store that no longer exists raises there again.
        with contextlib.suppress(RuntimeError):
            store.wait(keys, timedelta(seconds=patience))
            return [text.decode() for text in store.multi_get(keys)]
        return [store.get(key).decode() if store.check([key]) else None for key in keys]

    def _judge(self, ballots: list[str | None]) -> dict[int, str]:
        failures: dict[int, str] = {}
        steps: dict[int, str] = {}
        for rank, text in enumerate(ballots):
            if text is None:
                failures[rank] = f"{ABSENT} within {self.timeout:g} s"
                continue
            ballot = json.loads(text)
            steps[rank] = ballot["step"]
            if ballot["error"] is not None:
                failures[rank] = ballot["error"]
        if not failures and len(set(steps.values())) > 1:
            failures = {rank: f"{APART} {step!r}" for rank, step in steps.items()}
        return failures

    def _forget(self, number: int) -> None:
        # All ranks have cast their ballots in the next vote, so none reads this one any more. If
        # some have not, the last rank to leave removes this one.
        if number >= 0:
            self._store.delete_key(self._key(number, self._rank))
            if self._rank == 0:
                self._store.delete_key(self._key(number, "verdict"))


def cause_of(error: BaseException) -> str:
    """How a rank's exception is cast."""
    return f"{type(error).__name__}: {error}"


def bounded(function: Callable[[], T], seconds: float, what: str) -> T:
    """Runs `function` in a thread and returns its result, or raises TimeoutError in `seconds`.

    Only then is the thread left behind: nothing else can be done about a call that does not
    return. It is a daemon, so it does not keep the process."""
    result: list[T] = []
    failure: list[BaseException] = []

    def body() -> None:
        try:
            result.append(function())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=body, name=f"collx-{what}", daemon=True)
    deadline = time.monotonic() + seconds
    thread.start()
    thread.join(max(0.0, deadline - time.monotonic()))
    if thread.is_alive():
        raise TimeoutError(f"{what} did not return within {seconds:g} s")
    if failure:
        # Its traceback would keep the frames, and all memory that they hold, in a cycle.
        raise failure.pop().with_traceback(None)
    return result[0]
