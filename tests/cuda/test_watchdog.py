"""Threads that have never set a device, such as a watchdog. Their current device is the first one,
which most ranks do not use: a context there would take hundreds of megabytes, and a copy would be
of the wrong device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import collx
from tests.common.attempt import Attempt, allreduce, attempt, ones, works
from tests.common.limits import timeout_now
from tests.common.pool import Pool, on_ranks
from tests.common.rank import Rank
from tests.common.suites.lifecycle import exit_codes


def _contexts() -> list[bool]:
    has_context = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]
    return [has_context(i) for i in range(torch.cuda.device_count())]


def _in_a_thread(function: Callable[[], Any]) -> Attempt:
    found: list[Attempt] = []
    thread = threading.Thread(target=lambda: found.append(attempt(function)))
    thread.start()
    thread.join()
    return found[0]


def _watched(rank: Rank, timeout: float) -> tuple[list[list[bool]], list[Attempt]]:
    """The last rank calls raise_if_failed() before and after it has waited for the first one."""
    communicator = rank.new_communicator("watched", call_timeout=timeout)
    assert works(rank, communicator)
    contexts, found = [_contexts()], []
    if rank.rank == rank.size - 1:
        found.append(_in_a_thread(communicator.raise_if_failed))
        contexts.append(_contexts())
        allreduce(communicator, ones(rank))
        torch.cuda.synchronize()
        found.append(_in_a_thread(communicator.raise_if_failed))
        contexts.append(_contexts())
    rank.barrier()
    communicator.destroy()
    return contexts, found


@pytest.mark.own_gpu
@pytest.mark.worlds(2)
def test_a_watchdog_leaves_other_devices_alone(pool: Pool) -> None:
    contexts, found = pool.run(_watched, timeout_now(pool))[-1]
    assert [result.error for result in found] == ["", "CollectiveTimeout"], found
    own = [other == pool.size - 1 for other in range(len(contexts[0]))]
    assert contexts[0] == own, "cannot tell anything"
    assert contexts[1:] == [own, own]


@pytest.mark.own_gpu
@pytest.mark.worlds(2)
@on_ranks
def test_a_wait_for_a_posted_call_leaves_other_devices_alone(rank: Rank) -> None:
    handle = collx.post(collx.allreduce, ones(rank), group=rank.communicator())
    before = _contexts()
    found = _in_a_thread(lambda: (handle.is_completed(), handle.wait()))
    assert found.error == "", found
    assert _contexts() == before


CREATION = """
import threading
found = []
def create():
    own = torch.device("cuda", rank)
    found.append(collx.init(device=own, payload_bytes=4 << 20, timeout=30.0))
thread = threading.Thread(target=create)
thread.start()
thread.join()
contexts = [torch._C._cuda_hasPrimaryContext(i) for i in range(torch.cuda.device_count())]
assert contexts == [i == rank for i in range(len(contexts))], contexts
found[0].destroy()
"""


@pytest.mark.own_gpu
@pytest.mark.worlds(2)
def test_init_leaves_other_devices_alone(pool: Pool) -> None:
    for code, output in exit_codes(pool.world.device, "", program=CREATION):
        assert code == 0, output
