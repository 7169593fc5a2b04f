"""CUDA graphs: all operators in one graph, replayed with other inputs and with eager calls between;
chains in which each call reads what the previous one wrote; dependent launch at every level."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import collx
from tests.common.attempt import allreduce, assert_raised, attempt, finish, ones
from tests.common.calls import Call, Fields, Tensors, as_tuple, make, run_call
from tests.common.check import arenas_of, bytes_of, cut
from tests.common.norms import quantizes
from tests.common.operators import NAMES, call_of, is_norm, kernels, random_call
from tests.common.pool import Pool, on_ranks
from tests.common.rank import Rank
from tests.common.suites.skew import delay
from tests.common.values import unequal

PDL_LEVELS = ("off", "end", "early")
VARIANTS = 5  # inputs that the replays use in turn
SLICE = 1 << 16  # bytes of an arena for each call of a graph
PATTERNS = ("uneven", "nobody", "zeros", "one_sends", "wild")
JUNK = 85


def _padded(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Returns the tensors, padded to the number of rows of the longest one."""
    if tensors[0].dim() == 0 or len({tensor.shape for tensor in tensors}) == 1:
        return [tensor.to(device, copy=True) for tensor in tensors]
    rows = max(len(tensor) for tensor in tensors)
    made = []
    for tensor in tensors:
        whole = torch.zeros((rows, *tensor.shape[1:]), dtype=tensor.dtype)
        whole[: len(tensor)] = tensor
        made.append(whole.to(device))
    return made


class Static:
    """A call on tensors that stay in place, as a graph requires. It stands for VARIANTS calls with
    other values, and other splits on the device."""

    def __init__(self, rank: Rank, communicator: Any, call: Call, at: int = 0) -> None:
        self.call, self._communicator = call, communicator
        calls = [replace(call, seed=number + 1) for number in range(VARIANTS)]  # type: ignore[call-arg]
        if call.op == "alltoallv_device":
            calls = [replace(c, splits=s) for c, s in zip(calls, PATTERNS, strict=True)]  # type: ignore[call-arg]
        data = [one.data(rank.size) for one in calls]
        given = [one.given[rank.rank] for one in data]
        expected = [one.expected[rank.rank] for one in data]
        self._values = {
            name: _padded([one[name] for one in given], rank.device) for name in given[0]
        }
        self._expected = [_padded(outs, rank.device) for outs in zip(*expected, strict=True)]
        self._tensors = {name: torch.empty_like(v[0]) for name, v in self._values.items()}
        self._outs = tuple(torch.empty_like(variants[0]) for variants in self._expected)
        if call.symmetric != "none":
            arenas = arenas_of(rank, communicator)
            source = self._tensors["input"]
            self._tensors["input"] = cut(arenas.input[at : at + SLICE], source)
            self._outs = (cut(arenas.output[at : at + SLICE], self._outs[0]), *self._outs[1:])
        self._given = calls[0].arguments(communicator, self._tensors)
        if call.op == "alltoallv_device":
            self._given["capacity"] = len(self._outs[0])

    def fill(self, which: int) -> None:
        """Fills in the inputs of a variant, and junk where the results will be."""
        for name, tensor in self._tensors.items():
            tensor.copy_(self._values[name][which])
        for out in self._outs:
            bytes_of(out).fill_(JUNK)

    def __call__(self) -> None:
        make(self._communicator, self.call, self._given, self._outs)

    def spoil(self) -> None:
        """Overwrites the inputs of the call."""
        for tensor in self._tensors.values():
            bytes_of(tensor).fill_(JUNK)

    def wrong(self, which: int) -> torch.Tensor:
        """Returns the number of wrong elements, on the device."""
        pairs = zip(self._outs, self._expected, strict=True)
        return torch.stack([unequal(out, want[which]).sum() for out, want in pairs]).sum()


def _steps(norms: bool, every_algorithm: bool) -> list[Call]:
    """Returns calls of all operators of a kind, with all algorithms that can be captured or only
    with "auto"; sizes of one tile and of many tiles."""
    calls = []
    for number, (op, algorithm) in enumerate(kernels()):
        if is_norm(op) != norms or (algorithm != "auto" and not every_algorithm):
            continue
        fields: Fields = {"algorithm": algorithm, "max_blocks": (0, 0, 2)[number % 3]}
        fields.update(style="random", root=number, splits="uneven")
        if norms:
            rows, cols = ((1, 4096), (13, 384), (40, 1000))[number % 3]
            dtype = ("bfloat16", "float32")[number % 2]
            fields.update(rows=rows, cols=cols, dtype=dtype, keep_norm=bool(number % 2))
        else:
            shape = (8, 3) if "device" in op else ((37, 4), (500,), (96, 11))[number % 3]
            fields.update(shape=shape, dtype=("float32", "int32")[number % 2])
        calls.append(call_of(op, **fields))
    return calls


