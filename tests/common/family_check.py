"""Makes calls of the whole family on the ranks and compares with the reference: copies by all their
bytes, reductions by NaN mask and bits, and the bytes around as in check.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from .check import Placed, arenas_of, bytes_around, differences, run_each, share_memory
from .family_cases import (
    IN_PLACE,
    ONE_TENSOR,
    OPS,
    Call,
    Fields,
    data_of,
    parts,
    splits_of,
    strides_of,
)
from .rank import Rank
from .values import dense, unequal

Tensors = tuple[torch.Tensor, ...]

NEW_TENSORS = ("functional", "python")  # forms that return them
OUTS = ("out", "output_splits")


def byte_differences(result: torch.Tensor, expected: torch.Tensor) -> str:
    """What is wrong with a copy, by all its bytes; empty when nothing is."""
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return f"got {result.dtype}{list(result.shape)}, not {expected.dtype}{list(expected.shape)}"
    where = unequal(result, expected).nonzero().flatten()
    if len(where) == 0:
        return ""
    first = int(where[0])
    got, want = (
        dense(tensor).view(-1)[first : first + 1].view(torch.uint8).tolist()
        for tensor in (result, expected)
    )
    return (
        f"{len(where)} of {result.numel()} elements differ, the first at {first}: "
        f"bytes {got} instead of {want}"
    )


def all_differences(call: Call, world: int, rank: int, results: Tensors, expected: Tensors) -> str:
    """What is wrong with a call's results on a rank."""
    reduced = OPS[call.op].reduces and (call.op != "reduce" or rank == call.root % world)
    compare = differences if reduced else byte_differences
    if len(results) != len(expected):
        return f"{len(results)} results instead of {len(expected)}"
    found = (compare(got.cpu(), want) for got, want in zip(results, expected, strict=True))
    return next((wrong for wrong in found if wrong), "")


def arguments_of(communicator: Any, call: Call, source: torch.Tensor) -> Fields:
    """This rank's arguments of the op in torch.ops.collx, by name."""
    world, rank = communicator.world_size, communicator.rank
    op = OPS[call.op]
    given: Fields = {"input": source, **op.arguments(call, world, rank)}
    if op.name == "alltoallv_device":
        given["input_splits"] = torch.tensor(splits_of(call, world)[rank], device=source.device)
    if op.sized:
        given["group_size"] = world
    given["group_name"] = communicator.name
    return {**given, "algorithm": call.algorithm, "max_blocks": call.max_blocks}


def overload(name: str, form: str) -> Callable[..., Any]:
    """The operator in torch.ops.collx that has a form: "functional", "out" or "inplace"."""
    op = OPS[name]
    packet = getattr(torch.ops.collx, (op.packet or name) + "_" * (form == "inplace"))
    which = {"functional": op.overloads[0], "out": op.overloads[1], "inplace": "default"}[form]
    found: Callable[..., Any] = getattr(packet, which)
    return found


def _function_call(
    name: str, form: str, communicator: Any, given: Fields, outs: Tensors
) -> tuple[Callable[..., Any], Fields]:
    """The function in collx, and its arguments by name."""
    import collx

    mine = {key: value for key, value in given.items() if key not in ("group_size", "group_name")}
    if form == "python_out":
        mine.update(zip(OUTS, outs, strict=False))
    if name == "alltoallv_device":
        mine["device_splits"] = mine.pop("input_splits")
    packet = OPS[name].packet or name
    function = getattr(collx, packet + "_" * (form == "python_inplace"))
    return function, {**mine, "group": communicator}


def _function_results(form: str, given: Fields, outs: Tensors, result: Any) -> Tensors:
    results: Tensors = result if isinstance(result, tuple) else (result,)
    wanted = {"python_out": outs, "python_inplace": (given["input"],)}.get(form)
    if wanted is not None:
        assert len(results) == len(wanted), "not what was given is returned"
        assert all(got is want for got, want in zip(results, wanted, strict=True))
    return results


def make(communicator: Any, call: Call, given: Fields, outs: Tensors) -> Tensors:
    """Makes a call in its form, with these arguments; the tensors that hold the results."""
    if call.form.startswith("python"):
        function, mine = _function_call(call.op, call.form, communicator, given, outs)
        return _function_results(call.form, given, outs, function(**mine))
    if call.form == "functional":
        result = overload(call.op, "functional")(**given)
        return result if isinstance(result, tuple) else (result,)
    if call.form == "inplace":
        assert overload(call.op, "inplace")(**given) is None
        return (given["input"],)
    assert overload(call.op, "out")(**given, **dict(zip(OUTS, outs, strict=False))) is None
    return outs


