"""Invalid splits: those that one rank detects, those that only the device knows, and those on which
two ranks disagree. See bad_input.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ..attempt import Attempt, assert_raised, attempt, finish
from ..calls import Fields, Prepared
from ..check import bytes_around
from ..collectives import WITH_SPLITS, Call
from ..limits import assert_in_time, timeout_now
from ..pool import Pool, on_ranks, some_stand_for_all
from ..rank import Rank
from ..refusals import Given, Wrong, assert_all_refused, assert_refused, dtype, value

HOST, DEVICE = WITH_SPLITS[:1], WITH_SPLITS[1:]  # by where the splits are stored
MOST = 2**63 - 1


def _resplit(which: str, change: Callable[[list[int]], list[int]]) -> Fields:
    """Returns fields that change one of the two split arguments."""
    return {which: lambda given: change(list(given[which]))}


def _without_rows(*splits: int) -> Callable[[Given], Fields]:
    """An input without rows and these splits in both directions, filled up with zeros."""

    def change(given: Given) -> Fields:
        both = [*splits, *[0] * given.world][: given.world]
        return {"input": given.input[:0], "input_splits": both, "output_splits": both}

    return change


def _device_splits(*sizes: int, dtype: torch.dtype = torch.int64) -> Fields:
    """Device splits of the given shape; 0 stands for the number of ranks, -1 for one more."""

    def change(given: Given) -> torch.Tensor:
        shape = [given.world - size if size <= 0 else size for size in sizes]
        return torch.ones(shape, dtype=dtype, device=given.rank.device)

    return {"input_splits": change}


def _splits_in(given: Given, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().view(torch.int64)[: given.world]


WRONG: dict[str, Wrong] = {
    "too few input splits": value(
        HOST, "input_splits", **_resplit("input_splits", lambda s: s[1:])
    ),
    "too many output splits": value(
        HOST, "output_splits", **_resplit("output_splits", lambda s: [*s, 0])
    ),
    "negative input split": value(
        HOST,
        "input_splits",
        "-1",
        **_resplit("input_splits", lambda s: [-1, s[0] + s[-1] + 1, *s[2:]][: len(s)]),
    ),
    "negative output split": value(
        HOST, "output_splits", "-2", **_resplit("output_splits", lambda s: [-2, *s[1:]])
    ),
    "input splits that do not add up": value(
        HOST, "input_splits", **_resplit("input_splits", lambda s: [s[0] + 1, *s[1:]])
    ),
    "negative input split of an empty input": value(
        HOST, "input_splits", "-1", several=_without_rows(-1, 1)
    ),
    "input splits whose sum wraps around": value(
        HOST, "input_splits", str(MOST), several=_without_rows(MOST, MOST, 2)
    ),
    "output splits whose sum wraps around": value(
        HOST,
        "output_splits",
        str(MOST),
        **_resplit("output_splits", lambda s: [MOST, MOST, 2, *s[3:]][: len(s)]),
    ),
    "output splits whose bytes wrap around": value(
        HOST,
        "output_splits",
        str(2**60),
        "bytes",
        **_resplit("output_splits", lambda s: [2**60, *s[1:]]),
    ),
    "capacity whose bytes wrap around": value(DEVICE, "capacity", str(2**60), capacity=2**60),
    "negative capacity": value(DEVICE, "capacity", "-1", capacity=-1),
    "device splits of another dtype": dtype(
        DEVICE, "input_splits", "int64", **_device_splits(0, dtype=torch.int32)
    ),
    "device splits of another length": value(DEVICE, "input_splits", **_device_splits(-1)),
    "device splits of two dimensions": value(DEVICE, "input_splits", **_device_splits(0, 1)),
    "device splits elsewhere": value(
        DEVICE,
        "input_splits: got a tensor on",
        input_splits=lambda g: g.elsewhere("input_splits"),
    ),
    "output splits of another dtype": dtype(
        DEVICE, "output_splits", form="out", output_splits=lambda g: g.one(g.world)
    ),
    "output splits in the memory of the input": value(
        DEVICE,
        "output_splits: overlaps the input",
        form="out",
        output_splits=lambda g: _splits_in(g, g.input),
    ),
    "output splits in the memory of the output": value(
        DEVICE,
        "output_splits: overlaps out",
        form="out",
        output_splits=lambda g: _splits_in(g, g.outs["out"]),
    ),
    "output splits of another length": value(
        DEVICE, "output_splits", form="out", output_splits=lambda g: g.outs["output_splits"][1:]
    ),
}

SPLITS = tuple(what for what, row in WRONG.items() if row.ops == HOST)


@pytest.mark.worlds(1, 2, 3)
@pytest.mark.parametrize("what", sorted(WRONG))
def test_wrong_splits_are_refused_by_name(pool: Pool, what: str) -> None:
    """Each kind of mistake raises one error before anything is launched, so all ranks continue."""
    assert_all_refused(pool, __name__, what)


@pytest.mark.worlds(2, 3)
@on_ranks
def test_wrong_splits_are_refused_on_meta_tensors(rank: Rank) -> None:
    assert len(SPLITS) > 7
    for what in SPLITS:
        given = Given(rank, "alltoallv")
        arguments = given.spoiled(WRONG[what])
        arguments["input"] = arguments["input"].to("meta")
        result = attempt(lambda: given.call.overload("functional")(**arguments))  # noqa: B023
        assert_refused("alltoallv", WRONG[what], result)


# Splits that only the device knows: the last rank's splits for the first ranks, and the number of
# rows by which its capacity is too small.
DEVICE_SPLITS: dict[str, tuple[list[int], int]] = {
    "capacity too small": ([], 1),
    "negative split": ([-3], 0),
    "sum beyond the input": ([1006], 0),
    "sum that wraps around": ([MOST, MOST, 2], 0),
}
ROWS = 6
ALGORITHMS = ("auto", "direct")


@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize("check", [False, True], ids=["plain", "checked"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("what", sorted(DEVICE_SPLITS))
@on_ranks
def test_device_splits_that_do_not_fit_are_a_mismatch(
    rank: Rank, what: str, algorithm: str, check: bool, timeout: float
) -> None:
    """The mismatch is detected inside the call: every rank raises, nothing is written out of
    bounds, and the communicator refuses further work."""
    some_stand_for_all(rank, rank.size == 2 and not check)
    splits, missing = DEVICE_SPLITS[what]
    communicator = rank.new_communicator(
        "device-splits", rank.fresh_group(), call_timeout=3 * timeout, check=check
    )
    call = Call(
        "alltoallv_device", "int32", (ROWS, 5), algorithm=algorithm, form="out", style="bits"
    ).legal()
    prepared = Prepared(rank, communicator, call)
    if rank.rank == rank.size - 1:
        for other, rows in enumerate(splits[: rank.size]):
            prepared.given["input_splits"][other] = rows
        if missing:
            # The rows of `out` beyond the capacity are a canary: they must not be written to.
            prepared.outs[0] = prepared.outs[0].part(0, 0, ROWS * rank.size - missing)
            prepared.given["capacity"] -= missing
    rank.synchronize()
    rank.barrier()

    def run() -> None:
        prepared.make()
        finish(communicator)

    found = attempt(run)
    rank.barrier()
    found = found if found.error else attempt(communicator.raise_if_failed)
    for placed, before in zip(prepared.outs, prepared._outs_before, strict=True):
        assert bytes_around(placed, before) == ""
    after = attempt(run)
    rank.arenas.pop(communicator.name, None)
    communicator.destroy()
    word = "capacity" if what == "capacity too small" else "splits"
    assert_raised(found, "CollectiveMismatch", "alltoallv", f"rank {rank.size - 1}", word)
    assert after.error == "CommunicatorPoisoned", after


SENT, EXPECTED = 503, 497  # bytes; no other number in a message has these values


def _disagree(rank: Rank, algorithm: str, check: bool, timeout: float) -> list[Attempt]:
    communicator = rank.new_communicator(
        "disagree", rank.fresh_group(), call_timeout=timeout, check=check
    )
    last = rank.size - 1
    sent, received = [8] * rank.size, [8] * rank.size
    if rank.rank == 0:
        sent[last] = SENT
    if rank.rank == last:
        received[0] = EXPECTED
    source = torch.ones(sum(sent), dtype=torch.uint8, device=rank.device)
    out = torch.empty(sum(received), dtype=torch.uint8, device=rank.device)
    if algorithm == "direct":
        out = communicator.empty(SENT * rank.size, dtype=torch.uint8)[: sum(received)]
    rank.barrier()

    def run() -> None:
        torch.ops.collx.alltoallv.out(source, received, sent, communicator.name, algorithm, out=out)
        finish(communicator)

    found = [attempt(run)]
    rank.barrier()
    found.append(attempt(communicator.raise_if_failed))
    rank.arenas.pop(communicator.name, None)
    attempt(communicator.destroy)
    return found


@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@on_ranks
def test_splits_on_which_two_ranks_disagree_are_named_in_checked_mode(
    rank: Rank, algorithm: str, timeout: float
) -> None:
    """The check compares what each pair exchanges: all ranks raise, with both numbers."""
    call, later = _disagree(rank, algorithm, True, 10 * timeout)
    words = ("alltoallv", str(SENT), str(EXPECTED), "rank 0", f"rank {rank.size - 1}")
    assert_raised(call if call.error else later, "CollectiveMismatch", *words)


@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_splits_on_which_two_ranks_disagree_end_without_the_check(
    pool: Pool, algorithm: str
) -> None:
    """Without the check the data may be wrong, but no rank waits longer than the timeout. On CPU,
    and before stores into outputs, each pair always compares its numbers."""
    timeout = timeout_now(pool)
    results = pool.run(_disagree, algorithm, False, timeout)
    for call, later in results:
        assert call.error in ("", "CollectiveTimeout", "CollectiveMismatch"), call
        assert later.error in ("", "CollectiveTimeout", "CollectiveMismatch"), later
        assert_in_time(call, timeout)
        if pool.world.device == "cpu" or algorithm == "direct":
            assert "CollectiveMismatch" in (call.error, later.error), (call, later)
