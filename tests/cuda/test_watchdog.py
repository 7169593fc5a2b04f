"""raise_if_failed() from a thread that has never set a device, as a watchdog does."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.common.attempt import Attempt, attempt, works
from tests.common.pool import on_ranks
from tests.common.rank import Rank


def _contexts() -> list[bool]:
    has_context = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]
    return [has_context(i) for i in range(torch.cuda.device_count())]


@pytest.mark.own_gpu
@pytest.mark.worlds(2)
@on_ranks
def test_a_watchdog_leaves_other_devices_alone(rank: Rank) -> None:
    """The thread's current device is the first one, which this rank does not use: a context there
    would take hundreds of megabytes, and the copy would be of the wrong device."""
    communicator = rank.communicator()
    assert works(rank, communicator)
    found: list[Attempt] = []
    before = _contexts()
    watchdog = threading.Thread(target=lambda: found.append(attempt(communicator.raise_if_failed)))
    watchdog.start()
    watchdog.join()
    after = _contexts()
    assert [result.error for result in found] == [""]
    assert before == [other == rank.rank for other in range(len(before))], "cannot tell anything"
    assert after == before
