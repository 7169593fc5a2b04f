"""Collective calls that are voted on: init, empty, register, destroy.

If one rank refuses or fails, all ranks raise a named error, and no rank falls behind in the votes
(hazard 30)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import collx
from collx._bootstrap import selftest, symmetric
from collx._bootstrap.store import Ballot

from ..attempt import Attempt, assert_raised, attempt, works
from ..pool import on_ranks, some_stand_for_all
from ..rank import Rank

TIMEOUT = 20.0  # seconds, much longer than any vote takes
SHORT = 1.0  # seconds, for tests with an absent rank
MARGIN = 5.0  # seconds, for a busy machine

Call = Callable[[Any], object]


def _elsewhere(communicator: Any) -> str:
    return "cpu" if communicator.device.type == "cuda" else "cuda"


def _empty_elsewhere(communicator: Any) -> object:
    return collx.empty(8, device=_elsewhere(communicator), group=communicator)


def _unlike_tensor(communicator: Any) -> object:
    return communicator.register(torch.ones(4, device="meta"))


def _in_capture(call: Call) -> Call:
    """Returns the call as made during the capture of a CUDA graph."""

    def run(communicator: Any) -> object:
        with mock.patch("collx._bootstrap.symmetric._capturing", return_value=True):
            return call(communicator)

    return run


QUANTIZED = ("torch.qint8", "not quantized")
# The wrong call of one rank, and the class and words of the error. The others make a right call.
REFUSED: dict[str, tuple[Call, str, tuple[str, ...]]] = {
    "device": (_empty_elsewhere, "ValueError", ("device",)),
    "negative size": (lambda c: c.empty(-8), "ValueError", ("-8", "0 or more")),
    "too many bytes": (
        lambda c: c.empty(2**33, 2**31),
        "ValueError",
        ("(8589934592, 2147483648)", "2**63 - 1 bytes"),
    ),
    "too many bytes per element": (
        lambda c: c.empty_like(torch.empty(1, dtype=torch.uint8).expand(2**62), dtype=torch.int32),
        "ValueError",
        ("torch.int32", "2**63 - 1 bytes"),
    ),
    "size": (lambda c: c.empty("8"), "TypeError", ("size", "8")),
    "a fraction": (lambda c: c.empty(8.5), "TypeError", ("size", "8.5")),
    "dtype": (lambda c: c.empty(8, dtype=8), "TypeError", ("dtype",)),
    "quantized dtype": (lambda c: c.empty(8, dtype=torch.qint8), "TypeError", QUANTIZED),
    "tensor of a quantized dtype": (
        lambda c: c.empty_like(torch.quantize_per_tensor(torch.ones(8), 0.1, 0, torch.qint8)),
        "TypeError",
        QUANTIZED,
    ),
    "empty in a capture": (
        _in_capture(lambda c: c.empty(8)),
        "NotImplementedError",
        ("empty", "CUDA graph", "before the capture"),
    ),
    "register: no tensor": (lambda c: c.register(8), "TypeError", ("int",)),
    "register in a capture": (
        _in_capture(lambda c: c.register(_ordinary(c))),
        "NotImplementedError",
        ("register", "CUDA graph", "before the capture"),
    ),
    "register: other device": (_unlike_tensor, "ValueError", ("meta",)),
}


def _ordinary(communicator: Any) -> torch.Tensor:
    from torch.distributed import _symmetric_memory as symmetric_memory

    return symmetric_memory.empty(8, dtype=torch.float32, device=communicator.device)


def _all_calls_work(rank: Rank, communicator: Any) -> bool:
    """Returns whether empty, register and an operator on their tensors work on all ranks."""
    tensor = communicator.empty(1000).fill_(1)
    communicator.register(_ordinary(communicator))
    total = torch.ops.collx.allreduce(tensor, "sum", communicator.name)
    return bool((total == rank.size).all()) and works(rank, communicator)


def _refused(rank: Rank, what: str, where: int | None) -> Attempt:
    """Makes the wrong call on a rank (None: on all of them), and returns the outcome. Then all
    calls work."""
    wrong, *_ = REFUSED[what]
    communicator = rank.new_communicator("refusing", timeout=TIMEOUT)

    def call() -> None:
        if where in (rank.rank, None):
            wrong(communicator)
        elif what.startswith("register"):
            communicator.register(_ordinary(communicator))
        else:
            communicator.empty(8)

    found = attempt(call)
    assert _all_calls_work(rank, communicator)
    assert not communicator.poisoned
    communicator.destroy()
    return found


@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize("what", sorted(REFUSED))
@on_ranks
def test_a_refusal_on_one_rank_is_raised_on_all_of_them(rank: Rank, what: str) -> None:
    """Hazard 30: all ranks raise the same error at once, and then all calls work."""
    some_stand_for_all(rank, what == "device" and rank.size == 2)
    where = rank.size - 1
    *_, kind, words = REFUSED[what]
    found = _refused(rank, what, where)
    assert_raised(found, "InitError", f"rank {where}: {kind}", *words)
    assert found.seconds < TIMEOUT, found
    assert set(rank.gather(found.message)) == {found.message}


@pytest.mark.worlds(1, 2)
@pytest.mark.parametrize("what", sorted(REFUSED))
@on_ranks
def test_what_all_ranks_refuse_is_a_wrong_argument(rank: Rank, what: str) -> None:
    """Each raises its own error."""
    some_stand_for_all(rank, what == "device")
    *_, kind, words = REFUSED[what]
    assert_raised(_refused(rank, what, None), kind, *words)


@pytest.mark.worlds(2)
@on_ranks
def test_an_ordinary_tensor_cannot_be_registered(rank: Rank) -> None:
    communicator = rank.communicator()
    tensor = torch.ones(8, device=rank.device)
    found = attempt(lambda: communicator.register(tensor))
    fine = _all_calls_work(rank, communicator)
    words = ("register: tensor: got one that was not allocated as symmetric",)
    assert_raised(found, "ValueError", *words)
    assert fine


def _raise(*_: object) -> object:
    raise MemoryError("the injected fault")


@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize("step", ["allocation", "mapping"])
@on_ranks
def test_a_failure_on_one_rank_is_raised_on_all_of_them(rank: Rank, step: str) -> None:
    """A failure in either of the two votes of collx.empty leaves no rank behind."""
    some_stand_for_all(rank, step == "allocation" and rank.size == 2)
    communicator = rank.new_communicator("failing", timeout=TIMEOUT)
    exchange = symmetric.Rendezvous.exchange
    # The fault occurs after the exchange with the peers, so that they do not wait for it.
    mapping = mock.patch.object(
        symmetric.Rendezvous, "exchange", lambda self, tensor: _raise(exchange(self, tensor))
    )
    allocation = mock.patch.object(symmetric, "allocate", _raise)
    fault = allocation if step == "allocation" else mapping
    with fault if rank.rank == 0 else nullcontext():
        found = attempt(lambda: communicator.empty(100))
    fine = _all_calls_work(rank, communicator)
    communicator.destroy()
    assert_raised(found, "InitError", "rank 0: MemoryError: the injected fault")
    assert fine


@pytest.mark.worlds(1, 2)
@on_ranks
def test_a_symmetric_tensor_costs_two_votes(rank: Rank) -> None:
    """Each vote needs several round trips to the store."""
    communicator = rank.new_communicator("counted")
    given = _ordinary(communicator)

    def votes_of(call: Callable[[], object]) -> int:
        with mock.patch.object(Ballot, "vote", autospec=True, side_effect=Ballot.vote) as vote:
            call()
        return vote.call_count

    expected = {"empty": 2, "without elements": 1, "register": 2, "destroy": 1}
    assert {
        "empty": votes_of(lambda: communicator.empty(100)),
        "without elements": votes_of(lambda: communicator.empty(0, 5)),
        "register": votes_of(lambda: communicator.register(given)),
        "destroy": votes_of(communicator.destroy),
    } == expected


@pytest.mark.worlds(2, 3)
@on_ranks
def test_a_rank_that_is_absent_from_empty_is_a_timeout(rank: Rank) -> None:
    """As for an operator: all ranks raise in time and name the absent rank. The communicator is
    then poisoned, since no rank knows whether the call will ever be made. A late rank raises at
    once."""
    communicator = rank.new_communicator("absent", call_timeout=SHORT)
    last = rank.size - 1
    if rank.rank != last:
        found = attempt(lambda: communicator.empty(8))
    rank.barrier()
    if rank.rank == last:
        found = attempt(lambda: communicator.empty(8))
    rank.barrier()
    call = attempt(lambda: works(rank, communicator))
    checked = attempt(communicator.raise_if_failed)
    communicator.destroy()
    assert_raised(found, "CollectiveTimeout", f"rank {last}")
    assert found.seconds < (MARGIN if rank.rank == last else SHORT + MARGIN), found
    words = f"for rank {last} (timeout {SHORT:g} s) in a vote"
    assert_raised(checked, "CollectiveTimeout", words)
    assert call.error in ("CommunicatorPoisoned", "CollectiveTimeout"), call


@pytest.mark.worlds(2)
@pytest.mark.parametrize("call", ["empty", "register"])
@on_ranks
def test_a_name_works_again_after_a_rank_was_absent(rank: Rank, call: str) -> None:
    """A rank that misses a call is at the same attempt of init as its peers."""
    some_stand_for_all(rank, call == "empty")
    communicator = rank.new_communicator("again", call_timeout=SHORT)
    arguments = {"empty": 8, "register": _ordinary(communicator)}
    if rank.rank != 0:
        found = attempt(lambda: getattr(communicator, call)(arguments[call]))
    rank.barrier()
    destroyed = attempt(communicator.destroy)
    with rank.new_communicator("again", timeout=TIMEOUT) as another:
        assert _all_calls_work(rank, another)
    if rank.rank == 0:  # the absent rank learns of it in destroy
        assert destroyed.error == "CollectiveTimeout", destroyed
    else:
        assert (found.error, destroyed.error) == ("CollectiveTimeout", ""), (found, destroyed)


@pytest.mark.worlds(2)
@pytest.mark.parametrize("waits_in", ["leave", "cast_left"])
@on_ranks
def test_an_interrupt_of_destroy_or_init_keeps_neither_memory_nor_name(
    rank: Rank, waits_in: str
) -> None:
    """Every rank is interrupted while its `destroy`, or its failed init, uses the store."""
    interrupt = mock.patch.object(Ballot, waits_in, side_effect=KeyboardInterrupt)
    communicator = rank.new_communicator("freed", rank.fresh_group())
    if waits_in == "cast_left":
        communicator._native.report_absent(rank.rank, -1)
    with interrupt, pytest.raises(KeyboardInterrupt):
        communicator.destroy()
    rank.barrier()
    failing = mock.patch.object(selftest, "run", side_effect=RuntimeError)
    if waits_in == "leave":
        with interrupt, failing, pytest.raises(KeyboardInterrupt):
            rank.new_communicator("freed")
        rank.barrier()
    with rank.new_communicator("freed") as another:
        assert communicator.destroyed
        assert works(rank, another)


@pytest.mark.worlds(2)
@on_ranks
def test_a_failure_after_the_last_vote_is_left_to_the_next_call(rank: Rank) -> None:
    """An error after the last vote is not raised on one rank alone. A peer poisons the communicator
    after all ranks have agreed that a tensor is shared."""
    communicator = rank.new_communicator("meanwhile", rank.fresh_group(), timeout=TIMEOUT)
    native = communicator._memory._native
    stand_in = mock.Mock(wraps=native)
    stand_in.name, stand_in.destroyed = native.name, False

    def register(*arguments: Any) -> None:
        if rank.rank == 0:
            native.report_absent(0, 1)
        rank.barrier()
        native.register(*arguments)

    stand_in.register = register
    with mock.patch.object(communicator._memory, "_native", stand_in):
        communicator.empty(8)
    assert_raised(attempt(lambda: communicator.empty(8)), "CollectiveTimeout")
    rank.barrier()
    communicator.destroy()


@pytest.mark.worlds(2)
@on_ranks
def test_ranks_that_refuse_by_different_classes_raise_one(rank: Rank) -> None:
    """If one rank raises TypeError and another ValueError, all raise an InitError with both."""
    both = ("InitError", "TypeError", "ValueError")
    communicator = rank.new_communicator("differently", timeout=TIMEOUT)
    wrong = "8" if rank.rank == 0 else -8
    assert_raised(attempt(lambda: communicator.empty(wrong)), *both)
    assert _all_calls_work(rank, communicator)
    communicator.destroy()
    options: dict[str, Any] = {"pdl": "late"} if rank.rank == 0 else {"max_blocks": "many"}
    assert_raised(attempt(lambda: rank.new_communicator("differently", **options)), *both)


@pytest.mark.worlds(2)
@on_ranks
def test_different_calls_are_a_mismatch(rank: Rank) -> None:
    """The error names both calls; the rank that continues does not wait for the one that left."""
    communicator = rank.new_communicator("apart", timeout=TIMEOUT)
    first = attempt(communicator.destroy if rank.rank == 0 else lambda: communicator.empty(8))
    second = attempt(communicator.destroy)
    assert_raised(first, "CollectiveMismatch", "rank 0: is at 'destroy'", "rank 1: is at 'empty'")
    assert second.error == "", second
    assert second.seconds < TIMEOUT


@pytest.mark.worlds(2)
@on_ranks
def test_a_rank_that_has_left_is_named_at_once(rank: Rank) -> None:
    """Its with block ended with an error: no rank waits for the whole timeout."""
    communicator = rank.new_communicator("left", timeout=TIMEOUT)
    if rank.rank == 0:
        with pytest.raises(KeyError), communicator:
            raise KeyError("the program's own")
    else:
        found = attempt(lambda: communicator.empty(8))
        assert_raised(found, "CollectiveTimeout", "rank 0: left the communicator: KeyError")
        assert found.seconds < TIMEOUT
        assert communicator.poisoned
    communicator.destroy()


# Invalid arguments of init, and the class and words of the error.
INIT: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "timeout": ({"timeout": -1.0}, "ValueError", ("timeout", "-1.0")),
    "payload_bytes": ({"payload_bytes": 1}, "ValueError", ("payload_bytes", "1")),
    "pdl": ({"pdl": "late"}, "ValueError", ("pdl", "late")),
    "max_blocks": ({"max_blocks": "many"}, "TypeError", ("max_blocks", "str")),
    "device": ({"device": "meta"}, "ValueError", ("device", "meta")),
    "no device": ({"device": "gpu"}, "ValueError", ("device", "'gpu'; accepted: cuda, cpu")),
    "deterministic": ({"deterministic": "no"}, "TypeError", ("deterministic", "str")),
    "check": ({"check": "no"}, "TypeError", ("check", "str", "a bool, or None")),
}


def _init_refused(rank: Rank, what: str, where: int | None) -> Attempt:
    """Gives the invalid argument on a rank (None: on all of them), and returns the outcome. Then
    init works."""
    options = {"timeout": TIMEOUT, **(INIT[what][0] if where in (rank.rank, None) else {})}
    found = attempt(lambda: rank.new_communicator("init", **options))
    with rank.new_communicator("init", timeout=TIMEOUT) as communicator:
        assert _all_calls_work(rank, communicator)
    return found


@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize("what", sorted(INIT))
@on_ranks
def test_an_argument_of_init_refused_on_one_rank_is_raised_on_all(rank: Rank, what: str) -> None:
    """At once, with the rank and the cause; then init works."""
    some_stand_for_all(rank, what == "timeout" and rank.size == 2)
    _, kind, words = INIT[what]
    found = _init_refused(rank, what, 0)
    assert_raised(found, "InitError", f"rank 0: {kind}", *words)
    assert found.seconds < TIMEOUT
    assert set(rank.gather(found.message)) == {found.message}


@pytest.mark.worlds(2)
@pytest.mark.parametrize("what", sorted(INIT))
@on_ranks
def test_an_argument_of_init_that_all_ranks_refuse_is_wrong(rank: Rank, what: str) -> None:
    some_stand_for_all(rank, what == "timeout")
    _, kind, words = INIT[what]
    assert_raised(_init_refused(rank, what, None), kind, *words)


@pytest.mark.worlds(2)
@on_ranks
def test_a_name_in_use_on_one_rank_is_refused_on_all(rank: Rank) -> None:
    """One rank already uses the name of the new communicator for another one."""
    groups = [dist.new_group([r]) for r in range(rank.size)]
    mine = rank.new_communicator("twice", groups[0]) if rank.rank == 0 else None
    found = attempt(lambda: rank.new_communicator("twice", timeout=TIMEOUT))
    if mine is not None:
        mine.destroy()
    with rank.new_communicator("twice", timeout=TIMEOUT) as communicator:
        fine = works(rank, communicator)
    dist.destroy_process_group(groups[rank.rank])
    assert_raised(found, "InitError", "rank 0: ValueError", "exists already")
    assert found.seconds < TIMEOUT
    assert fine
