"""Fuzz: random calls on one communicator, the same on every rank. See drawing.py."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import strategies

from .. import collectives, norms
from ..calls import Call, run_call
from ..collectives import OPS, dtypes_and_ops
from ..drawing import MOST_IN_A_SEQUENCE, calls, for_all, sequences
from ..operators import random_call
from ..pool import Pool
from ..rank import Rank
from ..replay import check_calls
from ..worlds import seed_from_environment

KINDS = ("plain", "checked", "small")
REDUCTION = ("allreduce",)

# Elements of the larger tensors; fewer with the smallest payload.
LARGEST, LARGEST_SMALL = 30_000, 2000
# Calls of a test. Tests of all-reduces alone draw twice as many.
CALLS = {1: 150, 2: 500, 3: 250, 4: 160, 5: 120, 6: 80, 7: 70, 8: 60, 16: 20}
CALLS_SHARED = {1: 60, 2: 30, 3: 24, 4: 20, 5: 16, 6: 14, 7: 12, 8: 10}

# Every world size up to eight: kernels are compiled for 2, 4 and 8 ranks, and for any other number.
WORLDS = pytest.mark.worlds(*CALLS)


def communicator_of(rank: Rank, kind: str) -> Any:
    """Returns a communicator with a small payload. `kind`: "checked" enables checked mode, "small"
    selects the smallest payload."""
    options = {"check": kind == "checked", "payload_bytes": 1 << 20}
    if kind == "small":
        options["payload_bytes"] = rank.smallest_payload()
    return rank.communicator(f"fuzz-{kind}", **options)


def make_calls(
    rank: Rank, communicator: Any, seed: int, made: Sequence[Call], pause: Callable[[float], None]
) -> list[str]:
    """Makes calls and returns the errors. Before some calls each rank pauses for a different number
    of milliseconds."""
    pauses = random.Random(seed * 31 + rank.rank)
    found = []
    for number, call in enumerate(made):
        if pauses.random() < 0.05:
            pause(3.0 * pauses.random())
        if wrong := run_call(rank, communicator, call):
            found.append(f"call {number}: {call}: {wrong}")
    communicator.raise_if_failed()
    return found[:5]


def _fuzz(rank: Rank, kind: str, seed: int, made: list[Call]) -> list[str]:
    communicator = communicator_of(rank, kind)
    return make_calls(rank, communicator, seed, made, lambda ms: time.sleep(ms / 1000))


def _check(pool: Pool, kind: str, ops: tuple[str, ...] | None, count: int, scale: int = 1) -> None:
    """Makes about `count` calls, in sequences."""
    largest = scale * (LARGEST_SMALL if kind == "small" else LARGEST)

    def check(example: tuple[list[Call], int]) -> None:
        made, seed = example
        check_calls(pool, made, kind, job=_fuzz, arguments=(kind, seed), together=True)

    drawn = strategies.tuples(sequences(pool.size, largest, ops), strategies.integers(0, 1000))
    for_all(drawn, max(1, 2 * count // MOST_IN_A_SEQUENCE), check)


@WORLDS
@pytest.mark.parametrize("kind", ["plain", "checked"])
def test_random_all_reduces_on_one_communicator(pool: Pool, kind: str) -> None:
    """Hazards 4 and 14: any sequence of sizes, dtypes, ops, algorithms, layouts and forms."""
    count = CALLS_SHARED[pool.size] if pool.takes_turns else 2 * CALLS[pool.size]
    _check(pool, kind, REDUCTION, count)


@WORLDS
@pytest.mark.parametrize("kind", KINDS)
def test_random_calls_of_all_operators_on_one_communicator(pool: Pool, kind: str) -> None:
    """Hazards 4 and 14: any sequence of operators, roots, axes, splits, sizes, dtypes, algorithms
    and forms; with and without checked mode, and with a payload so small that nearly every call
    runs in chunks."""
    _check(pool, kind, None, (CALLS_SHARED if pool.takes_turns else CALLS)[pool.size])


@pytest.mark.full
@WORLDS
@pytest.mark.parametrize("kind", KINDS)
def test_many_more_random_calls(pool: Pool, kind: str) -> None:
    """Ten times as many calls, and larger tensors."""
    count = 600 if pool.takes_turns else 12_000 // pool.size
    _check(pool, kind, None, count, scale=2)
    if kind == "plain":
        _check(pool, kind, REDUCTION, count, scale=2)


# --- Controls.


def test_the_seed_is_really_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another seed draws other calls; the same seed draws the same calls."""

    def drawn(seed: int) -> list[Call]:
        monkeypatch.setenv("COLLX_FUZZ_SEED", str(seed))
        found: list[Call] = []
        for_all(calls(3, 1000), 30, found.append)
        return found

    assert drawn(11) == drawn(11)
    assert drawn(11) != drawn(12)
    monkeypatch.delenv("COLLX_FUZZ_SEED")
    assert seed_from_environment() != 11


