"""Bad input to the ops of the family: one clear error that names op, argument, what was given and
what is accepted, on every rank, before anything is launched; and the communicator works on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ..attempt import Attempt, attempt, finish, works
from ..check import bytes_around
from ..family_cases import (
    NEW,
    OPS,
    ROOTED,
    WITH_AXIS,
    WITH_SPLITS,
    Call,
    Fields,
    data_of,
)
from ..family_check import OUTS, Prepared, arguments_of, overload, run_call
from ..limits import assert_in_time, timeout_now
from ..pool import Pool, some_stand_for_all
from ..rank import Rank

REDUCING = tuple(op for op in NEW if OPS[op].reduces)
IN_CHUNKS = ("scatter", "alltoall")
DIRECT = tuple(op for op in NEW if "direct" in OPS[op].algorithms)
COPIED_DIRECTLY = tuple(op for op in NEW if "copy_engine" in OPS[op].algorithms)
WITH_DIMS = tuple(op for op in NEW if OPS[op].least_dims)
CHANGED = tuple(op for op in NEW if "inplace" in OPS[op].forms)  # those that have an op_

VALUE, TYPE = ("ValueError",), ("TypeError",)
NOWHERE = "no such group"
MOST = 2**63 - 1


@dataclass
class Given:
    """A call that would be right, for a row of the table to spoil."""

    rank: Rank
    communicator: Any
    name: str
    arguments: Fields
    outs: Fields

    @property
    def world(self) -> int:
        return self.rank.size

    @property
    def input(self) -> torch.Tensor:
        tensor: torch.Tensor = self.arguments["input"]
        return tensor

    def elsewhere(self) -> torch.device:
        return torch.device("cpu" if self.rank.device.type == "cuda" else "meta")

    def with_out(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Fields:
        """All outputs, the first of them another."""
        return {**self.outs, "out": change(self.outs["out"])}


def _given(rank: Rank, op: str) -> Given:
    communicator = rank.communicator()
    call = Call(op, "float32", (6, 4), style="random", splits="even", spare=2)
    inputs, results = data_of(call, rank.size)
    arguments = arguments_of(communicator, call, inputs[rank.rank].to(rank.device))
    results_here = [result.to(rank.device) for result in results[rank.rank]]
    return Given(rank, communicator, op, arguments, dict(zip(OUTS, results_here, strict=False)))


def _resplit(given: Given, which: str, change: Callable[[list[int]], list[int]]) -> Fields:
    return {which: change(list(given.arguments[which]))}


def _empty(given: Given, *splits: int) -> Fields:
    """An input without rows, and these splits in both directions."""
    both = [*splits, *[0] * given.world][: given.world]
    return {"input": given.input[:0], "input_splits": both, "output_splits": both}


def _device_splits(given: Given, **options: Any) -> Fields:
    device = options.pop("device", given.rank.device)
    return {"input_splits": torch.ones(**{"size": (given.world,), **options}, device=device)}


def _shifted_input(given: Given) -> Fields:
    """An input and an output in one piece of memory, one row apart."""
    source, out = given.input, given.outs["out"]
    memory = torch.ones(source.numel() + out.numel() + 8, device=given.rank.device)
    later = memory[4 : 4 + out.numel()].view(out.shape)
    return {"input": memory[: source.numel()].view(source.shape), **given.with_out(lambda _: later)}


def _part_of_another_rank(given: Given) -> Fields:
    """The smaller tensor is the part of the next rank in the larger one."""
    source, out = given.input, given.outs["out"]
    scatters = given.name == "reducescatter"
    rows = (out if scatters else source).shape[0]
    larger = torch.ones_like(source if scatters else out)
    smaller = larger.narrow(0, (given.rank.rank + 1) % given.world * rows, rows)
    first, second = (larger, smaller) if scatters else (smaller, larger)
    return {"input": first, "out": second}


def _symmetric(given: Given) -> torch.Tensor:
    tensor: torch.Tensor = given.communicator.empty(tuple(given.input.shape))
    return tensor.fill_(1)


@dataclass(frozen=True)
class Wrong:
    """A row: which ops it concerns, what is changed (arguments and outputs by name), the class of
    the error, and words of its message."""

    ops: tuple[str, ...]
    change: Callable[[Given], Fields]
    classes: tuple[str, ...]
    words: tuple[str, ...]
    form: str = "functional"


WRONG: dict[str, Wrong] = {
    "root behind the last rank": Wrong(
        ROOTED, lambda given: {"root": given.world}, VALUE, ("root",)
    ),
    "negative root": Wrong(ROOTED, lambda given: {"root": -1}, VALUE, ("root", "-1")),
    "root behind the last rank, in place": Wrong(
        ("broadcast", "reduce"), lambda given: {"root": 99}, VALUE, ("root", "99"), "inplace"
    ),
    "axis behind the last": Wrong(WITH_AXIS, lambda given: {"axis": 2}, VALUE, ("axis", "2")),
    "axis before the first": Wrong(WITH_AXIS, lambda given: {"axis": -3}, VALUE, ("axis", "-3")),
    "another group size": Wrong(
        tuple(op for op in NEW if OPS[op].sized),
        lambda given: {"group_size": given.world + 1},
        VALUE,
        ("group_size",),
    ),
    "0-dimensional input": Wrong(
        WITH_DIMS, lambda given: {"input": given.input[0, 0]}, VALUE, ("input: got",)
    ),
    "size that is not divisible": Wrong(
        IN_CHUNKS,
        lambda given: {"input": given.input[:-1]},
        VALUE,
        ("input", "a multiple of the group size"),
    ),
    "size that is not divisible, in place": Wrong(
        ("alltoall",),
        lambda given: {"input": given.input[:-1]},
        VALUE,
        ("input", "a multiple of the group size"),
        "inplace",
    ),
    "total of other parts": Wrong(
        ("allgather",), lambda given: {"total": 7 * given.world}, VALUE, ("total",)
    ),
    "negative total": Wrong(("allgather",), lambda given: {"total": -1}, VALUE, ("total", "-1")),
    "too few input splits": Wrong(
        ("alltoallv",),
        lambda given: _resplit(given, "input_splits", lambda splits: splits[1:]),
        VALUE,
        ("input_splits",),
    ),
    "too many output splits": Wrong(
        ("alltoallv",),
        lambda given: _resplit(given, "output_splits", lambda splits: [*splits, 0]),
        VALUE,
        ("output_splits",),
    ),
    "negative input split": Wrong(
        ("alltoallv",),
        lambda given: _resplit(
            given, "input_splits", lambda splits: [-1, splits[1] + splits[0] + 1, *splits[2:]]
        ),
        VALUE,
        ("input_splits", "-1"),
    ),
    "negative output split": Wrong(
        ("alltoallv",),
        lambda given: _resplit(given, "output_splits", lambda splits: [-2, *splits[1:]]),
        VALUE,
        ("output_splits", "-2"),
    ),
    "input splits that do not add up": Wrong(
        ("alltoallv",),
        lambda given: _resplit(given, "input_splits", lambda splits: [splits[0] + 1, *splits[1:]]),
        VALUE,
        ("input_splits",),
    ),
    "negative input split of an empty input": Wrong(
        ("alltoallv",), lambda given: _empty(given, -1, 1), VALUE, ("input_splits", "-1")
    ),
    "input splits whose sum wraps around": Wrong(
        ("alltoallv",),
        lambda given: _empty(given, MOST, MOST, 2),
        VALUE,
        ("input_splits", str(MOST)),
    ),
    "output splits whose sum wraps around": Wrong(
        ("alltoallv",),
        lambda given: {"output_splits": [MOST, MOST, 2][: given.world]},
        VALUE,
        ("output_splits", str(MOST)),
    ),
    "output splits whose bytes wrap around": Wrong(
        ("alltoallv",),
        lambda given: _resplit(given, "output_splits", lambda splits: [2**60, *splits[1:]]),
        VALUE,
        ("output_splits", str(2**60), "bytes"),
    ),
    "capacity whose bytes wrap around": Wrong(
        ("alltoallv_device",), lambda given: {"capacity": 2**60}, VALUE, ("capacity", str(2**60))
    ),
    "device splits of another dtype": Wrong(
        ("alltoallv_device",),
        lambda given: _device_splits(given, dtype=torch.int32),
        TYPE,
        ("input_splits", "int64"),
    ),
    "device splits of another length": Wrong(
        ("alltoallv_device",),
        lambda given: _device_splits(given, size=(given.world + 1,), dtype=torch.int64),
        VALUE,
        ("input_splits",),
    ),
    "device splits of two dimensions": Wrong(
        ("alltoallv_device",),
        lambda given: _device_splits(given, size=(given.world, 1), dtype=torch.int64),
        VALUE,
        ("input_splits",),
    ),
    "device splits elsewhere": Wrong(
        ("alltoallv_device",),
        lambda given: _device_splits(given, dtype=torch.int64, device=given.elsewhere()),
        (*VALUE, "NotImplementedError"),
        ("input_splits: got a tensor on",),
    ),
    "negative capacity": Wrong(
        ("alltoallv_device",), lambda given: {"capacity": -1}, VALUE, ("capacity", "-1")
    ),
    "output splits of another dtype": Wrong(
        ("alltoallv_device",),
        lambda given: {**given.outs, "output_splits": torch.empty(given.world)},
        (*TYPE, *VALUE),
        ("output_splits",),
        "out",
    ),
    "output splits of another length": Wrong(
        ("alltoallv_device",),
        lambda given: {**given.outs, "output_splits": given.outs["output_splits"][1:]},
        VALUE,
        ("output_splits",),
        "out",
    ),
    "unknown algorithm": Wrong(
        NEW, lambda given: {"algorithm": "ring"}, VALUE, ("algorithm", "ring", "auto", "fallback")
    ),
    "algorithm of allreduce": Wrong(
        NEW, lambda given: {"algorithm": "oneshot_push"}, VALUE, ("algorithm", "oneshot_push")
    ),
    "algorithm of broadcast": Wrong(
        tuple(op for op in NEW if op != "broadcast"),
        lambda given: {"algorithm": "pipelined"},
        VALUE,
        ("algorithm", "pipelined", "staged"),
    ),
    "algorithm that broadcast does not have": Wrong(
        ("broadcast",),
        lambda given: {"algorithm": "staged"},
        VALUE,
        ("algorithm", "staged", "onestage", "twostage", "pipelined"),
    ),
    "direct where it does not exist": Wrong(
        ("broadcast", *WITH_SPLITS), lambda given: {"algorithm": "direct"}, VALUE, ("algorithm",)
    ),
    "direct on ordinary tensors": Wrong(
        DIRECT, lambda given: {"algorithm": "direct"}, VALUE, ("algorithm", "direct", "symmetric")
    ),
    "direct on ordinary tensors, with out": Wrong(
        DIRECT,
        lambda given: {"algorithm": "direct", **given.outs},
        VALUE,
        ("algorithm", "direct", "symmetric"),
        "out",
    ),
    "copy_engine where it does not exist": Wrong(
        ("reducescatter", "reduce", *WITH_SPLITS),
        lambda given: {"algorithm": "copy_engine"},
        VALUE,
        ("algorithm",),
    ),
    "copy_engine into an ordinary tensor": Wrong(
        COPIED_DIRECTLY,
        lambda given: {"algorithm": "copy_engine", **given.outs},
        VALUE,
        ("algorithm", "copy_engine", "symmetric output"),
        "out",
    ),
    "direct in place that needs two tensors": Wrong(
        ("alltoall",),
        lambda given: {"algorithm": "direct", "input": _symmetric(given)},
        VALUE,
        ("algorithm", "direct"),
        "inplace",
    ),
    "direct with an ordinary tensor of the two": Wrong(
        tuple(op for op in DIRECT if OPS[op].peers == "output"),
        lambda given: {"algorithm": "direct", "input": _symmetric(given), **given.outs},
        VALUE,
        ("algorithm", "direct", "symmetric"),
        "out",
    ),
    "avg of integers": Wrong(
        REDUCING,
        lambda given: {"reduce_op": "avg", "input": given.input.int()},
        (*TYPE, "NotImplementedError"),
        ("avg", "int32"),
    ),
    "bool in a reduction": Wrong(
        REDUCING, lambda given: {"input": given.input.bool()}, TYPE, ("input", "bool")
    ),
    "complex in a reduction": Wrong(
        REDUCING,
        lambda given: {"input": given.input.to(torch.complex64)},
        TYPE,
        ("input", "complex"),
    ),
    "int16 in a reduction, in place": Wrong(
        ("reduce",), lambda given: {"input": given.input.short()}, TYPE, ("int16",), "inplace"
    ),
    "unknown reduce op": Wrong(
        REDUCING, lambda given: {"reduce_op": "median"}, VALUE, ("reduce_op", "median", "sum")
    ),
    "negative max_blocks": Wrong(
        NEW, lambda given: {"max_blocks": -1}, VALUE, ("max_blocks", "-1")
    ),
    "unknown communicator": Wrong(
        NEW, lambda given: {"group_name": NOWHERE}, VALUE, (NOWHERE, "collx.init")
    ),
    "unknown communicator, in place": Wrong(
        CHANGED, lambda given: {"group_name": NOWHERE}, VALUE, (NOWHERE,), "inplace"
    ),
    "sparse input": Wrong(
        NEW,
        lambda given: {"input": given.input.to_sparse()},
        (*TYPE, *VALUE, "NotImplementedError"),
        ("parse",),
    ),
    "out with a row too few": Wrong(
        NEW, lambda given: given.with_out(lambda out: out[:-1]), VALUE, ("out",), "out"
    ),
    "out with an element too many": Wrong(
        NEW,
        lambda given: given.with_out(lambda out: out.new_empty((out.shape[0], 5))),
        VALUE,
        ("out",),
        "out",
    ),
    "out of another number of dimensions": Wrong(
        NEW, lambda given: given.with_out(lambda out: out.view(-1)), VALUE, ("out",), "out"
    ),
    "out of another dtype": Wrong(
        NEW,
        lambda given: given.with_out(lambda out: out.double()),
        TYPE,
        ("out: got dtype float64",),
        "out",
    ),
    "out of a dtype of the same size": Wrong(
        NEW, lambda given: given.with_out(lambda out: out.int()), TYPE, ("out", "int32"), "out"
    ),
    "out elsewhere": Wrong(
        NEW,
        lambda given: given.with_out(lambda out: torch.empty_like(out, device=given.elsewhere())),
        (*VALUE, "NotImplementedError"),
        ("out: got a tensor on",),
        "out",
    ),
    "out that overlaps itself": Wrong(
        NEW,
        lambda given: given.with_out(lambda out: out[:1, :1].expand(out.shape)),
        VALUE,
        ("out", "location"),
        "out",
    ),
    "out that overlaps the input": Wrong(NEW, _shifted_input, VALUE, ("out", "overlap"), "out"),
    "out that is the input": Wrong(
        ("alltoallv",),
        lambda given: given.with_out(lambda _: given.input),
        VALUE,
        ("out", "overlap"),
        "out",
    ),
    "part of another rank": Wrong(
        WITH_AXIS, _part_of_another_rank, VALUE, ("out", "overlap"), "out"
    ),
    "input that overlaps itself, in place": Wrong(
        CHANGED,
        lambda given: {"input": given.input[:1].expand(given.input.shape)},
        VALUE,
        ("input", "location"),
        "inplace",
    ),
}


def _refused(rank: Rank, what: str) -> dict[str, Attempt]:
    row = WRONG[what]
    found = {}
    for op in row.ops:
        given = _given(rank, op)
        arguments = {**given.arguments, **row.change(given)}
        function = overload(op, row.form)
        found[op] = attempt(lambda: function(**arguments))  # noqa: B023
        given.communicator.raise_if_failed()
    communicator = rank.communicator()
    finish(communicator)
    assert works(rank, communicator)
    assert run_call(rank, communicator, Call(row.ops[-1], shape=(50,))) == ""
    return found


@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize("what", sorted(WRONG))
def test_a_wrong_argument_of_the_family_is_refused_by_name(pool: Pool, what: str) -> None:
    """A class for each kind of mistake; raised before anything is launched, so all ranks go on."""
    row = WRONG[what]
    for found in pool.run(_refused, what):
        assert set(found) == set(row.ops)
        for op, result in found.items():
            assert result.error in row.classes, (op, result)
            text = result.message.lower()
            for word in (OPS[op].packet or op, *row.words):
                assert word.lower() in text, (op, word, result.message)


SPLITS = tuple(what for what, row in WRONG.items() if row.ops == ("alltoallv",) and "split" in what)


def _splits_on_meta(rank: Rank) -> dict[str, Attempt]:
    found = {}
    for what in SPLITS:
        given = _given(rank, "alltoallv")
        arguments = {**given.arguments, **WRONG[what].change(given)}
        arguments["input"] = arguments["input"].to("meta")
        found[what] = attempt(lambda: overload("alltoallv", "functional")(**arguments))  # noqa: B023
    return found


@pytest.mark.worlds(2, 3)
def test_wrong_splits_are_refused_on_meta_tensors(pool: Pool) -> None:
    for found in pool.run(_splits_on_meta):
        assert len(found) > 7
        for what, result in found.items():
            assert result.error == "ValueError", (what, result)
            assert all(word in result.message for word in WRONG[what].words), (what, result)


def _input_elsewhere(rank: Rank) -> dict[str, Attempt]:
    found = {}
    elsewhere = "cpu" if rank.device.type == "cuda" else "cuda"
    for op in NEW:
        given = _given(rank, op)
        arguments = {**given.arguments, "input": given.input.to(elsewhere)}
        found[op] = attempt(lambda: overload(op, "functional")(**arguments))  # noqa: B023
    assert works(rank, rank.communicator())
    return found


@pytest.mark.worlds(2)
def test_an_input_on_another_device_is_refused(pool: Pool) -> None:
    """CPU and CUDA communicators do not take each other's tensors."""
    if not torch.cuda.is_available():
        pytest.skip("there is but one device")
    for found in pool.run(_input_elsewhere):
        for op, result in found.items():
            assert result.error in ("ValueError", "NotImplementedError", "RuntimeError"), result
            assert (OPS[op].packet or op) in result.message, (op, result)


