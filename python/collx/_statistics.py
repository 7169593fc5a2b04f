"""The statistics that `Communicator.stats` returns."""

from __future__ import annotations

from dataclasses import dataclass

from collx._extension import extension

__all__ = ["Statistics", "of"]


@dataclass(frozen=True)
class Statistics:
    """The calls of a rank on a communicator since `collx.init`, including the self-test. Replays of
    CUDA graphs only count in `completed`."""

    calls: dict[str, int]
    """Calls of this rank, by function."""

    bytes: dict[str, int]
    """Bytes of the inputs of these calls, by function."""

    completed: tuple[int, ...] | None
    """The number of calls that each rank has completed at this moment. A rank that the others wait
    for has the smallest number. None if the calls go through the process group."""

    waiting: tuple[bool, ...] | None
    """Whether each rank is in a call at this moment. None like `completed`."""

    waited: tuple[float, ...] | None
    """Seconds that this rank has waited for each rank. On the CPU, waits of less than a few
    microseconds are not counted. On CUDA, kernels wait, and the watchdog estimates the time by at
    least 40 samples per second; without `watchdog=True` it is None. Also None if the calls go
    through the process group."""


def of(native: extension.Communicator) -> Statistics:
    """Returns the statistics of a communicator, incomplete if it has been destroyed."""
    tallies = native.tallies()
    progress = native.progress()
    waited = native.waited()
    return Statistics(
        calls={op: calls for op, (calls, _) in tallies.items()},
        bytes={op: nbytes for op, (_, nbytes) in tallies.items()},
        completed=tuple(completed for completed, _ in progress) or None,
        waiting=tuple(in_call for _, in_call in progress) or None,
        waited=tuple(nanoseconds / 1e9 for nanoseconds in waited) or None,
    )
