"""Voted init: if any step fails on any rank, all ranks raise the same error, in time."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

import collx
from collx._bootstrap import selftest, steps
from collx._extension import extension

from ..attempt import Attempt, allreduce, assert_raised, attempt, ones, works
from ..limits import assert_in_time, timeout_now
from ..pool import Pool, on_ranks, some_stand_for_all
from ..rank import PAYLOAD_BYTES, TIMEOUT, Rank

pytestmark = pytest.mark.alone  # ranks are killed

STEPS_WHERE_SHARED = ("arguments", "allocate", "rendezvous", "self-test")
STEP_NAMES = (
    "arguments",
    "machine",
    "peer access",
    "backend",
    "allocate",
    "initialize",
    "rendezvous",
    "blocks",
    "clusters",
    "create",
    "self-test",
    "create again",
    "ready",
)


@contextmanager
def instead_of_step(name: str, run: Callable[[Any, Callable[[Any], Any]], Any]) -> Iterator[None]:
    """This rank runs `run(setup, original)` instead of the named step of init."""
    position = [step.name for step in steps.STEPS].index(name)
    original = steps.STEPS[position]
    steps.STEPS[position] = replace(original, run=lambda setup: run(setup, original.run))
    try:
        yield
    finally:
        steps.STEPS[position] = original


def _before_step(name: str, action: Callable[[], None]) -> AbstractContextManager[None]:
    """Runs `action` before this rank runs the named step of init."""

    def run(setup: Any, original: Callable[[Any], Any]) -> Any:
        action()
        return original(setup)

    return instead_of_step(name, run)


@pytest.mark.worlds(1)
@on_ranks
def test_every_step_of_init_has_its_faults(rank: Rank) -> None:
    """The control of this file: a new step of init must be added to these tests."""
    assert tuple(step.name for step in steps.STEPS) == STEP_NAMES


def _raise() -> None:
    raise OSError("the injected fault")


def _init_with(
    rank: Rank, where: int, step: str, action: Callable[[], None], timeout: float
) -> Attempt:
    def make() -> None:
        with rank.new_communicator("voted", timeout=timeout):
            pass

    if rank.rank == where:
        with _before_step(step, action):
            return attempt(make)
    reached = []
    with _before_step(step, lambda: reached.append(time.monotonic())):
        found = attempt(make)
    # Time only from here on, where this rank waits for the faulty one.
    since = reached[0] - found.started if reached else 0.0
    return replace(found, started=found.started + since, seconds=found.seconds - since)


@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize("step", STEP_NAMES)
@on_ranks
def test_a_fault_in_a_step_fails_init_alike_on_all_ranks(
    rank: Rank, step: str, timeout: float
) -> None:
    """Hazard 6: the same InitError everywhere, with rank, step and cause; then init works."""
    some_stand_for_all(rank, rank.size == 2)
    where = rank.size - 1
    found = _init_with(rank, where, step, _raise, timeout)
    assert set(rank.gather(found.message)) == {found.message}
    assert _begins_again(rank, "voted")
    assert_raised(found, "InitError", f"rank {where}", step, "the injected fault")


def _absence(rank: Rank, where: int, step: str, timeout: float) -> Attempt:
    assert _begins_again(rank, "warm")  # loads the kernels, so that the timed init does not
    # The faulty rank stays in the step until the others have given up.
    found = _init_with(rank, where, step, rank.barrier, timeout)
    if rank.rank != where:
        rank.barrier()
    rank.barrier()
    if step != "rendezvous":  # a process is not always reusable after an abandoned rendezvous
        assert _begins_again(rank, "voted")
    return found


def _begins_again(rank: Rank, name: str) -> bool:
    """Returns whether the communicator works after init with a name that failed before."""
    with rank.new_communicator(name) as communicator:
        return works(rank, communicator)


@pytest.mark.worlds(2)
@pytest.mark.parametrize("step", STEP_NAMES)
def test_a_rank_that_never_reaches_a_step_fails_init_in_time(pool: Pool, step: str) -> None:
    """Hazards 6 and 8: no step of init waits forever."""
    some_stand_for_all(pool, step in STEPS_WHERE_SHARED)
    timeout = timeout_now(pool)
    present, absent = pool.run(_absence, 1, step, timeout)
    for result in (present, absent):
        assert_raised(result, "InitError", step, "rank 1")
    # Two steps have their own wait, and the vote that follows waits again: PyTorch's rendezvous,
    # and on GPUs the kernel that waits for all ranks.
    waits = step == "rendezvous" or (step == "clusters" and pool.world.device == "cuda")
    assert_in_time(present, (2 if waits else 1) * timeout)
    if step == "rendezvous":
        pool.kill()


@pytest.mark.worlds(2)
@pytest.mark.parametrize("step", STEP_NAMES)
@on_ranks
def test_a_slow_step_is_no_failure(rank: Rank, step: str, timeout: float) -> None:
    """The negative control of the limits: one step is slow, and init succeeds."""
    found = _init_with(rank, 0, step, lambda: time.sleep(timeout / 4), timeout)
    rank.barrier()
    assert found.error == "", found


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _death(rank: Rank, where: int, step: str, timeout: float) -> Attempt:
    return _init_with(rank, where, step, _die, timeout)


@pytest.mark.worlds(2)
@pytest.mark.parametrize("step", ["arguments", "allocate", "rendezvous", "self-test", "ready"])
def test_a_rank_killed_within_init_fails_it_in_time(pool: Pool, step: str) -> None:
    """Hazards 6 and 22: a rank killed at any step, also before the rendezvous."""
    some_stand_for_all(pool, step in STEPS_WHERE_SHARED[1:])
    timeout = timeout_now(pool)
    pool.submit(_death, 1, step, timeout)
    try:
        (survivor,) = pool.collect([0])
    finally:
        pool.kill()
    assert_raised(survivor, "InitError", "rank 1")
    assert_in_time(survivor, 2 * timeout)


def _nobody_else(rank: Rank, timeout: float) -> Attempt:
    found = Attempt("", "", 0.0)
    if rank.rank == 0:
        found = attempt(lambda: rank.new_communicator("alone", timeout=timeout))
    rank.barrier()
    assert _begins_again(rank, "alone")
    return found


@pytest.mark.worlds(2, 3)
def test_init_on_one_rank_only_ends(pool: Pool) -> None:
    """Hazard 6: the others do not call init at all. Then all of them do, and it succeeds."""
    timeout = timeout_now(pool)
    found = pool.run(_nobody_else, timeout)[0]
    assert_raised(found, "InitError", "rank 1")
    assert_in_time(found, timeout)


def _interrupt_after(seconds: float, call: Callable[[], object]) -> None:
    """Sends SIGINT to this thread, the main thread, during the call."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    signals = (threading.get_ident(), signal.SIGINT)
    threading.Timer(seconds, signal.pthread_kill, signals).start()
    try:
        call()
    except KeyboardInterrupt:
        raise RuntimeError("interrupted") from None
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.worlds(2, 3)
@on_ranks
def test_an_interrupt_ends_a_vote_at_once(rank: Rank) -> None:
    """Rank 0 is interrupted while it waits for the other ranks: in init, and in empty. The ranks
    may call init again, and the peers of an established communicator learn of it."""

    def interrupt_the_first(call: Callable[[], object]) -> None:
        if rank.rank == 0:
            found = attempt(lambda: _interrupt_after(0.3, call))
            assert found.message == "interrupted", found
            assert found.seconds < TIMEOUT / 4, found
        rank.barrier()

    interrupt_the_first(lambda: rank.new_communicator("interrupted"))
    communicator = rank.new_communicator("interrupted")
    interrupt_the_first(lambda: communicator.empty(0))
    message = ""
    if rank.rank != 0:
        communicator.empty(0)
        refused = attempt(lambda: communicator.empty(8))
        message = refused.message
        assert refused.error == "CollectiveTimeout", refused
        assert "rank 0" in message, refused
        assert refused.seconds < TIMEOUT / 4, refused
    messages = rank.gather(message)
    communicator.destroy()
    # The others may learn of it from the first one before they vote.
    words = "rank 0: left the communicator: KeyboardInterrupt"
    assert any(words in each for each in messages), messages


