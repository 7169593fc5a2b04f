"""The algorithms that use NVLink multicast, with a switch simulated by the ranks' own addresses:
the same steps, barriers, tails and chunks, and the bits of every other algorithm.

These tests do not show that a switch behaves as PTX specifies. COLLX_TEST_MULTICAST=1 runs them on
a real switch: docs/guide/multicast.md."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

import collx
from tests.common.attempt import Attempt, allreduce, assert_raised, attempt, finish, ones, works
from tests.common.calls import Prepared, run_call
from tests.common.check import assert_none, differences
from tests.common.collectives import IN_PLACE, SYMMETRIC, Call, border_shapes, random_call
from tests.common.epilogues import CASES, expected, extras_of
from tests.common.epilogues import Call as Mapped
from tests.common.limits import assert_in_time, timeout_now
from tests.common.multicast import (
    ALGORITHMS,
    NORM_WAYS,
    STYLES,
    WAYS,
    able,
    accepted,
    adds,
    communicator_of,
    run_simulated,
    simulated,
)
from tests.common.norms import DTYPES as NORM_DTYPES
from tests.common.norms import EPILOGUES, calls_of, modes_of, placements, sizes
from tests.common.pool import Pool, on_ranks
from tests.common.rank import Rank
from tests.common.regions import BORDERS, past_the_wrap, run_on_poison
from tests.common.sampling import pairs, sampled
from tests.common.suites.skew import delay
from tests.common.suites.voting import instead_of_step
from tests.common.values import DTYPES, inputs_and_reference, legal_ops
from tests.common.worlds import HARDWARE, seed_from_environment

SHARED_BUDGET = {2: 48, 3: 24, 4: 20, 8: 12}
WORLDS = (2, 3, 4, 8)
Way = tuple[str, str]  # op and algorithm
each_way = pytest.mark.parametrize("way", WAYS, ids="-".join)


@pytest.fixture(autouse=True)
def on_a_switch(pool: Pool) -> None:
    if HARDWARE and pool.world.shared:
        pytest.skip("needs a GPU for each rank")


def call(dtype: str, size: int, way: Way | str, **more: Any) -> Call:
    op, algorithm = ("allreduce", way) if isinstance(way, str) else way
    fields = {"style": "random", "seed": size + 1, "shape": (size,), **more}
    return able(Call(op, dtype, algorithm=algorithm, **fields).legal())


def check(pool: Pool, calls: Iterable[Any], key: str = "simulated") -> None:
    budget = SHARED_BUDGET[pool.size] if pool.takes_turns else 400
    assert_none(pool.run(run_simulated, sampled(list(calls), budget), key))


@pytest.mark.worlds(*WORLDS)
@each_way
def test_what_is_accepted_gives_the_bits_of_the_reference(pool: Pool, way: Way) -> None:
    styles = itertools.cycle(STYLES)
    check(
        pool,
        [
            call(dtype, size, way, reduce_op=op, style=next(styles), root=size)
            for (dtype, op), size in itertools.product(accepted(*way), (1, 7, 1000, 40_003))
        ],
    )


@pytest.mark.worlds(*WORLDS)
@pytest.mark.parametrize("symmetric", SYMMETRIC)
@each_way
def test_no_tail_is_dropped(pool: Pool, way: Way, symmetric: str) -> None:
    """Sizes around the boundaries of vectors and parts, for any position of the tensors; nothing is
    written outside them."""
    dtypes = sorted({dtype for dtype, _ in accepted(*way)})
    calls = [
        call(dtype=fields["dtype"], size=fields["shape"][0], way=way, symmetric=symmetric)
        for fields in border_shapes(dtypes, pool.size)
    ]
    check(pool, calls)


@pytest.mark.worlds(2, 3)
@each_way
def test_any_shape_and_axis(pool: Pool, way: Way) -> None:
    """Parts of an axis other than the first consist of runs, aligned or not; also uneven and empty
    parts."""
    calls = [
        call(dtype, 0, way, shape=shape, axis=axis, uneven=uneven, symmetric=symmetric, root=axis)
        for dtype in ("float32", "bfloat16")
        for shape in ((6, 64), (5, 96), (4, 7), (3, 8, 40), (1, 5))
        for axis in range(len(shape))
        for uneven in (False, True)
        for symmetric in ("none", "both")
    ]
    check(pool, calls)


@pytest.mark.worlds(2, 3)
@each_way
def test_any_alignment_form_and_place(pool: Pool, way: Way) -> None:
    """Misaligned tensors use the ranks' own addresses."""
    dtypes = sorted({dtype for dtype, _ in accepted(*way)})
    calls = [
        call(dtype, size, way, input_offset=a, output_offset=b, symmetric="both")
        for dtype in dtypes
        for size in (5, 1030)
        for a, b in ((0, 1), (1, 0), (1, 1), (3, 7), (8, 16))
    ]
    calls += [
        call(dtype, size, way, form=form, symmetric=symmetric, root=size)
        for dtype in ("float32", "bfloat16")
        for size in (9, 20_001)
        for form in (*IN_PLACE, "part", "functional", "python_out")
        for symmetric in ("none", "both")
    ]
    check(pool, calls)