def _refused_by_python(rank: Rank) -> dict[str, Attempt]:
    import collx

    communicator = rank.communicator()
    tensor = torch.ones((2 * rank.size, 3), device=rank.device)
    splits = torch.full((rank.size,), 2, device=rank.device)
    found = {
        "allgather": attempt(lambda: collx.allgather(tensor, group=NOWHERE)),
        "reducescatter": attempt(lambda: collx.reducescatter(tensor, group=NOWHERE)),
        "alltoall_": attempt(lambda: collx.alltoall_(tensor, group=NOWHERE)),
        "barrier": attempt(lambda: collx.barrier(NOWHERE)),
        "broadcast": attempt(lambda: collx.broadcast(tensor, group=NOWHERE)),
        "alltoallv, one output": attempt(
            lambda: collx.alltoallv(
                tensor,
                group=communicator,
                device_splits=splits,
                capacity=2 * rank.size,
                out=torch.empty_like(tensor),
            )
        ),
        "alltoallv, no splits": attempt(
            lambda: collx.alltoallv(tensor, group=communicator)  # type: ignore[call-overload]
        ),
        "alltoallv, no capacity": attempt(
            lambda: collx.alltoallv(  # type: ignore[call-overload]
                tensor, group=communicator, device_splits=splits
            )
        ),
    }
    assert works(rank, communicator)
    return found


