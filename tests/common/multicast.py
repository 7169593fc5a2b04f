"""Communicators of tests whose kernels do by the ranks' own addresses what an NVLink switch does.

No test makes an address of real multicast: worlds.MULTICAST_OFF sees to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from collx._extension import extension

from .check import run_each
from .family_cases import Call
from .family_check import run_call
from .rank import Rank

ALGORITHMS = tuple(
    name
    for name in extension.algorithms("allreduce", multicast=True)
    if name not in extension.algorithms("allreduce")
)
SUMMED = ("float32", "float16", "bfloat16", "int32", "int64")
ACCEPTED = (*((dtype, "sum") for dtype in SUMMED), ("float32", "avg"))


@contextmanager
def simulated() -> Iterator[None]:
    """Communicators and symmetric tensors that are made meanwhile are such ones. All of a
    communicator have to be made so, on every rank."""
    from collx._bootstrap import multicast

    multicast.simulated = True
    try:
        yield
    finally:
        multicast.simulated = False


def communicator_of(rank: Rank, key: str = "simulated", **options: Any) -> Any:
    """The communicator of a key: made when first asked for. Collective."""
    if key == "simulated-small":
        options["payload_bytes"] = rank.smallest_payload()
    with simulated():
        return rank.communicator(key, **options)


def run_simulated(rank: Rank, calls: Iterable[Call], key: str = "simulated") -> list[str]:
    """A job: makes the calls and tells what went wrong."""
    communicator_of(rank, key)
    with simulated():
        return run_each(rank, calls, run_call, key)
