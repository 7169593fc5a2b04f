"""Collective calls that are voted: init, empty, register, destroy.

What one rank refuses or fails at is raised on all ranks by name, and no rank is left a vote behind
(hazard 30)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ..attempt import Attempt, attempt, works
from ..pool import Pool, some_stand_for_all
from ..rank import Rank

TIMEOUT = 20.0  # much longer than any vote takes
SHORT = 1.0  # of the tests in which a rank does not come
MARGIN = 5.0  # of a machine that is busy

Call = Callable[[Any], object]


def _elsewhere(communicator: Any) -> str:
    return "cpu" if communicator.device.type == "cuda" else "cuda"


def _empty_elsewhere(communicator: Any) -> object:
    import collx

    return collx.empty(8, device=_elsewhere(communicator), group=communicator)


def _unlike_tensor(communicator: Any) -> object:
    return communicator.register(torch.ones(4, device="meta"))


def _in_capture(call: Call) -> Call:
    """The call, made as during the capture of a CUDA graph."""

    def run(communicator: Any) -> object:
        with mock.patch("collx._bootstrap.symmetric._capturing", return_value=True):
            return call(communicator)

    return run


# What a rank refuses: the wrong call, the right one of the others, the class, and words of it.
REFUSED: dict[str, tuple[Call, Call, str, tuple[str, ...]]] = {
    "device": (_empty_elsewhere, lambda c: c.empty(8), "ValueError", ("device",)),
    "negative size": (
        lambda c: c.empty(-8),
        lambda c: c.empty(8),
        "ValueError",
        ("-8", "0 or more"),
    ),
    "size": (lambda c: c.empty("8"), lambda c: c.empty(8), "TypeError", ("size", "8")),
    "dtype": (lambda c: c.empty(8, dtype=8), lambda c: c.empty(8), "TypeError", ("dtype",)),
    "no tensor": (
        lambda c: c.register(8),
        lambda c: c.register(_ordinary(c)),
        "TypeError",
        ("int",),
    ),
    "empty in a capture": (
        _in_capture(lambda c: c.empty(8)),
        lambda c: c.empty(8),
        "NotImplementedError",
        ("empty", "CUDA graph", "before the capture"),
    ),
    "register in a capture": (
        _in_capture(lambda c: c.register(_ordinary(c))),
        lambda c: c.register(_ordinary(c)),
        "NotImplementedError",
        ("register", "CUDA graph", "before the capture"),
    ),
    "other device": (_unlike_tensor, lambda c: c.register(_ordinary(c)), "ValueError", ("meta",)),
}


def _ordinary(communicator: Any) -> torch.Tensor:
    from torch.distributed import _symmetric_memory as symmetric_memory

    return symmetric_memory.empty(8, dtype=torch.float32, device=communicator.device)


def _all_calls_work(rank: Rank, communicator: Any) -> bool:
    """Whether empty, register and an operator on their tensors still do on all ranks."""
    tensor = communicator.empty(1000).fill_(1)
    communicator.register(_ordinary(communicator))
    total = torch.ops.collx.allreduce(tensor, "sum", communicator.name)
    return bool((total == rank.size).all()) and works(rank, communicator)


def _refusing(rank: Rank, what: str, where: list[int]) -> tuple[Attempt, bool, Attempt]:
    wrong, right, *_ = REFUSED[what]
    communicator = rank.new_communicator("refusing", timeout=TIMEOUT)
    call = wrong if rank.rank in where else right
    found = attempt(lambda: call(communicator))
    fine = _all_calls_work(rank, communicator) and not communicator.poisoned
    return found, fine, attempt(communicator.destroy)


@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize("what", sorted(REFUSED))
def test_a_refusal_on_one_rank_is_raised_on_all_of_them(pool: Pool, what: str) -> None:
    """Hazard 30: at once, the same error everywhere, and then all calls work."""
    some_stand_for_all(pool, what == "device" and pool.size == 2)
    where = pool.size - 1
    *_, kind, words = REFUSED[what]
    results = pool.run(_refusing, what, [where])
    assert len({found.message for found, *_ in results}) == 1
    for found, fine, destroyed in results:
        assert found.error == "InitError", found
        assert f"rank {where}: {kind}" in found.message, found
        assert all(word in found.message for word in words), found
        assert found.seconds < TIMEOUT, found
        assert fine
        assert destroyed.error == "", destroyed


@pytest.mark.worlds(1, 2)
@pytest.mark.parametrize("what", sorted(REFUSED))
def test_what_all_ranks_refuse_is_a_wrong_argument(pool: Pool, what: str) -> None:
    """Each raises its own error."""
    some_stand_for_all(pool, what == "device")
    *_, kind, words = REFUSED[what]
    for found, fine, destroyed in pool.run(_refusing, what, list(range(pool.size))):
        assert found.error == kind, found
        assert all(word in found.message for word in words), found
        assert fine
        assert destroyed.error == "", destroyed


def _raise(*_: object) -> object:
    raise MemoryError("the injected fault")


def _failing(rank: Rank, step: str) -> tuple[Attempt, bool]:
    from collx._bootstrap import symmetric

    communicator = rank.new_communicator("failing", timeout=TIMEOUT)
    exchange = symmetric.Rendezvous.exchange
    # Having met the peers, who do not wait in vain then.
    mapping = mock.patch.object(
        symmetric.Rendezvous, "exchange", lambda self, tensor: _raise(exchange(self, tensor))
    )
    allocation = mock.patch.object(symmetric, "allocate", _raise)
    fault = allocation if step == "allocation" else mapping
    with fault if rank.rank == 0 else nullcontext():
        found = attempt(lambda: communicator.empty(100))
    fine = _all_calls_work(rank, communicator)
    communicator.destroy()
    return found, fine


@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize("step", ["allocation", "mapping"])
def test_a_failure_on_one_rank_is_raised_on_all_of_them(pool: Pool, step: str) -> None:
    """Neither of the two votes of collx.empty leaves a rank behind."""
    some_stand_for_all(pool, step == "allocation" and pool.size == 2)
    for found, fine in pool.run(_failing, step):
        assert found.error == "InitError", found
        assert "rank 0: MemoryError: the injected fault" in found.message
        assert fine


def _votes(rank: Rank) -> dict[str, int]:
    from collx._bootstrap.store import Ballot

    communicator = rank.new_communicator("counted")
    given = _ordinary(communicator)

    def votes_of(call: Callable[[], object]) -> int:
        with mock.patch.object(Ballot, "vote", autospec=True, side_effect=Ballot.vote) as vote:
            call()
        return vote.call_count

    return {
        "empty": votes_of(lambda: communicator.empty(100)),
        "without elements": votes_of(lambda: communicator.empty(0, 5)),
        "register": votes_of(lambda: communicator.register(given)),
        "destroy": votes_of(communicator.destroy),
    }


@pytest.mark.worlds(1, 2)
def test_a_symmetric_tensor_costs_two_votes(pool: Pool) -> None:
    """Each is some trips to the store and back."""
    expected = {"empty": 2, "without elements": 1, "register": 2, "destroy": 1}
    assert pool.run(_votes) == [expected] * pool.size


def _absent(rank: Rank) -> tuple[Attempt, Attempt, Attempt, Attempt]:
    communicator = rank.new_communicator("absent", timeout=SHORT)
    last = rank.size - 1
    found = Attempt("", "", 0.0)
    if rank.rank != last:
        found = attempt(lambda: communicator.empty(8))
    rank.barrier()
    if rank.rank == last:
        found = attempt(lambda: communicator.empty(8))
    rank.barrier()
    call = attempt(lambda: works(rank, communicator))
    return found, attempt(communicator.raise_if_failed), call, attempt(communicator.destroy)


@pytest.mark.worlds(2, 3)
def test_a_rank_that_is_absent_from_empty_is_a_timeout(pool: Pool) -> None:
    """As that of an operator: named on all ranks, in time; then the communicator is poisoned, since
    nobody knows whether the call will ever be made. A rank that comes late learns it at once."""
    last = pool.size - 1
    for rank, (found, checked, call, destroyed) in enumerate(pool.run(_absent)):
        assert found.error == "CollectiveTimeout", found
        assert f"rank {last}" in found.message, found
        assert found.seconds < (MARGIN if rank == last else SHORT + MARGIN), found
        assert checked.error == "CollectiveTimeout", checked
        assert f"for rank {last} (timeout {SHORT:g} s) in a vote" in checked.message, checked
        assert call.error in ("CommunicatorPoisoned", "CollectiveTimeout"), call
        assert destroyed.error == "", destroyed


def _begun_again(rank: Rank, call: str) -> list[Attempt]:
    """One rank does not make a collective call; then all ranks destroy and begin again."""
    communicator = rank.new_communicator("again", timeout=SHORT)
    given = _ordinary(communicator)
    arguments = {"empty": 8, "register": given}
    found = []
    if rank.rank != 0:
        found.append(attempt(lambda: getattr(communicator, call)(arguments[call])))
    rank.barrier()
    found.append(attempt(communicator.destroy))
    with rank.new_communicator("again", timeout=TIMEOUT) as another:
        assert _all_calls_work(rank, another)
    return found


@pytest.mark.worlds(2)
@pytest.mark.parametrize("call", ["empty", "register"])
def test_a_name_works_again_after_a_rank_was_absent(pool: Pool, call: str) -> None:
    """A rank that misses one call of all is at the same attempt of init as its peers."""
    some_stand_for_all(pool, call == "empty")
    (destroyed,), (found, also) = pool.run(_begun_again, call)
    assert found.error == "CollectiveTimeout", found
    assert destroyed.error == "CollectiveTimeout", destroyed  # the absent rank hears of it here
    assert also.error == "", also


def _poisoned_meanwhile(rank: Rank) -> list[Attempt]:
    """A peer poisons the communicator when all ranks have agreed that a tensor is shared."""
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
        found = [attempt(lambda: communicator.empty(8))]
    found.append(attempt(lambda: communicator.empty(8)))
    rank.barrier()
    communicator.destroy()
    return found


@pytest.mark.worlds(2)
def test_a_failure_after_the_last_vote_is_left_to_the_next_call(pool: Pool) -> None:
    """What no vote follows raises on no rank alone."""
    for first, second in pool.run(_poisoned_meanwhile):
        assert first.error == "", first
        assert second.error == "CollectiveTimeout", second


def _refused_differently(rank: Rank) -> list[Attempt]:
    communicator = rank.new_communicator("differently", timeout=TIMEOUT)
    wrong = "8" if rank.rank == 0 else -8
    found = [attempt(lambda: communicator.empty(wrong))]
    assert _all_calls_work(rank, communicator)
    communicator.destroy()
    options: dict[str, Any] = {"pdl": "late"} if rank.rank == 0 else {"max_blocks": "many"}
    found.append(attempt(lambda: rank.new_communicator("differently", **options)))
    return found


@pytest.mark.worlds(2)
def test_ranks_that_refuse_by_different_classes_raise_one(pool: Pool) -> None:
    """A TypeError here and a ValueError there: all ranks raise the InitError that names both."""
    for found in pool.run(_refused_differently):
        for result in found:
            assert result.error == "InitError", result
            assert "TypeError" in result.message
            assert "ValueError" in result.message


def _apart(rank: Rank) -> tuple[Attempt, Attempt]:
    communicator = rank.new_communicator("apart", timeout=TIMEOUT)
    first = attempt(communicator.destroy if rank.rank == 0 else lambda: communicator.empty(8))
    return first, attempt(communicator.destroy)


@pytest.mark.worlds(2)
def test_different_calls_are_a_mismatch(pool: Pool) -> None:
    """Both are named; and the rank that goes on does not wait for the one that has gone."""
    for first, second in pool.run(_apart):
        assert first.error == "CollectiveMismatch", first
        assert "rank 0: is at 'destroy'" in first.message
        assert "rank 1: is at 'empty'" in first.message
        assert second.error == "", second
        assert second.seconds < TIMEOUT


def _left(rank: Rank) -> tuple[Attempt, bool]:
    communicator = rank.new_communicator("left", timeout=TIMEOUT)
    found = Attempt("", "", 0.0)
    if rank.rank == 0:
        with pytest.raises(KeyError), communicator:
            raise KeyError("the program's own")
    else:
        found = attempt(lambda: communicator.empty(8))
    poisoned = communicator.poisoned
    communicator.destroy()
    return found, poisoned


@pytest.mark.worlds(2)
def test_a_rank_that_has_left_is_named_at_once(pool: Pool) -> None:
    """Its with block ended by an error: nobody waits for the length of the timeout."""
    found, poisoned = pool.run(_left)[1]
    assert found.error == "CollectiveTimeout", found
    assert "rank 0: left the communicator: KeyError" in found.message
    assert found.seconds < TIMEOUT
    assert poisoned


# Arguments of init that are refused, and words of the refusal.
INIT: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "timeout": ({"timeout": -1.0}, "ValueError", ("timeout", "-1.0")),
    "payload_bytes": ({"payload_bytes": 1}, "ValueError", ("payload_bytes", "1")),
    "pdl": ({"pdl": "late"}, "ValueError", ("pdl", "late")),
    "max_blocks": ({"max_blocks": "many"}, "TypeError", ("max_blocks", "str")),
    "device": ({"device": "meta"}, "ValueError", ("device", "meta")),
    "deterministic": ({"deterministic": "no"}, "TypeError", ("deterministic", "str")),
}


def _init_refused(rank: Rank, what: str, where: list[int]) -> tuple[Attempt, bool]:
    options = {"timeout": TIMEOUT, **(INIT[what][0] if rank.rank in where else {})}
    found = attempt(lambda: rank.new_communicator("init", **options))
    with rank.new_communicator("init", timeout=TIMEOUT) as communicator:
        return found, _all_calls_work(rank, communicator)


@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize("what", sorted(INIT))
def test_an_argument_of_init_refused_on_one_rank_is_raised_on_all(pool: Pool, what: str) -> None:
    """At once, with rank and cause; then init works."""
    some_stand_for_all(pool, what == "timeout" and pool.size == 2)
    _, kind, words = INIT[what]
    results = pool.run(_init_refused, what, [0])
    assert len({found.message for found, _ in results}) == 1
    for found, fine in results:
        assert found.error == "InitError", found
        assert f"rank 0: {kind}" in found.message, found
        assert all(word in found.message for word in words), found
        assert found.seconds < TIMEOUT
        assert fine


@pytest.mark.worlds(2)
@pytest.mark.parametrize("what", sorted(INIT))
def test_an_argument_of_init_that_all_ranks_refuse_is_wrong(pool: Pool, what: str) -> None:
    some_stand_for_all(pool, what == "timeout")
    _, kind, words = INIT[what]
    for found, fine in pool.run(_init_refused, what, list(range(pool.size))):
        assert found.error == kind, found
        assert all(word in found.message for word in words), found
        assert fine


def _name_in_use(rank: Rank) -> tuple[Attempt, bool]:
    groups = [dist.new_group([r]) for r in range(rank.size)]
    mine = rank.new_communicator("twice", groups[0]) if rank.rank == 0 else None
    found = attempt(lambda: rank.new_communicator("twice", timeout=TIMEOUT))
    if mine is not None:
        mine.destroy()
    with rank.new_communicator("twice", timeout=TIMEOUT) as communicator:
        fine = works(rank, communicator)
    dist.destroy_process_group(groups[rank.rank])
    return found, fine


@pytest.mark.worlds(2)
def test_a_name_in_use_on_one_rank_is_refused_on_all(pool: Pool) -> None:
    """A second communicator, for whose name that rank has another one."""
    for found, fine in pool.run(_name_in_use):
        assert found.error == "InitError", found
        assert "rank 0: ValueError" in found.message
        assert "exists already" in found.message
        assert found.seconds < TIMEOUT
        assert fine