class Prepared:
    """A call whose tensors lie in poisoned memory. `at`: where in the arenas, in bytes."""

    def __init__(self, rank: Rank, communicator: Any, call: Call, at: int = 0) -> None:
        self.call = call
        self.communicator = communicator
        inputs, results = data_of(call, communicator.world_size)
        self.expected = results[communicator.rank]
        data = inputs[communicator.rank]
        arenas = arenas_of(rank, communicator) if call.symmetric != "none" else None
        self._device = rank.device
        self._input_memory = self._output_memory = None
        if arenas and call.symmetric in ("input", "both"):
            self._input_memory = arenas.input[at:]
        if arenas and call.symmetric in ("output", "both"):
            self._output_memory = arenas.output[at:]
        self.source, self.outs = self._place(data, self.expected)
        self.source.view.copy_(data)
        self.given = arguments_of(communicator, call, self.source.view)
        self._before = [placed.whole.cpu().clone() for placed in (self.source, *self.outs)]

    def _placed_like(self, like: torch.Tensor, is_input: bool) -> Placed:
        call = self.call
        layout = call.layout if is_input else call.output_layout
        offset = call.input_offset if is_input else call.output_offset
        memory = self._input_memory if is_input else self._output_memory
        shape = tuple(like.shape)
        strides = strides_of(layout, shape)
        return Placed.poisoned(like.dtype, shape, strides, offset, memory, self._device)

    def _place(self, data: torch.Tensor, expected: Tensors) -> tuple[Placed, list[Placed]]:
        call, me = self.call, self.communicator.rank
        if call.form in IN_PLACE:
            source = self._placed_like(data, True)
            return source, [source]
        if call.form == "part":
            larger, smaller = self._placed_like(data, True), expected[0]
            if call.op == "allgather":
                larger, smaller = self._placed_like(expected[0], False), data
            axis = call.axis % smaller.dim()
            sizes = parts(larger.view.shape[axis], self.communicator.world_size)
            part = larger.part(axis, sum(sizes[:me]), sizes[me])
            return (part, [larger]) if call.op == "allgather" else (larger, [part])
        outs = [self._placed_like(expected[0], False)]
        if len(expected) > 1:
            shape = tuple(expected[1].shape)
            outs.append(Placed.poisoned(torch.int64, shape, (1,), 0, None, self._device))
        return self._placed_like(data, True), outs

    def make(self) -> Tensors:
        """Makes the call."""
        return make(self.communicator, self.call, self.given, tuple(o.view for o in self.outs))

    def post(self) -> Callable[[], Tensors]:
        """Posts the call, of a form that Python has; a function that waits for the results."""
        outs = tuple(o.view for o in self.outs)
        call, given = self.call, self.given
        function, mine = _function_call(call.op, call.form, self.communicator, given, outs)
        handle = function(**mine, async_op=True)
        return lambda: _function_results(call.form, given, outs, handle.wait())

    def wrong(self, results: Tensors, input_kept: bool = True) -> str:
        """What is wrong after the call; `input_kept`: nobody has written to the input since."""
        call, communicator = self.call, self.communicator
        wrong = all_differences(
            call, communicator.world_size, communicator.rank, results, self.expected
        )
        for placed, before in zip(self.outs, self._before[1:], strict=True):
            if call.form not in NEW_TENSORS:
                wrong = wrong or bytes_around(placed, before)
        checked = input_kept and call.form not in ONE_TENSOR
        if checked and bool(unequal(self.source.whole.cpu(), self._before[0]).any()):
            wrong = wrong or "the input changed"
        if not wrong and call.form in NEW_TENSORS:
            wrong = self._wrong_tensor(results)
        return wrong

    def _wrong_tensor(self, results: Sequence[torch.Tensor]) -> str:
        for result in results:
            if not result.is_contiguous():
                return f"the result has strides {result.stride()}"
            if share_memory(result, self.source.view) or result._base is not None:
                return "the result shares memory with the input"
        return ""


def run_call(rank: Rank, communicator: Any, call: Call) -> str:
    """Makes one call on this rank. Returns what is wrong, or an empty text."""
    if call.op == "barrier":
        torch.ops.collx.barrier(communicator.name)
        return ""
    prepared = Prepared(rank, communicator, call)
    return prepared.wrong(prepared.make())


def run_calls(rank: Rank, calls: Iterable[Call], key: str = "default") -> list[str]:
    """A job: makes the calls one after the other; what went wrong, one line each."""
    return run_each(rank, calls, run_call, key)
