"""Memory of `allocate_tensor` on several streams, and in captures of CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.common.pool import Pool, on_ranks
from tests.common.rank import Rank
from tests.common.suites.backend import group_of
from tests.common.suites.backend_memory import allocate, is_symmetric
from tests.common.suites.skew import delay

NUMEL = 1 << 20
LATE_MS = 100.0


def _overwrite(rank: Rank, group: Any, place: int) -> None:
    """Writes twos to the freed memory at `place`."""
    tensors = [allocate(rank, group, NUMEL) for _ in range(2)]
    assert place in [tensor.data_ptr() for tensor in tensors]
    for tensor in tensors:
        tensor.fill_(2)


def _read_late(rank: Rank, record: bool) -> float:
    """Returns the value that a late read on another stream sees after the tensor was freed."""
    group = group_of(rank)
    side = torch.cuda.Stream()
    tensor = allocate(rank, group, NUMEL).fill_(1)
    place = tensor.data_ptr()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        delay(rank, LATE_MS)
        copy = tensor.clone()
    if record:
        tensor[5:].record_stream(side)
    del tensor
    _overwrite(rank, group, place)
    torch.cuda.synchronize()
    assert len(set(copy.tolist())) == 1
    dist.destroy_process_group(group)
    return copy[0].item()


@pytest.mark.worlds(2)
def test_memory_is_not_used_again_before_a_recorded_stream_has_passed(pool: Pool) -> None:
    assert pool.run(_read_late, True) == [1.0] * pool.size


@pytest.mark.worlds(2)
def test_a_stream_that_was_not_recorded_reads_what_is_written_next(pool: Pool) -> None:
    """The control."""
    assert pool.run(_read_late, False) == [2.0] * pool.size


@pytest.mark.worlds(2)
@on_ranks
def test_a_stream_that_has_waited_for_a_posted_call_is_awaited(rank: Rank) -> None:
    group = group_of(rank)
    side = torch.cuda.Stream()
    part = torch.ones(NUMEL // rank.size, device=rank.device)
    tensor = allocate(rank, group, NUMEL)
    place = tensor.data_ptr()
    work = dist.all_gather_into_tensor(tensor, part, group=group, async_op=True)
    with torch.cuda.stream(side):
        work.wait()
        delay(rank, LATE_MS)
        copy = tensor.clone()
    torch.cuda.current_stream().synchronize()
    while not work.is_completed():
        pass
    del tensor, work
    _overwrite(rank, group, place)
    torch.cuda.synchronize()
    assert len(set(copy.tolist())) == 1
    dist.destroy_process_group(group)
    assert copy[0].item() == 1.0


@pytest.mark.worlds(2)
@on_ranks
def test_memory_stays_with_its_stream(rank: Rank) -> None:
    group = group_of(rank)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        tensor = allocate(rank, group, NUMEL)
    place = tensor.data_ptr()
    del tensor
    others = [allocate(rank, group, NUMEL) for _ in range(3)]
    assert place not in [other.data_ptr() for other in others]
    with torch.cuda.stream(side):
        again = allocate(rank, group, NUMEL)
    assert again.data_ptr() == place
    dist.destroy_process_group(group)


@pytest.mark.worlds(2)
@on_ranks
def test_a_capture_takes_the_memory_of_its_graph(rank: Rank) -> None:
    group = group_of(rank)
    source = torch.full((NUMEL // rank.size,), float(rank.rank), device=rank.device)
    before = allocate(rank, group, NUMEL)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inside = allocate(rank, group, NUMEL)
        dist.all_gather_into_tensor(inside, source, group=group)
    graph.replay()
    torch.cuda.synchronize()
    want = torch.arange(rank.size, device=rank.device).repeat_interleave(NUMEL // rank.size)
    assert bool((inside == want).all())
    assert not is_symmetric(rank, group, inside)
    after = allocate(rank, group, NUMEL)
    assert is_symmetric(rank, group, before)
    assert is_symmetric(rank, group, after)
    dist.destroy_process_group(group)
