"""Groups on the torch.distributed backend: many groups at once, failures, shutdown, options."""

from __future__ import annotations

import copy
import os
import random
import threading
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import collx
import collx.backend
from collx._bootstrap import steps
from collx.backend import _Maker

from ..attempt import Attempt, assert_raised, attempt, in_a_child, ones
from ..limits import AT_ONCE, assert_in_time, timeout_now
from ..pool import Pool, on_ranks
from ..rank import TIMEOUT, Rank
from .backend import finish, group_of, until_known
from .lifecycle import exit_codes, held

GROUPS = 12
CYCLES = {"cpu": 40, "cuda": 10}
FULL_CYCLES = 1000


def _sum(rank: Rank, group: Any, value: float = 1.0) -> bool:
    x = ones(rank) * value
    dist.all_reduce(x, group=group)
    return bool((x == value * rank.size).all())


@pytest.mark.worlds(2, 3)
@on_ranks
def test_twelve_groups_used_and_destroyed_in_opposite_orders(rank: Rank) -> None:
    """Each rank posts to twelve groups in its own order and waits for them in another order."""
    groups = [group_of(rank) for _ in range(GROUPS)]
    for group in groups:
        assert _sum(rank, group)
    mine = random.Random(5 + rank.rank)
    for turn in range(10):
        order = list(range(GROUPS))
        if turn % 2 == 0:
            order = order if rank.rank % 2 == 0 else order[::-1]
        else:
            mine.shuffle(order)
        xs = [ones(rank) * (i + turn) for i in range(GROUPS)]
        works = {i: dist.all_reduce(xs[i], group=groups[i], async_op=True) for i in order}
        mine.shuffle(order)
        for i in order:
            works[i].wait()
            assert bool((xs[i] == (i + turn) * rank.size).all()), (turn, i)
    order = list(range(GROUPS)) if rank.rank == 0 else list(range(GROUPS))[::-1]
    for i in order:
        dist.destroy_process_group(groups[i])


@pytest.mark.worlds(2)
@on_ranks
def test_groups_come_and_go_while_another_one_is_used(rank: Rank) -> None:
    busy = group_of(rank)
    assert _sum(rank, busy)
    counted: list[int] = []

    def use() -> None:
        # On a separate stream: calls of two groups on one stream must have the same order on all
        # ranks.
        on_cuda = rank.device.type == "cuda"
        if on_cuda:  # otherwise, the end of the block creates a context on the first device
            torch.cuda.set_device(rank.device)
        with torch.cuda.stream(torch.cuda.Stream(rank.device)) if on_cuda else nullcontext():
            for number in range(200):
                assert _sum(rank, busy, float(number % 7))
        counted.append(number)

    thread = threading.Thread(target=use)
    thread.start()
    for _ in range(3):
        group = group_of(rank)
        assert _sum(rank, group)
        dist.destroy_process_group(group)
    thread.join()
    assert counted == [199]
    dist.destroy_process_group(busy)


def _held() -> dict[str, int]:
    shared = [name for name in os.listdir("/dev/shm") if "collx" in name]
    return {
        **held(),
        "shared files": len(shared),
        "communicators": len(collx.communicator.live()),
    }


@pytest.mark.worlds(2)
@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.full)])
@on_ranks(deadline=600.0)
def test_groups_made_and_destroyed_leave_nothing(rank: Rank, full: bool) -> None:
    times = FULL_CYCLES if full else CYCLES[rank.device.type]
    for number in range(times):
        group = group_of(rank)
        assert _sum(rank, group)
        x = ones(rank)
        dist.all_reduce(x, group=group, async_op=True).wait()
        dist.destroy_process_group(group)
        del group
        if number == 4:
            rank.barrier()
            before = _held()
    rank.barrier()
    after = _held()
    assert after["communicators"] == before["communicators"]
    assert after["shared files"] <= before["shared files"], (before, after)
    # Allocators grow a little; a leak would add at least one for each group.
    for what in ("descriptors", "threads", "maps"):
        assert after[what] - before[what] < (times - 5) / 2, (what, before, after)


