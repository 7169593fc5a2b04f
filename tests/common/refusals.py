"""Valid calls that a row of a table makes invalid, and the expected errors. The tables are in
suites/bad_input.py, bad_norms.py, bad_splits.py."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import pytest
import torch

from .attempt import Attempt, attempt, finish, works
from .calls import Call, Data, Fields, run_call
from .operators import algorithms_of, call_of, name_in_errors
from .pool import Pool
from .rank import Rank

Ops = tuple[str, ...]

COLS = 128  # columns of the input of a normalization


@cache
def _right(op: str, world: int) -> tuple[Call, Data]:
    """Returns a valid call, which the rows of a table change."""
    collective: Fields = {"shape": (6, 4), "style": "random", "spare": 2}
    norm: Fields = {"rows": 2 * world, "cols": COLS, "keep_norm": False}
    call = call_of(op, world=world, dtype="float32", form="functional", **collective, **norm)
    return call, call.make_data(world)


class Given:
    """A valid call of a rank. `given[name]` is an argument or an output."""

    def __init__(self, rank: Rank, op: str) -> None:
        self.rank, self.world, self.op = rank, rank.size, op
        self.communicator = rank.communicator()
        self.call, data = _right(op, rank.size)
        tensors = {n: t.to(rank.device, copy=True) for n, t in data.given[rank.rank].items()}
        self.arguments = self.call.arguments(self.communicator, tensors)
        results = [result.to(rank.device) for result in data.expected[rank.rank]]
        self.outs: Fields = dict(zip(self.call.outputs(), results, strict=True))

    def __getitem__(self, name: str) -> Any:
        """Returns an argument or output. `out` is the first output, whatever its name is."""
        return {"out": next(iter(self.outs.values())), **self.arguments, **self.outs}[name]

    @property
    def input(self) -> torch.Tensor:
        tensor: torch.Tensor = self.arguments["input"]
        return tensor

    def one(self, count: int = 1, **options: Any) -> torch.Tensor:
        return torch.ones(count, device=self.rank.device, **options)

    def symmetric(self) -> torch.Tensor:
        """Returns a tensor with the shape of the input in symmetric memory."""
        tensor: torch.Tensor = self.communicator.empty(tuple(self.input.shape))
        return tensor.fill_(1)

    def elsewhere(self, name: str) -> torch.Tensor:
        device = "cpu" if self.rank.device.type == "cuda" else "meta"
        return torch.empty_like(self[name], device=device)

    def spoiled(self, row: Wrong) -> Fields:
        changes: Fields = {}
        for name, value in row.changes.items():
            changed = value(self) if callable(value) else value
            changes.update(changed if name == "several" else {name: changed})
        if row.form == "out":
            changes = {**self.outs, **changes}
            if "out" not in self.outs and "out" in changes:
                changes[next(iter(self.outs))] = changes.pop("out")
        return {**self.arguments, **changes}


@dataclass(frozen=True)
class Wrong:
    """A row: its operators, words of the message ("{out}" is the name of the first output,
    "{algorithms}" the names of all algorithms of the operator), the class of the error, the changed
    argument (values, or functions of `Given`; `several` changes several by name), and the minimum
    number of ranks."""

    ops: Ops
    words: tuple[str, ...]
    error: str
    form: str
    changes: Fields
    least: int = 1


def value(ops: Ops, *words: str, form: str = "functional", least: int = 1, **changes: Any) -> Wrong:
    return Wrong(ops, words, "ValueError", form, changes, least)


def dtype(ops: Ops, *words: str, form: str = "functional", **changes: Any) -> Wrong:
    return Wrong(ops, words, "TypeError", form, changes)


def assert_refused(op: str, row: Wrong, found: Attempt) -> None:
    assert found.error == row.error, (op, found)
    stands_for = {"{out}": (call_of(op).outputs()[0],), "{algorithms}": algorithms_of(op)}
    for word in (name_in_errors(op), *row.words):
        placeholder = next((name for name in stands_for if name in word), "")
        for text in stands_for.get(placeholder, ("",)):
            wanted = word.replace(placeholder, text) if placeholder else word
            assert wanted.lower() in found.message.lower(), (op, wanted, found.message)


def _refused(rank: Rank, suite: str, what: str) -> dict[str, Attempt]:
    """Calls the operators of a row with invalid arguments, and returns the outcomes on this rank.
    Checks that the communicator still works."""
    communicator = rank.communicator()
    row, found = import_module(suite).WRONG[what], {}
    for op in row.ops:
        given = Given(rank, op)
        arguments, function = given.spoiled(row), given.call.overload(row.form)
        found[op] = attempt(lambda: function(**arguments))  # noqa: B023
        communicator.raise_if_failed()
    finish(communicator)
    assert works(rank, communicator)
    assert run_call(rank, communicator, call_of(row.ops[-1], 50, rank.size)) == ""
    return found


def assert_all_refused(pool: Pool, suite: str, what: str) -> None:
    """Makes the invalid calls of a row of the suite's table WRONG, and checks the errors of all
    ranks."""
    row: Wrong = import_module(suite).WRONG[what]
    if pool.size < row.least:
        pytest.skip("right with so few ranks")
    for found in pool.run(_refused, suite, what):
        assert tuple(found) == row.ops
        for op, result in found.items():
            assert_refused(op, row, result)
