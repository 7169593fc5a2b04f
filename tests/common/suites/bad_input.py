"""Bad input: one clear error that names op, argument, what was given and what is accepted.

Every rank refuses before anything is launched, and the communicator works on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ..attempt import Attempt, attempt, in_a_child, ones, works
from ..limits import timeout_now
from ..pool import Pool, Pools
from ..rank import Rank
from ..worlds import World, gpu_count

Call = Callable[[Rank, str], Any]


def _functional(tensor: torch.Tensor, name: str, op: str = "sum", *more: Any) -> None:
    torch.ops.collx.allreduce(tensor, op, name, *more)


def _out(rank: Rank, name: str, out: torch.Tensor) -> None:
    torch.ops.collx.allreduce.out(ones(rank, 12), "sum", name, out=out)


def _partly_overlapping(rank: Rank, name: str) -> None:
    memory = ones(rank, 20)
    torch.ops.collx.allreduce.out(memory[:12], "sum", name, out=memory[4:16])


def _partly_overlapping_transposed(rank: Rank, name: str) -> None:
    memory = ones(rank, 20)
    source, out = memory[:12].view(3, 4).t(), memory[4:16].view(4, 3)
    torch.ops.collx.allreduce.out(source, "sum", name, out=out)


def _out_on_itself(rank: Rank, name: str) -> None:
    torch.ops.collx.allreduce.out(ones(rank, 12), "sum", name, out=ones(rank, 1).expand(12))


def _elsewhere(rank: Rank) -> str:
    return "cpu" if rank.device.type == "cuda" else "meta"


# What is wrong: the call, the class of the error, words that its message has.
WRONG: dict[str, tuple[Call, tuple[str, ...], tuple[str, ...]]] = {
    "complex tensor": (
        lambda rank, name: _functional(ones(rank, 4, torch.complex64), name),
        ("TypeError",),
        ("allreduce", "complex"),
    ),
    "bool tensor": (
        lambda rank, name: _functional(ones(rank, 4, torch.bool), name),
        ("TypeError",),
        ("allreduce", "bool"),
    ),
    "sparse tensor": (
        lambda rank, name: _functional(ones(rank, 4).to_sparse(), name),
        ("TypeError", "ValueError", "NotImplementedError"),
        ("allreduce", "parse"),
    ),
    "avg of integers": (
        lambda rank, name: _functional(ones(rank, 4, torch.int32), name, "avg"),
        ("TypeError", "NotImplementedError"),
        ("allreduce", "avg", "int32"),
    ),
    "unknown reduce op": (
        lambda rank, name: _functional(ones(rank), name, "median"),
        ("ValueError",),
        ("allreduce", "reduce_op", "median", "sum"),
    ),
    "unknown algorithm": (
        lambda rank, name: _functional(ones(rank), name, "sum", "ring"),
        ("ValueError",),
        ("allreduce", "algorithm", "ring", "oneshot_push"),
    ),
    "negative max_blocks": (
        lambda rank, name: _functional(ones(rank), name, "sum", "auto", -1),
        ("ValueError",),
        ("allreduce", "max_blocks", "-1"),
    ),
    "unknown communicator": (
        lambda rank, name: _functional(ones(rank), "no such group"),
        ("ValueError",),
        ("allreduce", "no such group"),
    ),
    "ordinary tensors in pull_push": (
        lambda rank, name: _functional(ones(rank), name, "sum", "pull_push"),
        ("ValueError", "NotImplementedError"),
        ("allreduce", "pull_push", "symmetric"),
    ),
    "out of another shape": (
        lambda rank, name: _out(rank, name, ones(rank, 13)),
        ("ValueError",),
        ("allreduce", "out: got", "12", "13"),
    ),
    "out of another dtype": (
        lambda rank, name: _out(rank, name, ones(rank, 12, torch.float64)),
        ("TypeError",),
        ("allreduce", "out: got", "float64"),
    ),
    "out on another device": (
        lambda rank, name: _out(rank, name, torch.ones(12, device=_elsewhere(rank))),
        ("ValueError", "NotImplementedError"),
        ("allreduce", "out: got a tensor on"),
    ),
    "out that overlaps the input partly": (
        _partly_overlapping,
        ("ValueError",),
        ("allreduce", "out: overlaps"),
    ),
    "out that overlaps the transposed input partly": (
        _partly_overlapping_transposed,
        ("ValueError",),
        ("allreduce", "out: overlaps"),
    ),
    "out that overlaps itself": (
        _out_on_itself,
        ("ValueError",),
        ("allreduce", "out: got", "location"),
    ),
}


def _refused(rank: Rank, what: str) -> Attempt:
    communicator = rank.communicator()
    found = attempt(lambda: WRONG[what][0](rank, communicator.name))
    communicator.raise_if_failed()
    assert works(rank, communicator)
    return found


def _assert_refused(found: Attempt, classes: tuple[str, ...], words: tuple[str, ...]) -> None:
    assert found.error in classes, found
    text = found.message.lower()
    for word in words:
        assert word.lower() in text, (word, found.message)


@pytest.mark.worlds(1, 2)
@pytest.mark.parametrize("what", sorted(WRONG))
def test_a_wrong_argument_is_refused_and_the_communicator_works_on(pool: Pool, what: str) -> None:
    """Semantics of errors: a class for each kind, raised before anything is launched."""
    _, classes, words = WRONG[what]
    for found in pool.run(_refused, what):
        _assert_refused(found, classes, words)


def _wrong_device(rank: Rank) -> Attempt:
    communicator = rank.communicator()
    other = torch.device("cpu") if rank.device.type == "cuda" else torch.device("cuda")
    if other.type == "cuda" and not torch.cuda.is_available():
        return attempt(lambda: rank.new_communicator("device", device=other))
    found = attempt(lambda: _functional(torch.ones(4, device=other), communicator.name))
    assert works(rank, communicator)
    return found


@pytest.mark.worlds(1, 2)
def test_a_device_that_does_not_match_is_refused(pool: Pool) -> None:
    """A tensor, or a communicator, on a device that is not there or not the communicator's."""
    for found in pool.run(_wrong_device):
        assert found.error in ("ValueError", "InitError", "NotImplementedError"), found
        assert "device" in found.message or "CUDA" in found.message or "cuda" in found.message


