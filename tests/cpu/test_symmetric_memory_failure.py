"""Tests that failures of CPU symmetric memory end in time on every rank, name the failed rank, and
leave nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from tests.common.attempt import Attempt, assert_raised, attempt, in_a_child
from tests.common.limits import assert_in_time, timeout_now
from tests.common.pool import Pool, on_ranks
from tests.common.rank import Rank
from tests.common.worlds import World

from .symmetric_memory import (
    Holdings,
    HookedStore,
    allocate,
    holdings,
    lend_group,
    orphans_in_shm,
    rendezvous,
    world_group,
    world_store,
)

VICTIM = 1


@pytest.fixture
def mortal() -> Iterator[Pool]:
    """Yields a pool of three ranks that a test may kill."""
    pool = Pool(World("cpu", 3))
    yield pool
    pool.kill()


def _await_signals(rank: Rank) -> list[Attempt]:
    handle = rendezvous(allocate(1), world_group())
    rank.barrier()
    results = [attempt(lambda: handle.wait_signal(1 - rank.rank, channel=5, timeout_ms=200))]
    rank.barrier()
    if rank.rank == 0:
        results.append(attempt(lambda: handle.barrier(channel=6, timeout_ms=200)))
    rank.barrier()
    return results


@pytest.mark.worlds(2)
def test_waits_end_in_time_and_name_rank_channel_and_peer(pool: Pool) -> None:
    results = pool.run(_await_signals)
    for rank, (wait, *_) in enumerate(results):
        words = (f"rank {rank} ", "200 ms", "channel 5", f"rank {1 - rank} to signal")
        assert_raised(wait, "RuntimeError", *words)
        assert wait.seconds >= 0.2
        assert_in_time(wait, 0.2)
    barrier = results[0][1]
    assert "channel 6 waiting for rank 1 to arrive" in barrier.message
    assert barrier.seconds >= 0.2
    assert_in_time(barrier, 0.2)


@pytest.mark.worlds(2)
@on_ranks
def test_wrong_arguments_are_refused_and_the_handle_works_on(rank: Rank) -> None:
    handle = rendezvous(allocate(1), world_group())
    channels = handle.signal_pad_size // 4 // rank.size
    calls: list[Callable[[], None]] = [
        lambda: handle.barrier(channel=channels),
        lambda: handle.barrier(channel=-1),
        lambda: handle.put_signal(rank.size, channel=0),
        lambda: handle.wait_signal(-1, channel=0),
    ]
    assert [attempt(call).error for call in calls] == ["ValueError"] * len(calls)
    handle.barrier(channel=channels - 1)


@pytest.mark.worlds(2, 4)
@on_ranks
def test_other_sizes_or_offsets_raise_on_every_rank_and_the_group_works_on(rank: Rank) -> None:
    tensor = allocate(100 + 28 * (rank.rank == VICTIM))
    size = attempt(lambda: rendezvous(tensor, world_group()))
    equal = allocate(100)
    part = equal[8 * (rank.rank == VICTIM) :]
    inside = torch.from_numpy(part.numpy())
    offset = attempt(lambda: rendezvous(inside, world_group()))
    rendezvous(equal, world_group()).barrier(channel=0)
    assert "sizes in bytes differ" in size.message
    assert "rank 0: 400" in size.message
    assert "rank 1: 512" in size.message
    assert "offsets in bytes differ" in offset.message
    assert "rank 1: 32" in offset.message


class _FatalStore(HookedStore):
    """Stops or kills this process before or after an action with a key of a step. `moment` contains
    "before" or "after", the action and the step."""

    def __init__(self, store: Any, moment: str, number: signal.Signals, timeout: float) -> None:
        super().__init__(store, timeout)
        self._moment = moment
        self._number = number

    def _fall(self, moment: str, key: str) -> None:
        when, action, step = self._moment.split()
        if moment == f"{when} {action}" and f"/{step}" in key:
            os.kill(os.getpid(), self._number)

    def before(self, action: str, key: str) -> None:
        self._fall(f"before {action}", key)

    def after(self, action: str, key: str, value: bytes) -> None:
        self._fall(f"after {action}", key)


def _meet_a_victim(
    rank: Rank, moment: str, number: signal.Signals, timeout: float
) -> tuple[Attempt, Holdings, Holdings]:
    store: HookedStore = HookedStore(world_store(), timeout)
    if rank.rank == VICTIM:
        store = _FatalStore(world_store(), moment, number, timeout)
    group = lend_group(rank, "victims", store)
    allocate(1)
    rank.barrier()  # so that only the victim misses the deadline
    before = holdings()
    result = attempt(lambda: rendezvous(allocate(1 << 20), group))
    return result, before, holdings()


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("before add meetings", signal.SIGKILL),
        ("before set offer", signal.SIGKILL),
        ("after set offer", signal.SIGKILL),
        ("after set offer", signal.SIGSTOP),
        ("after get offer/2", signal.SIGKILL),  # before it sends its descriptors
        ("before set verdict", signal.SIGKILL),  # after all ranks have mapped the memory
        ("before set verdict", signal.SIGSTOP),
    ],
)
def test_a_rank_lost_in_a_rendezvous_is_named_in_time_and_leaves_nothing(
    mortal: Pool, moment: str, number: signal.Signals
) -> None:
    mortal.start()
    orphans = orphans_in_shm()
    timeout = timeout_now(mortal, 2.0)
    mortal.submit(_meet_a_victim, moment, number, timeout)
    for result, before, after in mortal.collect(ranks=[0, 2]):
        assert_raised(result, "RuntimeError", f"rank {VICTIM}")
        assert_in_time(result, timeout)
        assert after.beyond(before) == []
    assert orphans_in_shm() <= orphans


def _lose_a_peer_later(rank: Rank) -> Attempt:
    handle = rendezvous(allocate(4), world_group())
    handle.barrier(channel=0)
    if rank.rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    return attempt(lambda: handle.barrier(channel=0, timeout_ms=500))


def test_a_rank_killed_after_the_rendezvous_is_named_by_the_next_barrier(mortal: Pool) -> None:
    mortal.submit(_lose_a_peer_later)
    for result in mortal.collect(ranks=[0, 2]):
        assert "500 ms on channel 0 waiting for rank 1" in result.message
        assert_in_time(result, 0.5)


def _miss_one_meeting(rank: Rank, timeout: float) -> tuple[Attempt, Attempt]:
    world_store().set_timeout(timedelta(seconds=timeout))
    tensor = allocate(16)
    rank.barrier()
    if rank.rank == VICTIM:
        rank.barrier()  # the others have given up
    missed = attempt(lambda: rendezvous(tensor, world_group()))
    if rank.rank != VICTIM:
        rank.barrier()
    rank.barrier()
    world_store().set_timeout(timedelta(seconds=60))
    met = attempt(lambda: rendezvous(tensor, world_group()).barrier(channel=0))
    return missed, met


def test_a_late_rank_learns_at_once_that_the_others_gave_up(mortal: Pool) -> None:
    timeout = timeout_now(mortal)
    results = mortal.run(_miss_one_meeting, timeout)
    for rank, (missed, met) in enumerate(results):
        assert "waiting for rank 1" in missed.message
        assert_in_time(missed, 0.0 if rank == VICTIM else timeout)
        assert met.error == "", f"rank {rank}: {met.message}"
    assert "gave up" in results[VICTIM][0].message


class _IntrudedStore(HookedStore):
    """Connects strangers to rank 0 before this rank connects."""

    def __init__(self, store: Any) -> None:
        super().__init__(store, 30.0)
        self.strangers: list[socket.socket] = []

    def after(self, action: str, key: str, value: bytes) -> None:
        if action != "get" or "offer/0" not in key:
            return
        # The offer begins with the address: 16 characters, and the number of those in use.
        address = b"\0" + value[1 : 1 + value[17]]
        read, write = os.pipe()
        impostor = (1).to_bytes(4, "little") + bytes(32)  # claims to be rank 1
        for message in (b"", b"x", impostor, impostor + b"x"):
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stranger.connect(address)
            if message:
                socket.send_fds(stranger, [message], [read, write])
            self.strangers.append(stranger)
        os.close(read)
        os.close(write)
        time.sleep(0.2)


@pytest.mark.worlds(2)
@on_ranks
def test_strangers_at_the_socket_are_ignored(rank: Rank) -> None:
    store: HookedStore = HookedStore(world_store(), 30.0)
    if rank.rank == 1:
        store = _IntrudedStore(world_store())
    group = lend_group(rank, "intruded", store)
    tensor = allocate(4)
    tensor.fill_(rank.rank)
    before = holdings()
    handle = rendezvous(tensor, group)
    handle.barrier(channel=0)
    assert bool((handle.get_buffer(1 - rank.rank, (4,), torch.float32) == 1 - rank.rank).all())
    rank.barrier()
    assert rank.rank == 1 or holdings().descriptors == before.descriptors


@pytest.mark.worlds(2)
@on_ranks
def test_a_forked_child_is_refused_and_its_parent_works_on(rank: Rank) -> None:
    tensor, other = allocate(4), allocate(4)
    handle = rendezvous(tensor, world_group())
    handle.barrier(channel=0)
    calls: list[Callable[[], Any]] = [
        lambda: handle.barrier(channel=0),
        lambda: handle.put_signal(1, channel=0),
        lambda: handle.wait_signal(1, channel=0),
        lambda: handle.buffer_ptrs,
        lambda: rendezvous(tensor, world_group()),
        lambda: rendezvous(other, world_group()),
        lambda: rendezvous(allocate(4), world_group()),
    ]
    for call in calls if rank.rank == 0 else []:
        assert "forked child" in in_a_child(call).splitlines()[0]
    handle.barrier(channel=0)  # the child's attempts have not reached the peer