def _one_never_comes(rank: Rank, absent: int, timeout: float) -> dict[str, Any]:
    group = group_of(rank, timeout=timedelta(seconds=timeout))
    assert _sum(rank, group)
    rank.barrier()
    found: dict[str, Any] = {}
    if rank.rank != absent:
        works = [dist.all_reduce(ones(rank), group=group, async_op=True) for _ in range(3)]
        found["future"] = works[0].get_future()
        found["waits"] = [attempt(partial(finish, rank, work)) for work in works]
        future = found.pop("future")
        if rank.device.type == "cpu":  # on CUDA a future completes when the call is enqueued
            found["then"] = attempt(future.wait)
        found["success"] = works[0].is_success()
        found["error"] = str(group._get_backend(rank.device).get_error())
    rank.barrier()
    found["next"] = attempt(partial(until_known, rank, group))
    found["destroy"] = attempt(lambda: dist.destroy_process_group(group))
    rank.barrier()
    return found


@pytest.mark.alone
@pytest.mark.worlds(2, 3)
def test_a_rank_that_never_comes_is_named_by_all_calls_in_flight(pool: Pool) -> None:
    absent, timeout = pool.size - 1, timeout_now(pool)
    for rank, found in enumerate(pool.run(_one_never_comes, absent, timeout)):
        assert found["destroy"].error == "", found
        assert_in_time(found["destroy"], slack=AT_ONCE)
        assert found["next"].error in ("CollectiveTimeout", "CommunicatorPoisoned"), found
        if rank == absent:
            continue
        assert not found["success"]
        assert "TIMEOUT" in found["error"].upper()
        assert_in_time(found["waits"][0], timeout)
        for result in found["waits"] + ([found["then"]] if "then" in found else []):
            assert result.error, found
            assert f"rank {absent}" in result.message, result


@pytest.mark.alone
@pytest.mark.worlds(2)
@on_ranks
def test_abort_ends_the_calls_of_all_ranks_and_names_who_did(rank: Rank, timeout: float) -> None:
    """Rank 0 aborts while the others wait for it."""
    group = group_of(rank, timeout=timedelta(seconds=60 * timeout))
    assert _sum(rank, group)
    rank.barrier()
    if rank.rank == 0:
        group.abort()
    found = attempt(partial(until_known, rank, group))
    rank.barrier()
    dist.destroy_process_group(group)
    assert_raised(found, "CommunicatorPoisoned", "rank 0 has aborted")
    assert found.seconds < 10 * timeout


AGAIN = """
from torch.distributed import distributed_c10d

x = torch.ones(100, device=device)
other = dist.new_group()
dist.all_reduce(x)
dist.all_reduce(x, group=other)
assert bool((x == size**2).all()), x
store.set(f"completed {{rank}}", "")  # an abort would end a call in progress on another rank
store.wait([f"completed {{each}}" for each in range(size)])
distributed_c10d.{ending}()
again = dist.PrefixStore("again", store)
dist.init_process_group("collx", store=again, rank=rank, world_size=size)
dist.all_reduce(x)
assert bool((x == size**3).all()), x
aborted = [one.name for one in collx.communicator.live() if one.poisoned]
assert aborted == [], aborted
dist.destroy_process_group()
"""


@pytest.mark.worlds(2)
@pytest.mark.parametrize(
    ("ending", "debug"),
    [("_abort_process_group", "OFF"), ("destroy_process_group", "DETAIL")],
    ids=["abort", "wrapped"],
)
def test_a_group_with_the_name_of_an_earlier_one_works(pool: Pool, ending: str, debug: str) -> None:
    """PyTorch does not shut down the backends of these groups."""
    found = exit_codes(
        pool.world.device,
        ending,
        {"TORCH_DISTRIBUTED_DEBUG": debug},
        program=AGAIN,
        size=pool.size,
        backend="collx",
    )
    for code, output in found:
        assert code == 0, output


