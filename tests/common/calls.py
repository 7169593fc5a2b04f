"""The harness of the operators' tests. A call of an operator is a plain value that is sent to the
ranks. There, the harness makes the call and compares its results with the reference.

Each family of operators has a subclass of `Call`: collectives.py, norms.py. operators.py lists all
operators. Quantized values and copies are compared by all their bytes, other results by NaN mask
and bits. The memory around each tensor is checked as in check.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any, TypeVar

import torch

from .check import Placed, arenas_of, bytes_around, differences, run_each, share_memory
from .rank import Rank
from .values import FLOATS, dense, dtype_of, unequal

Fields = dict[str, Any]
Tensors = tuple[torch.Tensor, ...]
Kind = TypeVar("Kind", bound="Call")

NEW_TENSORS = ("functional", "python")  # forms that return new tensors
WIDE = tuple(map(dtype_of, FLOATS))


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The fields that do not affect the values. Calls that only differ in these share their data.

    form           "functional", "out", "inplace": of torch.ops.collx; "python", "python_out",
                   "python_inplace": of the functions in collx; and forms of the subclass, which
                   are "out" with tensors that share memory
    layout         the layout of the inputs: "contiguous", "transposed", "sliced", "spread"
    output_layout  "natural" (the layout of a new result), or one of the layouts above
    input_offset, output_offset   the number of elements before each tensor
    symmetric      which of input and output are in symmetric memory: "none", "input", "output",
                   "both"
    """

    algorithm: str = "auto"
    form: str = "out"
    max_blocks: int = 0
    input_offset: int = 0
    output_offset: int = 0
    layout: str = "contiguous"
    output_layout: str = "natural"
    symmetric: str = "none"


@dataclass(frozen=True)
class Data:
    """The tensors of every rank by the names of the arguments, and its expected results, on the
    CPU. Must not be modified."""

    given: list[Fields]
    expected: list[Tensors]


class Call(Placement, ABC):
    """A call: its arguments, and the placement and the values of its tensors. Subclasses are frozen
    dataclasses with the arguments of their operators and these fields. `style`: the style of the
    values, see make_values."""

    op: str
    dtype: str
    style: str
    seed: int

    def __repr__(self) -> str:
        """Returns the call as Python code, with the fields that are not the default."""
        given = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in sorted(fields(self), key=lambda field: bool(field.kw_only))
            if getattr(self, field.name) != field.default
        ]
        return f"{type(self).__module__.rpartition('.')[2]}.Call({', '.join(given)})"

    @abstractmethod
    def legal(self: Kind) -> Kind:
        """Returns the closest valid call."""

    @abstractmethod
    def make_data(self, world: int) -> Data:
        """Returns the inputs and the expected results of the ranks."""

    @abstractmethod
    def outputs(self) -> tuple[str, ...]:
        """Returns the names of the results."""

    @abstractmethod
    def by_bytes(self, output: str, world: int, rank: int) -> bool:
        """Whether all bytes of a result are specified, including those of a NaN."""

    @abstractmethod
    def overload(self, form: str) -> Callable[..., Any]:
        """Returns the operator in torch.ops.collx for a form: "functional", "out" or "inplace"."""

    @abstractmethod
    def arguments(self, communicator: Any, tensors: Fields) -> Fields:
        """Returns a rank's arguments of the operator, by name, without outputs. `tensors`: the
        tensors of the rank, by the names in `Data.given`."""

    @abstractmethod
    def function_call(
        self, communicator: Any, given: Fields, outs: Tensors
    ) -> tuple[Callable[..., Any], Fields]:
        """Returns the function in collx, and its arguments by name."""

    def shared(self, output: str) -> str:
        """Returns the name of the input whose memory an output uses; "" if it has its own."""
        return "input" if self.form in ("inplace", "python_inplace", "alias") else ""

    def part(self, world: int, rank: int) -> tuple[str, int, int, int] | None:
        """Returns, for the form "part", the name of the larger one of "input" and "out", and axis,
        start and length of the smaller one in it."""
        return None

    def is_large(self, world: int) -> bool:
        """Whether the data is too large to be cached for other calls."""
        return False

    def data(self, world: int) -> Data:
        """Returns the inputs and the expected results of the ranks. Must not be modified."""
        call = self._of_same_data
        return call.make_data(world) if self.is_large(world) else _kept(call, world)

    @cached_property
    def _of_same_data(self: Kind) -> Kind:
        """The call with the default placement."""
        return replace(self, **asdict(Placement()))

    def tensors(self, rank: Rank) -> Fields:
        """Returns the rank's tensors, dense, on its device."""
        given = self.data(rank.size).given[rank.rank]
        return {name: tensor.to(rank.device, copy=True) for name, tensor in given.items()}

    def wrong_results(self, world: int, rank: int, results: Tensors) -> str:
        """Describes errors in a rank's results; "" if there are none."""
        expected = self.data(world).expected[rank]
        if len(results) != len(expected):
            return f"{len(results)} results instead of {len(expected)}"
        for name, got, want in zip(self.outputs(), results, expected, strict=False):
            exact = self.by_bytes(name, world, rank)
            if wrong := (byte_differences if exact else differences)(got.cpu(), want):
                return f"{name}: {wrong}"
        return ""