@pytest.mark.worlds(2, 3, 8)
@pytest.mark.parametrize("symmetric", SYMMETRIC)
@each_way
def test_calls_larger_than_the_payload_run_in_chunks(pool: Pool, way: Way, symmetric: str) -> None:
    """Inputs and results alternate between two halves of the staging memory."""
    sizes = (1000, 6001) if pool.takes_turns else (1, 1000, 4096, 30_001)
    calls = [
        call(dtype, size, way, symmetric=symmetric, max_blocks=blocks, root=blocks)
        for dtype, size, blocks in itertools.product(("float32", "bfloat16"), sizes, (0, 1, 3))
    ]
    check(pool, calls, "simulated-small")


@pytest.mark.worlds(2, 3)
def test_random_calls_of_all_ops(pool: Pool) -> None:
    """Any call after any other, and after calls with other algorithms."""
    choose = random.Random(seed_from_environment())
    calls = []
    for number in range(3 * SHARED_BUDGET[pool.size] if pool.takes_turns else 3000):
        op, algorithm = WAYS[number % len(WAYS)]
        drawn = random_call(choose, 1 << 14, pool.size, (op,))
        taken = drawn.algorithm if number % 4 == 3 else algorithm
        if taken == algorithm:
            drawn = able(replace(drawn, algorithm=taken)).legal()
        calls.append(drawn)
    assert_none(pool.run(run_simulated, calls))


# --- Fused normalizations.


def norm_calls(
    op: str, algorithm: str, factors: dict[str, Any], largest: int = 1 << 15
) -> list[Any]:
    """Returns calls in the modes that a switch supports: it rounds sums of 16-bit floats."""
    if HARDWARE:
        factors = {**factors, "style": ("exact",)}
    made = []
    for one in calls_of(op, pairs(factors, sizes(largest))):
        exact = one.rounding == "fp32" and one.dtype != "float32"
        rounding = "parity" if exact else one.rounding
        made.append(replace(one, rounding=rounding, algorithm=algorithm))
    return made


each_norm = pytest.mark.parametrize("way", NORM_WAYS, ids="-".join)


@pytest.mark.worlds(*WORLDS)
@each_norm
def test_norms_give_the_bits_of_the_reference(pool: Pool, way: Way) -> None:
    factors = {
        "rows": (1, 2, 7, 18),
        "cols": (1, 8, 100, 384, 4096, 8192, 20_000),
        **modes_of(way[0]),
    }
    factors["style"] = ("random", "rows", "bits")
    check(pool, norm_calls(*way, factors))


