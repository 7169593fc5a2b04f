"""Records the last calls of this process in the format of PyTorch's flight recorder.

Each communicator keeps its last 1,000 calls. With the environment variable COLLX_FLIGHT_RECORDER,
the first failure of a communicator writes the calls of all communicators to a file:

    COLLX_FLIGHT_RECORDER=/tmp/traces/collx_ torchrun --nproc-per-node 4 train.py
    python -m torch.distributed.flight_recorder.fr_trace /tmp/traces --allow-incomplete-ranks
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist

from collx import communicator
from collx.communicator import Communicator

__all__ = ["PREFIX", "dump", "trace"]

PREFIX = "COLLX_FLIGHT_RECORDER"
"""The environment variable with the prefix of the files that failures write."""

_VERSION = "2.10"  # of PyTorch's format

_log = logging.getLogger("collx")

# PyTorch's analyzer only supports the operations of NCCL, and checks sizes by the rules of each.
_NAMES = {
    "allreduce": "all_reduce",
    "reducescatter": "_reduce_scatter_base",
    "allgather": "_all_gather_base",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "alltoall": "all_to_all",
    "alltoallv": "all_to_all",
    "barrier": "all_reduce_barrier",
}
# The analyzer expects the C++ names of scalar types.
_DTYPES = {
    "float64": "Double",
    "float32": "Float",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "int64": "Long",
    "int32": "Int",
    "int16": "Short",
    "int8": "Char",
    "uint8": "Byte",
    "bool": "Bool",
}


def trace() -> dict[str, Any]:
    """Returns the last calls of all live communicators of this process, in the format of PyTorch's
    flight recorder: a dict with "version", "pg_config", "pg_status" and "entries".

    Each entry is one call, oldest first. In addition to PyTorch's fields, it has "collx_function",
    "collx_algorithm", "collx_shape" (of the input; for an allgather, of the result) and
    "collx_bytes" (of the input). "collective_seq_id" is the sequence number in error messages.
    "input_sizes" and "output_sizes" are those of an NCCL operation on the same data, in equal
    parts. "state" is "completed", "started" or "scheduled", as this rank currently knows it. After
    a CUDA graph has captured calls, states are not known and calls are "scheduled".
    """
    # Read once, so that the states of calls are consistent with the status of their communicator.
    completed = {one: _completed(one) for one in communicator.live()}
    entries = sorted(
        (entry for one, known in completed.items() for entry in _entries(one, *known)),
        key=lambda e: e["time_created_ns"],
    )
    # Numbers all calls since the start in one sequence: the analyzer omits calls that are older
    # than the oldest call that every rank still has.
    last = {e["process_group"][0]: e["collective_seq_id"] for e in entries}
    made = sum(number + 1 for number in last.values())
    for place, entry in enumerate(entries):
        entry["record_id"] = entry["op_id"] = made - len(entries) + place
    return {
        "version": _VERSION,
        "pg_config": {
            one.name: {"name": one.name, "desc": "collx", "ranks": str(_ranks_of(one))}
            for one in completed
        },
        "pg_status": {one.name: _status(one, *known) for one, known in completed.items()},
        "entries": entries,
    }


def dump(prefix: str | os.PathLike[str]) -> Path:
    """Writes `trace()` to a file and returns its path. The file name is `prefix` followed by the
    global rank of this process. PyTorch's analyzer reads the files of all ranks from one folder. An
    existing file is replaced atomically, so a reader never sees a partial file. Raises OSError."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    path = Path(f"{os.fspath(prefix)}{rank}")
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            pickle.dump(trace(), file)
        except BaseException:
            os.unlink(file.name)
            raise
    os.replace(file.name, path)
    return path


def after_failure(name: str) -> None:
    """Writes the trace after the failure of a communicator, if enabled. Never raises."""
    prefix = os.environ.get(PREFIX)
    failed = communicator.find(name)
    if not prefix or failed is None or failed.failure_is_dumped or sys.is_finalizing():
        return
    failed.failure_is_dumped = True
    try:
        path = dump(prefix)
        _log.error("collx: communicator %r failed; its last calls are in %s", name, path)
    except Exception:
        _log.exception(
            "collx: the last calls of communicator %r could not be written (%s=%s)",
            *(name, PREFIX, prefix),
        )


def _entries(one: Communicator, completed: int | None, under_way: bool) -> list[dict[str, Any]]:
    entries = []
    for call in one._native.recent_calls():
        number = call["number"]
        state = "scheduled"
        if completed is not None and number <= completed:
            state = "completed" if number < completed else "started" if under_way else state
        collective = call["op"].partition("_")[0]  # a fused norm starts with its collective
        inputs, outputs = _shapes(collective, call, one.world_size)
        entries.append(
            {
                "pg_id": 0,
                "process_group": (one.name, "collx"),
                "collective_seq_id": number,
                "p2p_seq_id": 0,
                "is_p2p": False,
                "profiling_name": f"nccl:{_NAMES[collective]}",
                "time_created_ns": call["created_ns"],
                "time_discovered_started_ns": None,
                "time_discovered_completed_ns": None,
                "input_sizes": [inputs],
                "input_dtypes": [_DTYPES.get(call["dtype"], call["dtype"])],
                "output_sizes": [outputs],
                "output_dtypes": [_DTYPES.get(call["dtype"], call["dtype"])],
                "state": state,
                "retired": state == "completed",
                "timeout_ms": round(one.timeout * 1000),
                "frames": [],
                "collx_function": call["function"],
                "collx_algorithm": call["executed_by"],
                "collx_shape": call["shape"],
                "collx_bytes": call["input_bytes"],
            }
        )
    return entries


def _completed(one: Communicator) -> tuple[int | None, bool]:
    """Returns the number of calls that this rank has completed, None if not known, and whether the
    next call is in progress, or was when it failed."""
    native = one._native
    if native.has_captured:
        return None, False
    progress = native.progress()
    if one.destroyed:  # possibly meanwhile, by another thread
        return None, False
    if progress:
        count, under_way = progress[one.rank]
        return count, under_way or one.poisoned
    # The communicator uses the process group. On the CPU, a counted call is complete.
    return (native.calls, one.poisoned) if one.device.type == "cpu" else (None, False)


def _shapes(collective: str, call: dict[str, Any], world: int) -> tuple[list[int], list[int]]:
    """Returns the shapes of input and output. The analyzer reports unequal parts as an error, so
    sizes are rounded up to a multiple of the number of ranks."""
    shape = list(call["shape"])
    part = -(-call["numel"] // world)
    if collective == "allgather":  # its record has the shape of the result
        return [part], [world * part]
    if collective == "reducescatter":
        return [world * part], [part]
    return shape, shape


def _status(one: Communicator, completed: int | None, under_way: bool) -> dict[str, int]:
    known = -1 if completed is None else completed - 1
    enqueued = one._native.calls - 1  # a call that failed on the CPU has not been counted
    return {
        "last_enqueued_collective": max(enqueued, known + under_way),
        "last_started_collective": known + under_way,
        "last_completed_collective": known,
    }


def _ranks_of(one: Communicator) -> list[int]:
    """Returns the ranks in the default process group, or the communicator's own if not known."""
    return one._native.global_ranks or list(range(one.world_size))
