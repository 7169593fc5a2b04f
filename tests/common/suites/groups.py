"""What stands for a communicator and for a reduction, and what is said of what does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ..attempt import Attempt, attempt, ones, works
from ..pool import Pool
from ..rank import Rank

REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
}


def _by_each(rank: Rank) -> dict[str, float]:
    """What an all-reduce gives, by what the group was given as; to init, and to the call."""
    import collx

    mesh = init_device_mesh(rank.device.type, (rank.size,), mesh_dim_names=("tp",))
    group = mesh.get_group()
    known: dict[str, Any] = {"mesh": mesh, "group": group, "name": str(group.group_name)}
    found = {}
    settings: dict[str, Any] = {"device": rank.device, "payload_bytes": 4 << 20}
    for made, given in known.items():
        with collx.init(given, **settings) as communicator:
            stands = {**known, "communicator": communicator, "named": communicator.name}
            for used, one in stands.items():
                result = collx.allreduce(ones(rank), group=one)
                symmetric = collx.zeros(3, group=one)
                kept = collx.get(one) is communicator and collx.is_initialized(one)
                right = kept and bool((symmetric == 0).all())
                found[f"{made}, {used}"] = float(result[0]) if right else -1.0
            with collx.init(communicator, name="another", **settings) as another:
                found[f"{made}, of it"] = float(collx.allreduce(ones(rank), group=another)[0])
    return found


@pytest.mark.worlds(1, 2, 3)
def test_a_group_is_given_as_what_the_program_has(pool: Pool) -> None:
    for found in pool.run(_by_each):
        assert len(found) == 18
        assert set(found.values()) == {pool.size}, found


def _wrong_groups(rank: Rank) -> dict[str, Attempt]:
    import collx

    communicator = rank.communicator()
    flat = init_device_mesh(rank.device.type, (rank.size, 1), mesh_dim_names=("tp", "dp"))
    gone = rank.fresh_group()
    dist.destroy_process_group(gone)
    mine = rank.fresh_group()
    wrong: dict[str, Callable[[], Any]] = {
        "mesh": lambda: collx.allreduce(ones(rank), group=flat),
        "mesh, init": lambda: collx.init(flat, device=rank.device),
        "mesh, empty": lambda: collx.empty(3, group=flat),
        "int": lambda: collx.allreduce(ones(rank), group=3),  # type: ignore[arg-type]
        "int, init": lambda: collx.init(3),  # type: ignore[arg-type]
        "name, init": lambda: collx.init("nobody"),
        "another job's, init": lambda: collx.init(gone),
        "without one": lambda: collx.allreduce(ones(rank), group=mine),
    }
    found = {what: attempt(call) for what, call in wrong.items()}
    assert works(rank, communicator)
    return found


@pytest.mark.worlds(2)
def test_what_stands_for_no_group_is_refused_by_name(pool: Pool) -> None:
    words = {
        "mesh": ("ValueError", "2 dimensions", "tp", 'mesh["name"]'),
        "int": ("TypeError", "int", "DeviceMesh", "ProcessGroup", "Communicator"),
        "name": ("ValueError", "nobody", "process group"),
        "another job's": ("ValueError", "never initialized", "destroyed"),
        "without one": ("ValueError", "collx.init"),
    }
    for found in pool.run(_wrong_groups):
        for what, result in found.items():
            error, *said = words[what.partition(",")[0]]
            assert result.error == error, (what, result)
            assert all(word in result.message for word in said), (what, result)


def _reduced(rank: Rank) -> list[str]:
    import collx

    communicator = rank.communicator()
    x = torch.arange(1.0, 13.0, device=rank.device) + rank.rank
    wrong = []
    for name, op in REDUCE_OPS.items():
        for given in (op, dist.ReduceOp(op)):
            pairs = {
                "allreduce": [collx.allreduce(x, one, communicator) for one in (name, given)],
                "allreduce_": [
                    collx.allreduce_(x.clone(), one, communicator) for one in (name, given)
                ],
                "reduce": [collx.reduce(x, one, 0, communicator) for one in (name, given)],
                "reduce_": [
                    collx.reduce_(x.clone(), one, 0, communicator) for one in (name, given)
                ],
                "reducescatter": [
                    collx.reducescatter(x, one, communicator) for one in (name, given)
                ],
            }
            wrong += [f"{f} {name}" for f, (a, b) in pairs.items() if not torch.equal(a, b)]
    return wrong


@pytest.mark.worlds(2)
def test_a_reduction_is_named_or_torchs_own(pool: Pool) -> None:
    assert pool.run(_reduced) == [[], []]


def _wrong_reductions(rank: Rank) -> dict[str, Attempt]:
    import collx

    communicator = rank.communicator()
    scaled: Any = dist._make_nccl_premul_sum(2.0)
    wrong = {"PREMUL_SUM": scaled, "BAND": dist.ReduceOp.BAND, "7": 7}
    x = ones(rank)
    found = {}
    for what, op in wrong.items():
        for function in (collx.allreduce, collx.allreduce_, collx.reducescatter, collx.reduce):
            name = f"{what}, {function.__name__}"
            found[name] = attempt(lambda: function(x, op, group=communicator))  # noqa: B023
    assert works(rank, communicator)
    return found


@pytest.mark.worlds(2)
def test_a_reduction_that_collx_does_not_have_is_refused_by_name(pool: Pool) -> None:
    for found in pool.run(_wrong_reductions):
        for what, result in found.items():
            given, _, function = what.partition(", ")
            assert result.error == ("TypeError" if given == "7" else "ValueError"), (what, result)
            for word in (f"collx.{function}: reduce_op", given, "sum, avg, max, min, prod"):
                assert word in result.message, (what, result)


def _alike(rank: Rank) -> list[bool]:
    import collx

    communicator = rank.communicator()
    plain = torch.zeros(4, 6, dtype=torch.bfloat16, device=rank.device).t()
    like = collx.empty_like(plain, group=communicator)
    other = collx.empty_like(plain, dtype=torch.int64, group=communicator)
    zero = collx.zeros(5, 2, dtype=torch.float64, group=communicator)
    direct = like.fill_(1), collx.empty_like(like, group=communicator)
    collx.allreduce(direct[0], out=direct[1], group=communicator, algorithm="pull_push")
    return [
        like.shape == (6, 4) and like.dtype == torch.bfloat16 and like.is_contiguous(),
        other.shape == (6, 4) and other.dtype == torch.int64,
        zero.shape == (5, 2) and zero.dtype == torch.float64 and bool((zero == 0).all()),
        bool((direct[1] == rank.size).all()),
        attempt(lambda: collx.empty_like("x", group=communicator)).error == "TypeError",  # type: ignore[arg-type]
    ]


@pytest.mark.worlds(1, 2)
def test_symmetric_tensors_like_others_and_of_zeros(pool: Pool) -> None:
    for found in pool.run(_alike):
        assert found == [True] * 5
