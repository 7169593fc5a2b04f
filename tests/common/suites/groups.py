"""Which objects are accepted as a group or as a reduction, and the errors for all others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import collx
from collx.communicator import of_group

from ..attempt import assert_raised, attempt, ones, works
from ..pool import on_ranks
from ..rank import Rank

REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
}


@pytest.mark.worlds(1, 2, 3)
@on_ranks
def test_a_group_is_given_as_what_the_program_has(rank: Rank) -> None:
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
    assert len(found) == 18
    assert set(found.values()) == {rank.size}, found


@pytest.mark.worlds(1, 2)
@on_ranks
def test_a_group_stands_for_its_communicator_under_any_name(rank: Rank) -> None:
    """Functions, layers, patches and compiled code find the same communicator. Finds communicators
    by their group if the communicators have names of their own."""
    group, other = rank.fresh_group(), rank.fresh_group()
    name = str(group.group_name)
    settings: dict[str, Any] = {"device": rank.device, "payload_bytes": 4 << 20}
    x = ones(rank)

    def meant() -> set[str]:
        compiled = torch.compile(lambda x: collx.allreduce(x, group=group), backend="eager")
        calls = (collx.allreduce(x, group=group), compiled(x))
        assert all(bool((result == rank.size).all()) for result in calls)
        layer = collx.nn.RowParallelLinear(2 * rank.size, 3, group=group, device=rank.device)
        assert collx.is_initialized(group)
        with collx.patch(group) as patched:
            served = [one.name for one in patched.communicators.values()]
        by_name = of_group(name)
        assert by_name is not None
        return {collx.get(group).name, by_name.name, str(layer.group), *served}

    def refused(use: Callable[[], Any]) -> None:
        assert_raised(attempt(use), "ValueError", "'mine', 'yours'")

    assert not collx.is_initialized(group)
    with collx.init(group, name="mine", **settings):
        assert meant() == {"mine"}
        with collx.init(group, name="yours", **settings):
            refused(lambda: collx.allreduce(x, group=group))
            refused(lambda: collx.get(group))
            refused(lambda: collx.patch(group))
            with collx.init(group, **settings):
                assert meant() == {name}
            refused(lambda: collx.allreduce(x, group=group))
        assert meant() == {"mine"}
        assert_raised(attempt(lambda: collx.allreduce(x, group=other)), "ValueError")


@pytest.mark.worlds(1, 2)
@on_ranks
def test_no_group_stands_for_a_communicator_of_other_ranks(rank: Rank) -> None:
    """PyTorch names its groups "0", "1", and so on. A communicator with such a name could be used
    for a group that has other ranks, and would silently sum over the wrong ranks."""
    settings: dict[str, Any] = {"device": rank.device, "payload_bytes": 4 << 20}
    groups = [dist.new_group([r]) for r in range(rank.size)]
    world = str(dist.group.WORLD.group_name)  # type: ignore[union-attr]
    alone = groups[rank.rank]
    of_first = rank.gather(str(alone.group_name))[0]
    taken = attempt(lambda: collx.init(alone, name=world, **settings))
    assert_raised(taken, "ValueError", "name of another process group")
    if rank.size > 1:
        taken = attempt(lambda: collx.init(name=of_first, **settings))
        assert_raised(taken, "InitError", "name of another process group")
    # PyTorch may later give a group the name of an existing communicator.
    later = str(dist.distributed_c10d._world.group_count)
    with collx.init(alone, name=later, **settings):
        group = rank.fresh_group()
        assert str(group.group_name) == later
        compiled = torch.compile(lambda x: collx.allreduce(x, group=group), backend="eager")
        uses: list[Callable[[], Any]] = [
            lambda: collx.allreduce(ones(rank), group=group),
            lambda: collx.empty(3, group=group),
            lambda: compiled(ones(rank)),
        ]
        for use in uses:
            assert "made from another group" in attempt(use).message
        assert not collx.is_initialized(group)


@pytest.mark.worlds(2)
@on_ranks
def test_what_stands_for_no_group_is_refused_by_name(rank: Rank) -> None:
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
    words = {
        "mesh": ("ValueError", "2 dimensions", "tp", 'mesh["name"]'),
        "int": ("TypeError", "int", "DeviceMesh", "ProcessGroup", "Communicator"),
        "name": ("ValueError", "nobody", "process group"),
        "another job's": ("ValueError", "never initialized", "destroyed"),
        "without one": ("ValueError", "collx.init"),
    }
    for what, call in wrong.items():
        assert_raised(attempt(call), *words[what.partition(",")[0]])
    assert works(rank, communicator)


@pytest.mark.worlds(2)
@on_ranks
def test_a_reduction_is_named_or_torchs_own(rank: Rank) -> list[str]:
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
@on_ranks
def test_a_reduction_of_torch_compiles_into_one_graph(rank: Rank) -> list[str]:
    """Another reduction compiles again, and does not use the graph of the first one."""
    communicator = rank.communicator()
    x = torch.arange(1.0, 13.0, device=rank.device) + rank.rank
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, op: collx.allreduce(x, op, communicator), fullgraph=True, backend="eager"
    )
    wrong = [
        name
        for name, op in REDUCE_OPS.items()
        if not torch.equal(compiled(x, op), collx.allreduce(x, name, communicator))
    ]
    constant = torch.compile(
        lambda x: collx.allreduce(x, dist.ReduceOp.MAX, communicator),
        fullgraph=True,
        backend="eager",
    )
    same = torch.equal(constant(x), collx.allreduce(x, "max", communicator))
    return wrong if same else [*wrong, "constant"]


@pytest.mark.worlds(2)
@on_ranks
def test_a_reduction_that_collx_does_not_have_is_refused_by_name(rank: Rank) -> None:
    communicator = rank.communicator()
    scaled: Any = dist._make_nccl_premul_sum(2.0)
    wrong = {"PREMUL_SUM": scaled, "BAND": dist.ReduceOp.BAND, "7": 7}
    x = ones(rank)
    for what, op in wrong.items():
        for function in (collx.allreduce, collx.allreduce_, collx.reducescatter, collx.reduce):
            refused = attempt(lambda: function(x, op, group=communicator))  # noqa: B023
            error = "TypeError" if what == "7" else "ValueError"
            words = (f"collx.{function.__name__}: reduce_op", what, "sum, avg, max, min, prod")
            assert_raised(refused, error, *words)
    assert works(rank, communicator)


@pytest.mark.worlds(1, 2)
@on_ranks
def test_symmetric_tensors_like_others_and_of_zeros(rank: Rank) -> None:
    communicator = rank.communicator()
    plain = torch.zeros(4, 6, dtype=torch.bfloat16, device=rank.device).t()
    for like in (collx.empty_like(plain, group=communicator), communicator.empty_like(plain)):
        assert (like.shape, like.dtype) == ((6, 4), torch.bfloat16)
        assert like.is_contiguous()
    other = collx.empty_like(plain, dtype=torch.int64, group=communicator)
    assert (other.shape, other.dtype) == ((6, 4), torch.int64)
    zeros = torch.zeros(5, 2, dtype=torch.float64)
    for zero in (
        collx.zeros(5, 2, dtype=torch.float64, group=communicator),
        communicator.zeros(5, 2, dtype=torch.float64),
    ):
        assert zero.dtype == torch.float64
        assert torch.equal(zero.cpu(), zeros)
    direct = like.fill_(1), communicator.empty_like(like, dtype=torch.bfloat16)
    collx.allreduce(direct[0], out=direct[1], group=communicator, algorithm="pull_push")
    assert bool((direct[1] == rank.size).all())
    assert collx.zeros((5, np.int64(2)), group=communicator).shape == (5, 2)
    text: Any = "x"
    assert_raised(attempt(lambda: collx.empty_like(text, group=communicator)), "TypeError")