@pytest.mark.worlds(2)
@on_ranks
def test_a_forked_child_does_not_use_the_store_of_its_parent(rank: Rank) -> None:
    if rank.device.type == "cuda":
        pytest.skip("CUDA cannot be used in a forked child")
    group, x = group_of(rank), ones(rank)
    calls = (partial(dist.all_reduce, x, group=group), partial(collx.allreduce, x, group=group))
    found = [in_a_child(call) for call in calls]
    rank.barrier()
    assert _sum(rank, group)  # the children have not used the store
    dist.destroy_process_group(group)
    assert all(said.startswith("ValueError") and "forked" in said for said in found), found


@pytest.mark.worlds(2)
@on_ranks
def test_abort_in_a_forked_child_leaves_the_parent_alone(rank: Rank) -> None:
    group = group_of(rank)
    assert _sum(rank, group)
    if rank.device.type == "cpu":  # CUDA cannot be used in a forked child
        in_a_child(group._get_backend(rank.device).abort)
    rank.barrier()
    assert _sum(rank, group)
    dist.destroy_process_group(group)


@pytest.mark.worlds(1, 2)
@on_ranks
def test_abort_after_the_end_of_the_group_does_nothing(rank: Rank) -> None:
    group = group_of(rank)
    assert _sum(rank, group)
    dist.destroy_process_group(group)
    group.abort()


@pytest.mark.worlds(2, 3)
@on_ranks
def test_all_gather_of_different_sizes_records_no_gradient(rank: Rank) -> None:
    group = group_of(rank)
    sizes = [3 + r for r in range(rank.size)]
    outputs = list(torch.empty(sum(sizes), device=rank.device).split(sizes))
    dist.all_gather(outputs, ones(rank, 3 + rank.rank).requires_grad_() * 1, group=group)
    assert not any(output.requires_grad for output in outputs)
    assert all(bool((output == 1).all()) for output in outputs)
    dist.destroy_process_group(group)


@pytest.mark.alone
@pytest.mark.worlds(2)
@on_ranks
def test_a_shorter_timeout_holds_for_later_calls(rank: Rank, timeout: float) -> None:
    group = group_of(rank)
    assert _sum(rank, group)
    group.set_timeout(timedelta(seconds=timeout))
    assert collx.get(group).timeout == pytest.approx(timeout, abs=1e-3)
    rank.barrier()
    if rank.rank == 0:
        work = dist.all_reduce(ones(rank), group=group, async_op=True)
        found = attempt(partial(finish, rank, work))
        assert_raised(found, "CollectiveTimeout")
        assert_in_time(found, timeout)
    rank.barrier()
    dist.destroy_process_group(group)


@pytest.mark.own_gpu
@pytest.mark.worlds(2, 3)
@on_ranks
def test_beside_communicators_and_groups_of_other_kinds(rank: Rank) -> None:
    """The group together with the program's own communicator for it, a group of another backend and
    subgroups created by a split."""
    group = group_of(rank)
    assert _sum(rank, group)
    with collx.init(group, device=rank.device, payload_bytes=4 << 20) as own:
        assert collx.get(group) is own
        x = torch.ones(100, device=rank.device)
        assert bool((collx.allreduce(x, group=group) == rank.size).all())
        result = collx.allreduce(x, group=own, algorithm="fallback")
        assert bool((result == rank.size).all())
        assert _sum(rank, group)
    assert collx.get(group).name.endswith(rank.device.type)
    result = collx.allreduce(x, group=group, algorithm="fallback")
    assert bool((result == rank.size).all())
    gloo = dist.new_group(backend="gloo")
    y = torch.ones(3)
    dist.all_reduce(y, group=gloo)
    assert y.tolist() == [rank.size] * 3
    backend = group._get_backend(rank.device)
    options = copy.deepcopy(backend.options)
    assert options.payload_bytes is None
    assert options.max_blocks is None
    ranks = list(range(rank.size))
    part = group.split_group(
        ranks[:1] if rank.rank == 0 else ranks[1:],
        timeout=timedelta(seconds=30),
        opts=options,
        group_name=f"split-{rank.rank > 0}",
        group_desc="part",
    )
    # Without options, the subgroup gets a copy of the parent's.
    single = group.split_group(
        [rank.rank], timeout=timedelta(seconds=7), group_name=f"single-{rank.rank}"
    )
    assert backend.options.group_name == group.group_name
    assert backend.options._timeout == timedelta(seconds=TIMEOUT)
    assert single._get_backend(rank.device).options._timeout == timedelta(seconds=7)
    single.shutdown()
    first, *others = (part._get_backend(device) for device in part._device_types)
    assert len(others) > 0
    assert all(other is first for other in others)
    z = torch.ones(4, device=rank.device)
    part.allreduce([z]).wait()
    assert z.tolist() == [1.0 if rank.rank == 0 else rank.size - 1.0] * 4
    part.shutdown()
    assert "shut down" in attempt(lambda: part.allreduce([z])).message
    dist.destroy_process_group(group)
    dist.destroy_process_group(gloo)


