"""Tests GPUs with the same index on all ranks, each of which only sees its own GPU. PyTorch's
rendezvous receives other indices, because its own option is an environment variable."""

from __future__ import annotations

import os
import struct
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from collx._bootstrap import symmetric


def request(index: int, pid: int) -> bytes:
    """Returns the relevant part of what a rank publishes about its allocation."""
    return struct.pack("=iiQQ", index, pid, 1 << 21, 1 << 20)


def stores(apart: bool) -> list[symmetric._BoundedStore]:
    shared = dist.HashStore()
    made = [symmetric._BoundedStore(shared, 1.0, rank) for rank in range(2)]
    for store in made:
        store.begin()
        store.same_index = 0 if apart else None
    return made


@pytest.mark.parametrize("apart", [True, False])
def test_gpus_of_one_index_are_told_apart_in_what_peers_see(apart: bool) -> None:
    """Each rank sees its own GPU as number 0. It receives other indices for the peers' allocations,
    which are otherwise unchanged. This only applies to the first exchange of a rendezvous."""
    first, second = stores(apart)
    first.set("CUDASymmetricMemory/7/0", request(0, 100))
    first.set("CUDASymmetricMemory/8/0", b"later")
    second.set("CUDASymmetricMemory/3/1", request(0, 101))
    assert first.get("CUDASymmetricMemory/7/1")[4:] == request(0, 101)[4:]
    seen = [
        struct.unpack("=i", store.get(key)[:4])[0]
        for store, key in [
            (first, "CUDASymmetricMemory/7/1"),
            (second, "CUDASymmetricMemory/3/0"),
        ]
    ]
    assert (len({0, *seen}) == 3) is apart
    assert second.get("CUDASymmetricMemory/4/0") == b"later"


def test_an_allocation_that_is_told_otherwise_is_no_guess() -> None:
    """A PyTorch that stores something else first is refused. The error contains the remedy."""
    first, _ = stores(apart=True)
    with pytest.raises(RuntimeError, match=f"{symmetric.SHARING}=1"):
        first.set("CUDASymmetricMemory/7/0", request(5, 100))


def test_a_rendezvous_leaves_the_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads may read the environment at any time, and a call must not leave it changed."""
    seen: list[str | None] = []

    def meet(tensor: torch.Tensor, name: str) -> object:
        seen.append(os.environ.get(symmetric.SHARING))
        raise RuntimeError("met")

    monkeypatch.delenv(symmetric.SHARING, raising=False)
    monkeypatch.setattr("collx._bootstrap.symmetric._SymmetricMemory.rendezvous", meet)
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=1))
    made = symmetric.Rendezvous("environment", store, 0, 2, 1.0)
    made.tell_apart(0)
    try:
        with pytest.raises(RuntimeError, match="met"):
            made.exchange(torch.ones(1))
    finally:
        made.close()
    assert seen == [None]
    assert symmetric.SHARING not in os.environ
