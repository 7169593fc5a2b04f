"""Accesses the words of a communicator's own region, for tests that start from rare states and
check that these were passed.

The offsets follow csrc/protocol/{cpu,cuda}_layout.h and csrc/cpu/control.h. Each use checks them:
the words must have the values of a communicator after its self-test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from collx._extension import extension

from .rank import Rank

BORDERS = (1 << 32, 1 << 31)  # where counters wrap around, as unsigned and as signed numbers

ALIGNMENT = 256  # alignment of every part of a region, in bytes
LINE = 64
CHECK_EPOCH, CHECK_SLOTS, CHECK_SLOT_BYTES, CHECK_FLAG = 132, 8448, 256, 152
MAX_BLOCKS, MAX_RANKS = 1024, 16
CHANNEL_TABLES, CUDA_RANKS = 3, 8  # uses sent, received and done, by rank
# Sizes of LaneWords and LaneCounts in 32-bit words, and the offsets of their counters.
LANE_WORDS, LANE_COUNTS = 32, 8
COUNTERS_IN_WORDS, COUNTERS_IN_COUNTS = (0, 1, 8, 9, 16), (0, 1, 2, 3, 4)
CPU_CONTROL_BYTES, CPU_AREAS = 256, 4
TILE_BYTES = 1024
AREAS = {"oneshot": 1, "twoshot": 2, "channels": 1}  # stages


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Places:
    """The offsets of the parts of a region."""

    epochs: int
    flags: int
    entries: list[tuple[int, int]]  # offset and number of tiles of each area with epochs
    counts: list[tuple[int, int]]  # offset and number of the words that count uses of channels
    lanes: int  # the number of lanes
    lane_words: int
    lane_counts: int
    staging: int
    results: int


def places(communicator: Any) -> Places:
    """Returns the offsets of the parts of a communicator's region."""
    layout: dict[str, int] = communicator._region
    on_cuda = communicator.device.type == "cuda"
    at = _aligned(layout["header"])
    epochs = at
    flags = epochs + _aligned(4 * MAX_BLOCKS if on_cuda else CPU_CONTROL_BYTES)
    at = flags + _aligned(8 * MAX_BLOCKS * MAX_RANKS if on_cuda else 2 * ALIGNMENT)
    entries, counts = [], []
    if on_cuda:
        for name, stages in AREAS.items():
            tiles = layout[name] // (stages * 2 * communicator.world_size * TILE_BYTES)
            entries.append((at, tiles))
            at += _aligned(8 * tiles)
        _, tiles = entries.pop()
        for _ in range(CHANNEL_TABLES):
            counts.append((at, CUDA_RANKS * tiles))
            at += _aligned(4 * CUDA_RANKS * tiles)
    per_rank = 4 * CUDA_RANKS
    lanes = layout.get("lane_tables", 0) // (per_rank * (LANE_WORDS + LANE_COUNTS) + 4)
    lane_words = at
    lane_counts = lane_words + _aligned(per_rank * LANE_WORDS * lanes)
    at = lane_counts + _aligned(per_rank * LANE_COUNTS * lanes) + _aligned(4 * lanes)
    staging = at + sum(_aligned(layout.get(name, 0)) for name in (*AREAS, "lanes"))
    results = staging + _aligned(layout["staging"])
    behind = 0 if on_cuda else 2 * ALIGNMENT  # for the counts of an alltoallv
    assert results + _aligned(layout["results"]) + behind == layout["total"]
    return Places(epochs, flags, entries, counts, lanes, lane_words, lane_counts, staging, results)


def _words(communicator: Any, start: int, count: int) -> torch.Tensor:
    region: torch.Tensor = communicator._memory._region
    return region[start : start + 4 * count].view(torch.int32)


def _lane_counters(communicator: Any, where: Places) -> list[torch.Tensor]:
    """Returns views of the words that count chunks: those that other ranks store in this region,
    and those of this rank."""
    pairs = CUDA_RANKS * where.lanes
    told = _words(communicator, where.lane_words, LANE_WORDS * pairs).view(pairs, LANE_WORDS)
    own = _words(communicator, where.lane_counts, LANE_COUNTS * pairs).view(pairs, LANE_COUNTS)
    found = [told[:, word] for word in COUNTERS_IN_WORDS]
    return found + [own[:, word] for word in COUNTERS_IN_COUNTS]


