"""The fallback when the process group itself fails: its error is raised at once, and not reported
as a timeout."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from collx._extension import extension

from ..attempt import assert_raised, attempt
from ..limits import assert_in_time
from ..pool import Pool, on_ranks
from ..rank import Rank
from .fallback_group import calls_of

PATIENCE = 60.0  # seconds; a call that raises earlier has not timed out
SHORT = 1.0


def _without_regions(rank: Rank, group: Any, timeout: float) -> Any:
    """Returns a communicator of ranks that cannot access each other's memory."""
    return extension.Communicator(
        name=f"through-{group.group_name}",
        group_name=group.group_name,
        device=rank.device,
        rank=rank.rank,
        world_size=rank.size,
        regions=[],
        payload_bytes=0,
        timeout_ms=int(timeout * 1000),
        pdl="off",
        check=False,
        agreed=extension.load_kernels(rank.device, rank.size),
    )


def _calls(rank: Rank, name: str) -> dict[str, Callable[[], Any]]:
    calls = calls_of(rank, name, "fallback")
    return {**calls, "barrier": lambda: torch.ops.collx.barrier(name)}


def _after(communicator: Any, call: Callable[[], Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"call": attempt(call), "check": attempt(communicator.check)}
    found["next"] = attempt(call)
    found["status"] = communicator.status()
    communicator.destroy()
    return found


@pytest.mark.worlds(2)
@pytest.mark.parametrize("op", ["allreduce", "alltoall", "allreduce_rmsnorm", "barrier"])
@on_ranks
def test_what_the_process_group_raises_comes_at_once(rank: Rank, op: str) -> None:
    """Hazard 31: a peer has closed its connections; the error contains the group's message."""
    if rank.world.backend != "gloo":
        pytest.skip("NCCL does not notice that a peer has gone")
    group = rank.fresh_group()
    communicator = _without_regions(rank, group, PATIENCE)
    call = _calls(rank, communicator.name)[op]
    call()
    rank.barrier()
    if rank.rank == rank.size - 1:
        communicator.destroy()
        dist.destroy_process_group(group)
        del group
    else:
        found = _after(communicator, call)
        words = (f"collx.{op}", "phase fallback", "peer")
        assert_raised(found["call"], "DistBackendError", *words)
        assert found["call"].seconds < PATIENCE / 2, found
        assert "waited" not in found["call"].message, found
        words = ("the process group of rank 0", "phase fallback", op)
        for later in (found["check"], found["next"]):
            assert_raised(later, "CommunicatorPoisoned", *words)
        assert found["status"]["failure"] == "group", found
        assert found["status"]["phase"] == "fallback", found
        assert found["status"]["call"]["op"] == op, found
    rank.barrier()


class _CutError(Exception):
    """An exception class that no library has."""


def _needs_a_group_that_gives_up(ranks: Pool | Rank) -> None:
    if "nccl" in ranks.world.backend:
        pytest.skip("a gather of NCCL's that a rank is missing from holds the GPU of the others")


@contextmanager
def _cut() -> Iterator[None]:
    """Every gather of this process raises a Python exception."""

    def gather(*_: Any, **__: Any) -> Any:
        raise _CutError("the wire is cut")

    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning that a kernel exists already
        for key in ("CPU", "CUDA"):
            library.impl("_allgather_base_", gather, key)
    try:
        yield
    finally:
        library._destroy()


@pytest.mark.worlds(2)
@pytest.mark.parametrize("op", ["allreduce", "barrier"])
@on_ranks
def test_an_exception_of_python_keeps_its_class(rank: Rank, op: str) -> None:
    """Hazard 31: process groups can be written in Python, too."""
    communicator = _without_regions(rank, rank.fresh_group(), PATIENCE)
    call = _calls(rank, communicator.name)[op]
    call()
    rank.barrier()
    with _cut():
        found = _after(communicator, call)
    assert found["call"].error == "_CutError", found
    assert found["call"].message == "the wire is cut"
    assert found["call"].seconds < PATIENCE / 2, found
    assert found["next"].error == found["check"].error == "CommunicatorPoisoned", found
    assert f"the process group of rank {rank.rank}" in found["next"].message, found


def _one_is_cut(rank: Rank) -> dict[str, Any]:
    communicator = rank.new_communicator("one-cut", rank.fresh_group(), call_timeout=SHORT)
    call = _calls(rank, communicator.name)["allreduce"]
    call()
    rank.barrier()
    if rank.rank == 0:
        with _cut():
            found = attempt(call)
    else:
        found = attempt(call)
    rank.barrier()
    result = {"call": found, "next": attempt(call), "destroy": attempt(communicator.destroy)}
    rank.barrier()
    return result


@pytest.mark.worlds(2, 3)
def test_peers_learn_whose_process_group_it_was(pool: Pool) -> None:
    """If ranks can notify each other, no rank reports a timeout of a missing rank instead."""
    _needs_a_group_that_gives_up(pool)
    first, *others = pool.run(_one_is_cut)
    assert first["call"].error == "_CutError", first
    for found in others:
        assert_raised(found["call"], "CommunicatorPoisoned", "the process group of rank 0")
        assert_in_time(found["call"], SHORT)
    for found in (first, *others):
        assert found["next"].error == "CommunicatorPoisoned", found
        assert found["destroy"].error == "", found


@pytest.mark.worlds(2)
@on_ranks
def test_a_rank_that_does_not_come_still_is_a_time_out(rank: Rank) -> None:
    """The negative control: a rank that has waited for the timeout reports a timeout."""
    _needs_a_group_that_gives_up(rank)
    communicator = _without_regions(rank, rank.fresh_group(), SHORT)
    call = _calls(rank, communicator.name)["allreduce"]
    call()
    rank.barrier()
    if rank.rank == 0:
        found = _after(communicator, call)
        assert_raised(found["call"], "CollectiveTimeout", f"(timeout {SHORT:g} s)")
        assert found["call"].seconds > SHORT * 0.9, found
        assert found["status"]["failure"] == "timeout"
    rank.barrier()