def _destroyed_after_an_interrupt(rank: Rank, timeout: float) -> Attempt:
    communicator = rank.new_communicator("left", call_timeout=timeout)
    if rank.rank == 0:
        attempt(lambda: _interrupt_after(0.3, lambda: communicator.empty(8)))
    rank.barrier()
    if rank.rank == 0:
        return attempt(communicator.destroy)
    time.sleep(timeout / 4)
    found = attempt(lambda: communicator.empty(8))
    communicator.destroy()
    return found


@pytest.mark.worlds(2, 3)
def test_a_rank_that_ends_after_an_interrupt_waits_for_no_rank_and_blames_none(pool: Pool) -> None:
    """Its vote on the end does not replace what it told the others when it was interrupted."""
    timeout = timeout_now(pool)
    destroyed, *others = pool.run(_destroyed_after_an_interrupt, timeout)
    assert destroyed.error == "", destroyed
    for refused in others:
        assert_raised(refused, "CollectiveTimeout", "rank 0")
        assert "no answer" not in refused.message, refused
        assert_in_time(refused, timeout)
    words = "rank 0: left the communicator: KeyboardInterrupt"
    assert any(words in refused.message for refused in others), others


@pytest.mark.worlds(2, 3)
@on_ranks
def test_init_works_after_a_rank_refused_its_group(rank: Rank, timeout: float) -> None:
    """The rank does not know its peers, so it cannot notify them. The next attempt succeeds."""
    group = "no such group" if rank.rank == 0 else None
    found = attempt(
        lambda: collx.init(group, name="test-early", device=rank.device, timeout=timeout)
    )
    rank.barrier()
    assert _begins_again(rank, "early")
    assert found.error == ("ValueError" if rank.rank == 0 else "InitError"), found
    assert rank.rank == 0 or "rank 0: no answer" in found.message


