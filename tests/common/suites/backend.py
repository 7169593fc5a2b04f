"""The torch.distributed backend: every form of every collective, compared with plain PyTorch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.fx import Graph

import collx
import collx.backend
from collx import nn
from collx._bootstrap.options import MAX_RANKS

from ..attempt import assert_raised, attempt, ones
from ..compiling import inductor, operators_in, through_pass
from ..pool import on_ranks
from ..rank import TIMEOUT, Rank

REDUCED = (torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.uint8)
MOVED = (torch.float32, torch.int16, torch.bool, torch.complex64, torch.float8_e4m3fn)
Op = dist.ReduceOp


def group_of(rank: Rank, **given: Any) -> Any:
    """Returns a new group of all ranks on the backend. Collective."""
    given.setdefault("timeout", timedelta(seconds=TIMEOUT))
    return dist.new_group(backend="collx", **given)


def until_known(rank: Rank, group: Any) -> None:
    """On CUDA, a call raises an earlier failure."""
    for _ in range(2):
        dist.all_reduce(ones(rank), group=group)
        rank.synchronize()


def finish(rank: Rank, work: Any) -> None:
    work.wait()
    rank.synchronize()
    work.wait()  # on CUDA, this call raises the failure


@dataclass(frozen=True)
class Case:
    """One rank's side of a collective."""

    rank: Rank
    group: Any
    dtype: torch.dtype
    async_op: bool

    @property
    def world(self) -> int:
        return self.rank.size

    @property
    def me(self) -> int:
        return self.rank.rank

    def of(self, rank: int, *shape: int) -> Tensor:
        """Returns a rank's input: small integers whose sums are exact in every dtype."""
        made = torch.Generator().manual_seed(1 + rank)
        low = 0 if self.dtype in (torch.uint8, torch.bool) else -3
        values = torch.randint(low, 4, shape, generator=made)
        return values.to(self.dtype).to(self.rank.device)

    def all(self, *shape: int) -> list[Tensor]:
        return [self.of(rank, *shape) for rank in range(self.world)]

    def new(self, *shape: int) -> Tensor:
        return self.of(99, *shape)

    def call(self, function: Callable[..., Any], *given: Any, **named: Any) -> None:
        work = function(*given, group=self.group, async_op=self.async_op, **named)
        if self.async_op:
            assert work.wait()
            self.rank.synchronize()
            assert work.is_completed()


Found = Iterator[tuple[Tensor, Tensor]]  # the actual and the expected tensors of a rank


def _total(parts: list[Tensor]) -> Tensor:
    wide = torch.int64 if not parts[0].dtype.is_floating_point else torch.float64
    return torch.stack([part.to(wide) for part in parts]).sum(0).to(parts[0].dtype)


def _all_reduce(c: Case) -> Found:
    x = c.of(c.me, 7, 5)
    c.call(dist.all_reduce, x)
    yield x, _total(c.all(7, 5))
    for op, over in ((Op.MAX, torch.amax), (Op.MIN, torch.amin)):
        x = c.of(c.me, 9)
        c.call(dist.all_reduce, x, op=op)
        yield x, over(torch.stack(c.all(9)).to(torch.float64), 0).to(c.dtype)
    x = c.of(c.me, 6, 4).t()  # not contiguous
    c.call(dist.all_reduce, x)
    yield x, _total(c.all(6, 4)).t()
    if c.dtype.is_floating_point:
        x = c.of(c.me, 8)
        c.call(dist.all_reduce, x, op=Op.AVG)
        # Divide on the CPU: CUDA's division by a number differs from IEEE division.
        yield x, (_total(c.all(8)).cpu().to(torch.float64) / c.world).to(c.dtype).to(x.device)


def _reduce(c: Case) -> Found:
    for root in range(c.world):
        x = c.of(c.me, 11)
        c.call(dist.reduce, x, root)
        if c.me == root:
            yield x, _total(c.all(11))