def _replays(rank: Rank, calls: list[Call], replays: int, between: int, level: str) -> list[str]:
    communicator = rank.only_communicator("graphs")
    choose = random.Random(replays)
    with communicator.set_pdl(level):
        assert communicator.explain("allreduce", 300).pdl == level
        steps = [Static(rank, communicator, call, SLICE * at) for at, call in enumerate(calls)]

        def run() -> None:
            for number, step in enumerate(steps):
                step()
                if number % 6 == 5:
                    torch.ops.collx.barrier(communicator.name)

        for step in steps:
            step.fill(0)
        run()
        rank.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        wrong = torch.zeros(len(steps), dtype=torch.int64, device=rank.device)
        found = []
        for number in range(replays):
            which = number * 3 % VARIANTS
            for step in steps:
                step.fill(which)
            graph.replay()
            for step in steps:
                step.spoil()
            wrong += torch.stack([step.wrong(which) for step in steps])
            if number % between == between - 1:
                eager = random_call(choose, 20_000, rank.size)
                told = run_call(rank, communicator, eager)
                found += [f"eager, after replay {number}: {eager}: {told}"] if told else []
        finish(communicator)
    counts = zip(calls, wrong.tolist(), strict=True)
    return found[:5] + [f"{call}: {count} wrong elements" for call, count in counts if count]


@pytest.mark.parametrize("level", PDL_LEVELS)
@pytest.mark.parametrize("norms", [False, True], ids=["collectives", "norms"])
def test_every_replay_of_all_operators_is_right(pool: Pool, norms: bool, level: str) -> None:
    """Hazards 2, 3, 4 and 14: every operator with every algorithm in one graph, with other inputs
    and device splits in each replay, and arbitrary eager calls between the replays."""
    if pool.takes_turns:
        whole = level == "early" and pool.size == 2
        replays, between, every = (50 - 30 * norms, 10, False) if whole else (6, 3, False)
    else:
        replays, between, every = (1000 if level == "early" else 200, 20, True)
        replays = replays * 4 // 10 if norms else replays
    calls = _steps(norms, every)
    assert pool.run(_replays, calls, replays, between, level) == [[]] * pool.size


@pytest.mark.parametrize(
    "op",
    ["allreduce_residual_rmsnorm_fp8", "allreduce_layernorm", "reducescatter_residual_rmsnorm"],
)
def test_ten_thousand_replays_of_a_norm_are_right(pool: Pool, op: str) -> None:
    """Hazards 2, 3, 4 and 14: 200 replays where ranks share a GPU."""
    replays, between = (200, 40) if pool.takes_turns else (10_000, 50)
    call = call_of(op, dtype="bfloat16", rows=7, cols=4096, keep_norm=quantizes(op))
    assert pool.run(_replays, [call], replays, between, "early") == [[]] * pool.size


REDUCTIONS = (
    (256, "auto", torch.float32, 0),
    (100_000, "twoshot_push", torch.float32, 3),
    (33, "oneshot_push", torch.bfloat16, 1),
    (4097, "oneshot_pull", torch.float32, 0),
    (5000, "twoshot_push", torch.int32, 0),
    (20_001, "twoshot_pull", torch.float32, 2),
    (150_001, "twoshot_lanes", torch.bfloat16, 0),
    (60_000, "twoshot_lanes", torch.int32, 3),
)


class Counting:
    """All-reduces whose right result follows from a counter in device memory, so that each one is
    checked on the device: rank r contributes counter + r."""

    def __init__(self, rank: Rank, communicator: Any) -> None:
        self.communicator = communicator
        self.world = rank.size
        self.rank = rank.rank
        self.counter = torch.zeros((), dtype=torch.int64, device=rank.device)
        self.wrong = torch.zeros((), dtype=torch.int64, device=rank.device)

    def step(self, calls: Sequence[tuple[int, str, torch.dtype, int]]) -> None:
        """Advances the counter and makes the calls."""
        # Modulo 17: sums of eight ranks stay exact in bfloat16.
        self.counter.copy_((self.counter + 1) % 17)
        expected = self.counter * self.world + self.world * (self.world - 1) // 2
        for numel, algorithm, dtype, max_blocks in calls:
            source = (self.counter + self.rank).to(dtype).expand(numel).contiguous()
            result = allreduce(self.communicator, source, algorithm, "sum", max_blocks)
            self.wrong.add_((result != expected.to(dtype)).sum())

    def captured(self, calls: Sequence[tuple[int, str, torch.dtype, int]]) -> Any:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step(calls)
        return graph