@pytest.mark.worlds(2, 3)
@each_norm
def test_norms_of_any_placement(pool: Pool, way: Way) -> None:
    """Rows at misaligned addresses; symmetric and other inputs, also with an epilogue."""
    factors = {"rows": (1, 5, 9), "cols": (1, 8, 37, 384, 2080), **placements(way[0])}
    factors.update(dtype=NORM_DTYPES, style=("random", "rows"), epilogue=("", *EPILOGUES))
    check(pool, norm_calls(*way, factors))


@pytest.mark.worlds(2, 3, 8)
@each_norm
def test_norms_larger_than_the_payload(pool: Pool, way: Way) -> None:
    factors = {"rows": (1, 3, 19), "cols": (8, 384, 2048, 9000), "dtype": NORM_DTYPES}
    factors.update(style=("random", "rows"), symmetric=("none", "input"))
    calls = norm_calls(*way, factors, 20_000)
    check(pool, calls, "simulated-small")


# --- Order, failures, and explain().


@pytest.mark.worlds(2, 4)
@on_ranks
def test_barriers_of_both_kinds_take_turns(rank: Rank) -> list[str]:
    """On the same flags: each kind adds to what the other kind has stored."""
    rounds = 20 if rank.world.takes_turns else 200
    communicator = communicator_of(rank)
    others = ("oneshot_pull", "pull_push", "twoshot_push")
    calls = itertools.cycle([*WAYS, *(("allreduce", str(name)) for name in others)])
    found = []
    with simulated():
        for number, way in zip(range(rounds), calls, strict=False):
            one = call("float32", 17 * number + 3, way, max_blocks=number % 4, root=number)
            if number % 7 == rank.rank:
                delay(rank, 1.0)
            wrong = run_call(rank, communicator, one)
            found += [f"call {number}: {one}: {wrong}"] if wrong else []
            if number % 5 == 0:
                torch.ops.collx.barrier(communicator.name)
    finish(communicator)
    return found


@pytest.mark.worlds(2)
@pytest.mark.parametrize("border", BORDERS, ids=["unsigned", "signed"])
@on_ranks
def test_epochs_survive_the_wrap_around(rank: Rank, border: int) -> list[str]:
    rounds = 3 if rank.world.takes_turns else 100
    calls = [
        call("float32", 700, way, seed=number % 5)
        for number in range(rounds)
        for way in [*WAYS, ("allreduce", "oneshot_pull")]
    ]
    with simulated():
        return past_the_wrap(rank, border, rounds, calls, run_call)


@pytest.mark.worlds(2, 3)
@on_ranks
def test_nothing_is_read_before_it_has_arrived(rank: Rank) -> list[str]:
    calls = [call("float32", 3000, way) for way in WAYS] * 3
    with simulated():
        if "poisoned" in rank._communicators:  # created by another suite, without multicast
            rank.drop("poisoned")
        found = run_on_poison(rank, calls, run_call)
        rank.drop("poisoned")
        return found


@pytest.mark.worlds(2, 4)
@pytest.mark.parametrize("symmetric", [False, True])
@each_way
@on_ranks
def test_input_may_be_overwritten_at_once(rank: Rank, way: Way, symmetric: bool) -> list[str]:
    """Overwrites each input at once, while another rank is late, and each result as soon as it has
    been read."""
    communicator = communicator_of(rank)
    kept: list[tuple[Prepared, Any]] = []
    with simulated():
        for number in range(6):
            lies = "both" if symmetric else "none"
            one = call("float32", 1003, way, seed=number % 3, symmetric=lies)
            prepared = Prepared(rank, communicator, one)
            if rank.rank == number % rank.size:
                delay(rank, 3.0)
            results = prepared.make()
            prepared.source.view.fill_(float("nan"))
            kept.append((prepared, tuple(result.clone() for result in results)))
            for result in results:
                result.fill_(-7.0)
    finish(communicator)
    wrong = (one.call.wrong_results(rank.size, rank.rank, results) for one, results in kept)
    return [found for found in wrong if found]


