"""Hooks of groups on the torch.distributed backend: what PyTorch's flight recorder records of
completed calls, and which hooks run for failed calls."""

from __future__ import annotations

import json
import pickle
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed.distributed_c10d import _coalescing_manager

from ..attempt import attempt, ones
from ..limits import assert_in_time, timeout_now
from ..pool import Pool, on_ranks
from ..rank import Rank
from .backend import finish, group_of, until_known
from .lifecycle import exit_codes

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(
        not hasattr(dist.ProcessGroup, "supports_completion_hooks"),
        reason="this PyTorch has no hooks for completion",
    ),
]


def _records(group: Any) -> list[dict[str, Any]]:
    """Returns the flight recorder's entries for the group's calls, in order."""
    found = json.loads(c10d._dump_fr_trace_json(backend="collx"))  # type: ignore[attr-defined]
    name = group.group_name
    return [each for each in found.get("entries", []) if each["process_group"][0] == name]


def _states(group: Any, seconds: float = 10.0) -> list[tuple[str, str, bool]]:
    """Returns the name and state of each call and whether the recorder has retired it, as soon as
    all calls have completed or the given time has passed."""
    until = time.monotonic() + seconds
    while True:
        records = _records(group)
        states = [(r["profiling_name"], r["state"], r["retired"]) for r in records]
        if all(state == "completed" for _, state, _ in states) or time.monotonic() > until:
            return states
        time.sleep(0.01)


@pytest.mark.own_gpu
@pytest.mark.worlds(2)
@on_ranks
def test_the_flight_recorder_sees_every_call_complete(rank: Rank) -> None:
    group = group_of(rank)
    assert group.supports_completion_hooks
    assert group.supports_abort_hooks
    x = ones(rank)
    dist.all_reduce(x, group=group)
    works = [dist.all_reduce(x, group=group, async_op=True) for _ in range(3)]
    for work in works:
        work.wait()
    out = torch.empty(rank.size * 8, device=rank.device)
    dist.all_gather_into_tensor(out, torch.ones(8, device=rank.device), group=group)
    if rank.device.type == "cpu":  # executed by the inner group
        dist.all_reduce(torch.tensor([1]), op=dist.ReduceOp.BOR, group=group)
    peer = (rank.rank + 1) % rank.size
    pair = [dist.P2POp(dist.isend, x, peer, group), dist.P2POp(dist.irecv, out[:8], peer, group)]
    pair[0].tensor = out[8:16]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    # The work object is dropped before the call has completed.
    dist.all_reduce(x, group=group, async_op=True)
    rank.synchronize()
    found = _states(group)
    dist.destroy_process_group(group)
    inner = ["all_reduce"] if rank.device.type == "cpu" else []
    names = ["all_reduce"] * 4 + ["_all_gather_base", *inner, "p2p", "p2p", "all_reduce"]
    assert len(found) == len(names), found
    for (title, state, retired), name in zip(found, names, strict=True):
        backend, _, op = title.partition(":")
        assert backend == "collx"
        assert op == name or (name == "p2p" and op.startswith(("send", "recv"))), title
        assert (state, retired) == ("completed", True), found


@pytest.mark.worlds(2, 3)
@on_ranks
def test_a_call_that_fails_is_no_completion_and_runs_the_abort_hooks_first(
    rank: Rank, timeout: float
) -> None:
    """The last rank does not make the second call."""
    group = group_of(rank, timeout=timedelta(seconds=timeout))
    called: list[float] = []
    group.register_abort_hook(1, lambda: called.append(time.monotonic()))
    dist.all_reduce(ones(rank), group=group)
    rank.barrier()
    if rank.rank != rank.size - 1:
        work = dist.all_reduce(ones(rank), group=group, async_op=True)
        waiting = _states(group, seconds=0.1)
        call = attempt(partial(finish, rank, work))
        assert called, "a hook runs before the failure is raised"
        assert call.error == "CollectiveTimeout", call
        for states in (waiting, _states(group, seconds=0.1)):
            (_, first, _), (_, second, retired) = states
            assert first == "completed", states
            assert second != "completed", states
            assert not retired
    rank.barrier()
    dist.destroy_process_group(group)


