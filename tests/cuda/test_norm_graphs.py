"""CUDA graphs of the fused normalizations: replayed with other values, with eager calls of other
shapes between."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.common.attempt import Attempt, attempt, finish, ones
from tests.common.norm_cases import OPS, Call, legal, outputs_of, quantizes, ways
from tests.common.norm_check import arguments_of, make, overload, run_norm, tensors_of
from tests.common.pool import Pool
from tests.common.rank import Rank
from tests.common.suites.norm_skew import Repeated
from tests.common.suites.skew import delay
from tests.common.values import unequal

PDL_LEVELS = ("off", "end", "early")
VARIANTS = 5  # values that the replays take in turn
SHAPES = ((1, 4096), (13, 384), (40, 1000))


def _calls(every_algorithm: bool) -> list[Call]:
    """All ops, in all algorithms that can be captured or in that of "auto"."""
    calls = []
    for number, (op, algorithm) in enumerate(ways()):
        if algorithm == "fallback" or (algorithm != "auto" and not every_algorithm):
            continue
        rows, cols = SHAPES[number % 3]
        dtype = ("bfloat16", "float32")[number % 2]
        call = Call(op, dtype, rows, cols, algorithm=algorithm, keep_norm=bool(number % 2))
        calls.append(legal(replace(call, max_blocks=(0, 0, 2)[number % 3])))
    return calls


def _eager(number: int) -> Call:
    """A call of another shape, between replays."""
    op, algorithm = ways()[7 * number % len(ways())]
    rows, cols = 1 + number * 7919 % 60, 8 * (1 + number * 104729 % 400)
    algorithm = "auto" if algorithm == "fallback" else algorithm
    return legal(Call(op, "float16", rows, cols, algorithm=algorithm, style="rows"))


def _differing(step: Repeated, expected: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """How many elements are wrong, on the device."""
    pairs = zip(step.outs, expected, strict=True)
    return torch.stack([unequal(out, want).sum() for out, want in pairs]).sum()


def _replays(rank: Rank, calls: list[Call], replays: int, between: int, level: str) -> list[str]:
    communicator = rank.only_communicator("graphs")
    with communicator.set_pdl(level):
        steps = [Repeated(rank, communicator, call, VARIANTS) for call in calls]
        wanted = [
            [tuple(t.to(rank.device) for t in expected) for expected in step.expected]
            for step in steps
        ]
        for step in steps:
            step.fill(0)
            step.make()
        rank.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for step in steps:
                step.make()
        wrong = torch.zeros(len(steps), dtype=torch.int64, device=rank.device)
        found = []
        for number in range(replays):
            which = number * 3 % VARIANTS
            for step in steps:
                step.fill(which)
            graph.replay()
            for step in steps:
                step.spoil()
            wrong += torch.stack(
                [_differing(step, want[which]) for step, want in zip(steps, wanted, strict=True)]
            )
            if number % between == between - 1:
                told = run_norm(rank, communicator, _eager(number))
                found += [f"eager, after replay {number}: {told}"] if told else []
        finish(communicator)
    counts = zip(calls, wrong.tolist(), strict=True)
    return found[:5] + [f"{call}: {count} wrong elements" for call, count in counts if count]


@pytest.mark.parametrize(
    "op",
    ["allreduce_residual_rmsnorm_fp8", "allreduce_layernorm", "reducescatter_residual_rmsnorm"],
)
def test_ten_thousand_replays_of_a_norm_are_right(pool: Pool, op: str) -> None:
    """Hazards 2, 3, 4 and 14: 10,000 replays (200 where ranks share a GPU) with other values each
    time, and eager calls of other shapes between them."""
    replays, between = (200, 40) if pool.takes_turns else (10_000, 50)
    call = Call(op, "bfloat16", 7, 4096, keep_norm=quantizes(op))
    assert pool.run(_replays, [call], replays, between, "early") == [[]] * pool.size


@pytest.mark.parametrize("level", PDL_LEVELS)
def test_every_replay_of_all_norms_is_right(pool: Pool, level: str) -> None:
    """Every op by every algorithm in one graph."""
    if pool.takes_turns:
        whole = level == "early" and pool.size == 2
        replays, between, every = (20, 10, False) if whole else (4, 2, False)
    else:
        replays, between, every = (400 if level == "early" else 100, 10, True)
    assert pool.run(_replays, _calls(every), replays, between, level) == [[]] * pool.size


def _chain(rank: Rank, level: str, rounds: int) -> list[int]:
    """Rows of +-1 stay so under each norm, whatever the sum's scale: what comes late would show."""
    communicator = rank.only_communicator("graphs")
    name, world = communicator.name, rank.size
    ops = torch.ops.collx
    wrong = []
    with communicator.set_pdl(level):
        # In bfloat16 x / |x| is 1 also where its float32 is one step less.
        source = torch.zeros((5, 512), device=rank.device, dtype=torch.bfloat16)
        weight = torch.ones(512, device=rank.device, dtype=torch.bfloat16)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            first = ops.allreduce_rmsnorm(source, weight, 0.0, name)
            total = ops.allreduce(first, "sum", name)
            second, added = ops.allreduce_residual_rmsnorm(total, first, weight, 0.0, name)
            q, scale = ops.allreduce_rmsnorm_int8(second, weight, 0.0, name)
        for number in range(1, rounds + 1):
            if rank.rank == number % world:
                delay(rank, 2.0)
            # The producer is slow: it has only just been started when the graph is.
            delay(rank, 0.5)
            sign = 1.0 if number % 2 else -1.0
            source.fill_(sign * number)
            graph.replay()
            source.fill_(float("nan"))
            for result, want in (
                (first, sign),
                (total, sign * world),
                (added, sign * (world * world + 1)),
                (second, sign),
                (q, sign * 127),
                ((scale * 127).round(), 1.0),
            ):
                wrong.append((result != want).sum())
    finish(communicator)
    return [int(count) for count in wrong if int(count)]


