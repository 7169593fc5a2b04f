"""Failure in the fused normalizations: a missing rank is named in time, and calls that differ
between ranks are, on all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ..attempt import Attempt, attempt, finish, works
from ..check import assert_none
from ..limits import AT_ONCE, assert_in_time, timeout_now
from ..norm_cases import OPS, Call, Fields, algorithms_of, quantizes, scatters, ways
from ..norm_check import Prepared, run_norm
from ..pool import Pool, some_stand_for_all
from ..rank import Rank
from ..sampling import every

pytestmark = pytest.mark.alone  # errors have to come in time

MANY = (
    "allreduce_residual_layernorm",
    "allreduce_residual_rmsnorm_fp8",
    "reducescatter_residual_rmsnorm_fp8",
)
DIRECTLY = [(op, algorithm) for op, algorithm in ways(*MANY) if algorithm != "fallback"]


def _one_never_comes(rank: Rank, call: Call, timeout: float) -> dict[str, Attempt]:
    communicator = rank.new_communicator("missing", rank.fresh_group(), timeout=timeout)
    prepared = Prepared(rank, communicator, call)

    def run() -> None:
        prepared.make()
        finish(communicator)

    run()
    rank.barrier()
    absent = rank.rank == rank.size - 1
    found = {}
    if not absent:
        found["call"] = attempt(run)
    rank.barrier()
    if absent:
        found["check"] = attempt(communicator.raise_if_failed)
    found["next"] = attempt(run)
    found["destroy"] = attempt(communicator.destroy)
    rank.barrier()
    with rank.new_communicator("missing", communicator.group) as fresh:
        assert works(rank, fresh)
        assert run_norm(rank, fresh, replace(call, seed=2)) == ""
    return found


@pytest.mark.worlds(3)
@pytest.mark.parametrize(("op", "algorithm"), DIRECTLY)
def test_a_missing_rank_of_a_norm_is_named(pool: Pool, op: str, algorithm: str) -> None:
    """Hazard 8: in time, with op and missing rank; the communicator refuses further work, and a new
    one works."""
    some_stand_for_all(pool, algorithm == "auto")
    call = Call(op, rows=7, cols=256, algorithm=algorithm)
    timeout = timeout_now(pool)
    for rank, found in enumerate(pool.run(_one_never_comes, call, timeout)):
        assert found["next"].error in ("CommunicatorPoisoned", "CollectiveTimeout"), found
        assert_in_time(found["next"], slack=AT_ONCE)
        assert found["destroy"].error == ""
        if rank == pool.size - 1:
            assert found["check"].error == "CollectiveTimeout", found
            continue
        assert found["call"].error == "CollectiveTimeout", found
        assert op in found["call"].message, found
        assert f"rank {pool.size - 1}" in found["call"].message, found
        assert_in_time(found["call"], timeout)
        assert found["call"].seconds > timeout * 0.8, found


# What the last rank does otherwise, and a word that the message has.
DIFFERENT: dict[str, tuple[Fields, tuple[str, ...]]] = {
    "rows": ({"rows": 9}, ("7", "9")),
    "columns": ({"cols": 512}, ("256", "512")),
    "dtype": ({"dtype": "float16"}, ("bfloat16", "float16")),
    "rounding": ({"rounding": "parity"}, ()),
    "eps": ({"eps": 0.5}, ()),
    "scales": ({"scale_mode": "group"}, ()),
    "fp8 format": ({"fp8_dtype": "e5m2"}, ()),
    "one result more": ({"keep_norm": True}, ()),
    "epilogue": ({"epilogue": "bias_relu"}, ("with epilogue ",)),
    "operator": ({"op": "allreduce_rmsnorm_fp8"}, ("allreduce_rmsnorm_fp8",)),
}


def _disagree(rank: Rank, what: str, timeout: float) -> list[Attempt]:
    communicator = rank.new_communicator(
        "disagree", rank.fresh_group(), timeout=timeout, check=True
    )
    call = Call("allreduce_residual_rmsnorm_fp8", rows=7, cols=256)
    if rank.rank == rank.size - 1:
        call = replace(call, **DIFFERENT[what][0])
    prepared = Prepared(rank, communicator, call)
    rank.barrier()

    def run() -> None:
        prepared.make()
        finish(communicator)

    found = [attempt(run)]
    rank.barrier()
    found.append(attempt(communicator.raise_if_failed))
    rank.arenas.pop(communicator.name, None)
    attempt(communicator.destroy)
    return found


@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize("what", sorted(DIFFERENT))
def test_norms_that_differ_between_ranks_are_named_in_checked_mode(pool: Pool, what: str) -> None:
    """Every option that changes results takes part in the comparison."""
    some_stand_for_all(pool, pool.size == 2 and what in ("rows", "rounding"))
    for call, later in pool.run(_disagree, what, timeout_now(pool, 10.0)):
        found = call if call.error else later
        assert found.error == "CollectiveMismatch", found
        for word in ("allreduce_residual_rmsnorm_fp8", *DIFFERENT[what][1]):
            assert word in found.message, (word, found)


def _checked_calls(rank: Rank, calls: list[Call]) -> list[str]:
    communicator = rank.communicator("checked", check=True)
    found = [(call, run_norm(rank, communicator, call)) for call in calls]
    return [f"{call}: {wrong}" for call, wrong in found if wrong]


@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize("op", OPS)
def test_the_check_lets_equal_calls_pass(pool: Pool, op: str) -> None:
    """In every algorithm, whatever a rank's own tensors are: some own no row."""
    calls = [
        Call(op, rows=rows, cols=256, algorithm=algorithm, form=form, keep_norm=quantizes(op))
        for algorithm in algorithms_of(op)
        for rows, form in ((1, "functional"), (4, "out"), (0, "out"))
    ]
    assert_none(pool.run(_checked_calls, every(calls, 6 if pool.takes_turns else 1)))


def test_a_scattering_norm_is_among_those_that_fail() -> None:
    assert any(scatters(op) for op in MANY)