@pytest.mark.worlds(2, 3)
@on_ranks
def test_a_rank_that_is_an_attempt_late_joins_the_next_one(rank: Rank, timeout: float) -> None:
    """Ranks agree on the number of an attempt, whatever each rank has counted. The last rank starts
    its first attempt when all others start their second one."""
    late = rank.rank == rank.size - 1
    if not late:
        found = attempt(lambda: rank.new_communicator("late", timeout=timeout))
        assert found.error == "InitError", found
    rank.barrier()
    if late:
        time.sleep(0.1)
    assert _begins_again(rank, "late")


@pytest.mark.worlds(2, 3)
@on_ranks
def test_ranks_of_an_abandoned_attempt_do_not_meet_those_of_the_next(
    rank: Rank, timeout: float
) -> None:
    """Rank 1 is still in the first attempt while the others wait for it in the second one. It
    raises the error of the old attempt, and then joins the new one."""

    def hold() -> None:
        rank.barrier()  # the others have given up
        time.sleep(timeout / 2)

    with _before_step("allocate", hold) if rank.rank == 1 else nullcontext():
        found = attempt(lambda: rank.new_communicator("stuck", timeout=timeout))
    if rank.rank != 1:
        rank.barrier()
    assert _begins_again(rank, "stuck")
    assert_raised(found, "InitError", "allocate", "rank 1: no answer")


_DIFFERENT: dict[str, tuple[Any, Any]] = {
    "payload_bytes": (8 << 20, 4 << 20),
    "timeout": (30.0, 45.0),
    "check": (True, False),
    "pdl": ("off", "early"),
    "deterministic": (True, False),
}


@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize("option", sorted(_DIFFERENT))
@on_ranks
def test_options_that_differ_between_ranks_are_refused_by_name(rank: Rank, option: str) -> None:
    """Hazard 5: ranks exchange the options that must agree."""
    value = _DIFFERENT[option][min(rank.rank, 1)]
    found = attempt(lambda: rank.new_communicator("options", **{option: value}))
    rank.barrier()
    with rank.new_communicator("options") as communicator:
        assert works(rank, communicator)
    assert_raised(found, "InitError", option)


def _different_name(rank: Rank, timeout: float) -> Attempt:
    found = attempt(lambda: rank.new_communicator(f"name{rank.rank}", timeout=timeout))
    rank.barrier()
    assert all(_begins_again(rank, f"name{each}") for each in range(rank.size))
    return found


@pytest.mark.worlds(2)
def test_names_that_differ_between_ranks_end_in_an_error(pool: Pool) -> None:
    """Hazard 5: ranks that look for each other under different names do not wait forever."""
    timeout = timeout_now(pool)
    for result in pool.run(_different_name, timeout):
        assert result.error == "InitError", result
        assert_in_time(result, timeout)


@contextmanager
def _swapped(first: str, second: str) -> Iterator[None]:
    """Swaps two steps of init on this rank."""
    names = [step.name for step in steps.STEPS]
    i, j = names.index(first), names.index(second)
    steps.STEPS[i], steps.STEPS[j] = steps.STEPS[j], steps.STEPS[i]
    try:
        yield
    finally:
        steps.STEPS[i], steps.STEPS[j] = steps.STEPS[j], steps.STEPS[i]


def _initialized_late(rank: Rank, swapped: bool, timeout: float) -> tuple[Attempt, float, float]:
    """Returns init's outcome, and when this rank had initialized and when it shared its region."""
    ready = known = 0.0

    def initialize(setup: Any, original: Callable[[Any], Any]) -> None:
        nonlocal ready
        setup.region.fill_(0xA5)  # new memory often happens to be zero
        rank.synchronize()
        if rank.rank == 0:
            time.sleep(timeout / 4)
        original(setup)
        ready = time.monotonic()

    def meet(setup: Any, original: Callable[[Any], Any]) -> Any:
        nonlocal known
        known = time.monotonic()
        return original(setup)

    def make() -> None:
        with rank.new_communicator("initialized", timeout=timeout) as communicator:
            assert works(rank, communicator)

    with ExitStack() as stack:
        stack.enter_context(instead_of_step("initialize", initialize))
        stack.enter_context(instead_of_step("rendezvous", meet))
        if swapped:
            stack.enter_context(_swapped("initialize", "rendezvous"))
        found = attempt(make)
    rank.barrier()
    return found, ready, known


