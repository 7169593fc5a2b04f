"""The kernels that go through NVLink multicast, with a switch that the ranks' own addresses make up
for: the same steps, barriers, tails and chunks, and the bits of every other algorithm.

What these tests do not show is that a switch does what PTX says of it: docs/multicast.md."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from tests.common.attempt import Attempt, allreduce, attempt, finish, ones, works
from tests.common.check import assert_none, differences
from tests.common.epilogues import CASES, expected, extras_of
from tests.common.epilogues import Call as Mapped
from tests.common.family_cases import IN_PLACE, Call, border_shapes, legal
from tests.common.family_check import run_call
from tests.common.limits import assert_in_time, timeout_now
from tests.common.multicast import (
    ACCEPTED,
    ALGORITHMS,
    SUMMED,
    communicator_of,
    run_simulated,
    simulated,
)
from tests.common.pool import Pool
from tests.common.rank import Rank
from tests.common.regions import BORDERS, past_the_wrap, run_on_poison
from tests.common.sampling import sampled
from tests.common.suites.skew import delay
from tests.common.suites.voting import _instead_of_step
from tests.common.values import DTYPES, inputs_and_reference, legal_ops

SHARED_BUDGET = {2: 48, 3: 24, 4: 20, 8: 12}
WORLDS = (2, 3, 4, 8)


def call(dtype: str, size: int, algorithm: str, **more: Any) -> Call:
    fields = {"style": "random", "seed": size + 1, **more}
    return legal(Call("allreduce", dtype, (size,), algorithm, **fields))


def check(pool: Pool, calls: Iterable[Call], key: str = "simulated") -> None:
    budget = SHARED_BUDGET[pool.size] if pool.shared else 400
    assert_none(pool.run(run_simulated, sampled(list(calls), budget), key))


@pytest.mark.worlds(*WORLDS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_is_accepted_gives_the_bits_of_the_reference(pool: Pool, algorithm: str) -> None:
    styles = itertools.cycle(("random", "bits", "special"))
    check(
        pool,
        [
            call(dtype, size, algorithm, reduce_op=op, style=next(styles))
            for (dtype, op), size in itertools.product(ACCEPTED, (1, 7, 1000, 40_003))
        ],
    )


@pytest.mark.worlds(*WORLDS)
@pytest.mark.parametrize("symmetric", ["none", "input", "output", "both"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_tail_is_dropped(pool: Pool, algorithm: str, symmetric: str) -> None:
    """Sizes around the borders of vectors and parts, wherever the tensors lie; nothing is written
    around them."""
    shapes = border_shapes(SUMMED, pool.size)
    calls = [
        call(fields["dtype"], fields["shape"][0], algorithm, symmetric=symmetric)
        for fields in shapes
    ]
    check(pool, calls)


@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_any_alignment_form_and_place(pool: Pool, algorithm: str) -> None:
    """What is not aligned goes by the ranks' own addresses."""
    calls = [
        call(dtype, size, algorithm, input_offset=a, output_offset=b, symmetric="both")
        for dtype in SUMMED
        for size in (5, 1030)
        for a, b in ((0, 1), (1, 0), (1, 1), (3, 7), (8, 16))
    ]
    calls += [
        call(dtype, size, algorithm, form=form, symmetric=symmetric)
        for dtype in ("float32", "bfloat16")
        for size in (9, 20_001)
        for form in (*IN_PLACE, "functional", "python_out")
        for symmetric in ("none", "both")
    ]
    check(pool, calls)