def _reduce_scatter(c: Case) -> Found:
    w = c.world
    total = _total(c.all(3 * w, 2))
    out = c.new(3, 2)
    c.call(dist.reduce_scatter_tensor, out, c.of(c.me, 3 * w, 2))
    yield out, total.chunk(w)[c.me]
    out = c.new(3, 2)
    c.call(dist.reduce_scatter, out, [t.clone() for t in c.of(c.me, 3 * w, 2).chunk(w)])
    yield out, total.chunk(w)[c.me]
    out = c.new(2, 3).t()  # not contiguous
    c.call(dist.reduce_scatter, out, list(c.of(c.me, 3 * w, 2).chunk(w)))
    yield out, total.chunk(w)[c.me]
    # Parts of different sizes.
    whole, sizes = sum(range(1, w + 1)), list(range(1, w + 1))
    out = c.new(sizes[c.me])
    c.call(dist.reduce_scatter, out, list(c.of(c.me, whole).split(sizes)))
    yield out, _total(c.all(whole)).split(sizes)[c.me]


REDUCTIONS = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
}


def _all_gather(c: Case) -> Found:
    w = c.world
    everything = torch.cat(c.all(4, 3))
    out = c.new(4 * w, 3)
    c.call(dist.all_gather_into_tensor, out, c.of(c.me, 4, 3))
    yield out, everything
    apart = [c.new(4, 3) for _ in range(w)]
    c.call(dist.all_gather, apart, c.of(c.me, 4, 3))
    yield torch.cat(apart), everything
    out = c.new(4 * w, 3)  # the list is one tensor
    c.call(dist.all_gather, list(out.chunk(w)), c.of(c.me, 4, 3))
    yield out, everything
    apart = [c.new(3, 4).t() for _ in range(w)]
    c.call(dist.all_gather, apart, c.of(c.me, 4, 3))
    yield torch.cat(apart), everything
    uneven = [c.new(rank + 1) for rank in range(w)]
    c.call(dist.all_gather, uneven, c.of(c.me, c.me + 1))
    yield torch.cat(uneven), torch.cat([c.of(rank, rank + 1) for rank in range(w)])
    uneven = [c.new(2 * rank + 2) for rank in range(w)]
    c.call(dist.all_gather, uneven, c.of(c.me, 2, c.me + 1).t())  # not contiguous, another shape
    yield torch.cat(uneven), torch.cat([c.of(r, 2, r + 1).t().reshape(-1) for r in range(w)])


def _broadcast(c: Case) -> Found:
    for root in range(c.world):
        x = c.of(c.me, 13)
        c.call(dist.broadcast, x, root)
        yield x, c.of(root, 13)


def _gather_and_scatter(c: Case) -> Found:
    for root in range(c.world):
        at_root = c.me == root
        lists = [c.new(3, 2) for _ in range(c.world)] if at_root else None
        c.call(dist.gather, c.of(c.me, 3, 2), lists, root)
        if lists is not None:
            yield torch.cat(lists), torch.cat(c.all(3, 2))
        out = c.new(5)
        parts = [c.of(rank, 5) for rank in range(c.world)] if at_root else None
        c.call(dist.scatter, out, parts, root)
        yield out, c.of(c.me, 5)
        # Root's own tensor is one of its list.
        parts = list(c.new(3 * c.world, 2).chunk(c.world))
        parts[c.me].copy_(c.of(c.me, 3, 2))
        c.call(dist.gather, parts[c.me], parts if at_root else None, root)
        if at_root:
            yield torch.cat(parts), torch.cat(c.all(3, 2))
        out = parts[c.me] if at_root else c.new(3, 2)
        c.call(dist.scatter, out, parts if at_root else None, root)
        yield out, c.of(c.me, 3, 2)


def _all_to_all(c: Case) -> Found:
    w = c.world
    rows = [t.chunk(w)[c.me] for t in c.all(2 * w, 3)]
    out = c.new(2 * w, 3)
    c.call(dist.all_to_all_single, out, c.of(c.me, 2 * w, 3))
    yield out, torch.cat(rows)
    lists = [c.new(2, 3) for _ in range(w)]
    c.call(dist.all_to_all, lists, [t.clone() for t in c.of(c.me, 2 * w, 3).chunk(w)])
    yield torch.cat(lists), torch.cat(rows)
    # Rank r sends r + s rows to rank s.
    sent = [[r + s for s in range(w)] for r in range(w)]
    received = [sent[r][c.me] for r in range(w)]
    out = c.new(sum(received), 2)
    given = c.of(c.me, sum(sent[c.me]), 2)
    c.call(dist.all_to_all_single, out, given, received, sent[c.me])
    want = [c.of(r, sum(sent[r]), 2).split(sent[r])[c.me] for r in range(w)]
    yield out, torch.cat(want)
    lists = [c.new(rows, 2) for rows in received]
    c.call(dist.all_to_all, lists, list(given.split(sent[c.me])))
    yield torch.cat(lists), torch.cat(want)


