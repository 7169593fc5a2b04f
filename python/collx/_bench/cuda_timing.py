"""Timing on a GPU, of calls in a CUDA graph and of eager calls."""

import time
from collections.abc import Callable
from functools import partial

import torch

from collx._bench.timing import REPLAYS, Ranks, Timing, summary


def capture(run: Callable[[], object], calls: int, warmup: int) -> torch.cuda.CUDAGraph:
    """Captures `calls` calls in a graph, on the current stream, which must not be the default
    stream."""
    for _ in range(max(1, warmup)):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(calls):
            run()
    return graph


def time_replays(graph: torch.cuda.CUDAGraph, calls: int, ranks: Ranks) -> Timing:
    return _time_on_device(graph.replay, graph.replay, calls, ranks)


def time_eager(run: Callable[[], object], calls: int, warmup: int, ranks: Ranks) -> Timing:
    """Times calls that a graph cannot contain. A few untimed calls absorb the skew between the
    ranks."""

    def repeat(times: int) -> None:
        for _ in range(times):
            run()

    return _time_on_device(partial(repeat, max(1, warmup)), partial(repeat, calls), calls, ranks)


def _time_on_device(
    absorb: Callable[[], object], run: Callable[[], object], calls: int, ranks: Ranks
) -> Timing:
    """Times `run`, which makes `calls` calls, after `absorb`."""
    us = []
    for _ in range(REPLAYS):
        torch.cuda.synchronize()
        ranks.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        absorb()
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        us.append(start.elapsed_time(end) / calls * 1e3)
    return summary(us, ranks)


def time_in_a_row(call: Callable[[], object], times: int, device: torch.device) -> float:
    """Returns the microseconds per call of `times` eager calls on this rank, measured by events on
    the GPU and by the clock on the CPU."""
    if device.type == "cpu":
        began = time.perf_counter()
        for _ in range(times):
            call()
        return (time.perf_counter() - began) / times * 1e6
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / times * 1e3