@pytest.mark.worlds(1, 2)
@on_ranks
def test_a_first_call_beside_the_end_of_the_group_makes_no_communicator(rank: Rank) -> None:
    """One thread is about to create the group's communicator while another shuts the group down."""
    group = group_of(rank)
    before = len(collx.communicator.live())
    begun, left = threading.Event(), threading.Event()
    original = _Maker.make

    def make(self: Any, device: torch.device) -> Any:
        begun.set()
        assert left.wait(60)
        return original(self, device)

    found: list[Attempt] = []
    with mock.patch.object(_Maker, "make", make):
        call = partial(group.allreduce, [ones(rank)])
        thread = threading.Thread(target=lambda: found.append(attempt(call)))
        thread.start()
        assert begun.wait(60)
        group.shutdown()
        left.set()
        thread.join()
    dist.destroy_process_group(group)
    assert_raised(found[0], "ValueError", "has been shut down")
    assert len(collx.communicator.live()) == before


@pytest.mark.worlds(2)
@on_ranks
def test_bad_input_is_refused_on_every_rank_and_the_group_works_on(rank: Rank) -> None:
    group = group_of(rank)
    assert _sum(rank, group)
    changed = collx.backend.Options()
    small = group_of(rank, pg_options=collx.backend.Options(payload_bytes=1))
    device, world = rank.device, rank.size
    backend = group._get_backend(device)
    x = ones(rank)
    average = dist.ReduceScatterOptions()
    average.reduceOp = dist.ReduceOp.AVG  # type: ignore[assignment]
    whole_numbers = torch.ones(3, 2, dtype=torch.int64, device=device)

    def refused(error: str, words: str, function: Any, *args: Any, **options: Any) -> None:
        assert_raised(attempt(lambda: function(*args, **options)), error, words)

    refused("TypeError", "collx.backend.Options", group_of, rank, pg_options=object())
    refused("TypeError", "blocks=3", collx.backend.Options, blocks=3)
    refused("ValueError", "payload_bytes: got 0", collx.backend.Options, payload_bytes=0)
    refused("ValueError", "payload_bytes: got -1", setattr, changed, "payload_bytes", -1)
    refused("ValueError", "max_blocks: got 0", setattr, changed, "max_blocks", 0)
    refused("ValueError", "max_blocks: got -2", collx.backend.Options, max_blocks=-2)
    refused("ValueError", "payload_bytes: got 1", _sum, rank, small)
    refused("ValueError", "tensor_list", dist.all_gather, [x] * (world + 1), x, group=group)
    rows = torch.ones(2 * world + 1, device=device)
    words = "multiple of the group size"
    refused("ValueError", words, dist.all_to_all_single, x, rows, group=group)
    into = dist.all_gather_into_tensor
    out, part = torch.empty(4, 2 * world, device=device).t(), torch.ones(2, 4, device=device)
    refused("ValueError", "not contiguous", into, out, part, group=group)
    words, whole = "2 times as many elements as the output", torch.ones(5, device=device)
    # Of five elements, the part of the first rank has three.
    refused("ValueError", words, dist.reduce_scatter_tensor, x[:3], whole, group=group)
    columns = torch.full((3, 2), rank.rank, dtype=torch.int64, device=device)
    words, bits = "got strides [2] for shape [3]", dist.ReduceOp.BOR
    refused("ValueError", words, dist.all_reduce, columns[:, 0], bits, group)
    assert bool((columns == rank.rank).all())
    outs, ins = [torch.ones(2, 3, device=device).t()], [[whole_numbers] * world]
    refused("ValueError", "got dtype Float", backend.reduce_scatter, outs, ins, average)
    meta = torch.empty_like(x, device="meta")
    refused("ValueError", "meta", dist.all_gather, [meta] * world, x, group=group)
    refused("RuntimeError", "meta", backend.allreduce, [meta])
    if device.type == "cuda" and torch.cuda.device_count() > 1:
        other = torch.device("cuda", (rank.rank + 1) % torch.cuda.device_count())
        elsewhere = torch.ones(3, device=other)
        refused("ValueError", "cuda", dist.all_reduce, elsewhere, group=group)
        out = torch.empty(3 * world, device=device)
        refused("ValueError", "cuda", into, out, elsewhere, group=group)
    assert _sum(rank, group)
    dist.destroy_process_group(small)
    dist.destroy_process_group(group)


