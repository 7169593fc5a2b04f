"""Errors carry the fields from which their message is made, however they leave an operator."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import collx

from ..attempt import attempt, finish, ones
from ..limits import timeout_now
from ..pool import Pool
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


def _absent(rank: Rank, way: str, timeout: float) -> list[dict[str, Any]]:
    """The last rank does not make the second call."""
    communicator = rank.new_communicator(f"fields-{way}", rank.fresh_group(), call_timeout=timeout)
    x = ones(rank).requires_grad_(way == "backward")
    y = collx.allreduce(x, group=communicator)

    def call() -> None:
        if way == "operator":
            torch.ops.collx.allreduce(x, "sum", communicator.name)
        elif way == "backward":
            y.sum().backward()
        finish(communicator)

    away = rank.rank == rank.size - 1
    found = [] if away else [_caught(call), _caught(lambda: collx.allreduce(x, group=communicator))]
    rank.barrier()
    communicator.destroy()
    return found


@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize("way", ["operator", "backward"])
def test_a_timeout_says_in_fields_who_was_missing(pool: Pool, way: str) -> None:
    """A backward pass runs on an autograd thread, and raises the same error object."""
    timeout = timeout_now(pool)
    *there, _ = pool.run(_absent, way, timeout)
    for rank, (first, then) in enumerate(there):
        assert first["class"] == "CollectiveTimeout", first
        assert first["the same"], first
        assert first["is"] == ("DistError", "RuntimeError", "TimeoutError")
        assert then["class"] == "CommunicatorPoisoned", then
        assert then["is"] == ("DistError", "RuntimeError")
        for error in (first, then):
            assert error["communicator"] == f"test-fields-{way}"
            assert (error["op"], error["peer"]) == ("allreduce", pool.size - 1), error
            assert error["rank"] in range(pool.size - 1), error
            assert f"phase {error['phase']} of allreduce" in error["text"], error
            assert error["call"]["shape"] == (1000,), error
            assert error["call"]["dtype"] == "float32", error
            assert error["peer_call"] is None, error
            assert (
                f"rank {error['rank']} timed out waiting for rank {error['peer']}" in error["text"]
            )
        assert first["sequence"] == then["sequence"], rank


def _different(rank: Rank, timeout: float) -> dict[str, Any]:
    communicator = rank.new_communicator(
        "fields-mismatch", rank.fresh_group(), call_timeout=timeout, check=True
    )

    def call() -> None:
        if rank.rank == 0:
            collx.allreduce(ones(rank), "sum", communicator)
        else:
            collx.broadcast(ones(rank, 7, torch.int32), 1, communicator)
        finish(communicator)

    found = _caught(call)
    rank.barrier()
    if not found["class"]:  # this rank left the call before the other one noticed the mismatch
        found = _caught(communicator.raise_if_failed)
    communicator.destroy()
    return found


@pytest.mark.worlds(2)
def test_a_mismatch_has_both_calls(pool: Pool) -> None:
    for error in pool.run(_different, timeout_now(pool)):
        assert error["class"] == "CollectiveMismatch", error
        assert error["phase"] == "check"
        assert {error["rank"], error["peer"]} == {0, 1}
        calls = {error["rank"]: error["call"], error["peer"]: error["peer_call"]}
        first, second = calls[0], calls[1]
        assert (first["op"], first["shape"], first["reduce_op"]) == ("allreduce", (1000,), "sum")
        assert (second["op"], second["dtype"], second["root"]) == ("broadcast", "int32", 1)
        runs = CARRIES_ONESTAGE[pool.world.device]
        assert (second["algorithm"], second["executed_by"]) == ("onestage", runs)
        assert f"by onestage, executed by {runs}" in error["text"]
        assert first["algorithm"] == first["executed_by"]


def _failed_init(rank: Rank, timeout: float) -> dict[str, Any]:
    options: dict[str, Any] = {"pdl": "sideways"} if rank.rank == 1 else {}
    try:
        rank.new_communicator("fields-init", timeout=timeout, **options)
    except collx.CollectiveError as raised:
        error: Any = raised
        return {"step": error.step, "failures": error.failures, "name": error.communicator}
    return {}


@pytest.mark.worlds(2)
def test_a_failed_init_says_in_fields_where_and_why(pool: Pool) -> None:
    for found in pool.run(_failed_init, timeout_now(pool)):
        assert found["step"] == "arguments"
        assert found["name"] == "test-fields-init"
        assert list(found["failures"]) == [1]
        assert "sideways" in found["failures"][1]


def _absent_from_empty(rank: Rank, timeout: float) -> list[dict[str, Any]]:
    communicator = rank.new_communicator("fields-empty", rank.fresh_group(), call_timeout=timeout)
    calls = (lambda: communicator.empty(3), communicator.raise_if_failed)
    found = [] if rank.rank == 1 else [_caught(call) for call in calls]
    rank.barrier()
    attempt(communicator.destroy)  # the absent rank may wait for the other one in it
    return found


@pytest.mark.worlds(2)
def test_a_vote_that_a_rank_is_absent_from_names_it_in_fields(pool: Pool) -> None:
    first, _ = pool.run(_absent_from_empty, timeout_now(pool))
    assert len(first) == 2
    for found in first:
        assert found["class"] == "CollectiveTimeout"
        assert (found["phase"], found["rank"], found["peer"]) == ("vote", 0, 1)
        assert found["communicator"] == "test-fields-empty"
        assert found["op"] is None


def _logged(rank: Rank) -> list[str]:
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(f"{record.levelname} {record.getMessage()}")

    logger, handler = logging.getLogger("collx"), Keep()
    logger.addHandler(handler)
    before = logger.level
    logger.setLevel(logging.DEBUG)
    try:
        rank.new_communicator("logged").destroy()
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
    return said


@pytest.mark.worlds(1)
def test_init_and_destroy_tell_the_logger(pool: Pool) -> None:
    (said,) = pool.run(_logged)
    assert any(line.startswith("DEBUG test-logged: step 'rendezvous'") for line in said), said
    assert any(line.startswith("INFO") and "ready" in line for line in said), said
    assert any(line.startswith("INFO") and "has left" in line for line in said), said