@pytest.mark.worlds(2, 3, 8)
@pytest.mark.parametrize("symmetric", ["none", "input", "both"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_calls_larger_than_the_payload_run_in_chunks(
    pool: Pool, algorithm: str, symmetric: str
) -> None:
    """Two halves of the staging memory in turn, for inputs and for results."""
    sizes = (1000, 6001) if pool.shared else (1, 1000, 4096, 30_001)
    calls = [
        call(dtype, size, algorithm, symmetric=symmetric, max_blocks=blocks)
        for dtype, size, blocks in itertools.product(("float32", "bfloat16"), sizes, (0, 1, 3))
    ]
    check(pool, calls, "simulated-small")


def _turns(rank: Rank, rounds: int) -> list[str]:
    communicator = communicator_of(rank)
    calls = itertools.cycle((*ALGORITHMS, "oneshot_pull", "pull_push", "twoshot_push"))
    found = []
    with simulated():
        for number, algorithm in zip(range(rounds), calls, strict=False):
            one = call("float32", 17 * number + 3, algorithm, max_blocks=number % 4)
            if number % 7 == rank.rank:
                delay(rank, 1.0)
            wrong = run_call(rank, communicator, one)
            found += [f"call {number}: {one}: {wrong}"] if wrong else []
            if number % 5 == 0:
                torch.ops.collx.barrier(communicator.name)
    finish(communicator)
    return found


@pytest.mark.worlds(2, 4)
def test_barriers_of_both_kinds_take_turns(pool: Pool) -> None:
    """At the same flags: what the one adds follows from what the other has stored."""
    assert_none(pool.run(_turns, 15 if pool.shared else 100))


def _wrap(rank: Rank, border: int, rounds: int) -> list[str]:
    calls = [
        call("float32", 700, algorithm, seed=number % 5)
        for number in range(rounds)
        for algorithm in (*ALGORITHMS, "oneshot_pull")
    ]
    with simulated():
        return past_the_wrap(rank, border, rounds, calls, run_call)


@pytest.mark.worlds(2)
@pytest.mark.parametrize("border", BORDERS, ids=["unsigned", "signed"])
def test_epochs_survive_the_wrap_around(pool: Pool, border: int) -> None:
    assert_none(pool.run(_wrap, border, 3 if pool.shared else 100))


def _poisoned(rank: Rank, calls: list[Call]) -> list[str]:
    with simulated():
        if "poisoned" in rank._communicators:  # another suite's, which has no multicast
            rank.drop("poisoned")
        found = run_on_poison(rank, calls, run_call)
        rank.drop("poisoned")
        return found


@pytest.mark.worlds(2, 3)
def test_nothing_is_read_before_it_has_arrived(pool: Pool) -> None:
    calls = [call("float32", 3000, algorithm) for algorithm in ALGORITHMS] * 3
    assert_none(pool.run(_poisoned, calls))


def _overwritten(rank: Rank, algorithm: str, symmetric: bool) -> list[str]:
    communicator = communicator_of(rank)
    with simulated():
        make = communicator.empty if symmetric else (lambda n: torch.empty(n, device=rank.device))
        source, out = make(1003), make(1003)
    kept = []
    for number in range(6):
        inputs, want = inputs_and_reference(rank.size, "random", "float32", "sum", 1003, number % 3)
        source.copy_(inputs[rank.rank].to(rank.device))
        out.fill_(float("nan"))
        if rank.rank == number % rank.size:
            delay(rank, 3.0)
        torch.ops.collx.allreduce.out(source, "sum", communicator.name, algorithm, 0, out=out)
        source.fill_(float("nan"))
        kept.append((out.clone(), want))
        out.fill_(-7.0)
    finish(communicator)
    return [found for result, want in kept if (found := differences(result.cpu(), want))]


@pytest.mark.worlds(2, 4)
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_input_may_be_overwritten_at_once(pool: Pool, algorithm: str, symmetric: bool) -> None:
    assert_none(pool.run(_overwritten, algorithm, symmetric))


def _mapped(rank: Rank, shape: tuple[int, ...]) -> list[str]:
    import collx

    communicator = communicator_of(rank)
    wrong = []
    for dtype, algorithm in itertools.product(("float32", "bfloat16"), ALGORITHMS):
        one = Mapped(0, "allreduce", dtype, shape)  # bias and relu
        source, want = expected(one, rank.size, rank.rank)
        extras = [t.to(rank.device) for t in extras_of(one, tuple(want.shape), rank.rank)]
        with simulated():
            x = communicator.empty(shape, dtype=source.dtype)
            apart = communicator.empty(shape, dtype=source.dtype)
        for given, out in ((x, apart), (x, x), (x, None), (source.to(rank.device), None)):
            given.copy_(source)
            got = collx.allreduce(
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


@pytest.mark.worlds(2, 3)
def test_epilogues(pool: Pool) -> None:
    """Compiled at run time with the same switch; each rank finishes its own output."""
    assert_none(pool.run(_mapped, (33, 65)))


def _replayed(rank: Rank, replays: int) -> list[str]:
    communicator = communicator_of(rank)
    with simulated():
        symmetric = communicator.empty(4099)
    ordinary, graph = ones(rank, 4099), torch.cuda.CUDAGraph()

    def calls() -> list[torch.Tensor]:
        return [
            allreduce(communicator, tensor, algorithm)
            for algorithm in ALGORITHMS
            for tensor in (symmetric, ordinary)
        ]

    calls()
    rank.synchronize()
    with torch.cuda.graph(graph):
        results = calls()
    wrong = []
    for number in range(1, replays + 1):
        symmetric.fill_(number + rank.rank)
        ordinary.fill_(number + rank.rank)
        graph.replay()
        finish(communicator)
        want = number * rank.size + rank.size * (rank.size - 1) // 2
        wrong += [f"replay {number}" for result in results if not bool((result == want).all())]
    return wrong


@pytest.mark.worlds(2, 4)
def test_every_replay_of_a_graph_is_right(pool: Pool) -> None:
    assert_none(pool.run(_replayed, 4 if pool.shared else 1000))


def _refused(rank: Rank) -> tuple[dict[tuple[str, str, str], Attempt], bool]:
    communicator = communicator_of(rank)
    found = {
        (algorithm, dtype, op): attempt(
            lambda: allreduce(communicator, ones(rank, 40, getattr(torch, dtype)), algorithm, op)  # noqa: B023
        )
        for algorithm in ALGORITHMS
        for dtype in DTYPES
        for op in legal_ops(dtype)
    }
    return found, works(rank, communicator)


@pytest.mark.worlds(2)
def test_what_a_switch_does_not_add_up_is_refused_by_name(pool: Pool) -> None:
    """max and min, prod, 8-bit integers, float64, an average that would be rounded twice."""
    for found, well in pool.run(_refused):
        assert well
        for (algorithm, dtype, op), result in found.items():
            if (dtype, op) in ACCEPTED:
                assert result.error == "", result
                continue
            assert result.error == "NotImplementedError", (dtype, op, result)
            for word in ("collx.allreduce", algorithm, dtype, op, '"auto" takes oneshot_push'):
                assert word in result.message, (word, result)


def _told(rank: Rank) -> tuple[Any, ...]:
    communicator = communicator_of(rank)
    found = communicator.explain("allreduce", 1000, algorithm="multimem_twoshot")
    automatic = communicator.explain("allreduce", 1 << 20, input_symmetric=True)
    return communicator.no_multicast, found.runs, str(found), automatic.algorithm


@pytest.mark.worlds(2)
def test_explain_tells_and_auto_does_not_take_it(pool: Pool) -> None:
    """The order of a switch is not that of the ranks."""
    for none, runs, text, automatic in pool.run(_told):
        assert none is None
        assert runs == "multimem_twoshot"
        assert "multicast  yes" in text
        assert automatic == "twoshot_push"


def _absent(rank: Rank, timeout: float, algorithm: str) -> Attempt:
    with simulated():
        communicator = rank.new_communicator("simulated-late", timeout=timeout)
    assert works(rank, communicator, algorithm)
    rank.barrier()
    if rank.rank < rank.size - 1:
        found = attempt(lambda: works(rank, communicator, algorithm))
        rank.barrier()
    else:
        rank.barrier()  # the others have given up
        found = attempt(communicator.check)
    communicator.destroy()
    return found


@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_rank_that_never_comes_is_named(pool: Pool, algorithm: str) -> None:
    """Each rank has a flag of its own, also where one addition reaches all."""
    timeout, absent = timeout_now(pool), pool.size - 1
    for rank, found in enumerate(pool.run(_absent, timeout, algorithm)):
        assert found.error == "CollectiveTimeout", found
        assert f"rank {absent}" in found.message, found
        assert_in_time(found, 0.0 if rank == absent else timeout)


def _apart(rank: Rank, check: bool) -> Attempt:
    with simulated():
        communicator = rank.new_communicator("simulated-apart", check=check)
    numel = 1000 if rank.rank < rank.size - 1 else 1004

    def run() -> None:
        allreduce(communicator, ones(rank, numel), "multimem_oneshot")
        finish(communicator)

    found = attempt(run)
    rank.barrier()
    found = found if found.error else attempt(communicator.check)
    communicator.destroy()
    return found


@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize("checked", [False, True])
def test_calls_that_differ_are_a_mismatch(pool: Pool, checked: bool) -> None:
    """The flags that additions make up carry fingerprints as well."""
    for found in pool.run(_apart, checked):
        assert found.error == "CollectiveMismatch", found


def _checked(rank: Rank) -> list[str]:
    with simulated():
        communicator = rank.new_communicator("simulated-checked", check=True)
        made = [call("bfloat16", size, a) for a in ALGORITHMS for size in (9, 4000)]
        wrong = [f"{one}: {run_call(rank, communicator, one)}" for one in made]
        rank.arenas.pop(communicator.name, None)
        communicator.destroy()
    return [line for line in wrong if not line.endswith(": ")]


@pytest.mark.worlds(2)
def test_checked_mode_lets_equal_calls_pass(pool: Pool) -> None:
    assert_none(pool.run(_checked))


def _damaged(rank: Rank) -> tuple[str, bool, Attempt]:
    def run(setup: Any, original: Any) -> Any:
        found = original(setup)
        assert found is None
        return "multimem_oneshot gave 1 in place of 2" if rank.rank == rank.size - 1 else None

    with simulated(), _instead_of_step("self-test", run):
        communicator = rank.new_communicator("simulated-damaged")
    refused = attempt(lambda: allreduce(communicator, ones(rank), "multimem_oneshot"))
    found = communicator.no_multicast, works(rank, communicator), refused
    communicator.destroy()
    return found


@pytest.mark.worlds(2, 3)
def test_multicast_that_fails_the_self_test_is_not_used(pool: Pool) -> None:
    """By any rank: the others' data was right."""
    for why, well, refused in pool.run(_damaged):
        assert well
        assert f"failed in the self-test of rank {pool.size - 1}" in why
        assert refused.error == "NotImplementedError"
        assert "gave 1 in place of 2" in refused.message


def _lacking(rank: Rank) -> tuple[str | None, bool]:
    lacks = "its GPU is of another age" if rank.rank == 0 else None

    def run(setup: Any, original: Any) -> Any:
        found = original(setup)
        return found if lacks is None else lacks

    with simulated(), _instead_of_step("rendezvous", run):
        communicator = rank.new_communicator("simulated-lacking")
    found = communicator.no_multicast, works(rank, communicator)
    communicator.destroy()
    return found


@pytest.mark.worlds(2, 3)
def test_what_one_rank_lacks_none_uses(pool: Pool) -> None:
    assert pool.run(_lacking) == [("rank 0: its GPU is of another age", True)] * pool.size