@pytest.mark.worlds(2)
def test_python_functions_refuse_as_their_ops_do(pool: Pool) -> None:
    """A communicator that is not there cannot say how many ranks it has; one output of two."""
    for found in pool.run(_refused_by_python):
        for name, result in found.items():
            assert result.error == "ValueError", (name, result)
            words = {
                "one output": "output_splits",
                "no splits": "device_splits",
                "no capacity": "capacity",
            }
            word = words.get(name.rpartition(", ")[2], NOWHERE)
            assert word in result.message, (name, result)


# Splits that the device alone knows: those of the last rank to the first ranks, and the rows that
# are missing in its result.
DEVICE_SPLITS: dict[str, tuple[list[int], int]] = {
    "capacity too small": ([], 1),
    "negative split": ([-3], 0),
    "sum beyond the input": ([1006], 0),
    "sum that wraps around": ([MOST, MOST, 2], 0),
}
ROWS = 6


def _wrong_on_the_device(
    rank: Rank, what: str, check: bool, timeout: float
) -> tuple[Attempt, Attempt, str]:
    splits, missing = DEVICE_SPLITS[what]
    communicator = rank.new_communicator(
        "device-splits", rank.fresh_group(), timeout=timeout, check=check
    )
    call = Call("alltoallv_device", "int32", (ROWS, 5), form="out", style="bits")
    prepared = Prepared(rank, communicator, call)
    last = rank.rank == rank.size - 1
    if last:
        for other, rows in enumerate(splits[: rank.size]):
            prepared.given["input_splits"][other] = rows
        if missing:
            # The rows of `out` behind the capacity are a canary: they must not be written to.
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
    around = [
        bytes_around(placed, before)
        for placed, before in zip(prepared.outs, prepared._before[1:], strict=True)
    ]
    after = attempt(run)
    communicator.destroy()
    return found, after, "".join(around)


