"""Tests how ranks agree on the number of clusters of thread blocks that are resident at once. The
devices are simulated."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from collx._bootstrap import steps, symmetric
from collx._extension import extension

THREADS, SIZES = (64, 128, 256, 512), (1, 2, 4, 8)
WORLD = 2

Holds = Callable[[int, int], int]  # number of clusters, from their size and the threads per block


def name_of(size: int, threads: int) -> str:
    return f"clusters of {size} x {threads}"


def agreed(monkeypatch: pytest.MonkeyPatch, offer: Holds, holds: Holds, shared: bool) -> Any:
    """Returns what the ranks agree on, and the number of rounds. `holds`: the number of clusters
    that are resident on all devices at once."""
    cases = list(itertools.product(SIZES, THREADS))

    def held_at_once(wanted: dict[str, int], *_: Any) -> dict[str, int]:
        return {
            name_of(size, threads): n if (n := wanted[name_of(size, threads)]) <= limit else 0
            for size, threads in cases
            for limit in [holds(size, threads)]
        }

    monkeypatch.setattr(extension, "held_at_once", held_at_once)
    monkeypatch.setattr(steps, "_current", lambda device: torch.no_grad())
    arguments: Any = type("Given", (), {"device": torch.device("cuda"), "rank": 0, "timeout": 1.0})
    setup = steps.Setup(arguments, *([None] * 3))  # type: ignore[arg-type]
    setup.regions = symmetric.Mapped([1] * WORLD, 0)
    setup.shared_device = shared
    setup.agreed = {name_of(size, threads): offer(size, threads) for size, threads in cases}
    setup.agreed |= {"blocks": 132, "multicast": 0}
    (step,) = (step for step in steps.STEPS if step.name == "clusters")
    assert step.conclude is not None
    rounds = 1
    while step.conclude(setup, [step.run(setup)] * WORLD):
        rounds += 1
    return setup.agreed, rounds


def of_device(size: int, threads: int) -> int:
    return 132 * 1024 // threads // size


def test_a_device_of_ones_own_offers_what_it_held(monkeypatch: pytest.MonkeyPatch) -> None:
    found, rounds = agreed(monkeypatch, of_device, of_device, shared=False)
    assert rounds == 1
    for size, threads in itertools.product(SIZES, THREADS):
        assert found[name_of(size, threads)] == of_device(size, threads)
    assert found["blocks"] == 132


def test_a_device_that_holds_less_offers_less(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = agreed(monkeypatch, of_device, lambda s, t: of_device(s, t) // 3, shared=False)
    for size, threads in itertools.product(SIZES, THREADS):
        assert 0 < found[name_of(size, threads)] <= of_device(size, threads) // 3


def test_ranks_that_share_a_device_offer_half_of_what_it_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With eight processes at 12 % of an H100 each, one cluster of eight blocks or three of four
    were resident per process."""
    held = {1: 14, 2: 28, 4: 3, 8: 1}
    found, _ = agreed(monkeypatch, of_device, lambda size, _: held[size], shared=True)
    for threads in THREADS:
        assert found[name_of(8, threads)] == 0
        assert found[name_of(4, threads)] == 1
        assert 0 < found[name_of(2, threads)] <= 14
        assert 0 < found[name_of(1, threads)] <= 14
    assert found["blocks"] == found[name_of(1, 512)]


def test_one_block_always_counts_as_held(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = agreed(monkeypatch, of_device, lambda *_: 0, shared=True)
    assert (found["blocks"], found[name_of(1, 512)]) == (1, 1)


def test_a_size_that_some_block_size_excludes_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def holds(size: int, threads: int) -> int:
        return 0 if (size, threads) == (4, 64) else of_device(size, threads)

    found, _ = agreed(monkeypatch, of_device, holds, shared=False)
    assert all(found[name_of(4, threads)] == 0 for threads in THREADS)
    assert all(found[name_of(2, threads)] > 0 for threads in THREADS)


def test_a_device_without_clusters_stays_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def old(size: int, threads: int) -> int:
        return of_device(size, threads) if size == 1 else 0

    found, rounds = agreed(monkeypatch, old, old, shared=False)
    assert rounds == 1
    assert all(found[name_of(8, threads)] == 0 for threads in THREADS)