def test_a_failing_sequence_is_shrunk_and_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that fails because of one call is shrunk to that call, shown with its program."""
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("COLLX_FUZZ_CALLS", raising=False)
    told: list[list[Call]] = []

    def check(made: list[Call]) -> None:
        if any(call.op == "scatter" for call in made):
            told.append(made)
            raise AssertionError

    with pytest.raises(AssertionError):
        for_all(sequences(2, 1000), 200, check)
    assert [call.op for call in told[-1]] == ["scatter"]
    assert eval(repr(told[-1][0]), {"collectives": collectives}) == told[-1][0]


def _drawn(count: int, ops: tuple[str, ...] | None = None) -> list[Any]:
    choose = random.Random(1)
    if ops is None:
        return [random_call(choose, LARGEST, 4) for _ in range(count)]
    return [collectives.random_call(choose, LARGEST, 4, ops) for _ in range(count)]


def test_random_calls_cover_every_collective_with_all_that_it_has() -> None:
    """Every operator in every algorithm, dtype and form; every value of the shared arguments."""
    made = [call for call in _drawn(25_000) if isinstance(call, collectives.Call)]

    def reached(op: str, name: str) -> set[object]:
        return {getattr(call, name) for call in made if op in ("", call.op)}

    assert reached("", "op") == set(OPS)
    for op in OPS.values():
        if op.name == "barrier":
            continue
        assert reached(op.name, "algorithm") == {"auto", *op.algorithms}
        assert reached(op.name, "dtype") == set(op.dtypes)
        assert reached(op.name, "form") == set(op.forms)
        assert reached(op.name, "root") == {0, 1, 2, 3}
        assert len(reached(op.name, "symmetric")) == 4
        shapes = [call.shape for call in made if call.op == op.name]
        assert set(range(op.least_dims, 4)) == {len(shape) for shape in shapes}
        assert any(0 in shape for shape in shapes)
    for name, count in (("style", 5), ("splits", 8), ("max_blocks", 6), ("reduce_op", 5)):
        assert len(reached("", name)) == count, name
    assert reached("allgather", "uneven") == {False, True}
    assert {-3, -2, -1, 0, 1, 2} <= reached("reducescatter", "axis")
    assert reached("alltoallv_device", "spare") == {0, 1, 3, 40}


def test_random_calls_cover_every_fused_normalization() -> None:
    made = [call for call in _drawn(25_000) if isinstance(call, norms.Call)]
    for op in norms.NAMES:
        mine = [call for call in made if call.op == op]
        assert {call.algorithm for call in mine} == set(norms.algorithms_of(op))
        assert {call.form for call in mine} == set(norms.forms_of(op))
        assert {call.rounding for call in mine} == set(norms.ROUNDINGS)
        assert {call.dtype for call in mine} == set(norms.DTYPES)
        assert {call.cols for call in mine} == set(norms.COLS)
        modes = {call.scale_mode for call in mine}
        assert modes == ({"row", "group", "tensor"} if norms.quantizes(op) else {"row"})
        assert {0, 1, 2, 3, 4} <= {call.rows for call in mine}
    assert max(call.rows * call.cols for call in made) > LARGEST // 2


def test_random_all_reduces_cover_what_there_is() -> None:
    """Every reduce op on every dtype that supports it."""
    made = _drawn(2000, REDUCTION)
    assert {call.op for call in made} == {"allreduce"}
    algorithms = 1 + len(OPS["allreduce"].algorithms)  # and "auto"
    for name, count in (("algorithm", algorithms), ("form", 7), ("symmetric", 4), ("layout", 3)):
        assert len({getattr(call, name) for call in made}) == count, name
    reached = {(call.dtype, call.reduce_op) for call in made}
    wanted = {(fields["dtype"], fields["reduce_op"]) for fields in dtypes_and_ops("allreduce")}
    assert reached == wanted
