"""Settings of a communicator: reading, setting, and setting for a block; timeout, order, launch."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from ..attempt import assert_raised, attempt, works
from ..pool import on_ranks
from ..rank import Rank


@pytest.mark.worlds(1, 2)
@on_ranks
def test_a_setting_can_be_read_and_set_for_a_block_or_for_good(rank: Rank) -> None:
    communicator = rank.new_communicator("settings", pdl="off")
    found: list[Any] = [communicator.deterministic, communicator.pdl]
    with communicator.set_deterministic(False):
        found.append(communicator.deterministic)
    found.append(communicator.deterministic)
    communicator.set_deterministic(False)
    communicator.set_pdl("off")
    found += [communicator.deterministic, communicator.pdl]
    found += [
        attempt(lambda: communicator.set_deterministic("no")).message,
        attempt(lambda: communicator.set_pdl("late")).message,
        attempt(lambda: setattr(communicator, "deterministic", True)).error,
    ]
    assert works(rank, communicator)
    communicator.destroy()
    assert found == [
        *(True, "off", False, True, False, "off"),
        "set_deterministic: value: got a str; accepted: a bool",
        "set_pdl: level: got 'late'; accepted: 'off', 'end', 'early'",
        "AttributeError",
    ]


@pytest.mark.worlds(2)
@on_ranks
def test_a_timeout_is_a_number_of_seconds_or_a_timedelta(rank: Rank) -> None:
    found = []
    for timeout in (7, 7.5, timedelta(minutes=2)):
        with rank.new_communicator("timeouts", timeout=timeout) as communicator:
            found.append(communicator.timeout)
            communicator.set_timeout(timeout)
            found.append(communicator.timeout)
            communicator.set_timeout(timedelta(seconds=9))
            found.append(communicator.timeout)
            assert works(rank, communicator)
            assert communicator.zeros(4).sum() == 0
    assert found == [7.0, 7.0, 9.0, 7.5, 7.5, 9.0, 120.0, 120.0, 9.0]


WRONG: dict[str, tuple[Any, str, str]] = {
    "zero": (timedelta(0), "ValueError", "0:00:00"),
    "negative": (timedelta(seconds=-1), "ValueError", "-1 day"),
    "infinite": (float("inf"), "ValueError", "inf"),
    "bool": (True, "TypeError", "bool"),
    "text": ("1", "TypeError", "str"),
}


@pytest.mark.worlds(2)
@on_ranks
def test_an_invalid_timeout_is_refused_with_its_value(rank: Rank) -> None:
    communicator, before = rank.communicator(), rank.communicator().timeout
    for given, error, word in WRONG.values():
        made = attempt(lambda: rank.new_communicator("wrong", timeout=given))  # noqa: B023
        changed = attempt(lambda: communicator.set_timeout(given))  # noqa: B023
        assert_raised(made, error, "init: timeout: got", word)
        assert_raised(changed, error, "set_timeout: timeout: got", word)
    assert communicator.timeout == before
    assert works(rank, communicator)


@pytest.mark.alone
@pytest.mark.worlds(2)
@on_ranks
def test_a_timeout_that_was_set_limits_allocations(rank: Rank, timeout: float) -> None:
    communicator = rank.new_communicator("alone", rank.fresh_group(), timeout=100 * timeout)
    communicator.set_timeout(timedelta(seconds=timeout))
    if rank.rank == 0:
        found = attempt(lambda: communicator.zeros(8))
        assert found.error == "CollectiveTimeout", found
        assert found.seconds < 10 * timeout
    rank.barrier()
    attempt(communicator.destroy)
