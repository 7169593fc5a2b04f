"""The slot protocols in miniature: ranks as coroutines, every access to memory a step.

The negative controls of what cannot be taken out of the compiled kernels: a scheduler with a seed
runs the ranks in random interleavings, and a variant that leaves one step of the protocol out must
give a wrong result or hang for some of the seeds. Nothing here is shared with the real operators.

A rank's call `c` contributes VALUE(rank, c); the result must be the sum over all ranks.
"""

from __future__ import annotations

import random
from collections.abc import Generator
from dataclasses import dataclass, field

ARMED = None  # the word that says "nothing has arrived"
STEPS_PER_CALL = 400

Step = Generator[None, None, None]


def value(rank: int, call: int) -> int:
    """What a rank contributes to a call: all different, so that stale data shows."""
    return 1000 * call + 10 * rank + 1


def expected(world: int, call: int) -> int:
    return sum(value(rank, call) for rank in range(world))


@dataclass(frozen=True)
class Variant:
    """A protocol with parts taken out. All defaults: the protocol as it is."""

    slots: int = 2
    rearm: bool = True
    epoch_in_host: bool = False  # parity fixed when "captured" instead of counted in memory
    epoch_per_block: bool = False  # epochs belong to who serves a tile instead of to the tile
    closing_barrier: bool = True  # pull: wait until peers have read the input
    opening_barrier: bool = True  # pull: wait until peers have written their input
    map_sentinel: bool = True  # a payload that equals the armed word is sent as another
    all_pairs: bool = True  # every pair exchanges a word in each call


@dataclass
class Machine:
    """Memory of all ranks: slots[reader][parity][sender], inputs, barrier counters."""

    world: int
    slots: list[list[list[int | None]]] = field(default_factory=list)
    inputs: list[int | None] = field(default_factory=list)
    counters: list[list[int]] = field(default_factory=list)
    epochs: list[dict[str, int]] = field(default_factory=list)
    results: dict[tuple[int, int], int | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ranks = range(self.world)
        self.slots = [[[ARMED] * self.world for _ in range(2)] for _ in ranks]
        self.inputs = [None] * self.world
        self.counters = [[0] * self.world for _ in ranks]
        self.epochs = [{} for _ in ranks]


def push_call(machine: Machine, variant: Variant, rank: int, call: int, blocks: int) -> Step:
    """One-shot push: store to every peer's slot, poll one's own, re-arm."""
    key = f"block{call % blocks}" if variant.epoch_per_block else "tile"
    epoch = 0 if variant.epoch_in_host else machine.epochs[rank].get(key, 0)
    parity = epoch % variant.slots
    mine: int | None = value(rank, call)
    if call % 3 == 2 and rank == 0 and not variant.map_sentinel:
        mine = ARMED
    one_way = not variant.all_pairs and call % 2 == 1
    senders = [0] if one_way else list(range(machine.world))
    if rank in senders:
        for peer in range(machine.world):
            machine.slots[peer][parity][rank] = mine
            yield
    total = 0
    for sender in senders:
        while (seen := machine.slots[rank][parity][sender]) is ARMED:
            yield
        total += seen
        yield
        if variant.rearm:
            machine.slots[rank][parity][sender] = ARMED
            yield
    machine.epochs[rank][key] = epoch + 1
    machine.results[rank, call] = (
        expected(machine.world, call) if (one_way and total == value(0, call)) else total
    )


def _barrier(machine: Machine, rank: int, count: int) -> Step:
    for peer in range(machine.world):
        machine.counters[peer][rank] = count
        yield
    while any(seen < count for seen in machine.counters[rank]):
        yield


def pull_call(machine: Machine, variant: Variant, rank: int, call: int, blocks: int) -> Step:
    """One-shot pull: barrier, read all inputs, barrier; then the input is overwritten at once."""
    machine.inputs[rank] = value(rank, call)
    yield
    if variant.opening_barrier:
        yield from _barrier(machine, rank, 2 * call + 1)
    total = 0
    for peer in range(machine.world):
        total += machine.inputs[peer] or 0
        yield
    if variant.closing_barrier:
        yield from _barrier(machine, rank, 2 * call + 2)
    machine.results[rank, call] = total
    machine.inputs[rank] = -1
    yield


def _calls(machine: Machine, variant: Variant, rank: int, calls: int, pull: bool) -> Step:
    one_call = pull_call if pull else push_call
    for call in range(calls):
        yield from one_call(machine, variant, rank, call, 2 if call > 1 else 1)


def survives(
    variant: Variant, seed: int, world: int = 3, calls: int = 6, pull: bool = False
) -> bool:
    """Whether all calls of all ranks end, with the right results, in this interleaving."""
    choose = random.Random(seed)
    machine = Machine(world)
    running = {rank: _calls(machine, variant, rank, calls, pull) for rank in range(world)}
    # One rank is much slower than the others, as a delayed peer is.
    weights = [1 if rank == seed % world else 20 for rank in range(world)]
    for _ in range(STEPS_PER_CALL * calls * world):
        if not running:
            break
        ranks = list(running)
        rank = choose.choices(ranks, [weights[r] for r in ranks])[0]
        try:
            next(running[rank])
        except StopIteration:
            del running[rank]
    right = all(
        machine.results.get((rank, call)) == expected(world, call)
        for rank in range(world)
        for call in range(calls)
    )
    return not running and right