@pytest.mark.skipif(HARDWARE, reason="of values whose sums are rounded")
@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize("op", ["allreduce", "reducescatter"])
@on_ranks
def test_epilogues(rank: Rank, op: str) -> list[str]:
    """Compiled at run time with the same switch; each rank finishes its own output."""
    shape = (33, 65)
    communicator = communicator_of(rank)
    wrong = []
    algorithms = ALGORITHMS if op == "allreduce" else ("multimem",)
    for dtype, algorithm in itertools.product(("float32", "bfloat16"), algorithms):
        one = Mapped(0, op, dtype, shape)  # bias and relu
        source, want = expected(one, rank.size, rank.rank)
        extras = [t.to(rank.device) for t in extras_of(one, tuple(want.shape), rank.rank)]
        with simulated():
            x = communicator.empty(shape, dtype=source.dtype)
            apart = communicator.empty(shape, dtype=source.dtype)
        results = [(x, apart), (x, x), (x, None)] if op == "allreduce" else [(x, None)]
        for given, out in (*results, (source.to(rank.device), None)):
            given.copy_(source)
            got = getattr(collx, op)(
                given,
                epilogue=CASES[0].function,
                extras=extras,
                out=out,
                algorithm=algorithm,
                group=communicator,
            )
            if found := differences(got.cpu(), want):
                wrong.append(f"{dtype} {algorithm}: {found}")
    return wrong


@pytest.mark.worlds(2, 4)
@on_ranks
def test_every_replay_of_a_graph_is_right(rank: Rank) -> list[str]:
    replays = 4 if rank.world.takes_turns else 100
    communicator, graph = communicator_of(rank), torch.cuda.CUDAGraph()
    with simulated():
        calls = [
            Prepared(rank, communicator, call("float32", 4099, way, symmetric=symmetric), at << 17)
            for symmetric in ("none", "both")
            for at, way in enumerate(WAYS)
        ]
    for one in calls:
        one.make()
    rank.synchronize()
    with torch.cuda.graph(graph):
        results = [one.make() for one in calls]
    wrong = []
    for number in range(replays):
        for made in results:
            for result in made:
                result.fill_(float(number))
        graph.replay()
        finish(communicator)
        for one, made in zip(calls, results, strict=True):
            found = one.call.wrong_results(rank.size, rank.rank, made)
            wrong += [f"replay {number}: {one.call}: {found}"] if found else []
    return wrong


@pytest.mark.worlds(2)
@pytest.mark.parametrize("way", [way for way in WAYS if adds(*way)], ids="-".join)
@on_ranks
def test_what_a_switch_does_not_add_up_is_refused_by_name(rank: Rank, way: Way) -> None:
    """max and min, prod, 8-bit integers, float64, and an average that would be rounded twice."""
    op, algorithm = way
    communicator = communicator_of(rank)
    taken = set()
    for dtype, reduce_op in ((name, other) for name in DTYPES for other in legal_ops(name)):
        one = Call(op, dtype, (40,), algorithm=algorithm, reduce_op=reduce_op)
        with simulated():
            prepared = Prepared(rank, communicator, one)
        result = attempt(prepared.make)
        if not result.error:
            taken.add((dtype, reduce_op))
            continue
        words = (f"collx.{op}", f'"{algorithm}"', dtype, reduce_op, '"auto" selects ')
        assert_raised(result, "NotImplementedError", *words)
    assert works(rank, communicator)
    assert taken == set(accepted(*way))


@pytest.mark.worlds(2)
@on_ranks
def test_sums_that_are_not_to_be_rounded_are_refused(rank: Rank) -> None:
    def norm(dtype: torch.dtype, rounding: str) -> None:
        x, weight = ones(rank, 64, dtype).view(4, 16), ones(rank, 16, dtype)
        given = (x, weight, 1e-6, communicator_of(rank).name, 0.0, rounding)
        torch.ops.collx.allreduce_rmsnorm(*given, algorithm="multimem_twoshot")

    words = ("allreduce_rmsnorm", "rounding fp32", "bfloat16", '"auto" selects oneshot_push')
    refused = attempt(lambda: norm(torch.bfloat16, "fp32"))
    assert_raised(refused, "NotImplementedError", *words)
    norm(torch.float32, "fp32")
    norm(torch.bfloat16, "parity")


