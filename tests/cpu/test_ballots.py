"""Tests that ranks meet in the open attempt of a ballot, whatever earlier attempts left in the
store. The ranks are threads, and the store is in memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from collx._bootstrap.store import LEFT, Ballot, VoteError

SHORT = 0.3
ENOUGH = 20.0


def _store() -> dist.Store:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=ENOUGH))
    return store


def _together(*calls: Callable[[], Any]) -> list[Any]:
    """Runs the calls at the same time. Returns what each one returned or raised."""
    with ThreadPoolExecutor(len(calls)) as threads:
        running: list[Future[Any]] = [threads.submit(call) for call in calls]
        return [each.exception() or each.result() for each in running]


def _ballots(store: dist.Store, timeout: float = ENOUGH) -> list[Ballot]:
    return [Ballot(store, "name", rank, 2, timeout) for rank in range(2)]


def _meet(ballots: list[Ballot], step: str = "step") -> list[Any]:
    first, second = ballots
    return _together(lambda: first.vote(step, "a"), lambda: second.vote(step, "b"))


def test_attempts_that_succeed_follow_each_other() -> None:
    store = _store()
    for _ in range(3):
        ballots = _ballots(store)
        assert _meet(ballots) == _meet(ballots, "another") == [["a", "b"]] * 2
        _together(*(ballot.leave for ballot in ballots))
    assert store.num_keys() == 1  # the number of the open attempt


def test_a_rank_that_missed_attempts_joins_the_open_one() -> None:
    store = _store()
    for _ in range(3):
        with pytest.raises(VoteError, match="rank 1: no answer"):
            Ballot(store, "name", 0, 2, SHORT).vote("step")
    assert _meet(_ballots(store)) == [["a", "b"]] * 2


def test_a_rank_that_asks_within_an_attempt_that_fails_hears_of_it() -> None:
    """A rank joins while the attempt is open, and votes after it has failed."""
    store = _store()
    late = Ballot(store, "name", 1, 2, ENOUGH)
    with pytest.raises(VoteError, match="rank 1: no answer"):
        Ballot(store, "name", 0, 2, SHORT).vote("step")
    with pytest.raises(VoteError, match="rank 1: no answer"):
        late.vote("step")
    assert _meet(_ballots(store)) == [["a", "b"]] * 2


def test_an_attempt_that_a_rank_gave_up_without_a_verdict_does_not_succeed() -> None:
    """The vote of the rank may be in the store, but its peer must not continue alone."""
    store = _store()
    given_up, peer = _ballots(store, SHORT)
    given_up.cast_left("KeyboardInterrupt")
    ballots = [Ballot(store, "name", 0, 2, ENOUGH)]
    with pytest.raises(VoteError, match="rank 0: left the communicator: it began again"):
        peer.vote("step")
    ballots.append(Ballot(store, "name", 1, 2, ENOUGH))
    assert _meet(ballots) == [["a", "b"]] * 2


def test_a_rank_that_has_left_takes_no_part_in_later_votes() -> None:
    left, peer = _ballots(_store())
    left.cast_left("KeyboardInterrupt")
    found = _meet([left, peer])
    assert [each.failures for each in found] == [{0: f"{LEFT}: KeyboardInterrupt"}] * 2


def test_a_rank_that_left_before_the_verdict_has_closed_the_attempt() -> None:
    store = _store()
    for ballot in _ballots(store):
        ballot.leave()
    assert _meet(_ballots(store)) == [["a", "b"]] * 2
    assert store.check(["collx/name/open"])
    assert store.get("collx/name/open") == b"2"


def test_a_vote_that_failed_on_all_ranks_leaves_no_keys_behind() -> None:
    store = _store()
    ballots = _ballots(store)
    for number in range(5):
        failed = _together(
            *(lambda b=ballot, n=number: b.vote(f"{n}", error="no") for ballot in ballots)
        )
        assert all(isinstance(each, VoteError) for each in failed)
    _together(*(ballot.leave for ballot in ballots))
    assert store.num_keys() == 1