@pytest.mark.worlds(2)
@on_ranks
def test_tensors_of_a_list_have_the_size_of_the_other_argument(rank: Rank) -> None:
    """Only root has a list and refuses it, so the other rank makes no call."""
    group, x = group_of(rank), ones(rank, 3)
    assert _sum(rank, group)
    if rank.rank == 0:
        lists, words = [ones(rank, 2), ones(rank, 4)], "_list: got a tensor of shape [2]"
        gather = attempt(lambda: dist.gather(x, lists, group=group))
        assert_raised(gather, "ValueError", words, "as the input has, 3")
        scatter = attempt(lambda: dist.scatter(x, lists, group=group))
        assert_raised(scatter, "ValueError", words, "as the output has, 3")
    assert _sum(rank, group)
    dist.destroy_process_group(group)


@pytest.mark.worlds(2)
@on_ranks
def test_ranks_with_different_versions_are_told_so(rank: Rank) -> None:
    """Rank 1 reports another version of the library."""
    group = group_of(rank)
    other = mock.patch.object(steps, "version", return_value="0.0.0")
    with other if rank.rank == 1 else nullcontext():
        found = attempt(lambda: dist.all_reduce(ones(rank), group=group))
    dist.destroy_process_group(group)
    assert_raised(found, "InitError", "version differs between the ranks")


@pytest.mark.worlds(1, 2)
@on_ranks
def test_graphs_and_no_creation_in_a_capture(rank: Rank) -> None:
    if rank.device.type != "cuda":
        pytest.skip("CUDA graphs")
    group, late = group_of(rank), group_of(rank)
    x = ones(rank)
    for asynchronous in (False, True):  # creates the communicator and its stream
        work = dist.all_reduce(x, group=group, async_op=asynchronous)
        if asynchronous:
            work.wait()
    found: list[Attempt | bool] = []
    for asynchronous in (False, True):
        x.fill_(1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work = dist.all_reduce(x, group=group, async_op=asynchronous)
            if asynchronous:
                work.wait()
        x.fill_(1)
        for _ in range(3):
            graph.replay()
        rank.synchronize()
        found.append(bool((x == rank.size**3).all()))

    def create() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            dist.all_reduce(x, group=late)

    found.append(attempt(create))
    rank.synchronize()
    found.append(_sum(rank, late))
    for each in (group, late):
        dist.destroy_process_group(each)
    first, second, refused, after = found
    assert first is True
    assert second is True
    assert after is True
    assert isinstance(refused, Attempt)
    assert_raised(refused, "NotImplementedError", "capture")
