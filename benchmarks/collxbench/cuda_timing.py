"""Times on a GPU: calls replayed from a CUDA graph, and eager ones."""

import time
from collections.abc import Callable
from functools import partial

import torch

from collxbench.timing import REPLAYS, Ranks, Timing, summary


def capture(run: Callable[[], object], calls: int, warmup: int) -> torch.cuda.CUDAGraph:
    """A graph of `calls` calls, on the current stream, which is not the default one."""
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
    """Of calls that no graph can hold: a few untimed ones absorb the skew between the ranks."""

    def repeat(times: int) -> None:
        for _ in range(times):
            run()

    return _time_on_device(partial(repeat, max(1, warmup)), partial(repeat, calls), calls, ranks)


def _time_on_device(
    absorb: Callable[[], object], run: Callable[[], object], calls: int, ranks: Ranks
) -> Timing:
    """Of `run`, which makes `calls` calls, behind `absorb`."""
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
    """Microseconds of one of `times` eager calls on this rank; on the CPU by the clock."""
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