MOVES = {
    "all_gather": _all_gather,
    "broadcast": _broadcast,
    "gather_and_scatter": _gather_and_scatter,
    "all_to_all": _all_to_all,
}


@pytest.mark.worlds(1, 2, 3)
@pytest.mark.parametrize("name", sorted(REDUCTIONS | MOVES))
@on_ranks
def test_every_collective_gives_what_torch_says(rank: Rank, name: str) -> list[str]:
    group = group_of(rank)
    wrong = []
    function = REDUCTIONS.get(name) or MOVES[name]
    for dtype in REDUCED if name in REDUCTIONS else MOVED:
        for async_op in (False, True):
            found = function(Case(rank, group, dtype, async_op))
            for number, (got, want) in enumerate(found):
                rank.synchronize()
                same = got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8)
                if not torch.equal(*same):
                    wrong.append(f"{dtype}, async_op={async_op}, {number}: {got} for {want}")
    dist.destroy_process_group(group)
    return wrong[:3]


@pytest.mark.worlds(1, 2)
@on_ranks
def test_values_that_are_no_plain_numbers(rank: Rank) -> None:
    """Complex and bool tensors, an empty one, and a parameter."""
    group = group_of(rank)
    world = rank.size
    z = torch.full((3,), 1 + 2j, device=rank.device)
    dist.all_reduce(z, group=group)
    assert bool((z == world * (1 + 2j)).all())
    # torch.distributed itself splits complex tensors into parts. The group also does so.
    for op in (Op.AVG, Op.MAX):
        options = dist.AllreduceOptions()
        options.reduceOp = op  # type: ignore[assignment]
        found = attempt(lambda: group.allreduce([z], options).wait())  # noqa: B023
        # There is no maximum of complex numbers.
        assert bool(found.error) == (op == Op.MAX), found
        assert bool((z == world * (1 + 2j)).all())
    b = torch.tensor([rank.rank == 0, True, False], device=rank.device)
    for op, want in ((Op.SUM, [True, True, False]), (Op.MIN, [world == 1, True, False])):
        x = b.clone()
        dist.all_reduce(x, op=op, group=group)
        assert x.tolist() == want, (op, x)
    nothing = torch.empty(0, 4, device=rank.device)
    dist.all_reduce(nothing, group=group)
    out = torch.empty(0, 4, device=rank.device)
    dist.all_gather_into_tensor(out, nothing, group=group)
    parameter = torch.nn.Parameter(torch.ones(4, device=rank.device))
    with torch.no_grad():
        dist.all_reduce(parameter, group=group)
    assert bool((parameter == world).all())
    dist.destroy_process_group(group)


@pytest.mark.own_gpu
@pytest.mark.worlds(2, 3)
@on_ranks
def test_the_inner_group_carries_out_the_rest(rank: Rank) -> None:
    """Calls that collx has no kernel for."""
    group = group_of(rank)
    me, world, device = rank.rank, rank.size, rank.device
    if device.type == "cpu":  # NCCL has no bitwise operations
        bits = torch.tensor([1 << me], device=device)
        dist.all_reduce(bits, op=Op.BOR, group=group)
        assert bits.item() == (1 << world) - 1
        sparse = torch.sparse_coo_tensor(torch.tensor([[me]]), torch.ones(1), (world,))
        dist.all_reduce(sparse, group=group)
        assert sparse.to_dense().tolist() == [1.0] * world
    right, left = (me + 1) % world, (me - 1) % world
    sent, got = torch.full((4,), float(me), device=device), torch.empty(4, device=device)
    if me == 0:
        dist.send(sent, right, group=group)
        dist.recv(got, left, group=group)
    else:
        dist.recv(got, left, group=group)
        dist.send(sent, right, group=group)
    assert got.tolist() == [float(left)] * 4
    got.fill_(-1)
    # NCCL coalesces its calls, Gloo does not.
    got_on_cpu = torch.full((4,), -1.0)
    both = [
        dist.P2POp(dist.isend, sent, right, group),
        dist.P2POp(dist.isend, sent.cpu(), right, group),
        dist.P2POp(dist.irecv, got, left, group),
        dist.P2POp(dist.irecv, got_on_cpu, left, group),
    ]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    assert got_on_cpu.tolist() == [float(left)] * 4
    assert got.tolist() == [float(left)] * 4
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": me}, group=group)
    assert objects == [{"rank": r} for r in range(world)]
    dist.destroy_process_group(group)


