"""Ranks out of step: what each operator guarantees about its tensors once it has completed in
stream order; and sequences of calls without a pause, in some of which pairs of ranks exchange
nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from ..attempt import finish
from ..calls import Call, Prepared, Tensors, make, run_call, run_calls
from ..check import arenas_of, assert_none, bytes_of, cut
from ..collectives import IN_PLACE, NEEDS_SYMMETRIC, OPS, ROOTED, WITH_SPLITS
from ..norms import quantizes
from ..operators import NAMES, call_of, is_norm, kernels
from ..pool import Pool, on_ranks, some_stand_for_all
from ..rank import Rank
from ..regions import BORDERS, past_the_wrap, run_on_poison
from ..sampling import every

pytestmark = pytest.mark.alone  # clusters of blocks

CYCLES_PER_MILLISECOND = 1_500_000
SLICE = 1 << 15  # bytes of an arena for each call of a sequence
ROOM = 1 << 18  # bytes for the input and for the output that calls share
WRITTEN = 85  # the byte that overwrites inputs
AFTERWARDS = 33  # the byte that overwrites outputs

# Norms that differ in what they pass on, and all collectives, with every algorithm.
NORMS = (
    "allreduce_layernorm",
    "allreduce_residual_rmsnorm",
    "allreduce_residual_rmsnorm_fp8",
    "reducescatter_residual_rmsnorm_fp8",
)
COLLECTIVES = tuple(op for op in NAMES if not is_norm(op))
DIRECTLY = kernels(*COLLECTIVES, *NORMS)


def delay(rank: Rank, milliseconds: float) -> None:
    """Delays this rank: its stream on CUDA, the process itself on CPU."""
    if rank.device.type == "cuda":
        torch.cuda._sleep(int(milliseconds * CYCLES_PER_MILLISECOND))
    else:
        time.sleep(milliseconds / 1000)


def _differs_when_symmetric(op: str, algorithm: str) -> bool:
    """Returns whether peers access symmetric tensors of the caller."""
    if is_norm(op) or op == "allreduce":
        return "pull" in algorithm or "lanes" in algorithm or "push" in algorithm
    return OPS[op].peers != "none" and (op not in WITH_SPLITS or algorithm in NEEDS_SYMMETRIC)


TENSORS = [
    (op, algorithm, symmetric)
    for op, algorithm in DIRECTLY
    for symmetric in (False, True)
    if (symmetric or algorithm not in (*NEEDS_SYMMETRIC, "pull_push"))
    and (not symmetric or _differs_when_symmetric(op, algorithm))
]


class Repeated:
    """Calls of one operator on memory that stays in place. They differ in data, roots and
    splits."""

    def __init__(self, rank: Rank, communicator: Any, call: Call, variants: int) -> None:
        self.call, self._rank, self._communicator = call, rank, communicator
        self.calls = [_varied(call, number) for number in range(variants)]
        self._values = [one.tensors(rank) for one in self.calls]
        self._memory = [torch.empty(ROOM, dtype=torch.uint8, device=rank.device) for _ in range(2)]
        if call.symmetric != "none":
            arenas = arenas_of(rank, communicator)
            self._memory = [arenas.input[:ROOM], arenas.output[:ROOM]]
        self._tensors, self._outs, self._given = [], [], []
        for one, values in zip(self.calls, self._values, strict=True):
            tensors = {name: torch.empty_like(value) for name, value in values.items()}
            tensors["input"] = cut(self._memory[0], values["input"])
            self._tensors.append(tensors)
            first, *rest = one.data(rank.size).expected[rank.rank]
            more = [torch.empty_like(like, device=rank.device) for like in rest]
            self._outs.append((cut(self._memory[1], first), *more))
            self._given.append(one.arguments(communicator, tensors))

    def fill(self, which: int) -> None:
        """Fills in the inputs, and junk where the results will be."""
        for name, tensor in self._tensors[which].items():
            tensor.copy_(self._values[which][name])
        self.overwrite_outputs(which, WRITTEN)

    def make(self, which: int) -> Tensors:
        """Makes the call and copies its results, in stream order."""
        results = make(self._communicator, self.calls[which], self._given[which], self._outs[which])
        return tuple(result.clone() for result in results)

    def overwrite_inputs(self, which: int) -> None:
        """Overwrites inputs in stream order, so that a peer that still reads one reads junk."""
        if self.call.form not in IN_PLACE:
            self._memory[0].fill_(WRITTEN)
        for name, tensor in self._tensors[which].items():
            if name != "input":
                bytes_of(tensor).fill_(WRITTEN)

    def overwrite_outputs(self, which: int, byte: int) -> None:
        self._memory[1].fill_(byte)
        for out in self._outs[which][1:]:
            bytes_of(out).fill_(byte)
        if self.call.form in IN_PLACE and byte == AFTERWARDS:
            self._memory[0].fill_(byte)

    def written_afterwards(self, which: int) -> bool:
        """Returns whether outputs differ from what `overwrite_outputs` last wrote."""
        tensors = [self._memory[0] if self.call.form in IN_PLACE else self._memory[1]]
        tensors += self._outs[which][1:]
        return any(
            bool(
                (t if t.is_contiguous() else t.movedim(-1, 0))
                .view(torch.uint8)
                .ne(AFTERWARDS)
                .any()
            )
            for t in tensors
        )

    def wrong(self, which: int, results: Tensors) -> str:
        return self.calls[which].wrong_results(self._rank.size, self._rank.rank, results)


def _varied(call: Call, number: int) -> Call:
    """Returns the call with other data and, if it has them, another root and other splits."""
    fields = {"seed": number + 1, "root": number}
    known = call.__dataclass_fields__
    return replace(call, **{name: v for name, v in fields.items() if name in known})  # type: ignore[arg-type]


def overwritten(
    rank: Rank,
    call: Call,
    rounds: int,
    blocks: Sequence[int] = (0,),
    key: str = "default",
    **options: Any,
) -> list[str]:
    """A job that overwrites inputs and outputs right after each call. Each rank in turn is late,
    before or after its input is produced. `blocks`: values of max_blocks, used in turn. `key`,
    `options`: of the communicator."""
    communicator = rank.communicator(key, **options)
    repeated = [
        Repeated(rank, communicator, replace(call, max_blocks=count), 3)
        for count in dict.fromkeys(blocks)
    ]
    kept: list[tuple[Repeated, int, Tensors]] = []
    for number in range(rounds):
        one, which, late = repeated[number % len(repeated)], number % 3, number % (2 * rank.size)
        if late == rank.rank:  # the producer of its input is slow
            delay(rank, 3.0)
        one.fill(which)
        if late == rank.size + rank.rank:  # the producer is on time, but the call is late
            delay(rank, 3.0)
        results = one.make(which)
        one.overwrite_inputs(which)
        kept.append((one, which, results))
        one.overwrite_outputs(which, AFTERWARDS)
    finish(communicator)
    rank.barrier()
    found = [wrong for one, which, got in kept if (wrong := one.wrong(which, got))]
    last, which, _ = kept[-1]
    if last.written_afterwards(which):
        found.append("an output was written to after the call had completed")
    return [f"{call}: {wrong}" for wrong in found[:5]]


@pytest.mark.worlds(2, 3, 4, 8)
@pytest.mark.parametrize(("op", "algorithm", "symmetric"), TENSORS)
def test_tensors_are_free_when_the_call_has_completed(
    pool: Pool, op: str, algorithm: str, symmetric: bool
) -> None:
    """Hazard 11: each rank in turn is milliseconds late, before or after its input is produced.
    Inputs are overwritten and outputs are reused right after the call."""
    some_stand_for_all(pool, pool.size == 2 or (algorithm == "auto" and not symmetric))
    rounds = pool.size if pool.takes_turns else 2 * pool.size
    for dtype, numel in (("float32", 1000), ("int32", 24_000))[: 1 if pool.takes_turns else 2]:
        fields = {"style": "random", "splits": "uneven", "spare": 5, "algorithm": algorithm}
        fields["symmetric"] = "both" if symmetric else "none"
        if is_norm(op):
            fields["symmetric"] = "input" if symmetric else "none"
        else:
            fields["dtype"] = dtype
            fields["style"] = "random" if OPS[op].reduces else "bits"
        assert_none(pool.run(overwritten, call_of(op, numel, pool.size, **fields), rounds))


@pytest.mark.worlds(2, 4)
@pytest.mark.parametrize("op", [op for op in COLLECTIVES if "inplace" in OPS[op].forms])
def test_a_tensor_changed_in_place_is_final(pool: Pool, op: str) -> None:
    """Hazard 11 for the forms that work on one tensor."""
    for form in ("inplace", "alias"):
        call = call_of(op, 600, form=form, style="random")
        assert_none(pool.run(overwritten, call, 2 if pool.takes_turns else 2 * pool.size))


def _in_a_row(rank: Rank, calls: list[Call], key: str) -> list[str]:
    """Makes all calls in a row, without waiting in between, while one rank is late."""
    communicator = rank.small_communicator() if key == "small" else rank.communicator()
    found = []
    for late in sorted({0, rank.size // 2, rank.size - 1} if rank.size < 8 else {0, 5}):
        prepared = [
            Prepared(rank, communicator, replace(call, seed=late + 1), SLICE * at)  # type: ignore[call-arg]
            for at, call in enumerate(calls)
        ]
        rank.synchronize()
        rank.barrier()
        if late == rank.rank:
            delay(rank, 3.0)
        results = []
        for one in prepared:
            results.append(one.make())
            if one.call.form not in IN_PLACE:
                bytes_of(one.source.whole).fill_(WRITTEN)
        finish(communicator)
        for number, (one, result) in enumerate(zip(prepared, results, strict=True)):
            wrong = one.wrong(result, input_kept=False)
            found += [f"rank {late} late, call {number}: {one.call}: {wrong}"] if wrong else []
    return found[:5]


def _step(op: str, algorithm: str, numel: int, world: int, **fields: object) -> Call:
    """Returns a call of a sequence; copying ops use integers, so that all bit patterns occur."""
    usual = {"dtype": "int32", "style": "armed", "splits": "zeros", "spare": 3}
    if is_norm(op):
        usual = {"style": "rows"}
    return call_of(op, numel, world, **{"algorithm": algorithm, **usual, **fields})


@pytest.mark.worlds(2, 3, 4, 8)
@pytest.mark.parametrize("key", ["default", "small"])
@pytest.mark.parametrize(("op", "algorithm"), DIRECTLY)
def test_a_fast_rank_does_not_overrun_a_slow_one(
    pool: Pool, op: str, algorithm: str, key: str
) -> None:
    """Hazards 4 and 14: an operator three times between all-reduces, with no wait between them. If
    a pair of ranks exchanges nothing in it, two slots alone would be overwritten before they are
    read."""
    some_stand_for_all(pool, pool.size == 2 and algorithm == "auto" and key == "small")
    largest = 500 if key == "small" else 3000
    allreduce = _step("allreduce", "auto", 300, pool.size)
    three = [
        _step(op, algorithm, numel, pool.size, dtype=dtype)
        for numel, dtype in zip(
            (largest, 7, largest // 2),
            ("bfloat16", "float32", "float16") if is_norm(op) else ("int32",) * 3,
            strict=True,
        )
    ]
    if is_norm(op):
        wide = 700 if key == "small" else 3000
        sizes = zip(three, ((5, wide), (1, 8), (17, wide // 5)), strict=True)
        three = [replace(one, rows=rows, cols=cols) for one, (rows, cols) in sizes]  # type: ignore[call-arg]
    assert_none(pool.run(_in_a_row, [allreduce, *three, allreduce], key))


@pytest.mark.worlds(2, 3, 4)
@pytest.mark.parametrize("op", [*ROOTED, *WITH_SPLITS])
def test_roots_and_splits_change_from_call_to_call(pool: Pool, op: str) -> None:
    """Hazard 14: senders and receivers differ in every call, and some calls have none."""
    splits = ("one_sends", "nobody", "one_receives", "wild", "zeros")
    calls = [
        _step(op, "auto", numel, pool.size, root=root, splits=splits[number % len(splits)])
        for number, (root, numel) in enumerate(
            ((0, 900), (1, 40), (0, 900), (2, 900), (2, 1), (1, 900))
        )
    ]
    assert_none(pool.run(_in_a_row, calls[:3] if pool.takes_turns else calls, "default"))


@pytest.mark.worlds(2, 3, 4, 8)
@pytest.mark.parametrize("backwards", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize("norms", [False, True], ids=["collectives", "norms"])
def test_all_operators_follow_each_other(pool: Pool, backwards: bool, norms: bool) -> None:
    """Hazards 4 and 14: every operator with every algorithm, one after another without a pause.
    Some collectives that use the same slots run between the norms."""
    chosen = [(op, way) for op, way in kernels() if is_norm(op) == norms]
    calls = [
        _step(op, algorithm, (700, 90, 5)[number % 3], pool.size, root=number)
        for number, (op, algorithm) in enumerate(chosen)
    ]
    if norms:
        among = ("allreduce", "reducescatter", "broadcast", "allgather")
        for number in range(0, len(chosen), 5):
            calls.insert(number, _step(among[number // 5 % 4], "auto", 200, pool.size))
    calls = every(calls, (6 if norms else 3) if pool.takes_turns else 1)
    assert_none(pool.run(_in_a_row, calls[::-1] if backwards else calls, "default"))


@on_ranks
def test_calls_of_changing_size_dtype_and_algorithm_follow_each_other(rank: Rank) -> list[str]:
    """Hazards 2, 4 and 14: tiles, slots and counters of consecutive calls do not conflict."""
    rounds = 30 if rank.world.takes_turns else 210
    communicator = rank.communicator()
    sizes = (5, 4000, 1, 0, 60_000, 300, 257)
    algorithms = [way for _, way in kernels("allreduce") if way != "pull_push"]
    found = []
    for number in range(rounds):
        call = call_of(
            "allreduce",
            sizes[number % len(sizes)],
            dtype=("float32", "int8", "bfloat16", "float64")[number % 4],
            algorithm=algorithms[number % len(algorithms)],
            style=("random", "ones", "bits")[number % 3],
            max_blocks=(0, 1, 3)[number % 3],
            seed=number % 4,
        )
        if number % 17 == rank.rank:
            delay(rank, 1.0)
        wrong = run_call(rank, communicator, call)
        if wrong:
            found.append(f"call {number}: {call}: {wrong}")
    return found


def _past_the_wrap(rank: Rank, border: int, rounds: int, calls: list[Call]) -> list[str]:
    varied = (_varied(call, number) for number in range(rounds) for call in calls)
    return past_the_wrap(rank, border, rounds, varied, run_call)


# The rounds and the calls of each: all operators together, and a long sequence of all-reduces.
WRAPPED: dict[str, Callable[[int], tuple[int, list[Call]]]] = {
    "allreduce": lambda world: (
        75,
        [
            _step("allreduce", algorithm, 700, world, dtype=dtype, style="random")
            for dtype in ("float32", "int32")
            for _, algorithm in kernels("allreduce")
            if algorithm not in ("auto", "pull_push")
        ],
    ),
    "collectives": lambda world: (
        12,
        [_step(op, way, 300, world) for op, way in kernels(*COLLECTIVES)],
    ),
    "norms": lambda world: (8, [_step(op, way, 1024, world) for op, way in kernels(*NORMS)]),
}


@pytest.mark.worlds(2, 3, 4)
@pytest.mark.parametrize("border", BORDERS, ids=["unsigned", "signed"])
@pytest.mark.parametrize("which", sorted(WRAPPED))
def test_counters_survive_the_wrap_around(pool: Pool, which: str, border: int) -> None:
    """Hazards 3 and 4: epochs and channel counters that start just before 2^32 (and 2^31)."""
    rounds, calls = WRAPPED[which](pool.size)
    if pool.takes_turns:
        rounds, calls = 3, every(calls, 4)
    assert_none(pool.run(_past_the_wrap, border, rounds, calls))


@pytest.mark.worlds(2, 3, 4)
def test_nothing_is_read_before_it_has_arrived(pool: Pool) -> None:
    """Hazard 20: staging, results and outputs hold NaN before each call (slots are armed with
    it)."""
    calls = [_step(op, algorithm, 3000, pool.size) for op, algorithm in kernels()]
    calls += [_step("allreduce", way, 3000, pool.size) for _, way in kernels("allreduce")] * 5
    assert_none(pool.run(run_on_poison, every(calls, 6 if pool.takes_turns else 1), run_call))


@pytest.mark.worlds(8, 16)
def test_ranks_that_outnumber_the_cores_make_progress(pool: Pool) -> None:
    """Hazard 23: many calls in a row without a pause."""
    calls = [call_of("allreduce", 64, seed=seed % 3, style="random") for seed in range(200)]
    assert_none(pool.run(run_calls, every(calls, 10 if pool.takes_turns else 1), deadline=200.0))


def _in_barrier(rank: Rank, late: int) -> tuple[float, float]:
    """Returns the times at which this rank entered and left the barrier."""
    communicator = rank.communicator()
    torch.ops.collx.barrier(communicator.name)
    rank.synchronize()
    rank.barrier()
    if rank.rank == late:
        delay(rank, 200.0)
        rank.synchronize()
    came = time.monotonic()
    torch.ops.collx.barrier(communicator.name)
    finish(communicator)
    return came, time.monotonic()


@pytest.mark.worlds(2, 3, 4)
def test_a_barrier_ends_when_the_last_rank_has_come(pool: Pool) -> None:
    """Every rank waits for the late rank."""
    for late in (0, pool.size - 1):
        times = pool.run(_in_barrier, late)
        assert min(left for _, left in times) >= times[late][0], times


def test_every_kind_of_output_is_among_those_that_are_reused() -> None:
    names = {name for op in NORMS for name in call_of(op, keep_norm=quantizes(op)).outputs()}
    assert names == {"out", "q_out", "scale_out", "residual_out", "norm_out"}
