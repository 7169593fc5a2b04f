"""Bad input outside operators: options, names, world sizes and processes that `init` refuses, and
the effect of one rank's refusal on the others."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from ..attempt import Attempt, assert_raised, attempt, finish, in_a_child, ones, works
from ..pool import Pools, on_ranks
from ..rank import Rank
from ..worlds import World, gpu_count

# By kind of mistake: the options, and words of the message.
WRONG: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "negative timeout": ({"timeout": -1.0}, ("timeout", "-1")),
    "zero timeout": ({"timeout": 0.0}, ("timeout", "0")),
    "NaN timeout": ({"timeout": float("nan")}, ("timeout", "nan")),
    "huge timeout": ({"timeout": 1e10}, ("timeout", "at most 1000000000")),
    "payload too small": ({"payload_bytes": 100}, ("payload", "100")),
    "negative payload": ({"payload_bytes": -1}, ("payload", "-1")),
    "unknown pdl": ({"pdl": "always"}, ("pdl", "always", "early")),
    "no blocks": ({"max_blocks": 0}, ("max_blocks", "0")),
    "huge payload": ({"payload_bytes": 2**70}, ("payload_bytes", f"1 to {2**63 - 1}")),
    "too many blocks": ({"max_blocks": 2**31}, ("max_blocks", f"1 to {2**31 - 1}")),
    "long name": ({"key": 1020 * "n"}, ("name", "got 1025 bytes", "at most 1024")),
    "name in use": ({"key": "default"}, ("test-default",)),
}


@pytest.mark.worlds(1, 2)
@pytest.mark.parametrize("what", sorted(WRONG))
@on_ranks
def test_a_wrong_option_of_init_is_refused(rank: Rank, what: str) -> None:
    """init names the option, its value and the accepted values on all ranks. A communicator name
    in use is refused, because names identify communicators."""
    options = {"key": "options", **WRONG[what][0]}
    communicator = rank.communicator()
    found = attempt(lambda: rank.new_communicator(**options))
    assert works(rank, communicator)
    assert_raised(found, "ValueError", *WRONG[what][1])


@pytest.mark.worlds(1, 2)
@pytest.mark.parametrize("variable", ["COLLX_CHECK", "COLLX_NO_CLUSTERS"])
@on_ranks
def test_a_variable_that_is_neither_0_nor_1_is_refused(rank: Rank, variable: str) -> None:
    communicator = rank.communicator()
    os.environ[variable] = "yes"
    try:
        found = attempt(lambda: rank.new_communicator("variables"))
    finally:
        del os.environ[variable]
    assert works(rank, communicator)
    words = (f"environment variable {variable}: got 'yes'; accepted: 0, 1",)
    assert_raised(found, "ValueError", *words)


@pytest.mark.worlds(1, 2)
@on_ranks
def test_a_device_that_is_not_there_is_refused(rank: Rank) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    found = attempt(lambda: rank.new_communicator("device", device=torch.device("cuda")))
    assert works(rank, rank.communicator())
    assert_raised(found, "ValueError", "cuda")


def _too_many(rank: Rank) -> Attempt:
    return attempt(lambda: rank.new_communicator("too-many", timeout=20.0))


def test_too_many_ranks_are_refused(pools: Pools, device: str) -> None:
    """World sizes 17 on CPU and 9 on CUDA are refused by name on every rank."""
    on_cuda = device == "cuda"
    world = World("cuda", 9, min(9, gpu_count())) if on_cuda else World("cpu", 17)
    crowd = pools.get(world)
    try:
        for found in crowd.run(_too_many):
            assert_raised(found, "ValueError", str(world.size), "8" if on_cuda else "16")
    finally:
        crowd.kill()


@pytest.mark.worlds(1, 2)
@on_ranks
def test_init_and_calls_in_a_forked_child_are_refused(rank: Rank) -> None:
    """Hazard 24: a child shares memory and sockets with its parent. It refuses by name, and
    destroying the communicator in the child does not affect the parent's."""
    communicator = rank.communicator()
    tensor = torch.ones(4)
    found = [in_a_child(lambda: rank.new_communicator("forked", timeout=2.0))]
    if rank.device.type == "cpu":
        allreduce = torch.ops.collx.allreduce
        found.append(in_a_child(lambda: allreduce(tensor, "sum", communicator.name)))
        symmetric = communicator.empty(4)
        found.append(in_a_child(lambda: communicator.empty(4)))
        found.append(in_a_child(lambda: communicator.register(symmetric)))
        found.append(in_a_child(communicator.destroy))
    rank.barrier()
    assert works(rank, communicator)
    communicator.empty(4)  # no child has voted
    init, *others = found
    assert init.split(":")[0] == "ValueError", init
    assert "fork" in init
    if others:
        *calls, destroy = others
        for call in calls:
            assert call.split(":")[0] == "RuntimeError", call
            assert "fork" in call
        assert destroy == ": ", destroy


@pytest.mark.worlds(2, 3)
@on_ranks
def test_when_one_rank_refuses_the_others_time_out_by_name(rank: Rank, timeout: float) -> None:
    """No rank hangs because another rank's argument was wrong."""
    communicator = rank.new_communicator("one-refuses", rank.fresh_group(), call_timeout=timeout)

    def call(reduce_op: str) -> None:
        torch.ops.collx.allreduce(ones(rank), reduce_op, communicator.name, "oneshot_push")
        finish(communicator)

    found = attempt(lambda: call("median" if rank.rank == 0 else "sum"))
    rank.barrier()
    after = attempt(lambda: call("sum"))
    communicator.destroy()
    if rank.rank == 0:
        assert (found.error, after.error) == ("ValueError", "CollectiveTimeout"), (found, after)
    else:
        assert_raised(found, "CollectiveTimeout", "rank 0")