_BAD_OPTIONS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "negative timeout": ({"timeout": -1.0}, ("timeout", "-1")),
    "zero timeout": ({"timeout": 0.0}, ("timeout", "0")),
    "NaN timeout": ({"timeout": float("nan")}, ("timeout", "nan")),
    "payload too small": ({"payload_bytes": 100}, ("payload", "100")),
    "negative payload": ({"payload_bytes": -1}, ("payload", "-1")),
    "unknown pdl": ({"pdl": "always"}, ("pdl", "always", "early")),
    "no blocks": ({"max_blocks": 0}, ("max_blocks", "0")),
}


def _bad_option(rank: Rank, what: str) -> Attempt:
    found = attempt(lambda: rank.new_communicator("options", **_BAD_OPTIONS[what][0]))
    assert works(rank, rank.communicator())
    return found


@pytest.mark.worlds(1, 2)
@pytest.mark.parametrize("what", sorted(_BAD_OPTIONS))
def test_a_wrong_option_of_init_is_refused(pool: Pool, what: str) -> None:
    """init names option, value and what is accepted, alike on all ranks."""
    for found in pool.run(_bad_option, what):
        assert found.error in ("ValueError", "InitError"), found
        assert all(word in found.message for word in _BAD_OPTIONS[what][1]), found


def _name_twice(rank: Rank) -> Attempt:
    communicator = rank.communicator()
    found = attempt(lambda: rank.new_communicator("default"))
    assert works(rank, communicator)
    return found


@pytest.mark.worlds(2)
def test_a_name_in_use_is_refused(pool: Pool) -> None:
    """Two communicators of one name would share what each looks up by it."""
    for found in pool.run(_name_twice):
        assert found.error in ("ValueError", "InitError"), found
        assert "test-default" in found.message


def _make_default(rank: Rank) -> Attempt:
    return attempt(lambda: rank.new_communicator("too-many", timeout=20.0))


def test_too_many_ranks_are_refused(pools: Pools, device: str) -> None:
    """World size 17 on CPU, 9 on CUDA: refused by name on every rank."""
    on_cuda = device == "cuda"
    world = World("cuda", 9, min(9, gpu_count())) if on_cuda else World("cpu", 17)
    crowd = pools.get(world)
    try:
        for found in crowd.run(_make_default):
            assert found.error in ("ValueError", "InitError"), found
            assert str(world.size) in found.message
            assert ("8" if on_cuda else "16") in found.message
    finally:
        crowd.kill()


def _never_initialized(rank: Rank) -> Attempt:
    return attempt(lambda: _functional(ones(rank), "0"))


@pytest.mark.worlds(2)
def test_a_group_that_was_never_initialized_is_refused(pool: Pool) -> None:
    """The default group exists, but collx.init was never called on it under its own name."""
    for found in pool.run(_never_initialized):
        assert found.error == "ValueError"
        assert "collx.init" in found.message


def _forked(rank: Rank) -> list[str]:
    communicator = rank.communicator()
    tensor = torch.ones(4)
    actions: list[Callable[[], Any]] = [lambda: rank.new_communicator("forked", timeout=2.0)]
    if rank.device.type == "cpu":
        actions.append(lambda: _functional(tensor, communicator.name))
        actions.append(communicator.destroy)
    found = [in_a_child(action) for action in actions]
    rank.barrier()
    assert works(rank, communicator)
    return found


@pytest.mark.worlds(1, 2)
def test_init_and_calls_in_a_forked_child_are_refused(pool: Pool) -> None:
    """Hazard 24: a child shares memory and sockets with its parent; it refuses by name, and
    destroying there does not touch the parent's communicator."""
    for found in pool.run(_forked):
        assert found[0].split(":")[0] in ("ValueError", "InitError"), found
        assert "fork" in found[0]
        if len(found) > 1:
            assert found[1].split(":")[0] in ("RuntimeError", "CommunicatorPoisoned"), found
            assert "fork" in found[1]


def _only_one_refuses(rank: Rank, timeout: float) -> tuple[Attempt, Attempt]:
    communicator = rank.new_communicator("one-refuses", rank.fresh_group(), timeout=timeout)
    op = "median" if rank.rank == 0 else "sum"

    def call() -> None:
        _functional(ones(rank), communicator.name, op, "oneshot_push")
        communicator.synchronize()

    found = attempt(call)
    rank.barrier()
    op = "sum"
    after = attempt(call)
    communicator.destroy()
    return found, after


@pytest.mark.worlds(2, 3)
def test_when_one_rank_refuses_the_others_time_out_by_name(pool: Pool) -> None:
    """Semantics of errors: nobody hangs because one rank's argument was wrong."""
    results = pool.run(_only_one_refuses, timeout_now(pool))
    assert results[0][0].error == "ValueError"
    assert results[0][1].error == "CollectiveTimeout"
    for found, _ in results[1:]:
        assert found.error == "CollectiveTimeout"
        assert "rank 0" in found.message
