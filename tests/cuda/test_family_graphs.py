"""CUDA graphs of the whole family: all ops in one graph, replayed with other inputs and with eager
calls between; a chain in which each reads what the one before wrote."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.common.attempt import Attempt, allreduce, attempt, finish, ones
from tests.common.check import arenas_of
from tests.common.family_cases import NEW, Call, data_of, legal, ways
from tests.common.family_check import arguments_of, make, overload, run_call
from tests.common.pool import Pool
from tests.common.rank import Rank
from tests.common.suites.skew import delay
from tests.common.values import unequal

PDL_LEVELS = ("off", "end", "early")
VARIANTS = 5  # inputs that the replays take in turn
ROWS = 8  # of a chunk of alltoallv_device, whose splits change from replay to replay
SLICE = 1 << 16  # of an arena, for each call of the graph
PATTERNS = ("uneven", "nobody", "zeros", "one_sends", "wild")
JUNK = 85


def _variants(call: Call) -> list[Call]:
    """The calls that one captured call stands for: with other values, and other device splits."""
    calls = [replace(call, seed=number + 1) for number in range(VARIANTS)]
    if call.op != "alltoallv_device":
        return calls
    return [replace(one, splits=splits) for one, splits in zip(calls, PATTERNS, strict=True)]


def _padded(tensor: torch.Tensor, rows: int, device: torch.device) -> torch.Tensor:
    whole = torch.zeros((rows, *tensor.shape[1:]), dtype=tensor.dtype)
    whole[: tensor.shape[0]] = tensor
    return whole.to(device)


class Static:
    """A call on tensors that stay where they are, as a graph needs them."""

    def __init__(self, rank: Rank, communicator: Any, call: Call, at: int) -> None:
        self._call, self._communicator = call, communicator
        calls = _variants(call)
        data = [data_of(one, rank.size) for one in calls]
        mine = [(inputs[rank.rank], results[rank.rank]) for inputs, results in data]
        sent = max(values.shape[0] for values, _ in mine)
        got = max(results[0].shape[0] for _, results in mine)
        self._inputs = [_padded(values, sent, rank.device) for values, _ in mine]
        self._expected = [
            tuple(
                _padded(result, got if index == 0 else result.shape[0], rank.device)
                for index, result in enumerate(results)
            )
            for _, results in mine
        ]
        self._source = torch.empty_like(self._inputs[0])
        self._outs = tuple(torch.empty_like(one) for one in self._expected[0])
        if call.symmetric != "none":
            arenas = arenas_of(rank, communicator)
            self._source = _cut(arenas.input[at : at + SLICE], self._source)
            self._outs = (_cut(arenas.output[at : at + SLICE], self._outs[0]),)
        self._given = arguments_of(communicator, calls[0], self._source)
        self._splits = []
        if call.op == "alltoallv_device":
            self._given["capacity"] = got
            self._splits = [
                arguments_of(communicator, one, self._source)["input_splits"] for one in calls
            ]

    def fill(self, which: int) -> None:
        """Puts another input into place, and junk where the result will be."""
        self._source.copy_(self._inputs[which])
        if self._splits:
            self._given["input_splits"].copy_(self._splits[which])
        for out in self._outs:
            out.fill_(JUNK)

    def __call__(self) -> None:
        make(self._communicator, self._call, self._given, self._outs)

    def wrong(self, which: int) -> torch.Tensor:
        """How many elements are wrong, on the device."""
        pairs = zip(self._outs, self._expected[which], strict=True)
        return torch.stack([unequal(out, want).sum() for out, want in pairs]).sum()

    def spoil(self) -> None:
        """Overwrites the input."""
        self._source.fill_(JUNK)


def _cut(memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return memory[: like.numel() * like.element_size()].view(like.dtype).view(like.shape)


def _calls(every_algorithm: bool) -> list[Call]:
    """All ops, in all algorithms that can be captured or in that of "auto"; sizes of one tile and
    of many."""
    calls = []
    for number, (op, algorithm) in enumerate(ways("allreduce", *NEW)):
        if algorithm == "fallback" or (algorithm != "auto" and not every_algorithm):
            continue
        shape = (ROWS, 3) if op == "alltoallv_device" else ((37, 4), (500,), (96, 11))[number % 3]
        dtype = ("float32", "int32")[number % 2]
        call = Call(op, dtype, shape, algorithm, style="random", root=number, splits="uneven")
        calls.append(legal(replace(call, max_blocks=(0, 0, 2)[number % 3])))
    return calls


def _eager(number: int, world: int) -> list[Call]:
    """Calls of other sizes, between replays."""
    chosen = ways()[number % len(ways())], ways()[(7 * number + 3) % len(ways())]
    size = 1 + number * 7919 % 9000 // world
    return [
        legal(Call(op, "uint8" if op[0] != "r" else "int8", (size,), way, splits="zeros"))
        for op, way in chosen
        if way != "fallback"
    ]


def _replays(rank: Rank, replays: int, between: int, level: str, every: bool) -> list[str]:
    communicator = rank.only_communicator("graphs")
    with communicator.set_pdl(level):
        steps = [
            Static(rank, communicator, call, SLICE * at) for at, call in enumerate(_calls(every))
        ]

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
                for call in _eager(number, rank.size):
                    told = run_call(rank, communicator, call)
                    found += [f"eager, after replay {number}: {call}: {told}"] if told else []
        finish(communicator)
    counts = zip(_calls(every), wrong.tolist(), strict=True)
    return found[:5] + [f"{call}: {count} wrong elements" for call, count in counts if count]


@pytest.mark.parametrize("level", PDL_LEVELS)
def test_every_replay_of_all_ops_is_right(pool: Pool, level: str) -> None:
    """Hazards 2, 3, 4 and 14: 1,000 replays (50 where ranks share a GPU) of every op by every
    algorithm, with other inputs and device splits each time, and eager calls between them."""
    if pool.takes_turns:
        whole = level == "early" and pool.size == 2
        replays, between, every = (50, 10, False) if whole else (6, 3, False)
    else:
        replays, between, every = (1000 if level == "early" else 200, 20, True)
    found = pool.run(_replays, replays, between, level, every)
    assert found == [[]] * pool.size


def _chain(rank: Rank, level: str, rounds: int) -> list[int]:
    communicator = rank.only_communicator("graphs")
    name, world, me = communicator.name, rank.size, rank.rank
    ops = torch.ops.collx
    wrong = []
    with communicator.set_pdl(level):
        source = torch.zeros(600, device=rank.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            spread = ops.broadcast(source, 0, name)
            all_of_them = ops.allgather(source[:300], world, name)
            part = ops.reducescatter(all_of_them, "sum", world, name)
            mixed = ops.alltoall(all_of_them, world, name)
            chunk = ops.scatter(mixed, world - 1, world, name)
            at_root = ops.gather(chunk, 0, world, name)
            reduced = ops.reduce(spread, "sum", 1 % world, name)
            ops.barrier(name)
            total = allreduce(communicator, at_root)
        for number in range(1, rounds + 1):
            if me == number % world:
                delay(rank, 2.0)
            # The producer is slow: it has only just been started when the graph is.
            delay(rank, 0.5)
            source.fill_(number + me)
            graph.replay()
            source.fill_(float("nan"))
            last = number + world - 1
            for result, want in (
                (spread, number),
                (part, world * (number + me)),
                (mixed, number + me),
                (chunk, last),
                (at_root, last if me == 0 else 0),
                (reduced, world * number if me == 1 % world else number),
                (total, last),
            ):
                wrong.append((result != want).sum())
    finish(communicator)
    return [int(count) for count in wrong if int(count)]


@pytest.mark.worlds(1, 2, 3, 4)
@pytest.mark.parametrize("level", PDL_LEVELS)
def test_each_op_waits_for_what_the_one_before_wrote(pool: Pool, level: str) -> None:
    """Hazard 13: no load of upstream data and no store to protocol memory before the wait."""
    rounds = 4 if pool.takes_turns else 100
    assert pool.run(_chain, level, rounds) == [[]] * pool.size


def _capture_first(rank: Rank, op: str) -> str:
    with rank.new_communicator("captured-first") as communicator:
        step = Static(rank, communicator, Call(op, shape=(40, 3), style="random"), 0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        found = []
        for which in range(3):
            step.fill(which)
            graph.replay()
            finish(communicator)
            found.append(int(step.wrong(which)))
        return f"{op}: {found}" if any(found) else ""


@pytest.mark.worlds(2)
@pytest.mark.parametrize("op", NEW)
def test_the_first_call_of_an_op_may_be_captured(pool: Pool, op: str) -> None:
    """Hazard 9: init has loaded every kernel, nothing is compiled or loaded in a capture."""
    assert pool.run(_capture_first, op) == [""] * pool.size


def _fallback_captured(rank: Rank) -> tuple[dict[str, Attempt], bool]:
    communicator = rank.communicator()
    source = ones(rank)
    calls = [Call(op, shape=(12, 3), algorithm="fallback") for op in NEW]
    givens = [
        arguments_of(communicator, call, data_of(call, rank.size)[0][rank.rank].to(rank.device))
        for call in calls
    ]
    found = {}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call, given in zip(calls, givens, strict=True):
            found[call.op] = attempt(lambda: overload(call.op, "functional")(**given))  # noqa: B023
        result = allreduce(communicator, source)
    graph.replay()
    finish(communicator)
    return found, bool((result == rank.size).all())


@pytest.mark.worlds(2)
def test_the_fallback_of_no_op_is_captured(pool: Pool) -> None:
    """It waits on the host; the capture and the communicator go on."""
    for found, fine in pool.run(_fallback_captured):
        assert set(found) == set(NEW)
        for op, result in found.items():
            assert result.error == "NotImplementedError", (op, result)
            assert "fallback" in result.message
            assert "capture" in result.message
        assert fine
