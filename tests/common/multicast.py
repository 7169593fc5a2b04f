"""Communicators with simulated multicast: kernels use the address of each rank instead of an NVLink
switch.

Tests do not create real multicast addresses, which worlds.MULTICAST_OFF disables. With HARDWARE,
which requires exclusive use of such a machine, the same tests run on the switch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from collx._bootstrap import multicast
from collx._extension import extension

from . import collectives, norms
from .calls import Call, run_calls
from .collectives import NAMES, OPS
from .rank import Rank
from .values import COPIED, DTYPES, legal_ops
from .worlds import HARDWARE


def _ways(ops: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Returns every (op, algorithm) that needs multicast."""
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
"""The styles of values that are reduced. A switch adds in its own order."""


def adds(op: str, algorithm: str) -> bool:
    """Whether the switch adds the values."""
    return OPS[op].reduces and algorithm != "multimem_gather"


def accepted(op: str, algorithm: str) -> list[tuple[str, str]]:
    """Returns the accepted dtypes with their reduce ops."""
    if adds(op, algorithm):
        return [*((dtype, "sum") for dtype in ADDED), ("float32", "avg")]
    if not OPS[op].reduces:
        return [(dtype, "sum") for dtype in COPIED]
    return [(dtype, other) for dtype in DTYPES for other in legal_ops(dtype)]


def able(call: Any) -> Any:
    """Returns the call, changed to one that its multicast algorithm accepts."""
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
    """Makes new communicators and symmetric tensors use simulated multicast. This must include all
    tensors of such a communicator, on every rank."""
    multicast.simulated = not HARDWARE
    try:
        yield
    finally:
        multicast.simulated = False


def communicator_of(rank: Rank, key: str = "simulated", **options: Any) -> Any:
    """Returns the communicator of a key. Creates it at the first call. Collective."""
    if key == "simulated-small":
        options["payload_bytes"] = rank.smallest_payload()
    with simulated():
        return rank.communicator(key, **options)


def run_simulated(rank: Rank, calls: Iterable[Call], key: str = "simulated") -> list[str]:
    """A job that makes the calls. Returns one line for each failure."""
    communicator_of(rank, key)
    with simulated():
        return run_calls(rank, map(able, calls), key)
