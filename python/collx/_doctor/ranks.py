"""Runs collx: starts the ranks, and gathers the facts that they report within the time limit.

The ranks write their facts to the store of their process group, which is in the process of the
doctor. The facts of a rank remain available after it exits or is terminated.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing as processes

import collx
from collx import _launch
from collx._bench.cuda_timing import capture, time_eager, time_replays
from collx._bench.job import GlooRanks
from collx._bench.ops import OPS
from collx._bench.ops_norm import NORM_OPS
from collx._bench.timing import time_batches
from collx._bootstrap import multicast
from collx._doctor import gpus
from collx._doctor.facts import Device, Rank, Run, Timing
from collx._extension import extension

SIZES = {"cpu": (8 << 10, 256 << 10, 4 << 20), "cuda": (8 << 10, 1 << 20, 64 << 20)}
_OPERATORS = tuple(name for name, op in OPS.items() if op.has_tensor and op not in NORM_OPS)
_CALLS, _WARMUP = 20, 3
_INIT_SHARE = 0.5  # share of the time limit for collx.init, whose error names the missing rank
_LEAST = 1.0  # seconds for collx.init at least, so that it ends after a short time limit
_GRACE = 2  # seconds for the other ranks to report, after one has ended


def run(device: str, count: int, timeout: float, function: Callable[..., int] | None = None) -> Run:
    """Starts `count` ranks and waits up to `timeout` seconds. Then terminates those that are still
    running. `function`: the function of a rank, for tests."""
    found = Run(device, timeout, [Rank(number) for number in range(count)])
    try:
        started = _launch.start(function or rank, count, device, timeout)
    except OSError as error:
        for one in found.ranks:
            one.ended = f"it was not started: {error}"
        return found
    deadline = time.monotonic() + timeout
    try:
        while not started.context.join(max(0.0, deadline - time.monotonic()), _GRACE):
            if time.monotonic() >= deadline:
                found.timed_out = True
                break
    except (processes.ProcessExitedException, processes.ProcessRaisedException) as error:
        lines = [line for line in str(error).strip().splitlines() if line.strip()]
        found.ranks[error.error_index].ended = lines[-1].strip()
    finally:
        for process in started.context.processes:
            process.kill()
            process.join()
    _collect(found, started.store)
    return found


def _collect(found: Run, store: dist.Store) -> None:
    for one in found.ranks:
        for name in ("stage", "device", "error"):
            setattr(one, name, _get(store, f"{one.rank}/{name}", getattr(one, name)))
    for name in ("init_seconds", "peers", "fallback_reason"):
        setattr(found, name, _get(store, f"0/{name}", getattr(found, name)))
    found.multicast_unavailable_reason = _get(store, "0/multicast_unavailable_reason", None)
    found.algorithms = _get(store, "0/algorithms", {})
    found.devices = [Device(**one) for one in _get(store, "0/devices", [])]
    found.timings = [Timing(**one) for one in _get(store, "0/timings", [])]


def _get(store: dist.Store, key: str, default: Any) -> Any:
    key = f"doctor/{key}"
    return json.loads(store.get(key)) if store.check([key]) else default


class _Reports:
    """Writes facts of this rank to the store."""

    def __init__(self) -> None:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.store = dist.TCPStore(host, port, is_master=False)

    def write(self, **facts: Any) -> None:
        for name, value in facts.items():
            self.store.set(f"doctor/{self.rank}/{name}", json.dumps(value))


def rank(device_type: str, timeout: float) -> int:
    """Runs a rank. An exception is reported as a fact."""
    reports = _Reports()
    try:
        _report(reports, device_type, timeout)
    except Exception as error:
        reports.write(error=f"{type(error).__name__}: {error}")
    return 0


def _report(reports: _Reports, device_type: str, timeout: float) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if device_type == "cuda":
        reports.write(stage="devices")
        device = torch.device("cuda", reports.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        if reports.rank == 0:
            reports.write(devices=[asdict(one) for one in gpus.devices()], peers=gpus.peers())
    # The doctor reports whether multicast is supported, but does not create multicast objects.
    # Without this variable, PyTorch would create them in the rendezvous.
    os.environ[multicast.OFF] = "1"
    reports.write(device=str(device), stage="process group")
    # The group has PyTorch's timeout, which is longer: a rank that raised at the end of the time
    # limit would be reported as failed instead of as late.
    store = dist.PrefixStore("group", reports.store)
    dist.init_process_group("gloo", store=store, rank=reports.rank, world_size=reports.world)
    ranks = GlooRanks()
    ranks.barrier()
    reports.write(stage="collx.init")
    begin = time.perf_counter()
    comm = collx.init(device=device, timeout=max(_LEAST, timeout * _INIT_SHARE))
    reports.write(
        init_seconds=time.perf_counter() - begin,
        fallback_reason=comm.fallback_reason,
        multicast_unavailable_reason=comm.multicast_unavailable_reason,
        algorithms={op: _available(comm, op) for op in _OPERATORS},
    )
    timings: list[Timing] = []
    for nbytes in SIZES[device_type]:
        reports.write(stage=f"all-reduce of {nbytes} bytes")
        timings.append(_time(comm, nbytes, ranks))
        reports.write(timings=[asdict(one) for one in timings])
    reports.write(stage="destroy")
    comm.destroy()
    reports.write(stage="done")
    dist.destroy_process_group()


def _available(comm: collx.Communicator, op: str) -> dict[str, str | None]:
    """Returns for each algorithm the reason why calls cannot use it, or None."""
    found: dict[str, str | None] = {}
    for name in extension.algorithms(op, multicast=True):
        found[name] = comm.fallback_reason if name != "fallback" else None
        if found[name] is not None:
            continue
        try:
            comm.explain(op, 1 << 20, algorithm=name, input_symmetric=True, output_symmetric=True)
        except NotImplementedError:
            found[name] = f"needs NVLink multicast: {comm.multicast_unavailable_reason}"
        except ValueError as error:
            found[name] = str(error)
    return found


def _time(comm: collx.Communicator, nbytes: int, ranks: GlooRanks) -> Timing:
    x = torch.ones(nbytes // 4, device=comm.device)
    y = torch.empty_like(x)
    crossing = 2 * (comm.world_size - 1) * nbytes // comm.world_size
    us = _microseconds(comm, lambda: collx.allreduce(x, out=y, group=comm), ranks)
    comm.synchronize()
    copy = _copy(comm, max(1, crossing))
    link = None
    if copy is not None and crossing:
        link = _microseconds(comm, copy, ranks, graph=False)
    return Timing(
        bytes=nbytes,
        algorithm=comm.explain("allreduce", x.shape, x.dtype).executed_by,
        us=us,
        busbw_gbs=crossing / us / 1e3,
        link_gbs=None if link is None else crossing / link / 1e3,
    )


def _copy(comm: collx.Communicator, nbytes: int) -> Callable[[], object] | None:
    """Returns a function that copies to the next rank's GPU, or within the memory of the CPU.
    Returns None if there is no other GPU."""
    there = comm.device
    if comm.device.type == "cuda":
        count = torch.cuda.device_count()
        there = torch.device("cuda", (comm.rank + 1) % comm.world_size % count)
        if there == comm.device:
            return None
    source = torch.ones(nbytes, dtype=torch.uint8, device=comm.device)
    target = torch.zeros(nbytes, dtype=torch.uint8, device=there)
    return lambda: target.copy_(source)


def _microseconds(
    comm: collx.Communicator, call: Callable[[], object], ranks: GlooRanks, graph: bool = True
) -> float:
    """Returns the median time of a call on the slowest rank."""
    if comm.device.type == "cpu":
        return time_batches(call, _CALLS, _WARMUP, ranks).us
    with torch.cuda.stream(torch.cuda.Stream(comm.device)):
        if not graph or comm.fallback_reason is not None:  # graphs cannot contain the fallback
            return time_eager(call, _CALLS, _WARMUP, ranks).us
        return time_replays(capture(call, _CALLS, _WARMUP), _CALLS, ranks).us
