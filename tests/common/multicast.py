"""Communicators of tests whose kernels do by the ranks' own addresses what an NVLink switch does.

No test makes an address of real multicast: worlds.MULTICAST_OFF sees to it. But with HARDWARE, for
whoever has such a machine to himself, the same tests run on the switch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from collx._extension import extension

from . import collectives, norms
from .calls import Call, run_calls
from .collectives import NAMES, OPS
from .rank import Rank
from .values import COPIED, DTYPES, legal_ops
from .worlds import HARDWARE


def _ways(ops: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Every (op, algorithm) that needs multicast."""
    return tuple(
        (op, name)
        for op in ops
        for name in extension.algorithms(op, multicast=True)
        if name not in extension.algorithms(op)
    )


WAYS = _ways(op for op in NAMES if op == OPS[op].packet)
NORM_WAYS = _ways(norms.NAMES)
ALGORITHMS = tuple(name for op, name in WAYS if op == "allreduce")
ADDED = ("float32", "float16", "bfloat16", "int32", "int64")  # the dtypes
STYLES = ("exact",) if HARDWARE else ("random", "bits", "special")
"""Of values that are reduced. A switch adds up in an order of its own."""


def adds(op: str, algorithm: str) -> bool:
    """Whether the switch adds up, or the ranks in their order, or nobody."""
    return OPS[op].reduces and algorithm != "multimem_gather"


def accepted(op: str, algorithm: str) -> list[tuple[str, str]]:
    """dtypes with their reduce ops."""
    if adds(op, algorithm):
        return [*((dtype, "sum") for dtype in ADDED), ("float32", "avg")]
    if not OPS[op].reduces:
        return [(dtype, "sum") for dtype in COPIED]
    return [(dtype, other) for dtype in DTYPES for other in legal_ops(dtype)]


def able(call: Any) -> Any:
    """The call, made one that its algorithm accepts: all others are."""
    if not isinstance(call, collectives.Call):
        return call
    if (call.dtype, call.reduce_op) in accepted(call.op, call.algorithm):
        pass
    elif call.dtype in ADDED or not adds(call.op, call.algorithm):
        call = replace(call, reduce_op="sum")
    else:
        call = replace(call, reduce_op="sum", dtype="bfloat16")
    return replace(call, style="exact") if HARDWARE and adds(call.op, call.algorithm) else call


@contextmanager
def simulated() -> Iterator[None]:
    """Communicators and symmetric tensors that are made meanwhile are such ones. All of a
    communicator have to be made so, on every rank."""
    from collx._bootstrap import multicast

    multicast.simulated = not HARDWARE
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
        return run_calls(rank, map(able, calls), key)
