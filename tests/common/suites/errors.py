"""Errors carry the fields from which their message is made, however they leave an operator."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any
from unittest import TestCase

import pytest
import torch
import torch.distributed as dist

import collx

from ..attempt import attempt, finish, ones
from ..pool import on_ranks
from ..rank import Rank

CARRIES_ONESTAGE = {"cpu": "staged", "cuda": "channels"}  # executes a small "onestage" broadcast
FIELDS = ("communicator", "op", "phase", "rank", "peer", "sequence", "call", "peer_call")


def _caught(call: Callable[[], Any]) -> dict[str, Any]:
    """Returns the fields, class and base classes of the raised error, after a pickle round trip."""
    try:
        call()
    except collx.CollectiveError as error:
        again = pickle.loads(pickle.dumps(error))
        kinds = (dist.DistError, RuntimeError, TimeoutError)
        return {
            **{field: getattr(again, field) for field in FIELDS},
            "the same": all(getattr(again, f) == getattr(error, f) for f in FIELDS),
            "class": type(error).__name__,
            "is": tuple(kind.__name__ for kind in kinds if isinstance(error, kind)),
            "text": str(error),
        }
    return {"class": ""}


@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize("way", ["operator", "backward"])
@on_ranks
def test_a_timeout_says_in_fields_who_was_missing(rank: Rank, way: str, timeout: float) -> None:
    """The last rank does not make the second call. A backward pass runs on an autograd thread, and
    raises the same error object."""
    communicator = rank.new_communicator(f"fields-{way}", rank.fresh_group(), call_timeout=timeout)
    x = ones(rank).requires_grad_(way == "backward")
    y = collx.allreduce(x, group=communicator)

    def call() -> None:
        if way == "operator":
            torch.ops.collx.allreduce(x, "sum", communicator.name)
        elif way == "backward":
            y.sum().backward()
        finish(communicator)

    last = rank.size - 1
    if rank.rank != last:
        first, then = _caught(call), _caught(lambda: collx.allreduce(x, group=communicator))
    rank.barrier()
    communicator.destroy()
    if rank.rank == last:
        return
    assert first["class"] == "CollectiveTimeout", first
    assert first["the same"], first
    assert first["is"] == ("DistError", "RuntimeError", "TimeoutError")
    assert then["class"] == "CommunicatorPoisoned", then
    assert then["is"] == ("DistError", "RuntimeError")
    for error in (first, then):
        assert error["communicator"] == f"test-fields-{way}"
        assert (error["op"], error["peer"]) == ("allreduce", last), error
        assert error["rank"] in range(last), error
        assert f"phase {error['phase']} of allreduce" in error["text"], error
        assert error["call"]["shape"] == (1000,), error
        assert error["call"]["dtype"] == "float32", error
        assert error["peer_call"] is None, error
        assert f"rank {error['rank']} timed out waiting for rank {last}" in error["text"]
    assert first["sequence"] == then["sequence"]


@pytest.mark.worlds(2)
@on_ranks
def test_a_mismatch_has_both_calls(rank: Rank, timeout: float) -> None:
    communicator = rank.new_communicator(
        "fields-mismatch", rank.fresh_group(), call_timeout=timeout, check=True
    )

    def call() -> None:
        if rank.rank == 0:
            collx.allreduce(ones(rank), "sum", communicator)
        else:
            collx.broadcast(ones(rank, 7, torch.int32), 1, communicator)
        finish(communicator)

    error = _caught(call)
    rank.barrier()
    if not error["class"]:  # this rank left the call before the other one noticed the mismatch
        error = _caught(communicator.raise_if_failed)
    communicator.destroy()
    assert error["class"] == "CollectiveMismatch", error
    assert error["phase"] == "check"
    assert {error["rank"], error["peer"]} == {0, 1}
    calls = {error["rank"]: error["call"], error["peer"]: error["peer_call"]}
    first, second = calls[0], calls[1]
    assert (first["op"], first["shape"], first["reduce_op"]) == ("allreduce", (1000,), "sum")
    assert (second["op"], second["dtype"], second["root"]) == ("broadcast", "int32", 1)
    runs = CARRIES_ONESTAGE[rank.device.type]
    assert (second["algorithm"], second["executed_by"]) == ("onestage", runs)
    assert f"by onestage, executed by {runs}" in error["text"]
    assert first["algorithm"] == first["executed_by"]


@pytest.mark.worlds(2)
@on_ranks
def test_a_failed_init_says_in_fields_where_and_why(rank: Rank, timeout: float) -> None:
    options: dict[str, Any] = {"pdl": "sideways"} if rank.rank == 1 else {}
    with pytest.raises(collx.InitError) as raised:
        rank.new_communicator("fields-init", timeout=timeout, **options)
    error: Any = raised.value
    assert error.step == "arguments"
    assert error.communicator == "test-fields-init"
    assert list(error.failures) == [1]
    assert "sideways" in error.failures[1]


@pytest.mark.worlds(2)
@on_ranks
def test_a_vote_that_a_rank_is_absent_from_names_it_in_fields(rank: Rank, timeout: float) -> None:
    communicator = rank.new_communicator("fields-empty", rank.fresh_group(), call_timeout=timeout)
    calls = (lambda: communicator.empty(3), communicator.raise_if_failed)
    for found in [] if rank.rank == 1 else [_caught(call) for call in calls]:
        assert found["class"] == "CollectiveTimeout"
        assert (found["phase"], found["rank"], found["peer"]) == ("vote", 0, 1)
        assert found["communicator"] == "test-fields-empty"
        assert found["op"] is None
    rank.barrier()
    attempt(communicator.destroy)  # the absent rank may wait for the other one in it


@pytest.mark.worlds(1)
@on_ranks
def test_init_and_destroy_tell_the_logger(rank: Rank) -> None:
    with TestCase().assertLogs("collx", "DEBUG") as logged:
        rank.new_communicator("logged").destroy()
    said = logged.output
    assert any(line.startswith("DEBUG:collx:test-logged: step 'rendezvous'") for line in said), said
    assert any(line.startswith("INFO:") and "ready" in line for line in said), said
    assert any(line.startswith("INFO:") and "has left" in line for line in said), said