def _counted(rank: Rank, replays: int, between: int, level: str, calls: int) -> int:
    communicator = rank.only_communicator("graphs")
    counting = Counting(rank, communicator)
    with communicator.set_pdl(level):
        other = torch.cuda.Stream()
        other.wait_stream(torch.cuda.current_stream())  # the counters are zeroed there
        with torch.cuda.stream(other):
            counting.step(REDUCTIONS[:calls])
        torch.cuda.current_stream().wait_stream(other)
        rank.synchronize()
        graph = counting.captured(REDUCTIONS[:calls])
        for number in range(replays):
            graph.replay()
            if number % between == between - 1:
                size = 1 + number * 7919 % 30_000
                counting.step([(size, "auto", torch.float32, number % 3)])
        finish(communicator)
    return int(counting.wrong)


@pytest.mark.parametrize("level", PDL_LEVELS)
def test_ten_thousand_replays_of_all_reduces_are_right(pool: Pool, level: str) -> None:
    """Hazards 2, 3 and 4: epochs and slots are in device memory. Calls of several sizes, with eager
    calls of other sizes between the replays; 200 replays where ranks share a GPU."""
    if pool.takes_turns:
        whole = level == "early" and pool.size == 2
        replays, between, calls = (200, 20, 2) if whole else (12, 4, 4)
    else:
        replays, between, calls = (10_000, 40, len(REDUCTIONS))
    wrong = pool.run(_counted, replays, between, level, calls)
    assert wrong == [0] * pool.size


@pytest.mark.worlds(2, 4)
@on_ranks
def test_graphs_of_different_shapes_alternate(rank: Rank) -> None:
    """Hazard 4: the layout of flags and slots does not depend on shapes."""
    communicator = rank.communicator()
    counting = Counting(rank, communicator)
    graphs = [counting.captured(calls) for calls in (REDUCTIONS[:2], REDUCTIONS[2:5])]
    for number in range(40):
        graphs[number * number % 3 % 2].replay()
    finish(communicator)
    assert int(counting.wrong) == 0


# --- Chains. Each one takes a source and a communicator, and makes calls that read what the
# previous call wrote. It returns the results and a function that returns the expected results on
# rank r for the source's value v.

Wanted = Callable[[int, int], list[float]]


def _of_reductions(source: torch.Tensor, communicator: Any) -> tuple[Tensors, Wanted]:
    world = communicator.world_size
    first = allreduce(communicator, source, "twoshot_push")
    second = allreduce(communicator, first[:300], "oneshot_push")
    third = allreduce(communicator, second, "oneshot_pull")
    fourth = allreduce(communicator, first, "twoshot_pull")

    def wanted(v: int, r: int) -> list[float]:
        base = world * v + world * (world - 1) // 2  # each rank contributes v + its number
        return [base, base * world, base * world**2, base * world]

    return (first, second, third, fourth), wanted


def _of_collectives(source: torch.Tensor, communicator: Any) -> tuple[Tensors, Wanted]:
    ops, name, world = torch.ops.collx, communicator.name, communicator.world_size
    spread = ops.broadcast(source[:600], 0, name)
    everything = ops.allgather(source[:300], world, name)
    part = ops.reducescatter(everything, "sum", world, name)
    mixed = ops.alltoall(everything, world, name)
    chunk = ops.scatter(mixed, world - 1, world, name)
    at_root = ops.gather(chunk, 0, world, name)
    reduced = ops.reduce(spread, "sum", 1 % world, name)
    ops.barrier(name)
    total = allreduce(communicator, at_root)

    def wanted(v: int, r: int) -> list[float]:
        last = v + world - 1
        at_one = world * v if r == 1 % world else v
        return [v, world * (v + r), v + r, last, last if r == 0 else 0, at_one, last]

    return (spread, part, mixed, chunk, at_root, reduced, total), wanted


def _of_norms(source: torch.Tensor, communicator: Any) -> tuple[Tensors, Wanted]:
    """Each norm maps a row of one repeated value to ones, whatever its scale: in bfloat16 x / |x|
    is 1 even if its float32 value is one step less. The sign of the source alternates."""
    ops, name, world = torch.ops.collx, communicator.name, communicator.world_size
    parity = source[:2560].remainder(2).mul(2).sub(1).view(5, 512)  # parity of v + r: 1 or -1
    signs = ops.broadcast(parity.bfloat16(), 0, name)
    weight = torch.ones(512, device=source.device, dtype=torch.bfloat16)
    first = ops.allreduce_rmsnorm(signs, weight, 0.0, name)
    total = ops.allreduce(first, "sum", name)
    second, added = ops.allreduce_residual_rmsnorm(total, first, weight, 0.0, name)
    q, scale = ops.allreduce_rmsnorm_int8(second, weight, 0.0, name)

    def wanted(v: int, r: int) -> list[float]:
        sign = 1.0 if v % 2 else -1.0
        return [sign, sign * world, sign * (world * world + 1), sign, sign * 127, 1.0]

    return (first, total, added, second, q, (scale * 127).round()), wanted