LARGE = 2 << 20  # elements of float32
FEW_BLOCKS = 16  # up to this many blocks, calls of two ranks use lanes from a smaller size on


@pytest.mark.worlds(2, 4)
@on_ranks
def test_auto_takes_it_where_any_order_will_do(rank: Rank) -> None:
    """A switch does not add in the order of the ranks, and saves nothing between two ranks. Tensors
    that are not symmetric are not copied to the region to use it."""
    communicator = communicator_of(rank)
    found = communicator.explain("allreduce", 1000, algorithm="multimem_twoshot")

    def taken(op: str, symmetric: bool = True) -> str:
        places = {"input_symmetric": symmetric, "output_symmetric": symmetric}
        return communicator.explain(op, LARGE, **places).algorithm

    def auto() -> dict[str, str]:
        return {op: taken(op) for op in ("allreduce", "reduce", "reducescatter", "allgather")}

    with communicator.set_deterministic(False):
        free, staged = auto(), taken("allreduce", False)
        text = str(communicator.explain("allreduce", LARGE))
    few = communicator.explain("allreduce", LARGE).blocks <= FEW_BLOCKS
    none = communicator.multicast_unavailable_reason
    runs = found.executed_by
    said = str(found)
    ordered = auto()
    lanes = few and rank.size == 2
    pushes, pulls = ("twoshot_lanes", "lanes") if lanes else ("twoshot_push", "staged")
    assert none is None
    assert runs == "multimem_twoshot"
    assert "multicast  yes\n" in said
    assert "multicast  yes, which may add in its own order\n" in text
    assert (ordered["allreduce"], ordered["reduce"]) == (pushes, pulls)
    some = rank.size > 2
    assert free["allreduce"] == ("multimem_twoshot" if some else pushes)
    assert free["reduce"] == ("multimem" if some else pulls)
    assert staged == pushes
    for op in ("reducescatter", "allgather"):
        assert free[op] == ordered[op], op


@pytest.mark.worlds(4)
@on_ranks
def test_deterministic_algorithms_keep_the_order_of_the_ranks(rank: Rank) -> None:
    communicator = communicator_of(rank)
    places = {"input_symmetric": True, "output_symmetric": True}
    x = ones(rank, 64, torch.float32)
    torch.use_deterministic_algorithms(True)
    try:
        with communicator.set_deterministic(False):
            taken = communicator.explain("allreduce", LARGE, **places).algorithm
        given = ("sum", communicator.name, "multimem_oneshot")
        called = [attempt(lambda: torch.ops.collx.allreduce(x, *given))]
        called += [attempt(lambda: torch.ops.collx.allreduce(x.int(), *given))]
    finally:
        torch.use_deterministic_algorithms(False)
    finish(communicator)
    floats, integers = called
    assert taken == "twoshot_push"
    assert_raised(floats, "RuntimeError", "collx.allreduce", "multimem_oneshot")
    assert not integers.error, integers


@pytest.mark.worlds(4)
@on_ranks
def test_init_lets_auto_take_it(rank: Rank, timeout: float) -> None:
    with simulated():
        communicator = rank.new_communicator(
            "simulated-free", deterministic=False, call_timeout=timeout
        )
        x, out = (communicator.empty(LARGE) for _ in range(2))
    given, want = inputs_and_reference(rank.size, STYLES[0], "float32", "sum", LARGE, 1)
    x.copy_(given[rank.rank])
    torch.ops.collx.allreduce.out(x, "sum", communicator.name, out=out)
    finish(communicator)
    wrong = differences(out.cpu(), want)
    # Only one rank changes the setting.
    with communicator.set_deterministic(rank.rank == 0):
        attempt(lambda: torch.ops.collx.allreduce.out(x, "sum", communicator.name, out=out))
    apart = rank.gather(attempt(lambda: finish(communicator)).error)
    communicator.destroy()
    assert wrong == ""
    assert any(apart), "ranks that take different ways do not meet"