@pytest.mark.own_gpu
@pytest.mark.worlds(2, 3)
@on_ranks
def test_parts_have_any_shape_if_the_inner_group_carries_out_the_calls(rank: Rank) -> None:
    """Gloo itself refuses stacked parts, and crashes for an output without dimensions."""
    me, world, device = rank.rank, rank.size, rank.device
    numbers = torch.arange(world * 2.0, device=device).view(world, 2)
    with mock.patch.dict(MAX_RANKS, {device.type: 0}):  # as with more ranks than collx serves
        group = group_of(rank)
        for given in (numbers, numbers[:, 1].contiguous()):
            gathered, part = torch.empty_like(given), torch.empty_like(given[me])
            dist.all_gather_into_tensor(gathered, given[me], group=group)
            dist.reduce_scatter_tensor(part, given, group=group)
            rank.synchronize()
            assert gathered.equal(given)
            assert part.equal(given[me] * world)
        assert not collx.communicator.of_group(group.group_name)
    dist.destroy_process_group(group)


@pytest.mark.worlds(2)
@on_ranks
def test_wait_accepts_any_timeout(rank: Rank) -> None:
    """A clock that counts nanoseconds in 64 bits ends after 292 years."""
    group = group_of(rank)
    for late in (0, 1):
        rank.barrier()
        if rank.rank == late:
            time.sleep(0.2)
        x = ones(rank)
        assert dist.all_reduce(x, group=group, async_op=True).wait(timedelta(days=400 * 365))
        assert bool((x == rank.size).all())
    dist.destroy_process_group(group)


def _column(rank: Rank) -> Tensor:
    return torch.arange(rank.size, device=rank.device, dtype=torch.float32).unsqueeze(1)


