"""A separate process group for the fallback, for a communicator whose group cannot gather."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import collx

from ..attempt import Attempt, assert_raised, attempt
from ..limits import assert_in_time
from ..pool import Pool, on_ranks
from ..rank import PAYLOAD_BYTES, TIMEOUT, Rank
from .voting import instead_of_step

SHORT = 1.0
REFUSING = "refusing"


class _Refusing(dist.ProcessGroup):
    """A process group without a backend, which supports no collective."""

    @property
    def group_name(self) -> Any:  # the C++ class asks its backends
        return distributed_c10d._world.pg_names[self]


def _group_that_cannot_gather() -> Any:
    if REFUSING not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            REFUSING,
            lambda store, rank, size, timeout: _Refusing(rank, size),  # type: ignore[call-arg]
            devices=["cpu", "cuda"],
        )
    return dist.new_group(backend=REFUSING)


def _init(rank: Rank, group: Any, timeout: float = TIMEOUT, **given: Any) -> Any:
    """Creates a communicator as if the ranks were on different machines."""
    apart = instead_of_step("machine", lambda setup, run: setup.arguments.rank)
    with apart, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning that there is no direct access
        return collx.init(
            group, device=rank.device, payload_bytes=PAYLOAD_BYTES, timeout=timeout, **given
        )


def calls_of(
    rank: Rank, name: str, algorithm: str = "auto"
) -> dict[str, Callable[[], torch.Tensor]]:
    """Returns one call for each kind of operator that has its own fallback."""
    torch.manual_seed(rank.rank)
    x = torch.randn(2 * rank.size, 8, device=rank.device)
    weight, ops = x.new_ones(8), torch.ops.collx
    return {
        "allreduce": lambda: ops.allreduce(x, "sum", name, algorithm),
        "alltoall": lambda: ops.alltoall(x, rank.size, name, algorithm),
        "allreduce_rmsnorm": lambda: ops.allreduce_rmsnorm(
            x, weight, 1e-6, name, algorithm=algorithm
        ),
    }


@pytest.mark.worlds(2, 3)
@on_ranks
def test_it_serves_where_the_group_itself_cannot(rank: Rank) -> None:
    """The results have the same bits as those of the algorithms on peer memory."""
    group, inner = _group_that_cannot_gather(), rank.fresh_group()
    without = attempt(lambda: _init(rank, group))
    assert_raised(without, "InitError", "needs a process group that serves")
    communicator = _init(rank, group, fallback_group=inner)
    assert communicator.fallback_reason
    expected = calls_of(rank, rank.communicator().name)
    for op, call in calls_of(rank, communicator.name).items():
        assert torch.equal(call(), expected[op]()), op
    torch.ops.collx.barrier(communicator.name)
    rank.barrier()
    communicator.destroy()
    dist.destroy_process_group(inner)


def _group_of_a_backend(rank: Rank, own: int) -> Any:
    """A group created by a backend, which torch.distributed does not know. `own`: the rank in
    it."""
    assert rank.store is not None
    store = dist.PrefixStore(f"of a backend/{own == rank.rank}", rank.store)
    kind = dist.ProcessGroup.BackendType.GLOO
    group = dist.ProcessGroup(store, own, rank.size)
    gloo = dist.ProcessGroupGloo(store, own, rank.size, timedelta(seconds=TIMEOUT))
    group._register_backend(torch.device("cpu"), kind, gloo)
    group._set_default_backend(kind)
    return group


@pytest.mark.worlds(2)
@pytest.mark.parametrize("made_by_backend", [False, True])
@on_ranks
def test_the_fallback_by_name_takes_it(rank: Rank, made_by_backend: bool) -> None:
    """Also if the ranks have access to each other's memory."""
    group = _group_that_cannot_gather()
    inner = _group_of_a_backend(rank, rank.rank) if made_by_backend else rank.fresh_group()
    communicator = rank.new_communicator("by-name", group, fallback_group=inner)
    x = torch.ones(9, device=rank.device)
    found = attempt(lambda: torch.ops.collx.allreduce(x, "sum", communicator.name, "fallback"))
    rank.barrier()
    communicator.destroy()
    assert found.error == "", found


def _one_does_not_come(rank: Rank, regions: bool) -> dict[str, Any]:
    group, inner = _group_that_cannot_gather(), rank.fresh_group()
    if regions:
        communicator = rank.new_communicator(
            "late", group, call_timeout=SHORT, fallback_group=inner
        )
    else:
        communicator = _init(rank, group, SHORT, fallback_group=inner)
    x = torch.ones(9, device=rank.device)
    call = lambda: torch.ops.collx.allreduce(x, "sum", communicator.name, "fallback")  # noqa: E731
    call()
    rank.barrier()
    found: dict[str, Any] = {}
    if rank.rank == 0:
        found = {"call": attempt(call), "next": attempt(call)}
    rank.barrier()
    communicator.destroy()
    return found


@pytest.mark.worlds(2)
@pytest.mark.parametrize("regions", [False, True])
def test_a_rank_that_does_not_come_is_named_in_time(pool: Pool, regions: bool) -> None:
    """The error names the rank if the ranks have regions."""
    if "nccl" in pool.world.backend:
        pytest.skip("a gather of NCCL's that a rank is missing from holds the GPU of the others")
    found, _ = pool.run(_one_does_not_come, regions)
    assert found["call"].error == "CollectiveTimeout", found
    assert_in_time(found["call"], SHORT)
    assert found["next"].error == "CommunicatorPoisoned", found
    if regions:
        assert "rank 1" in found["call"].message, found


@pytest.mark.worlds(2)
@on_ranks
def test_other_groups_are_refused(rank: Rank) -> None:
    """On every rank; the name is free afterwards."""
    size = rank.size
    alone = [dist.new_group([one], backend=rank.world.backend) for one in range(size)]
    groups = {
        "smaller": alone[rank.rank],
        "of others": alone[(rank.rank + 1) % size],
        "other order": _group_of_a_backend(rank, size - 1 - rank.rank),
        "no group": "gloo",
        "serves nothing": _group_that_cannot_gather(),
    }

    def init_with(group: Any) -> Attempt:
        return attempt(lambda: rank.new_communicator("wrong", fallback_group=group))

    found = {what: init_with(group) for what, group in groups.items()}
    inner = rank.fresh_group()
    found["one has none"] = init_with(inner if rank.rank == 0 else None)
    found["one is wrong"] = init_with(inner if rank.rank == 0 else alone[rank.rank])
    rank.barrier()
    rank.new_communicator("wrong", fallback_group=inner).destroy()
    says = {
        "smaller": ("ValueError", "fallback_group: got the global ranks [{rank}]"),
        "of others": ("ValueError", "not a member of fallback_group"),
        "other order": ("ValueError", "accepted: rank {rank} of 2, as in group"),
        "no group": ("TypeError", "fallback_group: got a str"),
        "serves nothing": ("ValueError", "fallback_group: got a group for"),
        "one has none": ("InitError", "fallback_group differs between the ranks"),
        "one is wrong": ("InitError", "fallback_group: got the global ranks [1]"),
    }
    for what, (error, words) in says.items():
        assert_raised(found[what], error, words.format(rank=rank.rank))
