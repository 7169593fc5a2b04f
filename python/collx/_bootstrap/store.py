"""Agreement between the ranks of a communicator through the store of the process group.

A ballot is a sequence of votes. In each vote, every rank casts the result of a local step: success
with a value, or failure with a cause. All ranks get the same verdict, because a compare-and-set in
the store fixes the first verdict that any rank reaches. A rank that timed out therefore does the
same as a rank whose peer arrived a moment later.

Ballots with the same name are numbered attempts. The store contains the number of the open attempt.
A rank that begins joins the open attempt, however often it or its peers have begun before. An
attempt is closed permanently before its first verdict is fixed. A rank that arrives later therefore
begins the next attempt. Ranks of different attempts never meet, because all keys of an attempt
contain its number.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")

_OPEN = "open"  # the key for the number of the open attempt

# Prefixes of the causes of ranks that did not vote, have left, or are at another step.
ABSENT = "no answer"
LEFT = "left the communicator"
APART = "is at"

# Seconds that a rank whose step timed out gives its peers to detect the same.
_LEAST_PATIENCE = 0.4

# Additional seconds that the store has after the time limit of the ranks. It responds within
# milliseconds unless its host has exited or is stopped, or the machine is overloaded.
_STORE_GRACE = 0.9

# Seconds between two looks at the store: the first pause, its growth with the time that the wait
# has taken, and the longest pause.
_FIRST_PAUSE = 0.0002
_PAUSE_GROWTH = 0.1
_LONGEST_PAUSE = 0.01


class _Caller(threading.local):
    """The caller of `bounded` in the thread that `bounded` has started."""

    def __init__(self) -> None:
        self.gone = threading.Event()  # set when nobody waits for the thread any more


_caller = _Caller()


class VoteError(Exception):
    """A failed vote. `failures` (rank to cause) are the same on all ranks, except if the store
    failed, which each rank detects by itself."""

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

    Joins the open attempt for `name`. Waits at most `timeout` seconds. Raises the errors of the
    store, and TimeoutError if it does not respond.
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
        self._left: str | None = None  # the cause that this rank has cast for all further votes
        self._attempt, self._store = bounded(self._join, timeout + _STORE_GRACE, "store")

    def _join(self) -> tuple[int, dist.Store]:
        while True:
            attempt = int(self._attempts.compare_set(_OPEN, "", "0"))
            store = dist.PrefixStore(str(attempt), self._attempts)
            if store.add(f"joined/{self._rank}", 1) == 1:
                return attempt, store
            # This rank left this attempt before without a verdict, for example because the store
            # did not respond. Its old ballot may still exist, so the attempt must not succeed.
            self._close(attempt)
            failed = json.dumps({self._rank: f"{LEFT}: it began again"})
            store.compare_set(self._key(0, "verdict"), "", failed)

    def _close(self, attempt: int) -> None:
        self._attempts.compare_set(_OPEN, str(attempt), str(attempt + 1))

    def vote(
        self, step: str, value: Any = None, error: str | None = None, spent: float = 0.0
    ) -> list[Any]:
        """Casts a JSON-serializable `value` or a failure, and returns the values of all ranks.
        Raises the same VoteError on every rank if a rank failed, did not vote, or is at another
        step. `spent`: the seconds of the timeout that the step itself has used."""
        if self._left is not None:  # another ballot would replace the cause that peers will read
            raise VoteError(step, {self._rank: self._left}, self._world_size)
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
            # No agreement is possible without the store. Every rank detects this by itself.
            failed = {self._rank: f"the store failed: {reason}"}
            raise VoteError(step, failed, self._world_size, store_failed=True) from reason
        except BaseException as reason:
            self.cast_left(type(reason).__name__)  # so that peers need not wait
            raise
        if failures:
            raise VoteError(step, failures, self._world_size)
        return [json.loads(text)["value"] for text in ballots]

    def take(self, step: str, run: Callable[[], Any]) -> list[Any]:
        """Runs a local step and votes on its result. Returns the JSON-serializable values that
        `run` returned on all ranks. An exception in `run` is a failure in this vote, so the vote
        numbers of the ranks remain equal. VoteError then has this rank's exception as its cause."""
        value, own, started = None, None, time.monotonic()
        try:
            value = run()
        except Exception as reason:
            own = reason.with_traceback(None)  # its frames would keep memory alive in a cycle
        except BaseException as reason:
            self.cast_left(type(reason).__name__)
            raise
        error = None if own is None else cause_of(own)
        try:
            return self.vote(step, value, error, spent=time.monotonic() - started)
        except VoteError as verdict:
            if own is not None:
                raise verdict from own
            raise

    def cast_left(self, why: str) -> None:
        """Casts in the next vote, whatever its step, that this rank has left. Does not wait for
        other ranks. This rank's own later votes fail with the same cause."""
        if self.broken or self._left is not None:
            return
        self._left = f"{LEFT}: {why}"
        ballot = json.dumps({"step": None, "value": None, "error": self._left})
        with contextlib.suppress(Exception):  # The store and the peers may no longer exist.
            bounded(
                lambda: self._store.set(self._key(self._number, self._rank), ballot),
                _STORE_GRACE,
                "store",
            )

    def leave(self) -> None:
        """Leaves the ballot. The last rank to leave removes the remaining keys."""
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
            # A verdict without failures requires all ballots, so all of them exist now, even if
            # this rank timed out a moment earlier.
            ballots = [store.get(key).decode() for key in self._keys(number)]
        if None not in ballots:
            self._forget(number - 1)
        return [text or "" for text in ballots], agreed

    def _collect(self, number: int, patience: float) -> list[str | None]:
        store, keys = self._store, self._keys(number)
        # The missing ranks are determined below. A store that no longer exists raises again there.
        with contextlib.suppress(RuntimeError):
            if await_keys(store, keys, patience):
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
        # All ranks have cast their ballots in the next vote, so no rank reads this one any more.
        # Otherwise the last rank to leave removes it.
        if number >= 0:
            self._store.delete_key(self._key(number, self._rank))
            if self._rank == 0:
                self._store.delete_key(self._key(number, "verdict"))