def _as_int32(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value


def mark_failed(communicator: Any, by: int) -> None:
    """Marks this rank as if rank `by` had failed, and had not left its note yet."""
    _words(communicator, 0, 1).fill_(by + 1)


def set_epochs(rank: Rank, communicator: Any, epoch: int) -> None:
    """Sets every counter of a communicator that has made no calls yet. Collective."""
    rank.synchronize()
    rank.barrier()
    given = communicator._given
    where = places(communicator)
    value = _as_int32(epoch)
    if given.device.type == "cpu":
        channels = _words(communicator, where.epochs + 4, CPU_AREAS)
        assert bool((channels[:3] > 0).all()), "the self-test has counted elsewhere"
        channels.fill_(value)
        settled = _words(communicator, where.epochs + 4 + 4 * CPU_AREAS, CPU_AREAS)
        settled.fill_(value)
        for channel in range(CPU_AREAS):
            _words(communicator, where.flags + channel * LINE, 2).fill_(value)
    else:
        counted = [int(_words(communicator, at, 1)[0]) for at, _ in where.entries]
        assert min(counted) > 0, "the self-test has counted elsewhere"
        # Initializes the region again, so that no word of the self-test has an epoch that occurs
        # again after the wraparound.
        extension.initialize_region(
            communicator._memory._region.data_ptr(),
            given.device,
            given.world_size,
            given.payload_bytes,
        )
        _words(communicator, where.epochs, MAX_BLOCKS).fill_(value)
        _words(communicator, where.flags, 2 * MAX_BLOCKS * MAX_RANKS)[1::2].fill_(value)
        for start, tiles in where.entries:
            _words(communicator, start, 2 * tiles)[::2].fill_(value)
        for start, words in where.counts:
            _words(communicator, start, words).fill_(value)
        for counter in _lane_counters(communicator, where):
            counter.fill_(value)
    _words(communicator, CHECK_EPOCH, 1).fill_(value)
    for slot in range(2 * MAX_RANKS):
        at = CHECK_SLOTS + slot * CHECK_SLOT_BYTES + CHECK_FLAG
        _words(communicator, at + 4, 1).fill_(value)
    rank.synchronize()
    rank.barrier()


def counters(communicator: Any) -> dict[str, torch.Tensor]:
    """Returns the counters that `set_epochs` sets and that calls advance, by name."""
    where = places(communicator)
    if communicator.device.type == "cpu":
        areas = _words(communicator, where.epochs + 4, CPU_AREAS).tolist()
        return {f"area {a}": torch.tensor([value]) for a, value in enumerate(areas)}
    found = {"barriers": _words(communicator, where.epochs, MAX_BLOCKS)}
    for name, (at, tiles) in zip(AREAS, where.entries, strict=False):
        found[f"tiles of {name}"] = _words(communicator, at, 2 * tiles)[::2]
    for name, (at, words) in zip(("sent", "received", "done"), where.counts, strict=True):
        found[f"uses {name}"] = _words(communicator, at, words)
    *_, scattered, results, _, _, _ = _lane_counters(communicator, where)
    found["chunks scattered"], found["chunks of results"] = scattered, results
    return {name: words.cpu() for name, words in found.items()}


def past_the_wrap(
    rank: Rank,
    border: int,
    rounds: int,
    calls: Iterable[Any],
    run: Callable[[Rank, Any, Any], str],
) -> list[str]:
    """Makes the calls, which include each kind `rounds` times, on a communicator whose counters
    start half as many uses before `border`. Returns the failures, and the counters that advanced
    without reaching the border. Collective."""
    communicator = rank.new_communicator("wrap", payload_bytes=rank.smallest_payload())
    ahead = max(1, rounds // 2)
    set_epochs(rank, communicator, border - ahead)
    made = ((number, call, run(rank, communicator, call)) for number, call in enumerate(calls))
    found = [f"call {number}: {call}: {wrong}" for number, call, wrong in made if wrong]
    rank.synchronize()
    advanced = {
        name: int(((words.long() - (border - ahead)) % (1 << 32)).max())
        for name, words in counters(communicator).items()
    }
    short = {name: by for name, by in advanced.items() if 0 < by < ahead}
    if short or not any(advanced.values()):
        found.append(f"the counters start {ahead} before {border:#x} and advance by {advanced}")
    communicator.destroy()
    rank.arenas.pop(communicator.name, None)
    return found[:5]


def run_on_poison(
    rank: Rank, calls: Iterable[Any], run: Callable[[Rank, Any, Any], str]
) -> list[str]:
    """A job that makes the calls. Before each call, it fills staging and results with NaN."""
    communicator = rank.communicator("poisoned", payload_bytes=1 << 20)
    found = []
    for call in calls:
        _poison_payload(rank, communicator)
        wrong = run(rank, communicator, call)
        found += [f"{call}: {wrong}"] if wrong else []
    return found


def _poison_payload(rank: Rank, communicator: Any) -> None:
    """Fills the memory in which pull forms stage data with NaN (of float32). Collective."""
    rank.synchronize()
    rank.barrier()
    layout: dict[str, int] = communicator._region
    where = places(communicator)
    region: torch.Tensor = communicator._memory._region
    for start, name in ((where.staging, "staging"), (where.results, "results")):
        region[start : start + layout[name]].view(torch.float32).fill_(float("nan"))
    rank.synchronize()
    rank.barrier()