def _hooks_for_failures(rank: Rank, timeout: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    # A synchronous call, and a hook that is unregistered.
    group = group_of(rank, timeout=timedelta(seconds=timeout))
    called: list[str] = []
    group.register_abort_hook(1, lambda: called.append("kept"))
    group.register_abort_hook(2, lambda: called.append("gone"))
    group.register_abort_hook(3, _broken)
    group.unregister_abort_hook(2)
    dist.all_reduce(ones(rank), group=group)
    found["bad input"] = attempt(partial(_bad, rank, group))
    found["after bad input"] = list(called)
    rank.barrier()
    if rank.rank == 0:
        found["call"] = attempt(lambda: until_known(rank, group))
        found["after call"] = list(called)
    rank.barrier()
    dist.destroy_process_group(group)
    # Coalesced calls.
    group = group_of(rank, timeout=timedelta(seconds=timeout))
    group.register_abort_hook(1, lambda: called.append("coalesced"))
    dist.all_reduce(ones(rank), group=group)
    rank.barrier()
    if rank.rank == 0:
        found["coalesced"] = attempt(partial(_coalesced, rank, group))
        found["after coalesced"] = list(called)
    rank.barrier()
    dist.destroy_process_group(group)
    # An abort.
    group = group_of(rank)
    group.register_abort_hook(1, lambda: called.append("abort"))
    dist.all_reduce(ones(rank), group=group)
    rank.barrier()
    if rank.rank == 0:
        group.abort()
        found["after abort"] = list(called)
    rank.barrier()
    dist.destroy_process_group(group)
    return found


def _coalesced(rank: Rank, group: Any) -> None:
    with _coalescing_manager(group, async_ops=True) as manager:
        parts = [torch.empty(3 * rank.size, device=rank.device) for _ in range(2)]
        for part in parts:
            dist.all_to_all_single(part, torch.ones_like(part), group=group)
    for _ in range(2):  # on CUDA, only the second wait raises the failure
        manager.wait()
        rank.synchronize()


def _broken() -> None:
    raise ValueError("of a hook")


def _bad(rank: Rank, group: Any) -> None:
    dist.all_gather([ones(rank)] * (rank.size + 1), ones(rank), group=group)


@pytest.mark.worlds(2)
def test_abort_hooks_of_synchronous_calls_and_of_an_abort(pool: Pool) -> None:
    timeout = timeout_now(pool)
    found, other = pool.run(_hooks_for_failures, timeout)
    for each in (found, other):
        assert each["bad input"].error == "ValueError", each
        assert each["after bad input"] == []
    assert found["call"].error == "CollectiveTimeout", found
    assert_in_time(found["call"], timeout)
    assert set(found["after call"]) == {"kept"}
    assert found["coalesced"].error == "CollectiveTimeout", found
    assert found["after coalesced"][-1] == "coalesced"
    assert found["after abort"][-1] == "abort"


DUMPED = """
from datetime import timedelta
x = torch.ones(1000, device=device)
dist.all_reduce(x)
dist.group.WORLD.set_timeout(timedelta(seconds=1))
if rank == 0:
    try:
        for _ in range(2):
            dist.all_reduce(x)
            torch.accelerator.synchronize() if device == "cuda" else None
    except RuntimeError:
        os._exit(3)  # at once: the file is complete
store.wait(["never"], timedelta(seconds=3))
{ending}
"""


@pytest.mark.worlds(2)
def test_the_flight_recorder_has_written_its_trace_when_a_failure_is_raised(
    pool: Pool, tmp_path: Path
) -> None:
    settings = {
        "TORCH_FR_DUMP_ON_TIMEOUT": "1",
        "TORCH_INCLUDE_STACK_TRACE": "0",
        "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "trace_"),
    }
    (code, output), _ = exit_codes(pool.world.device, "", settings, program=DUMPED, backend="collx")
    assert code == 3, output
    first, second, *_ = pickle.loads((tmp_path / "trace_0").read_bytes())["entries"]
    assert (first["profiling_name"], first["state"]) == ("collx:all_reduce", "completed")
    assert second["state"] != "completed"


@pytest.mark.worlds(1, 2)
@on_ranks
def test_memory_stats_have_the_bytes_of_the_regions(rank: Rank) -> None:
    group = group_of(rank)
    backend = group._get_backend(rank.device)
    found = [backend.memory_stats()]
    dist.all_reduce(ones(rank), group=group)
    found.append(backend.memory_stats())
    dist.destroy_process_group(group)
    before, after = found
    assert set(before) == {"suspend", "suspended", "persist", "total"}
    assert set(before.values()) == {0}
    assert after["persist"] == after["total"] > 1 << 20
    assert after["suspend"] == 0


@pytest.mark.worlds(1)
@on_ranks
def test_a_hook_may_unregister_itself(rank: Rank) -> None:
    """While it runs."""
    group = group_of(rank)
    called = []

    def hook() -> None:
        called.append(1)
        group.unregister_abort_hook(1)

    group.register_abort_hook(1, hook)
    dist.all_reduce(ones(rank), group=group)
    rank.barrier()
    group.abort()
    group.abort()
    assert len(called) == 1
    rank.barrier()
    dist.destroy_process_group(group)