def _absent(rank: Rank, timeout: float, way: Way) -> Attempt:
    with simulated():
        communicator = rank.new_communicator("simulated-late", call_timeout=timeout)
        prepared = Prepared(rank, communicator, call("float32", 1000, way))

        def run() -> None:
            prepared.make()
            finish(communicator)

        run()
    rank.barrier()
    if rank.rank < rank.size - 1:
        found = attempt(run)
        rank.barrier()
    else:
        rank.barrier()  # the others have given up by now
        found = attempt(communicator.raise_if_failed)
    rank.arenas.pop(communicator.name, None)
    communicator.destroy()
    return found


@pytest.mark.worlds(2, 3)
@each_way
def test_a_rank_that_never_comes_is_named(pool: Pool, way: Way) -> None:
    """Each rank has its own flag, even if one addition reaches all ranks."""
    timeout, absent = timeout_now(pool), pool.size - 1
    for rank, found in enumerate(pool.run(_absent, timeout, way)):
        assert_raised(found, "CollectiveTimeout", f"rank {absent}")
        assert_in_time(found, 0.0 if rank == absent else timeout)


@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize("checked", [False, True])
@on_ranks
def test_calls_that_differ_are_a_mismatch(rank: Rank, checked: bool) -> None:
    """Flags that are written by additions carry fingerprints as well."""
    with simulated():
        communicator = rank.new_communicator("simulated-apart", check=checked)
    numel = 1000 if rank.rank < rank.size - 1 else 1004

    def run() -> None:
        allreduce(communicator, ones(rank, numel), "multimem_oneshot")
        finish(communicator)

    found = attempt(run)
    rank.barrier()
    found = found if found.error else attempt(communicator.raise_if_failed)
    communicator.destroy()
    assert found.error == "CollectiveMismatch", found


@pytest.mark.worlds(2)
@on_ranks
def test_checked_mode_lets_equal_calls_pass(rank: Rank) -> list[str]:
    with simulated():
        communicator = rank.new_communicator("simulated-checked", check=True)
        made = [call("bfloat16", size, way) for way in WAYS for size in (9, 4000)]
        wrong = [f"{one}: {run_call(rank, communicator, one)}" for one in made]
        rank.arenas.pop(communicator.name, None)
        communicator.destroy()
    return [line for line in wrong if not line.endswith(": ")]


@pytest.mark.worlds(2, 3)
@on_ranks
def test_multicast_that_fails_the_self_test_is_not_used(rank: Rank) -> None:
    """No rank uses it, although the other ranks' data was right."""

    def run(setup: Any, original: Any) -> Any:
        found = original(setup)
        assert found is None
        return "multimem_oneshot gave 1 in place of 2" if rank.rank == rank.size - 1 else None

    with simulated(), instead_of_step("self-test", run):
        communicator = rank.new_communicator("simulated-damaged")
    refused = attempt(lambda: allreduce(communicator, ones(rank), "multimem_oneshot"))
    found = communicator.multicast_unavailable_reason, works(rank, communicator), refused
    communicator.destroy()
    why, well, refused = found
    assert well
    assert f"failed in the self-test of rank {rank.size - 1}" in why
    assert_raised(refused, "NotImplementedError", "gave 1 in place of 2")


@pytest.mark.worlds(2, 3)
@on_ranks
def test_what_one_rank_lacks_none_uses(rank: Rank) -> None:
    lacks = "its GPU is of another age" if rank.rank == 0 else None

    def run(setup: Any, original: Any) -> Any:
        found = original(setup)
        return found if lacks is None else lacks

    with simulated(), instead_of_step("rendezvous", run):
        communicator = rank.new_communicator("simulated-lacking")
    found = communicator.multicast_unavailable_reason, works(rank, communicator)
    communicator.destroy()
    assert found == ("rank 0: its GPU is of another age", True)