def cause_of(error: BaseException) -> str:
    """Returns the cause that a rank casts for an exception."""
    return f"{type(error).__name__}: {error}"


def await_keys(store: dist.Store, keys: list[str], seconds: float) -> bool:
    """Returns whether the keys exist in the store within `seconds`. Raises InterruptedError if the
    caller of `bounded` does not wait any more.

    A wait of the store itself would occupy the connection that all threads of the process share,
    and it could not be ended."""
    started = time.monotonic()
    while not store.check(keys):
        waited = time.monotonic() - started
        if waited >= seconds:
            return False
        pause = min(_FIRST_PAUSE + _PAUSE_GROWTH * waited, _LONGEST_PAUSE)
        if _caller.gone.wait(min(pause, seconds - waited)):
            raise InterruptedError("the caller does not wait any more")
    return True


def bounded(function: Callable[[], T], seconds: float, what: str) -> T:
    """Runs `function` in a thread and returns its result. Raises TimeoutError after `seconds`.

    After a timeout or an interrupt, the thread remains until its current call to the store or to
    PyTorch returns. It is a daemon, so it does not prevent the process from exiting."""
    result: list[T] = []
    failure: list[BaseException] = []
    gone = threading.Event()

    def body() -> None:
        _caller.gone = gone
        try:
            result.append(function())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=body, name=f"collx-{what}", daemon=True)
    deadline = time.monotonic() + seconds
    thread.start()
    try:
        thread.join(max(0.0, deadline - time.monotonic()))
    except BaseException:
        gone.set()
        # An interpreter that exits first would end the thread within a C++ function, which aborts
        # the process.
        thread.join(_STORE_GRACE)
        raise
    if thread.is_alive():
        gone.set()
        raise TimeoutError(f"{what} did not return within {seconds:g} s")
    if failure:
        # The traceback would keep the frames and their memory alive in a cycle.
        raise failure.pop().with_traceback(None)
    return result[0]
