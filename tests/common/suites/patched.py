"""Programs that call torch.distributed, under `collx.patch`: which calls collx executes, their
results, and that other calls are unchanged."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _coalescing_manager

import collx

from .. import interpreters
from ..attempt import Attempt, assert_raised, attempt, works
from ..check import differences
from ..pool import on_ranks
from ..rank import Rank


def seen(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Returns the result of a call and the operators of collx that it calls.

    Profiles a second call: during the first one, collx queries what an operator accepts."""
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        result = call()
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    names = [event.name.partition("::") for event in events]
    return result, [name for namespace, _, name in names if namespace == "collx"]


def _given(rank: Rank, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns whole numbers, whose sums are the same in any order."""
    shape = (rank.size, 2, 3)
    numbers = torch.arange(6 * rank.size).view(shape) + 100 * rank.rank
    return numbers.to(rank.device, dtype)


Call = Callable[[Tensor, Any], Tensor]


def _all_reduce(x: Tensor, group: Any) -> Tensor:
    dist.all_reduce(x, dist.ReduceOp.MAX, group=group)
    return x


def _broadcast(x: Tensor, group: Any) -> Tensor:
    dist.broadcast(x, group_src=1, group=group)
    dist.broadcast(x[0], dist.get_global_rank(group, 0), group)
    return x


def _joined(x: Tensor, group: Any) -> Tensor:
    out = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(out, x, group=group)
    return out


def _reduce_scatter(x: Tensor, group: Any) -> Tensor:
    out = torch.empty_like(x[:1])
    dist.reduce_scatter_tensor(out, x, group=group)
    return out


def _all_to_all(x: Tensor, group: Any) -> Tensor:
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out


def _uneven(x: Tensor, group: Any) -> Tensor:
    """A rank receives (its number + 1) rows from each rank."""
    size, me = group.size(), group.rank()
    rows = x.view(-1, 3).repeat(size, 1)[: size * (size + 1) // 2]
    out = x.new_empty(size * (me + 1), 3)
    dist.all_to_all_single(out, rows, [me + 1] * size, [r + 1 for r in range(size)], group=group)
    return out


IN_PLACE: dict[str, tuple[Call, list[str]]] = {
    "all_reduce": (_all_reduce, ["allreduce_"]),
    "broadcast": (_broadcast, ["broadcast_", "broadcast_"]),
    "all_gather_into_tensor": (_joined, ["allgather"]),
    "reduce_scatter_tensor": (_reduce_scatter, ["reducescatter"]),
    "all_to_all_single": (_all_to_all, ["alltoallv"]),
    "all_to_all_single, uneven": (_uneven, ["alltoallv"]),
}
FUNCTIONAL: dict[str, tuple[Call, list[str]]] = {
    "all_reduce": (lambda x, g: functional.all_reduce(x, "sum", g), ["allreduce"]),
    "product": (lambda x, g: functional.all_reduce(x, "product", g), ["allreduce"]),
    "broadcast": (lambda x, g: functional.broadcast(x, 1, g), ["broadcast"]),
    "all_gather_tensor": (lambda x, g: functional.all_gather_tensor(x, 0, g), ["allgather"]),
    "reduce_scatter_tensor": (
        lambda x, g: functional.reduce_scatter_tensor(x, "sum", 0, g),
        ["reducescatter"],
    ),
    "all_to_all_single": (
        lambda x, g: functional.all_to_all_single(x, [1] * g.size(), [1] * g.size(), g),
        ["alltoallv"],
    ),
}
CALLS = {
    **{f"dist: {name}": call for name, call in IN_PLACE.items()},
    **{f"functional: {name}": call for name, call in FUNCTIONAL.items()},
}


@pytest.mark.worlds(2, 3)
@on_ranks
def test_calls_of_torch_distributed_are_carried_out_by_collx(rank: Rank) -> list[str]:
    """With the same results; the process group executes them before and afterwards."""
    group = rank.fresh_group()
    # gloo, the backend of ranks that share a GPU, crashes in functional calls on a GPU.
    own = torch.device("cpu") if rank.world.shared else rank.device
    wrong = []
    with rank.new_communicator("patched", group):
        for what, (call, ops) in CALLS.items():
            wanted, before = seen(lambda: call(_given(rank).to(own), group).clone())  # noqa: B023
            with collx.patch(group):
                found, under = seen(lambda: call(_given(rank), group).clone())  # noqa: B023
            _, after = seen(lambda: call(_given(rank).to(own), group).clone())  # noqa: B023
            if (before, under, after) != ([], ops, []):
                wrong.append(f"{what}: {before}, {under}, {after}")
            if text := differences(found.cpu(), wanted.cpu()):
                wrong.append(f"{what}: {text}")
    return wrong


@pytest.mark.worlds(2)
@on_ranks
def test_the_parts_may_be_stacked(rank: Rank) -> None:
    """An additional dimension instead of a longer one: gloo refuses it, NCCL accepts it."""
    group, x = rank.fresh_group(), _given(rank)
    out = x.new_empty(rank.size, *x.shape)
    with rank.new_communicator("patched", group), collx.patch(group):
        dist.all_gather_into_tensor(out, x, group)
        part = torch.empty_like(x[0])
        dist.reduce_scatter_tensor(part, x, group=group)
    given = torch.stack(rank.gather(x.cpu()))
    assert torch.equal(out.cpu(), given)
    assert torch.equal(part.cpu(), given.sum(0)[rank.rank])


def _transposed_gather(x: Tensor, group: Any) -> Tensor:
    out = x.new_empty(x.shape[1], 2 * x.shape[0]).t()
    dist.all_gather_into_tensor(out, x, group=group)
    dist.all_gather_into_tensor(again := torch.empty_like(x).repeat(2, 1), x.t().clone().t(), group)
    return out + again


def _sparse(x: Tensor, group: Any) -> Tensor:
    dist.all_reduce(sparse := x.to_sparse(), group=group)
    return sparse.to_dense()


def _other_shape(x: Tensor, group: Any) -> Tensor:
    dist.all_to_all_single(out := x.new_empty(x.numel()), x, group=group)
    return out


def _single_elements(x: Tensor, group: Any) -> Tensor:
    try:
        dist.all_to_all_single(x.new_empty(()), x[0, 0], group=group)
    except (RuntimeError, IndexError):  # by version of PyTorch
        return x
    return x + 1


def _from_first_to_second(x: Tensor, group: Any) -> Tensor:
    """The tensor of the rank that sends or receives nothing has no second dimension."""
    rows, nothing = x.shape[0], x.new_empty(0)
    if dist.get_rank(group) == 0:
        dist.all_to_all_single(nothing, x, [0, 0], [0, rows], group)
        return x
    dist.all_to_all_single(out := torch.empty_like(x), nothing, [rows, 0], [0, 0], group)
    return out


UNUSUAL: dict[str, tuple[Call, list[str]]] = {
    "transposed": (_transposed_gather, ["allgather"] * 2),
    "sparse": (_sparse, []),
    "another shape": (_other_shape, ["alltoallv"]),
    "no dimensions": (_single_elements, []),
    "empty tensors": (_from_first_to_second, ["alltoallv"]),
}


@pytest.mark.worlds(2)
@on_ranks
def test_unusual_tensors_give_the_results_of_the_process_group(rank: Rank) -> list[str]:
    if rank.device.type == "cuda":
        pytest.skip("NCCL refuses these tensors")
    group, x = rank.fresh_group(), _given(rank)[:, 0].contiguous()
    wrong = []
    with rank.new_communicator("patched", group):
        for what, (call, ops) in UNUSUAL.items():
            wanted = call(x, group)
            with collx.patch(group):
                found, under = seen(lambda: call(x, group))  # noqa: B023
            if under != ops or differences(found, wanted):
                wrong.append(f"{what}: {under}, {found} instead of {wanted}")
    return wrong


@pytest.mark.worlds(2)
@on_ranks
def test_parts_of_unequal_sizes_fail_on_all_ranks_alike(rank: Rank) -> None:
    """The error is that of the process group, and the communicator remains usable."""
    group, given = rank.fresh_group(), torch.zeros(7, device=rank.device)
    with rank.new_communicator("patched", group, 3.0) as communicator:
        with collx.patch(group):
            found = attempt(lambda: dist.reduce_scatter_tensor(given[:4] + 1, given, group=group))
        assert works(rank, communicator)
    assert found.error
    assert set(rank.gather(found.error)) == {found.error}


class Subclass(Tensor):
    pass


Asynchronous = Callable[[Tensor, Any, bool], tuple[Tensor, Any]]
"""Maps a tensor, a group and async_op to the tensor that the call writes and what it returns."""

ASYNCHRONOUS: dict[str, Asynchronous] = {
    "all_reduce": lambda x, g, a: (x, dist.all_reduce(x, group=g, async_op=a)),
    "subclass": lambda x, g, a: (x, dist.all_reduce(x.as_subclass(Subclass), group=g, async_op=a)),
    "parameter": lambda x, g, a: (x, dist.all_reduce(nn.Parameter(x), group=g, async_op=a)),
    "broadcast": lambda x, g, a: (x, dist.broadcast(x, group_src=1, group=g, async_op=a)),
    "all_gather_into_tensor": lambda x, g, a: (
        out := x.new_empty(g.size() * x.shape[0], *x.shape[1:]),
        dist.all_gather_into_tensor(out, x, g, async_op=a),
    ),
    "transposed": lambda x, g, a: (
        out := x.new_empty(*x.shape[1:], g.size() * x.shape[0]).movedim(2, 0),
        dist.all_gather_into_tensor(out, x, g, async_op=a),
    ),
    "reduce_scatter_tensor": lambda x, g, a: (
        out := torch.empty_like(x[:1]),
        dist.reduce_scatter_tensor(out, x, group=g, async_op=a),
    ),
    "all_to_all_single": lambda x, g, a: (
        out := torch.empty_like(x),
        dist.all_to_all_single(out, x, group=g, async_op=a),
    ),
}


@pytest.mark.worlds(2)
@on_ranks
def test_coalesced_calls_stay_with_the_process_group(rank: Rank) -> None:
    """The manager waits for the works of the process group only."""
    group = rank.fresh_group()
    with rank.new_communicator("patched", group, 5.0), collx.patch(group):
        tensors = [torch.full((100,), float(i), device=rank.device) for i in range(3)]
        with _coalescing_manager(group, async_ops=True) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor, group=group, async_op=True)
        manager.wait()
        for i, tensor in enumerate(tensors):
            assert bool((tensor == i * rank.size).all()), tensor


@pytest.mark.worlds(2)
@on_ranks
def test_ranks_may_differ_in_async_op(rank: Rank) -> list[str]:
    """collx serves asynchronous calls too."""
    group, wrong = rank.fresh_group(), []
    with rank.new_communicator("patched", group, 5.0), collx.patch(group):
        for what, call in ASYNCHRONOUS.items():
            wanted, nothing = call(_given(rank), group, False)
            assert nothing is None
            for posts in (rank.rank == 0, rank.rank != 0, True):
                output, work = call(_given(rank), group, posts)
                results = [output]
                if posts:
                    assert isinstance(work, dist.Work)
                    copied = work.get_future().then(lambda done: done.value()[0].clone())
                    assert work.wait()
                    rank.synchronize()
                    assert work.is_completed()
                    assert work.is_success()
                    results += [copied.wait(), *work.result()]
                wrong += [f"{what}: {r}" for r in results if differences(r.cpu(), wanted.cpu())]
    return wrong


@pytest.mark.worlds(2)
@pytest.mark.parametrize("divide_by_all", [True, False], ids=["all", "not joined"])
@on_ranks(deadline=60.0)
def test_uneven_inputs_of_data_parallel_training(rank: Rank, divide_by_all: bool) -> None:
    """Ranks that have joined make synchronous calls that the others make asynchronously. The
    reducer in C++ waits for these, unless it always divides by all ranks."""
    group = rank.fresh_group()
    torch.manual_seed(0)
    with rank.new_communicator("patched", group, 5.0), collx.patch(group):
        model = nn.parallel.DistributedDataParallel(Mlp().to(rank.device), process_group=group)
        with model.join(divide_by_initial_world_size=divide_by_all):
            for _ in range(2 + rank.rank):
                model(torch.ones(2, 8, device=rank.device)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.alone
@pytest.mark.worlds(2)
@on_ranks
def test_an_asynchronous_call_fails_in_wait(rank: Rank) -> None:
    if rank.device.type == "cuda":
        pytest.skip("on a GPU, the next call or synchronize raises a timeout")
    group = rank.fresh_group()
    communicator = rank.new_communicator("patched", group, 1.0)
    if rank.rank == 0:
        with collx.patch(group):
            work: Any = dist.all_reduce(_given(rank), group=group, async_op=True)
        limit = attempt(lambda: work.wait(timedelta(milliseconds=50)))
        assert_raised(limit, "CollectiveTimeout", "has not completed within 0.05 s")
        assert_raised(attempt(work.wait), "CollectiveTimeout", "rank 1")
        assert_raised(attempt(work.get_future().wait), "CollectiveTimeout")
        assert not work.is_success()
    rank.barrier()
    communicator.destroy()


@pytest.mark.worlds(2)
@on_ranks
def test_inference_tensors_are_written_outside_of_inference_mode(rank: Rank) -> list[str]:
    """As torch.distributed writes them. Also on one rank alone: the ranks decide alike."""
    import collx

    group, wrong = rank.fresh_group(), []
    with rank.new_communicator("patched", group), collx.patch(group):
        for what in ("all_reduce", "broadcast", "all_to_all_single"):
            call, ops = IN_PLACE[what]
            wanted, _ = seen(lambda: call(_given(rank), group).clone())  # noqa: B023
            for inference in (True, rank.rank == 0):
                with torch.inference_mode(inference):
                    given = [_given(rank) for _ in range(2)]
                found, under = seen(lambda: call(given.pop(), group).clone())  # noqa: B023
                if under != ops or differences(found.cpu(), wanted.cpu()):
                    wrong.append(f"{what}, {inference}: {under}, {found}")
    return wrong


@pytest.mark.worlds(2)
@on_ranks
def test_what_collx_does_not_serve_stays_with_the_process_group(rank: Rank) -> None:
    group, other = rank.fresh_group(), rank.fresh_group()
    communicator = rank.new_communicator("patched", group)
    # The process group supports these reductions, and collx does not.
    gpu = rank.device.type == "cuda"
    reduce_op: Any = dist._make_nccl_premul_sum(2.0) if gpu else dist.ReduceOp.BOR

    calls: dict[str, Callable[[], Any]] = {
        "another group": lambda: dist.all_reduce(_given(rank), group=other),
        "another group, functional": lambda: functional.all_reduce(_given(rank), "sum", other) + 0,
        "a dtype": lambda: dist.all_reduce(_given(rank, torch.complex64), group=group),
        "a reduction": lambda: dist.all_reduce(
            _given(rank, torch.float32 if gpu else torch.int32), reduce_op, group=group
        ),
    }
    with collx.patch(communicator), collx.patch(group):
        assert {what: seen(call)[1] for what, call in calls.items()} == {what: [] for what in calls}
    twice = collx.patch(group)
    with collx.patch(group):
        twice.remove()
        twice.remove()
        assert seen(lambda: dist.all_reduce(_given(rank), group=group))[1] == ["allreduce_"]
    with collx.patch(group):
        communicator.destroy()
        assert seen(lambda: dist.all_reduce(_given(rank), group=group))[1] == []


@pytest.mark.worlds(2)
@on_ranks
def test_gradients_are_those_of_torch_distributed(rank: Rank) -> None:
    group = rank.fresh_group()

    def run() -> tuple[Tensor, Tensor]:
        leaf = _given(rank).requires_grad_()
        with torch.no_grad():
            dist.broadcast(leaf, group_src=0, group=group)
        made = functional.all_gather_tensor_autograd(leaf * 2, 0, group)
        plain = functional.all_reduce(leaf.detach(), "sum", group)
        (made * made.detach()).sum().backward()
        assert leaf.grad is not None
        return leaf.grad, plain + 0

    with rank.new_communicator("patched", group) as communicator:
        wanted, _ = seen(run)
        with collx.patch(communicator):
            found, ops = seen(run)
    assert ops == ["broadcast_", "allgather", "allreduce", "reducescatter"]
    assert [differences(a.cpu(), b.cpu()) for a, b in zip(found, wanted, strict=True)] == ["", ""]


def world_mesh(rank: Rank) -> DeviceMesh:
    """Returns a mesh of all ranks on their default group, for all tests of a process. DTensor
    caches treat two meshes of the same ranks as equal, and would call the group of the first."""
    assert dist.group.WORLD is not None
    return DeviceMesh.from_group(dist.group.WORLD, rank.device.type)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.up(x).relu()
        return x + self.down(hidden)


def training_step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Returns the output, and this rank's part of each gradient."""
    model.zero_grad()
    out = model(x)
    out.pow(2).sum().backward()
    gradients: list[Any] = [p.grad for p in model.parameters()]
    return [out.detach(), *(g.to_local().clone() for g in gradients)]


def far(found: list[Tensor], wanted: list[Tensor]) -> list[str]:
    return [
        f"{n}: {(a - b).abs().max()}"
        for n, (a, b) in enumerate(zip(found, wanted, strict=True))
        if not torch.allclose(a, b, 1e-5, 1e-5)
    ]


@pytest.mark.worlds(2)
@on_ranks
def test_a_module_names_the_groups_of_its_parameters(rank: Rank) -> None:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = world_mesh(rank)
    torch.manual_seed(0)
    model: Any = parallelize_module(
        Mlp().to(rank.device), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()}
    )
    x = torch.randn(4, 8, device=rank.device)

    def refused(module: nn.Module) -> Attempt:
        return attempt(lambda: collx.patch(module).remove())

    alone = nn.Module()
    unknown = DeviceMesh.from_group(rank.fresh_group(), rank.device.type)
    alone.weight = nn.Parameter(DTensor.from_local(x, unknown, run_check=False))
    without = refused(alone)
    with rank.new_communicator(None, dist.group.WORLD):
        wanted = training_step(model, x)
        with collx.patch(model):
            found, ops = seen(lambda: training_step(model, x))
        plain = refused(Mlp())
    apart = far(found, wanted)
    assert apart == []
    assert ops == ["allreduce"]  # after the second layer; the input needs no gradient
    for each in (without, plain):
        words = "no parameter that is a DTensor on a group with a communicator"
        assert_raised(each, "ValueError", words)