@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize("check", [False, True], ids=["plain", "checked"])
@pytest.mark.parametrize("what", sorted(DEVICE_SPLITS))
def test_device_splits_that_do_not_fit_are_a_mismatch(pool: Pool, what: str, check: bool) -> None:
    """They are found inside the call: every rank raises, nothing is written out of bounds, and
    the communicator refuses further work."""
    some_stand_for_all(pool, pool.size == 2 and not check)
    timeout = timeout_now(pool, 3.0)
    for found, after, around in pool.run(_wrong_on_the_device, what, check, timeout):
        assert found.error == "CollectiveMismatch", found
        assert "alltoallv" in found.message
        assert f"rank {pool.size - 1}" in found.message
        word = "capacity" if what == "capacity too small" else "splits"
        assert word in found.message
        assert after.error in ("CollectiveMismatch", "CommunicatorPoisoned"), after
        assert around == ""


SENT, EXPECTED = 503, 497  # bytes, told apart from all else in a message


def _disagree(rank: Rank, check: bool, timeout: float) -> list[Attempt]:
    communicator = rank.new_communicator(
        "disagree", rank.fresh_group(), timeout=timeout, check=check
    )
    last = rank.size - 1
    sent, received = [8] * rank.size, [8] * rank.size
    if rank.rank == 0:
        sent[last] = SENT
    if rank.rank == last:
        received[0] = EXPECTED
    source = torch.ones(sum(sent), dtype=torch.uint8, device=rank.device)
    rank.barrier()

    def run() -> None:
        torch.ops.collx.alltoallv(source, received, sent, communicator.name)
        finish(communicator)

    found = [attempt(run)]
    rank.barrier()
    found.append(attempt(communicator.raise_if_failed))
    rank.arenas.pop(communicator.name, None)
    attempt(communicator.destroy)
    return found


@pytest.mark.worlds(2, 3)
def test_splits_on_which_two_ranks_disagree_are_named_in_checked_mode(pool: Pool) -> None:
    """The check compares what a pair exchanges: all ranks raise, with both numbers."""
    for call, later in pool.run(_disagree, True, timeout_now(pool, 10.0)):
        found = call if call.error else later
        assert found.error == "CollectiveMismatch", found
        for word in ("alltoallv", str(SENT), str(EXPECTED), "rank 0", f"rank {pool.size - 1}"):
            assert word in found.message, (word, found)


@pytest.mark.worlds(2, 3)
def test_splits_on_which_two_ranks_disagree_end_without_the_check(pool: Pool) -> None:
    """Without it the data may be wrong, but nobody waits for longer than the timeout. On CPU the
    pair always compares its numbers."""
    timeout = timeout_now(pool)
    results = pool.run(_disagree, False, timeout)
    for call, later in results:
        assert call.error in ("", "CollectiveTimeout", "CollectiveMismatch"), call
        assert later.error in ("", "CollectiveTimeout", "CollectiveMismatch"), later
        assert_in_time(call, timeout)
    if pool.world.device == "cpu":
        errors = {found.error for result in results for found in result}
        assert "CollectiveMismatch" in errors
