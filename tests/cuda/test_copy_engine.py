"""Copies by copy engines: what "auto" selects beside other work, and a rank that dies in a call.

Numerics, forms, skew, graphs and missing ranks are those of the suites of all algorithms."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch

from tests.common.attempt import Attempt, call_until_failure, finish
from tests.common.limits import assert_in_time, timeout_now
from tests.common.pool import Pool
from tests.common.rank import Rank

LARGE = 32 << 20  # bytes of a rank: the copies take most of the time of a call


def _selected(rank: Rank) -> dict[str, tuple[str, int]]:
    communicator = rank.new_communicator("copy-engine-selected", overlap=True)
    ways: dict[str, dict[str, Any]] = {
        "symmetric": {"output_symmetric": True},
        "ordinary": {},
        "small": {"output_symmetric": True, "shape": 1000},
    }
    found = {}
    for op in ("allgather", "broadcast", "gather", "scatter", "alltoall", "reducescatter"):
        for way, given in ways.items():
            explained = communicator.explain(op, **{"shape": (1 << 20,), **given})
            found[f"{op}, {way}"] = (explained.algorithm, explained.blocks)
    communicator.destroy()
    return found


@pytest.mark.worlds(2, 4)
def test_auto_takes_copy_engines_where_multiprocessors_are_left_alone(pool: Pool) -> None:
    for found in pool.run(_selected):
        for what, (algorithm, blocks) in found.items():
            expected = what.endswith("symmetric") and not what.startswith("reducescatter")
            assert (algorithm == "copy_engine") == expected, (what, algorithm)
            assert blocks <= 16, (what, blocks)


def _beside_a_product(rank: Rank) -> list[str]:
    """Posted calls and products that fill the device, with all of both on their way at once."""
    import collx

    communicator = rank.communicator("copy-engine-product")
    n = 1 << 20
    outs = [communicator.empty(n * rank.size, dtype=torch.int32) for _ in range(3)]
    a = torch.randn(2048, 2048, device=rank.device)
    found = []
    for i in range(30):
        out = outs[i % len(outs)]
        x = torch.full((n,), i * rank.size + rank.rank, dtype=torch.int32, device=rank.device)
        handle = collx.post(collx.allgather, x, communicator, out=out, algorithm="copy_engine")
        for _ in range(3):
            a = torch.tanh(a @ a)
        handle.wait()
        wanted = torch.arange(rank.size, device=rank.device) + i * rank.size
        found.append((out.view(rank.size, n) != wanted[:, None]).sum())
    finish(communicator)
    return [f"call {i}: {int(wrong)} wrong" for i, wrong in enumerate(found) if wrong]


@pytest.mark.worlds(2, 4)
def test_results_beside_products(pool: Pool) -> None:
    assert pool.run(_beside_a_product) == [[]] * pool.size


def _gather_until_failure(rank: Rank, timeout: float) -> Attempt:
    import collx

    communicator = rank.communicator("copy-engine-killed", timeout=timeout)
    x = torch.zeros(LARGE, dtype=torch.uint8, device=rank.device)
    out = communicator.empty(LARGE * rank.size, dtype=torch.uint8)

    def call() -> None:
        for _ in range(20):
            collx.allgather(x, communicator, out=out, algorithm="copy_engine")
        finish(communicator)

    return call_until_failure(rank, call)


@pytest.mark.alone  # ranks are killed
@pytest.mark.worlds(2, 4)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_rank_lost_within_a_call_is_named_in_time(pool: Pool, number: signal.Signals) -> None:
    """The copies are nearly all of the time, so the rank is lost between the two barriers."""
    pool.kill()  # no word of another test is left in the store
    timeout = timeout_now(pool)
    pool.submit(_gather_until_failure, timeout)
    pool.wait_for("calling")
    pool.signal(pool.size - 1, number)
    try:
        for survivor in pool.collect(range(pool.size - 1)):
            assert survivor.error == "CollectiveTimeout", survivor
            assert f"rank {pool.size - 1}" in survivor.message
            assert_in_time(survivor, timeout)
    finally:
        pool.kill()