@pytest.mark.worlds(2)
@on_ranks(deadline=300.0)
def test_dynamo_sees_through_a_patch(rank: Rank) -> None:
    """Dynamo compiles functional collectives, which run on collx where they run eagerly."""
    group = rank.fresh_group()

    def model(x: Tensor) -> Tensor:
        y = x * 2
        dist.all_reduce(y, group=group)
        return y + 1

    with rank.new_communicator("patched", group), torch.no_grad(), collx.patch(group):
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        found, ops = seen(lambda: compiled(_given(rank)))
        wanted = model(_given(rank))
    wrong = differences(found.cpu(), wanted.cpu())
    assert wrong == ""
    assert ops == ["allreduce"]


@pytest.mark.worlds(2)
@on_ranks
def test_a_group_without_a_communicator_is_refused(rank: Rank) -> None:
    found = attempt(lambda: collx.patch(rank.fresh_group()))
    words = ("this process has no communicator", "call collx.init first")
    assert_raised(found, "ValueError", *words)


@pytest.mark.worlds(2)
@on_ranks
def test_other_tools_may_wrap_and_restore_in_any_order(rank: Rank) -> list[str]:
    """Another tool counts calls; its wrapper is installed and removed at any time."""
    group, standing = rank.fresh_group(), dist.all_reduce
    own = torch.device("cpu") if rank.world.shared else rank.device
    counted = []

    def counting(beneath: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counted.append(1)
            return beneath(*args, **kwargs)

        return call

    def checked(what: str, served: bool, counts: int) -> list[str]:
        x = _given(rank).to(rank.device if served else own)
        counted.clear()
        _, ops = seen(lambda: dist.all_reduce(x.clone(), group=group))
        found = (ops, len(counted) // 2)  # `seen` calls twice
        wanted = (["allreduce_"] if served else [], counts)
        return [] if found == wanted else [f"{what}: {found}"]

    wrong = []
    with rank.new_communicator("patched", group):
        try:
            with collx.patch(group):
                ours = dist.all_reduce
                dist.all_reduce = counting(ours)
                wrong += checked("wrapped while patched", True, 1)
            wrong += checked("the patch ends beneath the wrapper", False, 1)
            with collx.patch(group):
                wrong += checked("patched over the wrapper", True, 0)
                wrong += [] if dist.all_reduce is not ours else ["the wrapper is lost"]
            wrong += checked("and no longer", False, 1)
            dist.all_reduce = ours
            wrong += checked("ours is restored after its end", False, 0)
            with collx.patch(group):
                wrong += checked("patched where it was restored", True, 0)
                work = dist.all_reduce(_given(rank).to(own), group=group, async_op=True)
                assert work is not None
                work.wait()
            wrong += [] if dist.all_reduce is standing else ["what stood there is not back"]
            with collx.patch(group):
                dist.all_reduce = standing
                wrong += checked("restored beneath a patch", False, 0)
                with collx.patch(group):
                    wrong += checked("patched once more", True, 0)
            wrong += [] if dist.all_reduce is standing else ["what stood there is not back"]
        finally:
            dist.all_reduce = standing
    return wrong


SUCCESSOR = """
import torch, torch.distributed as dist, collx
from collx._patch import _serving
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD.group_name
name = group()
communicator = collx.init(device="cpu")
collx.patch()
assert _serving(name, torch.ones(3)) is communicator
dist.destroy_process_group()
assert group() == name
assert _serving(name, torch.ones(3)) is None
"""


def test_a_group_with_the_name_of_a_destroyed_one_is_not_patched() -> None:
    """Every default group has the same name."""
    [(code, output)] = interpreters.run(SUCCESSOR, [()], {"GLOO_SOCKET_IFNAME": "lo"}, 120)
    assert code == 0, output


PATCHED = (
    "all_reduce",
    "broadcast",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
)


@pytest.mark.worlds(2)
@on_ranks
def test_a_patch_that_fails_leaves_nothing_behind(rank: Rank) -> list[str]:
    """Another tool already overrides the functional broadcast, which only one library may do."""
    group, standing = rank.fresh_group(), {name: getattr(dist, name) for name in PATCHED}
    wrong = []
    with rank.new_communicator("patched", group):
        taken = torch.library.Library("_c10d_functional", "IMPL")
        taken.impl("broadcast", lambda *_: None, "CPU")
        try:
            collx.patch(group)
            wrong.append("patched")
        except RuntimeError:
            pass
        finally:
            taken._destroy()
        wrong += [name for name in PATCHED if getattr(dist, name) is not standing[name]]
        own = torch.device("cpu") if rank.world.shared else rank.device
        call = FUNCTIONAL["all_reduce"][0]
        wrong += seen(lambda: call(_given(rank).to(own), group).clone())[1]
        with collx.patch(group):
            _, ops = seen(lambda: call(_given(rank), group).clone())
        wrong += [] if ops == ["allreduce"] else [f"patched afterwards: {ops}"]
    return wrong
