"""Tests symmetric memory on the CPU through torch.distributed._symmetric_memory, without failures.
test_symmetric_memory_failure.py tests failures."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from collx import _C
from tests.common.attempt import attempt
from tests.common.pool import Pool, on_ranks
from tests.common.rank import Rank

from .symmetric_memory import allocate, holdings, rendezvous, world_group, world_store


def _pads_are_zero(handle: Any) -> bool:
    return all(int(handle.get_signal_pad(r).sum()) == 0 for r in range(handle.world_size))


@pytest.mark.worlds(1, 2, 4, 16)
@pytest.mark.parametrize("numel", [17, 1_000_003])
@on_ranks
def test_every_rank_reads_and_writes_every_other(rank: Rank, numel: int) -> None:
    tensor = allocate(numel)
    tensor.copy_(torch.arange(numel) + 1000 * rank.rank)
    handle = rendezvous(tensor, world_group())
    assert (handle.rank, handle.world_size) == (rank.rank, rank.size)
    assert handle.buffer_size == tensor.nbytes
    handle.barrier(channel=0)
    for peer in range(rank.size):
        seen = handle.get_buffer(peer, (numel,), torch.float32)
        assert torch.equal(seen, torch.arange(numel) + 1000.0 * peer)
    handle.barrier(channel=0)
    # Each rank writes one element of each peer's tensor.
    for peer in range(rank.size):
        handle.get_buffer(peer, (1,), torch.float32, storage_offset=rank.rank)[0] = -rank.rank
    handle.barrier(channel=0)
    assert torch.equal(tensor[: rank.size], -torch.arange(rank.size).float())
    assert tensor[rank.size] == rank.size + 1000 * rank.rank
    rank.barrier()
    assert _pads_are_zero(handle)


def _barrier_rounds(rank: Rank, synchronized: bool, rounds: int) -> int:
    tensor = allocate(1, torch.int64)
    handle = rendezvous(tensor, world_group())
    peers = [handle.get_buffer(r, (1,), torch.int64) for r in range(rank.size)]
    rank.barrier()
    wrong = 0
    for step in range(1, rounds + 1):
        if step % 20 == 1 and rank.rank == step // 20 % rank.size:
            time.sleep(0.02)  # a different rank is late each time
        tensor.fill_(step)
        if synchronized:
            handle.barrier(channel=3)
        wrong += sum(int(peer) != step for peer in peers)
        if synchronized:
            handle.barrier(channel=3)
    rank.barrier()
    assert _pads_are_zero(handle)
    return wrong


@pytest.mark.worlds(2, 4, 8)
def test_a_barrier_orders_data_also_with_more_ranks_than_cores(pool: Pool) -> None:
    assert pool.run(_barrier_rounds, True, 100) == [0] * pool.size


@pytest.mark.worlds(2)
def test_without_the_barrier_the_same_rounds_go_wrong(pool: Pool) -> None:
    assert sum(pool.run(_barrier_rounds, False, 100)) > 0


@pytest.mark.worlds(2, 4, 8)
@on_ranks
def test_signals_order_data_round_a_ring(rank: Rank) -> None:
    rounds = 100
    tensor = allocate(1024, torch.int64)
    handle = rendezvous(tensor, world_group())
    previous, following = (rank.rank - 1) % rank.size, (rank.rank + 1) % rank.size
    source = handle.get_buffer(previous, (1024,), torch.int64)
    for step in range(rounds):
        if rank.rank > 0 or step > 0:
            handle.wait_signal(previous, channel=1)
            tensor.copy_(source + 1)
        handle.put_signal(following, channel=1)
    if rank.rank == 0:
        handle.wait_signal(previous, channel=1)
    rank.barrier()
    assert _pads_are_zero(handle)
    assert bool((tensor == (rounds - 1) * rank.size + rank.rank).all())


@pytest.mark.worlds(2)
@on_ranks
def test_a_second_signal_waits_until_the_first_is_taken(rank: Rank) -> None:
    handle = rendezvous(allocate(1), world_group())
    if rank.rank == 0:
        handle.put_signal(1, channel=0)
        full = attempt(lambda: handle.put_signal(1, channel=0, timeout_ms=100))
        assert "rank 0" in full.message
        assert "rank 1 to take the previous signal" in full.message
    rank.barrier()
    if rank.rank == 0:
        handle.put_signal(1, channel=0)  # sleeps until the peer has received the first
    else:
        time.sleep(0.1)
        handle.wait_signal(0, channel=0)
        handle.wait_signal(0, channel=0)
        assert _pads_are_zero(handle)
    rank.barrier()


@pytest.mark.worlds(1)
@on_ranks
def test_other_python_threads_run_during_a_wait(rank: Rank) -> None:
    handle = rendezvous(allocate(1), world_group())
    ticks, waiting = 0, True

    def tick() -> None:
        nonlocal ticks
        while waiting:
            ticks += 1
            time.sleep(0.005)

    thread = threading.Thread(target=tick)
    thread.start()
    attempt(lambda: handle.wait_signal(0, channel=0, timeout_ms=500))
    waiting = False
    thread.join()
    assert ticks > 10


@pytest.mark.worlds(4)
@on_ranks
def test_groups_on_one_allocation_keep_apart(rank: Rank) -> None:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    own = halves[rank.rank // 2]
    first = rank.rank // 2 * 2
    tensor = allocate(8)
    tensor.fill_(rank.rank)
    half = rendezvous(tensor, own)
    whole = rendezvous(tensor, world_group())  # two groups on one allocation
    assert (half.rank, half.world_size) == (rank.rank - first, 2)
    assert (whole.rank, whole.world_size) == (rank.rank, 4)
    half.barrier(channel=0)
    for peer in range(2):
        assert half.get_buffer(peer, (8,), torch.float32)[7] == first + peer
    # A signal of one group does not reach the other, even on the same channel and memory.
    if half.rank == 0:
        half.put_signal(1, channel=0)
    rank.barrier()
    lost = attempt(lambda: whole.wait_signal(0, channel=0, timeout_ms=50))
    assert "timed out" in lost.message
    if half.rank == 1:
        half.wait_signal(0, channel=0)
    whole.barrier(channel=1)
    for peer in range(4):
        assert whole.get_buffer(peer, (8,), torch.float32)[0] == peer
    rank.barrier()


@pytest.mark.worlds(2)
@on_ranks
def test_a_second_rendezvous_meets_nobody(rank: Rank) -> None:
    tensor = allocate(64)
    handle = rendezvous(tensor, world_group())
    if rank.rank == 0:
        assert rendezvous(tensor, world_group()) is handle
        again = rendezvous(tensor[8:], world_group())
        assert again.buffer_ptrs == handle.buffer_ptrs
    del handle
    if rank.rank == 1:
        assert rendezvous(tensor, world_group()).buffer_size == 256
    rank.barrier()


@pytest.mark.worlds(2)
@on_ranks
def test_a_tensor_inside_an_allocation_has_its_offset(rank: Rank) -> None:
    tensor = allocate(64)
    tensor.copy_(torch.arange(64) + 100 * rank.rank)
    inside = torch.from_numpy(tensor.numpy()[16:])  # a separate storage within the allocation
    handle = rendezvous(inside, world_group())
    assert (handle.offset, handle.buffer_size) == (64, 256)
    handle.barrier(channel=0)
    peer = 1 - rank.rank
    assert handle.get_remote_tensor(peer, (48,), torch.float32)[0] == 16 + 100 * peer
    assert handle.get_buffer(peer, (64,), torch.float32)[0] == 100 * peer
    assert rendezvous(tensor, world_group()).offset == 0
    rank.barrier()


def _outlive(rank: Rank) -> None:
    tensor = allocate(1 << 16)
    tensor.fill_(rank.rank + 1)
    handle = rendezvous(tensor, world_group())
    handle.barrier(channel=0)
    del tensor
    if rank.rank == 0:
        del handle  # this rank releases everything, but its peer still sees its data
    rank.barrier()
    if rank.rank == 1:
        for peer in range(2):
            seen = handle.get_buffer(peer, (1 << 16,), torch.float32)
            assert bool((seen == peer + 1).all())
        del handle, seen
    rank.barrier()
    assert holdings().segments == 0


@pytest.mark.worlds(2)
def test_a_handle_keeps_all_memory_and_nothing_else_does(pool: Pool) -> None:
    pool.kill()  # new ranks have no allocations of other tests
    pool.run(_outlive)


@pytest.mark.worlds(2)
@on_ranks
def test_a_thousand_cycles_leave_nothing_behind(rank: Rank) -> None:
    def one(step: int) -> None:
        tensor = allocate(1 + step % 3000)
        handle = rendezvous(tensor, world_group())
        if step % 100 == 0:
            handle.barrier(channel=0)

    one(0)
    rank.barrier()
    before, keys = holdings(), world_store().num_keys()
    rank.barrier()
    for step in range(1000):
        one(step)
    rank.barrier()
    after = holdings()
    keys = world_store().num_keys() - keys
    assert after == before
    assert keys <= 0  # the store only keeps the keys of the last rendezvous


@pytest.mark.worlds(1)
@on_ranks
def test_memory_is_zeroed_aligned_and_taken_only_where_touched(rank: Rank) -> None:
    before = holdings().named  # earlier tests of this process may have left semaphores
    tensor = allocate(1 << 34, torch.uint8)  # 16 GiB: larger than most /dev/shm, but untouched
    assert tensor.data_ptr() % 4096 == 0
    tensor[1 << 33] = 7
    assert int(tensor[:4096].sum()) == 0
    assert (int(tensor[1 << 33]), int(tensor[-1])) == (7, 0)
    # The memory has no name in a file system, so that it cannot leak or fill a small /dev/shm.
    assert holdings().segments > 0
    assert holdings().named == before
    assert allocate(0).numel() == 0


_F_GET_SEALS, _F_SEAL_EXEC, _MFD_NOEXEC_SEAL = 1034, 0x20, 0x8  # from linux/fcntl.h, memfd.h


@pytest.mark.worlds(1)
@on_ranks
def test_memory_is_not_executable(rank: Rank) -> None:
    """A machine with vm.memfd_noexec=2 requires this. Kernels before 6.3 do not have the seal."""
    try:
        os.close(os.memfd_create("probe", _MFD_NOEXEC_SEAL))
    except OSError:
        pytest.skip("this kernel does not know MFD_NOEXEC_SEAL")
    tensor = allocate(8)
    files = {f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")}
    own = [file for file in files if os.path.lexists(file) and "collx buffer" in os.readlink(file)]
    with open(own[-1], "rb") as file:
        assert fcntl.fcntl(file, _F_GET_SEALS) & _F_SEAL_EXEC
    del tensor


@pytest.mark.worlds(1)
@on_ranks
def test_registering_twice_is_harmless(rank: Rank) -> None:
    _C.register_cpu_allocator()
    _C.register_cpu_allocator()
    assert symm_mem.get_backend(torch.device("cpu")) == "COLLX"
    with open("/proc/sys/kernel/random/boot_id") as file:
        assert _C.boot_id() == file.read().strip()
    assert rendezvous(torch.zeros(4), world_group()) is None
