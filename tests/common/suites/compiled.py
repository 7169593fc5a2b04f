"""Collectives in code that torch.compile generates with Inductor: all of them run, on every rank,
in program order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import collx

from .. import collectives
from ..attempt import attempt
from ..calls import Fields
from ..check import differences
from ..compiling import code_of, inductor, needs_compiler
from ..operators import call_of
from ..pool import on_ranks
from ..rank import Rank
from ..shares import own_part
from . import tracing

UNUSED, EQUAL, APART = 5, 5, 10
EQUAL_NUMBER = 50


def expected() -> list[str]:
    """Returns the calls that `_program` makes."""
    names = []
    for number in range(APART):
        if number < UNUSED:
            names += [f"reduce {number + 1}", f"allreduce {EQUAL_NUMBER}"]
        names.append(f"allgather {number + 11}")
    return names


def _total(number: int, size: int) -> int:
    """Returns the rows of the result of an independent call. Earlier calls have larger results, so
    that a scheduler that saves memory would start with the last one."""
    return 40 * (APART - number) * size + 1


def _program(rank: Rank, name: str, x: torch.Tensor, own: list[torch.Tensor]) -> Any:
    """Makes 20 collectives: 5 whose results are unused, 5 with equal arguments, and 10 independent
    ones whose shapes differ between ranks. The results are used only in matrix products, for which
    no code is generated, to keep compilation short."""
    ops = torch.ops.collx
    results = []
    for number in range(APART):
        if number < UNUSED:
            ops.reduce(x.detach(), "sum", 0, name, "auto", number + 1)
            results.append(ops.allreduce(x, "sum", name, "auto", EQUAL_NUMBER))
        total = _total(number, rank.size)
        gathered = ops.allgather(own[number], rank.size, name, 0, total, "auto", number + 11)
        results.append(gathered.t() @ gathered)
    return results


def _compiled(rank: Rank, training: bool, unmarked: str = "") -> tuple[list[list[str]], list[str]]:
    """Returns the calls of a program by graph, as `compiling.calls_in` does (with gradients, the
    forward and the backward pass have a graph each), and how each result differs from that of the
    eager program."""
    name = rank.communicator().name

    def tensors() -> tuple[torch.Tensor, list[torch.Tensor]]:
        x = torch.arange(12.0, device=rank.device).view(3, 4).requires_grad_(training)
        wholes = [torch.ones(_total(n, rank.size), 3).cumsum(1) for n in range(APART)]
        own = [own_part(w, rank).to(rank.device).requires_grad_(training) for w in wholes]
        return x, own

    def program(x: torch.Tensor, own: list[torch.Tensor]) -> Any:
        return _program(rank, name, x, own)

    with inductor(), _without(unmarked):
        given = tensors()
        results, kept = code_of(torch.compile(program, fullgraph=True), *given, backward=training)
    plain = tensors()
    wanted = program(*plain)
    pairs = list(zip(results, wanted, strict=True))
    if training:
        sum(tensor.sum() for tensor in wanted).backward()
        pairs += [(a.grad, b.grad) for a, b in zip(given[1], plain[1], strict=True)]
        pairs.append((given[0].grad, plain[0].grad))
    return kept, [differences(a.detach().cpu(), b.detach().cpu()) for a, b in pairs]


@contextmanager
def _without(marks: str) -> Iterator[None]:
    """Removes the named marks: "token", "lowering"."""
    from torch._inductor.lowering import lowerings
    from torch._library.effects import EffectType
    from torch.fx.node import _side_effectful_functions
    from torch.library import _register_effectful_op

    from collx.compile import lowering
    from collx.compile.operators import making

    lowering.register()
    kept: dict[Any, Any] = {op: lowerings[op] for op in making()}
    if "token" in marks:
        for op in making():
            _register_effectful_op(op, None)
            # Tracing a call with a token added it.
            _side_effectful_functions.discard(op)
    if "lowering" in marks:
        for op in making():
            del lowerings[op]
    try:
        yield
    finally:
        lowerings.update(kept)
        for op in making():
            _register_effectful_op(op, EffectType.ORDERED)


@pytest.mark.worlds(2)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@needs_compiler
@on_ranks(deadline=400.0)
def test_every_call_is_kept_in_its_order(rank: Rank, training: bool) -> None:
    """Hazard 26: 20 calls, some of which a compiler would drop, merge or reorder. Each rank
    compiles for itself, with different shapes."""
    kept, results = _compiled(rank, training)
    assert kept[0] == expected()
    assert rank.gather(kept) == [kept] * rank.size
    assert not any(results)
    assert len(kept) == 1 + training
    if training:  # gradients of equal calls are summed before they are reduced
        assert [c.split()[0] for c in kept[1]].count("reducescatter") == APART
        assert "allreduce" in " ".join(kept[1])


@pytest.mark.worlds(2)
@pytest.mark.parametrize("unmarked", ["token", "token lowering"])
@needs_compiler
@on_ranks(deadline=400.0)
def test_without_a_token_calls_are_lost(rank: Rank, unmarked: str) -> None:
    """The control: Inductor's node alone takes effect too late, and having neither mark is
    worse."""
    kept, _ = _compiled(rank, False, unmarked)
    assert len(kept[0]) < len(expected())


@pytest.mark.worlds(2)
@pytest.mark.skipif(torch.__version__ >= "2.15", reason="there the token keeps the order by itself")
@needs_compiler
@on_ranks(deadline=400.0)
def test_without_a_lowering_calls_change_their_places(rank: Rank) -> None:
    """The control: the token alone does not constrain Inductor's scheduler."""
    kept, _ = _compiled(rank, False, "lowering")
    assert sorted(kept[0]) == sorted(expected())
    assert kept[0] != expected()