@pytest.mark.worlds(1, 2)
@on_ranks
def test_coalesced_calls(rank: Rank) -> None:
    group = group_of(rank)
    world, device = rank.size, rank.device
    for asynchronous in (False, True):
        xs = [torch.full((n,), float(n), device=device) for n in (1, 5, 9)]
        with _coalescing_manager(group, async_ops=asynchronous) as manager:
            for x in xs:
                dist.all_reduce(x, group=group)
        if asynchronous:
            manager.wait()
        assert all(bool((x == x.numel() * world).all()) for x in xs), xs
        outs = [torch.empty(n * world, device=device) for n in (2, 3)]
        with _coalescing_manager(group, async_ops=asynchronous) as manager:
            for out in outs:
                part = torch.full((out.numel() // world,), float(rank.rank), device=device)
                dist.all_gather_into_tensor(out, part, group=group)
        if asynchronous:
            manager.wait()
        assert all(bool((o.view(world, -1) == _column(rank)).all()) for o in outs), outs
        parts = [torch.empty(n, device=device) for n in (2, 3)]
        with _coalescing_manager(group, async_ops=asynchronous) as manager:
            for part in parts:
                whole = torch.ones(part.numel() * world, device=device)
                dist.reduce_scatter_tensor(part, whole, group=group)
        if asynchronous:
            manager.wait()
        assert all(bool((part == world).all()) for part in parts), parts
    dist.destroy_process_group(group)


@pytest.mark.worlds(2)
@on_ranks
def test_functions_and_layers_create_the_communicator_as_collectives_do(rank: Rank) -> None:
    """Uses new groups in ways other than torch.distributed, and looks groups up on one rank."""
    x = torch.ones(4, 8, device=rank.device)

    def layers(group: Any) -> Tensor:
        norm = nn.TensorParallelRMSNorm(8, group=group, device=rank.device)
        layer = nn.RowParallelLinear(8, 8, bias=False, group=group, device=rank.device)
        torch.nn.init.ones_(layer.weight)
        with torch.no_grad():
            return norm(x) * layer(x[:, : layer.weight.size(1)])

    uses: dict[str, tuple[Callable[[Any], Tensor], Any]] = {
        "a function": (lambda group: collx.allreduce(x, group=group), rank.size),
        "a posted call": (
            lambda group: collx.post(collx.allreduce, x, group=group).wait(),
            rank.size,
        ),
        "a size": (lambda group: collx.allgather(x, group).sum(0), 4.0 * rank.size),
        "an operator": (
            lambda group: torch.ops.collx.allreduce(x, "sum", group.group_name),
            rank.size,
        ),
        "layers": (layers, 8.0),
        "mappings": (lambda group: nn.mappings.split_to_ranks(x, group).sum(1), 8.0 / rank.size),
        "compiled": (
            torch.compile(lambda group: collx.allreduce(x, group=group), backend="aot_eager"),
            rank.size,
        ),
    }
    wrong = []
    for what, (use, expected) in uses.items():
        group = group_of(rank)
        if rank.rank == 0:  # these create nothing, so one rank may call them
            lookup = attempt(partial(collx.get, group))
            words = 'the backend "collx" has not created a communicator'
            assert_raised(lookup, "ValueError", words)
            uneven = torch.empty(2 * rank.size + 1, device="meta")
            shape = attempt(partial(collx.reducescatter, uneven, group=group))
            assert_raised(shape, "ValueError", "no communicator")
        for _ in range(2):
            result = use(group)
            if not torch.allclose(result, torch.full_like(result, expected)):
                wrong.append(f"{what}: {result}")
        if what != "mappings" and not collx.is_initialized(group):
            wrong.append(f"{what}: no communicator")
        dist.destroy_process_group(group)
    assert wrong == []


@pytest.mark.worlds(1, 2)
@on_ranks
def test_what_pytorch_calls_beside_collectives(rank: Rank) -> None:
    group, x = group_of(rank), torch.ones(100, device=rank.device)
    dist.barrier(group, device_ids=[rank.device.index or 0])
    work = dist.all_reduce(x, group=group, async_op=True)
    work.block_current_stream()
    assert bool((x + 1 == rank.size + 1).all())
    work.wait()
    assert collx.get(group.group_name) is collx.get(group)
    assert collx.is_initialized(group.group_name)
    backend = group._get_backend(rank.device)
    backend.perform_nocolor_split(rank.device)  # for ranks outside of a new group
    assert backend.options.global_ranks_in_group == list(range(rank.size))
    dist.destroy_process_group(group)


@pytest.mark.worlds(1, 2)
@on_ranks
def test_a_first_call_checks_what_depends_on_the_rank(rank: Rank) -> None:
    """The check of the residual needs the rank, which only the communicator knows."""
    x = torch.ones(2 * rank.size, 8, device=rank.device)
    one, weight = torch.ones(1, 8, device=rank.device), torch.ones(8, device=rank.device)
    for used in (False, True):
        group = group_of(rank)
        if used:
            dist.all_reduce(weight.clone(), group=group)
        for name in (group, group.group_name):
            found = attempt(partial(collx.reducescatter_rmsnorm, x, one, weight, 1e-6, name))
            assert_raised(found, "ValueError", "residual: got shape [1, 8]")
        dist.destroy_process_group(group)


@pytest.mark.worlds(1, 2)
@on_ranks
def test_functional_collectives_and_the_functions_of_collx(rank: Rank) -> None:
    """PyTorch's functional collectives: eager, patched, and in a graph that collx rewrites."""
    group = group_of(rank)
    x = torch.full((8, 4), float(rank.rank), device=rank.device)
    want = float(sum(range(rank.size)))
    warm = torch.ones(1, device=rank.device)
    dist.all_reduce(warm, group=group)  # creates the communicator

    def model(x: Tensor) -> Tensor:
        return functional.all_reduce(x, "sum", group) + 1

    assert bool((model(x) == want + 1).all())
    communicator = collx.get(group)
    assert communicator.name == f"{group.group_name}/{rank.device.type}"
    assert bool((collx.allreduce(x, group=group) == want).all())
    with collx.patch(group):
        y = x.clone()
        dist.all_reduce(y, group=group)
        assert bool((y == want).all())
    graphs: list[Graph] = []
    with inductor():
        compiled = torch.compile(model, fullgraph=True, backend=through_pass(graphs))
        assert bool((compiled(x) == want + 1).all())
    assert operators_in(graphs) == ["allreduce"]
    dist.destroy_process_group(group)
    assert communicator.destroyed
