"""Measures time.

CUDA: the median of the replays of a graph of many calls. One replay before the start event absorbs
the skew between the ranks on the device. CPU: the median of batches of calls. Each batch follows a
barrier and a few untimed calls, which absorb the skew after the barrier. Both report the slowest
rank.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, Protocol

REPLAYS = 9
HOST_CALLS = 50  # far fewer than the capacity of a GPU's launch queue
UNTIMED_STEPS = 3  # steps of a model that absorb the skew between the ranks
BATCH_SECONDS = 0.3  # a CPU batch has fewer calls if they would take longer


@dataclass(frozen=True)
class Timing:
    """Microseconds per call: median, minimum and maximum of the repetitions, each on the rank where
    it is largest."""

    us: float
    us_min: float
    us_max: float


class Ranks(Protocol):
    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    def barrier(self) -> None: ...

    def maximum(self, values: Sequence[float]) -> list[float]: ...


def calls_of(nbytes: int, asked: int) -> int:
    """Returns the number of calls in one graph or batch."""
    if asked > 0:
        return asked
    return 100 if nbytes <= 1 << 20 else 20 if nbytes <= 16 << 20 else 8


def summary(us: Sequence[float], ranks: Ranks) -> Timing:
    """Summarizes the repetitions of this rank, and takes the maximum over the ranks."""
    return Timing(*ranks.maximum([statistics.median(us), min(us), max(us)]))


def time_batches(run: Callable[[], object], calls: int, warmup: int, ranks: Ranks) -> Timing:
    """Times `run` on the CPU. Every rank makes the same number of calls."""
    ranks.barrier()
    run()
    start = time.perf_counter()
    run()
    [estimate] = ranks.maximum([time.perf_counter() - start])
    calls = max(1, min(calls, int(BATCH_SECONDS / max(estimate, 1e-9))))
    untimed = max(1, min(warmup, calls))
    us = []
    for _ in range(REPLAYS):
        ranks.barrier()
        for _ in range(untimed):
            run()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        us.append((time.perf_counter() - start) / calls * 1e6)
    return summary(us, ranks)


class Turn(NamedTuple):
    step: Callable[[], object]
    around: Callable[[], AbstractContextManager[object]] = nullcontext


def time_by_turns(
    turns: Mapping[str, Turn], calls: int, ranks: Ranks, synchronize: Callable[[], object]
) -> dict[str, float]:
    """Returns the microseconds of each step, the median on the slowest rank. The steps alternate in
    each repetition, so that other load on the machine affects all of them alike."""
    us: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(REPLAYS):
        for name, (step, around) in turns.items():
            with around():
                ranks.barrier()
                for _ in range(UNTIMED_STEPS):
                    step()
                synchronize()
                start = time.perf_counter()
                for _ in range(calls):
                    step()
                synchronize()
                us[name].append((time.perf_counter() - start) / calls * 1e6)
    return {name: summary(found, ranks).us for name, found in us.items()}


def time_host(
    runs: Sequence[Callable[[], object]],
    synchronize: Callable[[], None],
    calls: int,
    warmup: int,
    ranks: Ranks,
) -> list[Timing]:
    """Times how long eager calls take until they return, while a GPU executes asynchronously. The
    functions alternate in each repetition, so that other load on the machine affects all of them
    alike."""
    us: list[list[float]] = [[] for _ in runs]
    for _ in range(REPLAYS):
        for run, found in zip(runs, us, strict=True):
            synchronize()
            ranks.barrier()
            for _ in range(max(1, warmup)):
                run()
            start = time.perf_counter()
            for _ in range(calls):
                run()
            found.append((time.perf_counter() - start) / calls * 1e6)
    synchronize()
    return [summary(found, ranks) for found in us]