@pytest.mark.worlds(2)
@needs_compiler
@on_ranks(deadline=400.0)
def test_forms_that_write_keep_their_place(rank: Rank) -> None:
    """They cannot have a token: the functional form is traced instead."""
    forms = [(op, form) for op in collectives.NAMES for form in tracing.forms(op)[1:]]

    def calls() -> list[Fields]:
        found = [call_of(op, 24, rank.size, style="random", splits="uneven") for op, _ in forms]
        return [
            tracing.call_with(rank, call, form)[1]
            for call, (_, form) in zip(found, forms, strict=True)
        ]

    def program(calls: list[Fields]) -> torch.Tensor:
        for (op, form), given in zip(forms, calls, strict=True):
            call_of(op).overload(form)(**given)
        return torch.ones(1, device=rank.device)

    eager, given = calls(), calls()
    program(eager)
    with inductor():
        _, kept = code_of(torch.compile(program, fullgraph=True), given)
    pairs = [pytree.arg_tree_leaves(found) for found in (given, eager)]
    tensors = [(a, b) for a, b in zip(*pairs, strict=True) if isinstance(a, torch.Tensor)]
    called = [collectives.OPS[op].packet for op, _ in forms]
    wrong = [differences(a.cpu(), b.cpu()) for a, b in tensors]
    assert kept[0] == called
    assert len(wrong) > len(called)
    assert not any(wrong)


@pytest.mark.worlds(2)
@pytest.mark.parametrize("in_place", [False, True], ids=["functional", "in_place"])
@needs_compiler
@on_ranks(deadline=300.0)
def test_checkpoints_do_not_call_again(rank: Rank, in_place: bool) -> None:
    """Activation checkpointing does not recompute collectives in the backward pass: it keeps their
    results."""
    name = rank.communicator().name

    def reduced(x: torch.Tensor) -> torch.Tensor:
        if in_place:
            torch.ops.collx.allreduce_(x, "sum", name)
            return x
        result: torch.Tensor = torch.ops.collx.allreduce(x, "sum", name)
        return result

    def block(x: torch.Tensor) -> torch.Tensor:
        torch.ops.collx.reduce(x.detach(), "sum", 0, name)
        inner = reduced(x @ x)
        return reduced(inner @ inner)

    def program(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(block, x, use_reentrant=False)
        return found

    found = []
    for function in (torch.compile(program, fullgraph=True), program):
        x = torch.eye(4, device=rank.device).requires_grad_()
        with inductor():
            result, kept = code_of(lambda x: [function(x)], x, backward=True)  # noqa: B023
        assert x.grad is not None
        found.append((result[0].detach().cpu(), x.grad.cpu(), kept))
    (a, b, kept), (c, d, _) = found
    wrong = [differences(a, c), differences(b, d)]
    assert wrong == ["", ""]
    assert kept == [["reduce", "allreduce", "allreduce"], ["allreduce", "allreduce"]]


@pytest.mark.worlds(2)
@needs_compiler
@on_ranks(deadline=300.0)
def test_a_communicator_that_is_not_there_is_named(rank: Rank) -> None:
    """Before init, and after destroy, when the code is already compiled. Dynamo wraps an error that
    occurs during tracing in its own exception."""

    def program(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.ops.collx.allreduce(x, "sum", "test-life")
        return found

    def thin(x: torch.Tensor) -> torch.Tensor:
        return collx.allgather(x, "test-life")  # looks up the number of ranks during tracing

    x = torch.ones(4, device=rank.device)
    with inductor():
        compiled = torch.compile(program, fullgraph=True)
        traced = attempt(lambda: torch.compile(thin, fullgraph=True)(x))
        early = attempt(lambda: compiled(x))
        communicator = rank.new_communicator("life")
        compiled(x)
        communicator.destroy()
        late = attempt(lambda: compiled(x))
        with rank.new_communicator("life"):
            compiled(x)
    assert 'no communicator "test-life"' in traced.message, traced
    for refused in (early, late):
        assert refused.error in ("ValueError", "CommunicatorPoisoned"), refused
        assert "test-life" in refused.message, refused


@pytest.mark.worlds(2)
@needs_compiler
@on_ranks(deadline=300.0)
def test_ranks_that_compile_different_code_are_told(rank: Rank) -> None:
    reduce_op = "sum" if rank.rank else "max"
    communicator = rank.new_communicator("differently", check=True, timeout=5.0)
    name = communicator.name

    def program(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.ops.collx.allreduce(x, reduce_op, name)
        return found

    def run() -> None:
        torch.compile(program, fullgraph=True)(torch.ones(4, device=rank.device))
        communicator.synchronize()

    with inductor():
        found = attempt(run)
    communicator.destroy()
    assert found.error == "CollectiveMismatch", found


@pytest.mark.worlds(2)
@needs_compiler
@on_ranks(deadline=500.0)
def test_compiled_code_takes_tensors_of_any_length(rank: Rank) -> None:
    """For some lengths the ranks' parts differ in size, which may need another program."""
    ops, name, size = torch.ops.collx, rank.communicator().name, rank.size

    def function(x: torch.Tensor) -> torch.Tensor:
        part = ops.reducescatter(ops.allreduce(x, "sum", name), "sum", size, name)
        whole: torch.Tensor = ops.allgather(part, size, name, 0, x.shape[0])
        return whole

    wrong = []
    with inductor(), torch.no_grad():
        compiled = torch.compile(function, fullgraph=True, dynamic=True)
        for rows in (4, 8, 7, 1, 9, 4):
            x = torch.arange(3.0 * rows, device=rank.device).view(rows, 3) + rank.rank
            wrong.append(differences(compiled(x).cpu(), function(x).cpu()))
    assert wrong == [""] * 6
