"""Measures calls: the median of several batches on the slowest rank.

On a GPU, a batch is one replay of a CUDA graph after an untimed replay, which absorbs the skew
between the ranks. On the CPU, untimed calls absorb it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from collx._bench.cuda_timing import capture

BATCHES = 5
_UNTIMED = 3
_MOST_CALLS = {"cpu": 2000, "cuda": 100}  # maximum number of calls in a batch


def maximum(values: Sequence[float]) -> list[float]:
    """Returns the maximum of each value over all ranks. Collective."""
    found = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return [float(value) for value in found]


def microseconds(batches: Sequence[Callable[[], float]]) -> list[float]:
    """Returns the microseconds per call of each batch. The batches alternate, so that other load on
    the machine affects all of them. Collective."""
    times: list[list[float]] = [[] for _ in batches]
    for _ in range(BATCHES):
        for batch, found in zip(batches, times, strict=True):
            found.append(batch())
    return maximum([statistics.median(found) for found in times])


def batch_of(call: Callable[[], Any], device: torch.device, seconds: float) -> Callable[[], float]:
    """Returns a function that makes a batch of calls and returns the microseconds per call. Five
    batches take about `seconds`. Collective, and so is the returned function."""
    on_cuda = device.type == "cuda"
    duration = _eager_on_cuda(call) if on_cuda else _on_cpu(call, _UNTIMED)
    [estimate] = maximum([duration])
    wanted = int(seconds / BATCHES * 1e6 / max(estimate, 1e-3))
    calls = max(1, min(wanted, _MOST_CALLS[device.type]))
    if not on_cuda:
        return lambda: _on_cpu(call, calls)
    graph = capture(call, calls, warmup=1)
    return lambda: _replay(graph, calls)


def _on_cpu(call: Callable[[], Any], calls: int) -> float:
    dist.barrier()
    for _ in range(min(_UNTIMED, calls)):
        call()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - began) / calls * 1e6


def _eager_on_cuda(call: Callable[[], Any]) -> float:
    call()
    return _between_events(call, call)


def _replay(graph: torch.cuda.CUDAGraph, calls: int) -> float:
    return _between_events(graph.replay, graph.replay) / calls


def _between_events(untimed: Callable[[], Any], timed: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    dist.barrier()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    untimed()
    start.record()
    timed()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3
