"""Calls that fail during other calls: makes them, and checks their errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .attempt import Attempt, finish
from .calls import Call, Fields, Prepared
from .operators import call_of
from .rank import Rank

ROOT = 0


def small_call(op: str, world: int, **fields: Any) -> Call:
    """Returns a call of 1000 elements or of 7 rows. `fields` replace the defaults."""
    usual: Fields = {"style": "random", "root": ROOT, "rows": 7, "cols": 256}
    return call_of(op, 1000, world, **{**usual, **fields})


def repeated(rank: Rank, communicator: Any, call: Call) -> Callable[[], None]:
    """Returns a function that makes a call, always on the same tensors, and waits for its end.
    Collective: all ranks have prepared their tensors before one makes the call."""
    prepared = None if call.op == "barrier" else Prepared(rank, communicator, call)
    rank.barrier()

    def run() -> None:
        if prepared is None:
            torch.ops.collx.barrier(communicator.name)
        else:
            prepared.make()
        finish(communicator)

    return run


def assert_named(result: Attempt, error: str, *words: str) -> None:
    """Fails if an attempt did not end with an error of this class that contains all words."""
    assert result.error == error, result
    assert "RuntimeError" in result.bases
    for word in words:
        assert word in result.message, (word, result.message)
