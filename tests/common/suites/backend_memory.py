"""Symmetric memory of a group's backend: `allocate_tensor`, which FSDP2 calls for its buffers."""

from __future__ import annotations

import random
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import collx
import collx.backend
from collx._bootstrap import symmetric

from ..attempt import Attempt, assert_raised, attempt, in_a_child, ones
from ..limits import assert_in_time, timeout_now
from ..pool import Pool, on_ranks
from ..rank import Rank
from .backend import group_of, until_known

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool)
NUMEL = 12_000  # divisible by 2, 3 and 4 ranks


def allocate(
    rank: Rank, group: Any, numel: int = NUMEL, dtype: torch.dtype = torch.float32
) -> Tensor:
    backend = group._get_backend(rank.device)
    assert backend.supports_tensor_alloc(rank.device)
    made: Tensor = backend.allocate_tensor(numel, dtype=dtype, device=rank.device)
    assert (made.shape, made.dtype, made.device) == ((numel,), dtype, rank.device)
    return made


def _gather_directly(rank: Rank, group: Any, out: Tensor, value: float = 1.0) -> bool:
    """Returns whether peers write the right values to `out`, which must be symmetric."""
    part = torch.full((out.numel() // rank.size,), value + rank.rank, dtype=out.dtype)
    collx.allgather(part.to(rank.device), group=group, algorithm="direct", out=out)
    want = torch.cat([torch.full_like(part, value + r) for r in range(rank.size)])
    return torch.equal(out.cpu(), want)


def is_symmetric(rank: Rank, group: Any, tensor: Tensor) -> bool:
    found = attempt(lambda: _gather_directly(rank, group, tensor))
    assert found.error in ("", "ValueError"), found
    return found.error == ""


@pytest.mark.worlds(2, 3)
@on_ranks
def test_tensors_are_symmetric_whatever_their_dtype(rank: Rank) -> None:
    group = group_of(rank)
    for dtype in DTYPES:
        out, values = allocate(rank, group, dtype=dtype), allocate(rank, group, dtype=dtype)
        assert _gather_directly(rank, group, out)
        values.fill_(1)
        dist.all_gather_into_tensor(out, values[: NUMEL // rank.size], group=group)
        assert bool((out == 1).all())
        part = allocate(rank, group, NUMEL // rank.size, dtype)
        dist.reduce_scatter_tensor(part, values, op=dist.ReduceOp.MAX, group=group)
        assert bool((part == 1).all())
    assert is_symmetric(rank, group, allocate(rank, group, rank.size))
    empty = allocate(rank, group, 0)
    assert empty.untyped_storage().nbytes() == 0
    backend = group._get_backend(rank.device)
    refused = attempt(lambda: backend.allocate_tensor(-1, dtype=torch.float32, device=rank.device))
    assert_raised(refused, "ValueError", "size")
    if rank.device.type == "cpu":
        communicator = collx.get(group)
        taken = communicator.explain("allgather", NUMEL, output_symmetric=True)
        assert taken.executed_by == "direct"
        taken = communicator.explain("reducescatter", NUMEL, input_symmetric=True)
        assert taken.executed_by == "direct"
    dist.destroy_process_group(group)


@pytest.mark.worlds(2, 3)
@on_ranks
def test_ranks_free_in_orders_of_their_own(rank: Rank) -> None:
    """Each rank keeps and drops tensors at random. Tensors stay symmetric: calls by the direct
    algorithm succeed, with the right results."""
    group = group_of(rank)
    same, mine = random.Random(3), random.Random(rank.rank)
    held: list[tuple[Tensor, Tensor]] = []
    places: set[int] = set()
    again = 0
    for number in range(150):
        tensor = allocate(rank, group, rank.size * same.choice((64, 1000, 5000)))
        again += tensor.data_ptr() in places
        places.add(tensor.data_ptr())
        assert _gather_directly(rank, group, tensor, float(number))
        held.append((tensor, tensor.clone()))
        while len(held) > 5 or (held and mine.random() < 0.3):
            tensor, copy = held.pop(mine.randrange(len(held)))
            assert torch.equal(tensor, copy), number  # no later call has written to it
            del tensor
    dist.destroy_process_group(group)
    assert again > 50


@pytest.mark.worlds(2)
@on_ranks
def test_freed_memory_is_used_again_and_no_sooner(rank: Rank) -> None:
    group = group_of(rank)
    tensor: Any = None
    places = []
    for _ in range(20):
        tensor = None
        tensor = allocate(rank, group)
        places.append(tensor.data_ptr())
    assert len(set(places)) == 2
    view = tensor[10:20]
    del tensor
    assert view.data_ptr() - 40 not in [allocate(rank, group).data_ptr() for _ in range(5)]
    dist.destroy_process_group(group)


@pytest.mark.worlds(2, 3)
@on_ranks
def test_a_posted_call_keeps_the_memory(rank: Rank) -> None:
    group = group_of(rank)
    rows = [3] * rank.size
    source = torch.arange(3.0 * rank.size, device=rank.device)
    dist.all_to_all_single(torch.empty_like(source), source, rows, rows, group=group)
    tensor: Any = allocate(rank, group, source.numel())
    place = tensor.data_ptr()
    rank.barrier()
    if rank.rank == 0:
        dist.all_to_all_single(tensor, source, rows, rows, group=group, async_op=True)
    tensor = None
    others = [allocate(rank, group, source.numel()) for _ in range(4)]
    if rank.rank == 0:  # its call still waits for the others
        assert place not in [other.data_ptr() for other in others]
    rank.barrier()
    if rank.rank > 0:
        dist.all_to_all_single(torch.empty_like(source), source, rows, rows, group=group)
    dist.barrier(group)
    rank.synchronize()
    # On CUDA, the next posted call frees the tensors of completed calls.
    work = dist.all_reduce(ones(rank), group=group, async_op=True)
    assert work is not None
    work.wait()
    others += [allocate(rank, group, source.numel()) for _ in range(2)]
    assert place in [other.data_ptr() for other in others]
    dist.destroy_process_group(group)


def _budget(rank: Rank, symmetric_bytes: int, lacking: int) -> list[bool]:
    """Returns which tensors of 40, 200, 20 and 20 KB are symmetric. Rank `lacking` lacks memory."""
    options = collx.backend.Options(symmetric_bytes=symmetric_bytes)
    group = group_of(rank, pg_options=options)
    dist.all_reduce(ones(rank), group=group)
    without = mock.patch.object(symmetric, "allocate", side_effect=MemoryError("injected"))
    with without if rank.rank == lacking else nullcontext():
        sizes = (10_000, 50_000, 5_000, 5_000)
        tensors = [allocate(rank, group, size // rank.size * rank.size) for size in sizes]
    found = [is_symmetric(rank, group, tensor) for tensor in tensors]
    for tensor in tensors:
        part = ones(rank, tensor.numel() // rank.size)
        dist.all_gather_into_tensor(tensor, part, group=group)
        assert bool((tensor == 1).all())
    dist.destroy_process_group(group)
    return found


@pytest.mark.worlds(2, 3)
def test_what_does_not_fit_is_ordinary_memory_on_all_ranks(pool: Pool) -> None:
    assert pool.run(_budget, 64_000, -1) == [[True, False, True, False]] * pool.size
    assert pool.run(_budget, 1 << 20, pool.size - 1) == [[False] * 4] * pool.size


@pytest.mark.worlds(2)
@on_ranks
def test_a_rank_whose_memory_is_full_stops_the_growth_on_all_ranks(rank: Rank) -> None:
    group = group_of(rank)
    first = allocate(rank, group)
    full = mock.patch.object(symmetric, "allocate", side_effect=MemoryError("injected"))
    with full if rank.rank == 0 else nullcontext():
        second = allocate(rank, group, rank.size << 23)  # needs a segment of its own
    third, fourth = allocate(rank, group), allocate(rank, group, rank.size << 23)
    found = [is_symmetric(rank, group, tensor) for tensor in (first, second, third, fourth)]
    dist.destroy_process_group(group)
    assert found == [True, False, True, False]


@pytest.mark.worlds(2)
@on_ranks
def test_an_option_disables_it(rank: Rank) -> None:
    group = group_of(rank, pg_options=collx.backend.Options(symmetric_bytes=0))
    backend = group._get_backend(rank.device)
    assert not backend.supports_tensor_alloc(rank.device)
    made = backend.allocate_tensor(NUMEL, dtype=torch.float32, device=rank.device)
    assert not is_symmetric(rank, group, made)
    dist.destroy_process_group(group)
    refused = attempt(lambda: collx.backend.Options(symmetric_bytes=-1))
    assert_raised(refused, "ValueError", "symmetric_bytes")


@pytest.mark.worlds(2)
@on_ranks
def test_options_that_differ_are_named(rank: Rank) -> None:
    options = collx.backend.Options(symmetric_bytes=(1 + rank.rank) << 20)
    group = group_of(rank, pg_options=options)
    found = attempt(lambda: allocate(rank, group))
    dist.destroy_process_group(group)
    assert_raised(found, "CollectiveMismatch", "'symmetric_bytes': 1048576")


@pytest.mark.worlds(2, 3)
@on_ranks
def test_allocations_that_differ_are_refused_on_all_ranks(rank: Rank) -> None:
    group = group_of(rank)
    kept = [allocate(rank, group), allocate(rank, group, 100 + 1000 * rank.rank)]
    found = attempt(lambda: allocate(rank, group))
    assert attempt(lambda: allocate(rank, group)).error == "CommunicatorPoisoned"
    del kept
    rank.barrier()
    dist.destroy_process_group(group)
    assert_raised(found, "CollectiveMismatch", "different sizes")


def _one_never_allocates(
    rank: Rank, absent: int, timeout: float, set_later: bool
) -> Attempt | None:
    limit = timedelta(seconds=timeout)
    group = group_of(rank, timeout=20 * limit if set_later else limit)
    first = allocate(rank, group)
    if set_later:
        group.set_timeout(limit)
    rank.barrier()
    found = None
    if rank.rank != absent:
        allocate(rank, group)  # returns without the peers
        found = attempt(lambda: allocate(rank, group))
    rank.barrier()
    assert attempt(lambda: until_known(rank, group)).error
    del first
    dist.destroy_process_group(group)
    return found


@pytest.mark.alone
@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize("set_later", [False, True])
def test_a_rank_that_does_not_allocate_is_named(pool: Pool, set_later: bool) -> None:
    absent, timeout = pool.size - 1, timeout_now(pool)
    for rank, found in enumerate(pool.run(_one_never_allocates, absent, timeout, set_later)):
        if rank == absent:
            continue
        assert_raised(found, "CollectiveTimeout", f"rank {absent}", "allocate_tensor")
        assert_in_time(found, timeout)


@pytest.mark.worlds(2)
@on_ranks
def test_tensors_outlive_the_group_and_no_more_are_made(rank: Rank) -> None:
    group = group_of(rank)
    tensor = allocate(rank, group).fill_(7)
    backend = group._get_backend(rank.device)
    dist.destroy_process_group(group)
    rank.barrier()
    refused = attempt(partial(backend.allocate_tensor, 8, dtype=torch.int8, device=rank.device))
    assert_raised(refused, "ValueError", "shut down")
    del backend
    assert bool((tensor == 7).all())
    copy = tensor[3:]
    del tensor
    assert bool((copy == 7).all())


@pytest.mark.worlds(2)
@on_ranks
def test_what_a_forked_child_frees_stays_the_parents(rank: Rank) -> None:
    group = group_of(rank)
    held = [allocate(rank, group)]
    place = held[0].data_ptr()
    assert in_a_child(held.clear) == ": "
    others = [allocate(rank, group) for _ in range(4)]
    assert place not in [other.data_ptr() for other in others]
    dist.destroy_process_group(group)