@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize("swapped", [False, True], ids=["", "swapped"])
def test_a_region_is_ready_before_a_peer_can_know_it(pool: Pool, swapped: bool) -> None:
    """Hazard 10: every rank initializes its memory, however late it is, before any rank shares its
    region. The control swaps the two steps."""
    some_stand_for_all(pool, pool.size == 2)
    results = pool.run(_initialized_late, swapped, timeout_now(pool))
    in_order = max(ready for _, ready, _ in results) < min(known for *_, known in results)
    assert in_order != swapped, results
    if swapped:
        pool.kill()  # the wrong order may have left any state
    else:
        assert [found.error for found, *_ in results] == [""] * pool.size, results


@pytest.mark.worlds(2)
@pytest.mark.parametrize("fails", [False, True], ids=["", "fails"])
@on_ranks
def test_what_follows_a_failed_test_of_multicast_is_voted(rank: Rank, fails: bool) -> None:
    """All ranks create their communicator again without multicast. If one fails, all fail."""
    calls = 0

    def initialize(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if fails and rank.rank == 0 and calls == 2:
            _raise()
        original(*arguments)

    original = extension.initialize_region
    found_wrong = instead_of_step("self-test", lambda setup, run: run(setup) or "wrong data")
    with found_wrong, mock.patch.object(extension, "initialize_region", initialize):
        found = attempt(lambda: _begins_again(rank, "again"))
    rank.barrier()
    assert calls == 2, calls
    assert found.error == ("InitError" if fails else ""), found
    assert not fails or "rank 0: OSError: the injected fault" in found.message, found


@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize("step", ["machine", "peer access"])
@on_ranks
def test_without_direct_access_all_ranks_fall_back_and_say_why(rank: Rank, step: str) -> None:
    """Hazards 5, 18 and 21: a limitation of one rank applies to all ranks; only rank 0 warns."""
    if step == "peer access" and rank.device.type == "cpu":
        pytest.skip("on CPU every rank of a machine reaches the others")

    def elsewhere(setup: Any, original: Callable[[Any], Any]) -> Any:
        value = original(setup)
        if rank.rank != rank.size - 1:
            return value
        return "another machine" if step == "machine" else [value[0], "peer of rank 0"]

    def unreachable(setup: Any, original: Callable[[Any], Any]) -> Any:
        # Rank 0's GPU gets a unique name, and the last rank does not reach it.
        device, index, *rest = original(setup)
        if rank.rank == 0:
            return ["peer of rank 0", index, *rest]
        return [device, index, "peer of rank 0"] if rank.rank == rank.size - 1 else [device, index]

    other = elsewhere if step == "machine" else unreachable
    with instead_of_step(step, other), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        communicator = collx.init(
            name="apart", device=rank.device, payload_bytes=PAYLOAD_BYTES, timeout=TIMEOUT
        )
    reason = communicator.fallback_reason
    reasons = rank.gather(reason)
    well = works(rank, communicator)
    algorithm = communicator.explain("allreduce", 100).algorithm
    forced = attempt(lambda: allreduce(communicator, ones(rank), "oneshot_push"))
    of_empty = allreduce(communicator, communicator.empty((9,)).fill_(2))
    communicator.destroy()
    assert reason
    assert set(reasons) == {reason}
    assert well
    assert bool((of_empty > 2).all())
    assert algorithm == "fallback"
    assert forced.error == "NotImplementedError", forced
    assert (rank.rank == 0) == any(reason in str(warning.message) for warning in caught)
    places = {warning.filename for warning in caught}
    assert rank.rank != 0 or places == {__file__}, "a warning points at the caller of init"


@pytest.mark.worlds(2, 3)
@on_ranks
def test_wrong_data_in_the_self_test_fails_init(rank: Rank, timeout: float) -> None:
    """Hazard 18: the self-test exchanges real data and detects access that delivers wrong data.
    Rank 0 sends another value in one element than the other ranks expect."""
    original = selftest._values

    def values(rank: int, dtype: torch.dtype) -> torch.Tensor:
        made = original(rank, dtype)
        if rank == 0:
            made[4098] += 1
        return made

    with mock.patch.object(selftest, "_values", values) if rank.rank == 0 else nullcontext():
        found = attempt(lambda: rank.new_communicator("wrong", timeout=3 * timeout))
    rank.barrier()
    assert_raised(found, "InitError", "self-test", "4098")