@pytest.mark.worlds(1, 2, 4, 8)
@pytest.mark.parametrize("level", PDL_LEVELS)
def test_each_norm_waits_for_what_the_one_before_wrote(pool: Pool, level: str) -> None:
    """Hazard 13: no load of upstream data and no store to protocol memory before the wait."""
    assert pool.run(_chain, level, 4 if pool.takes_turns else 100) == [[]] * pool.size


def _capture_first(rank: Rank, op: str) -> list[int]:
    with rank.new_communicator("captured-first") as communicator:
        step = Repeated(rank, communicator, Call(op, rows=6), 3)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step.make()
        found = []
        for which in range(3):
            step.fill(which)
            graph.replay()
            finish(communicator)
            wanted = tuple(t.to(rank.device) for t in step.expected[which])
            found.append(int(_differing(step, wanted)))
        return found


@pytest.mark.worlds(2)
@pytest.mark.parametrize("op", OPS)
def test_the_first_call_of_a_norm_may_be_captured(pool: Pool, op: str) -> None:
    """Hazard 9: init has loaded every kernel, nothing is compiled or loaded in a capture."""
    assert pool.run(_capture_first, op) == [[0, 0, 0]] * pool.size


def _fallback_captured(rank: Rank) -> tuple[dict[str, Attempt], bool]:
    communicator = rank.communicator()
    source = ones(rank)
    calls = [Call(op, form="functional", algorithm="fallback") for op in OPS]
    givens = [
        arguments_of(call, communicator.name, tensors_of(call, rank.size, rank.rank, rank.device))
        for call in calls
    ]
    found = {}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call, given in zip(calls, givens, strict=True):
            found[call.op] = attempt(lambda: make(communicator, call, given, ()))  # noqa: B023
        result = torch.ops.collx.allreduce(source, "sum", communicator.name)
    graph.replay()
    finish(communicator)
    return found, bool((result == rank.size).all())


@pytest.mark.worlds(2)
def test_the_fallback_of_no_norm_is_captured(pool: Pool) -> None:
    """It waits on the host; the capture and the communicator go on."""
    for found, fine in pool.run(_fallback_captured):
        assert set(found) == set(OPS)
        for op, result in found.items():
            assert result.error == "NotImplementedError", (op, result)
            assert "fallback" in result.message
        assert fine


def test_every_output_of_a_graph_is_looked_at() -> None:
    import collx  # noqa: F401

    for op in OPS:
        schema = overload(op, quantizes(op), True)._schema  # type: ignore[attr-defined]
        names = [argument.name for argument in schema.arguments if argument.kwarg_only]
        assert tuple(names) == outputs_of(op, quantizes(op))