CHAINS = {"allreduce": _of_reductions, "collectives": _of_collectives, "norms": _of_norms}


@pytest.mark.worlds(1, 2, 3, 4, 8)
@pytest.mark.parametrize("level", PDL_LEVELS)
@pytest.mark.parametrize("which", sorted(CHAINS))
@on_ranks
def test_each_call_waits_for_what_the_one_before_wrote(
    rank: Rank, which: str, level: str
) -> list[int]:
    """Hazard 13: before the wait, no load of upstream data and no store to protocol memory."""
    rounds = 4 if rank.world.takes_turns else 200 if which == "allreduce" else 100
    communicator = rank.only_communicator("graphs")
    wrong = []
    with communicator.set_pdl(level):
        source = torch.zeros(70_000, device=rank.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results, wanted = CHAINS[which](source, communicator)
        for number in range(1, rounds + 1):
            if rank.rank == number % rank.size:
                delay(rank, 2.0)
            # The producer is slow: it has only just started when the graph starts.
            delay(rank, 0.5)
            source.fill_(number + rank.rank)
            graph.replay()
            source.fill_(float("nan"))
            for result, want in zip(results, wanted(number, rank.rank), strict=True):
                wrong.append((result != want).sum())
    finish(communicator)
    return [int(count) for count in wrong if int(count)]


# --- The first calls in a capture, and calls that a capture refuses.


@pytest.mark.worlds(1, 2)
@pytest.mark.parametrize("op", NAMES)
@on_ranks
def test_the_first_call_of_an_operator_may_be_captured(rank: Rank, op: str) -> None:
    """Hazard 9: init loads every kernel, so nothing is compiled or loaded in a capture."""
    with rank.new_communicator("captured-first") as communicator:
        step = Static(rank, communicator, call_of(op, 120, rank.size, style="random"))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        found = []
        for which in range(3):
            step.fill(which)
            graph.replay()
            finish(communicator)
            found.append(int(step.wrong(which)))
        assert found == [0, 0, 0]


@pytest.mark.worlds(2)
@on_ranks
def test_the_fallback_is_refused_in_a_capture(rank: Rank) -> None:
    """The fallback waits on the host; the capture and the communicator remain usable."""
    communicator = rank.communicator()
    source = ones(rank)
    calls = [call_of(op, 36, rank.size, algorithm="fallback") for op in NAMES]
    givens = [call.arguments(communicator, call.tensors(rank)) for call in calls]
    found = {}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call, given in zip(calls, givens, strict=True):
            found[call.op] = attempt(lambda: as_tuple(call.overload("functional")(**given)))  # noqa: B023
        result = allreduce(communicator, source)
    graph.replay()
    finish(communicator)
    assert set(found) == set(NAMES)
    for refused in found.values():
        assert_raised(refused, "NotImplementedError", "fallback", "capture")
    assert (result == rank.size).all()


@pytest.mark.worlds(2)
@on_ranks
def test_what_meets_the_other_ranks_is_refused_in_a_capture(rank: Rank) -> None:
    """The capture and the communicator remain usable."""
    communicator = rank.only_communicator("graphs")
    source, group = ones(rank), rank.fresh_group()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls = (
            lambda: communicator.empty(8),
            lambda: communicator.register(source),
            lambda: collx.init(group, device=rank.device),
        )
        found = [attempt(call) for call in calls]
        result = allreduce(communicator, source)
    graph.replay()
    finish(communicator)
    fine = bool((result == rank.size).all())
    assert [one.error for one in found] == ["NotImplementedError"] * 3, found
    for one, call in zip(found, ("empty", "register", "init"), strict=True):
        assert call in one.message
        assert "before the capture" in one.message
    assert fine


@pytest.mark.parametrize("op", NAMES)
def test_every_output_of_a_graph_is_looked_at(op: str) -> None:
    call = call_of(op)
    schema = call.overload("out")._schema  # type: ignore[attr-defined]
    outs = [argument.name for argument in schema.arguments if argument.is_out]
    assert tuple(outs) == call.outputs()