@lru_cache(maxsize=8)
def _kept(call: Call, world: int) -> Data:
    return call.make_data(world)


def byte_differences(result: torch.Tensor, expected: torch.Tensor) -> str:
    """Describes the differences of a copy, compared by all its bytes; "" if there are none."""
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


def strides_of(layout: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the strides of a tensor in a layout; contiguous strides if the shape does not support
    the layout."""
    if layout == "transposed":
        return tuple(torch.empty(shape[::-1], device="meta").stride()[::-1])
    if layout == "sliced" and len(shape) > 1:
        return torch.empty((*shape[:-1], shape[-1] + 3), device="meta").stride()
    compact = torch.empty(shape, device="meta").stride()
    return tuple(2 * stride for stride in compact) if layout == "spread" else compact


def as_tuple(result: Any) -> Tensors:
    """Returns the results of an operator as a tuple."""
    return result if isinstance(result, tuple) else (result,)


def _function_results(form: str, given: Fields, outs: Tensors, result: Any) -> Tensors:
    results = as_tuple(result)
    wanted = {"python_out": outs, "python_inplace": (given["input"],)}.get(form)
    if wanted is not None:
        assert len(results) == len(wanted), "not what was given is returned"
        assert all(got is want for got, want in zip(results, wanted, strict=True))
    return results


def make(communicator: Any, call: Call, given: Fields, outs: Tensors) -> Tensors:
    """Makes a call in its form with these arguments. Returns the tensors with the results."""
    if call.form.startswith("python"):
        function, mine = call.function_call(communicator, given, outs)
        return _function_results(call.form, given, outs, function(**mine))
    if call.form == "functional":
        return as_tuple(call.overload("functional")(**given))
    if call.form == "inplace":
        assert call.overload("inplace")(**given) is None
        return (given["input"],)
    by_name = dict(zip(call.outputs(), outs, strict=True))
    assert call.overload("out")(**given, **by_name) is None
    return outs


class Prepared:
    """A call with tensors in poisoned memory. `at`: the offset in the arenas, in bytes."""

    def __init__(self, rank: Rank, communicator: Any, call: Call, at: int = 0) -> None:
        self.call, self.communicator, self._device = call, communicator, rank.device
        self._world, self._rank = communicator.world_size, communicator.rank
        data = call.data(self._world)
        self.expected = data.expected[self._rank]
        memory: list[Any] = [None, None]
        if call.symmetric != "none":
            arenas = arenas_of(rank, communicator)
            memory[0] = arenas.input[at:] if call.symmetric != "output" else None
            memory[1] = arenas.output[at:] if call.symmetric != "input" else None
        given = data.given[self._rank]
        self.read = self._place_inputs(given, memory[0])
        self.outs = self._place_outputs(memory[1])
        if (part := call.part(self._world, self._rank)) is not None:
            larger, *place = part
            if larger == "out":
                self.read["input"] = self.outs[0].part(*place)
            else:
                self.outs[0] = self.read["input"].part(*place)
        for name, tensor in given.items():
            self.read[name].view.copy_(tensor)
        views = {name: placed.view for name, placed in self.read.items()}
        self.given = call.arguments(communicator, views)
        self._read_before = {name: placed.whole.cpu().clone() for name, placed in self.read.items()}
        self._outs_before = [placed.whole.cpu().clone() for placed in self.outs]

    @property
    def source(self) -> Placed:
        return self.read["input"]

    def _placed(self, like: torch.Tensor, strides: Any, offset: int, memory: Any) -> Placed:
        shape = tuple(like.shape)
        return Placed.poisoned(like.dtype, shape, tuple(strides), offset, memory, self._device)

    def _place_inputs(self, given: Fields, memory: Any) -> dict[str, Placed]:
        layout, offset = self.call.layout, self.call.input_offset
        return {
            name: self._placed(
                tensor,
                strides_of(layout, tuple(tensor.shape)),
                offset,
                memory if name == "input" else None,
            )
            for name, tensor in given.items()
        }

    def _place_outputs(self, memory: Any) -> list[Placed]:
        layout, offset = self.call.output_layout, self.call.output_offset
        placed = []
        for name, want in zip(self.call.outputs(), self.expected, strict=True):
            if shared := self.call.shared(name):
                placed.append(self.read[shared])
                continue
            strides = want.stride() if layout == "natural" else strides_of(layout, want.shape)
            placed.append(self._placed(want, strides, offset, None if placed else memory))
        return placed

    def make(self) -> Tensors:
        """Makes the call while free memory contains NaN, to detect reads of other memory."""
        poison = [
            torch.full_like(placed.whole, float("nan"))
            for placed in self.read.values()
            if placed.whole.dtype in WIDE
        ]
        del poison
        return make(self.communicator, self.call, self.given, tuple(o.view for o in self.outs))

    def post(self) -> Callable[[], Tensors]:
        """Posts the call, in a form of the Python function. Returns a function that waits for the
        results."""
        outs = tuple(o.view for o in self.outs)
        call, given = self.call, self.given
        function, mine = call.function_call(self.communicator, given, outs)
        handle = function(**mine, async_op=True)
        return lambda: _function_results(call.form, given, outs, handle.wait())

    def wrong(self, results: Tensors, input_kept: bool = True) -> str:
        """Describes errors after the call. `input_kept`: the inputs have not been overwritten
        since."""
        call = self.call
        if wrong := call.wrong_results(self._world, self._rank, results):
            return wrong
        if call.form in NEW_TENSORS:
            return self._wrong_tensors(results) or self._changed(input_kept)
        for placed, before in zip(self.outs, self._outs_before, strict=True):
            if wrong := bytes_around(placed, before):
                return wrong
        return self._changed(input_kept)

    def _changed(self, input_kept: bool) -> str:
        written = {self.call.shared(name) for name in self.call.outputs()}
        written |= {"input"} if self.call.form == "part" else set()
        for name, placed in self.read.items() if input_kept else ():
            before = self._read_before[name]
            if name not in written and bool(unequal(placed.whole.cpu(), before).any()):
                return f"the {name} changed"
        return ""

    def _wrong_tensors(self, results: Tensors) -> str:
        for number, (result, want) in enumerate(zip(results, self.expected, strict=True)):
            if result.stride() != want.stride():
                return f"result {number} has strides {result.stride()} instead of {want.stride()}"
            others = [*(placed.view for placed in self.read.values()), *results[:number]]
            if result._base is not None or any(share_memory(result, other) for other in others):
                return f"result {number} shares memory"
        return ""


def run_call(rank: Rank, communicator: Any, call: Call) -> str:
    """Makes one call on this rank. Returns a description of errors, "" if there are none."""
    if call.op == "barrier":
        torch.ops.collx.barrier(communicator.name)
        return ""
    prepared = Prepared(rank, communicator, call)
    return prepared.wrong(prepared.make())


def run_calls(rank: Rank, calls: Iterable[Call], key: str = "default") -> list[str]:
    """A job that makes the calls one after the other. Returns one line for each failure."""
    return run_each(rank, calls, run_call, key)
