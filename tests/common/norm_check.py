"""Makes calls of the fused normalizations on the ranks and compares with the reference: quantized
values and scales by all their bytes, other tensors by NaN mask and bits; and the bytes around.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from .check import Placed, arenas_of, bytes_around, differences, run_each, share_memory
from .family_cases import strides_of
from .family_check import byte_differences
from .norm_cases import (
    EPILOGUES,
    Call,
    Fields,
    Tensors,
    data_of,
    family_of,
    outputs_of,
    quantizes,
    scale_options,
)
from .rank import Rank
from .values import dtype_of, unequal

NEW_TENSORS = ("functional", "python")  # forms that return them


def wrong_results(call: Call, results: Tensors, expected: Tensors) -> str:
    """What is wrong with a call's results on a rank."""
    if len(results) != len(expected):
        return f"{len(results)} results instead of {len(expected)}"
    names = outputs_of(call.op, call.keep_norm)
    for name, got, want in zip(names, results, expected, strict=True):
        compare = byte_differences if name in ("q_out", "scale_out") else differences
        wrong = compare(got.cpu(), want)
        if wrong:
            return f"{name}: {wrong}"
    return ""


def overload(op: str, keep_norm: bool, out: bool) -> Callable[..., Any]:
    """The operator in torch.ops.collx."""
    packet = getattr(torch.ops.collx, op)
    name = ("keep_norm_out" if out else "keep_norm") if keep_norm else ("out" if out else "default")
    found: Callable[..., Any] = getattr(packet, name)
    return found


def arguments_of(call: Call, group_name: str, tensors: Fields) -> Fields:
    """A rank's arguments of the op in torch.ops.collx, by name. `tensors`: input, weight, and
    residual, bias, scale and extras_0, extras_1, ... where the call has them."""
    given: Fields = {**tensors, "eps": call.eps, "group_name": group_name}
    if call.epilogue:
        extras = [given.pop(name) for name in tensors if name.startswith("extras_")]
        given.update(expression=_expression(call), extras=extras)
    if "layernorm" not in call.op:
        given["weight_offset"] = call.weight_offset
    if quantizes(call.op):
        given.update(scale_options(call))
    given["rounding"] = call.rounding
    return {**given, "algorithm": call.algorithm, "max_blocks": call.max_blocks}


def _expression(call: Call) -> str:
    from collx.epilogues import expression_of

    case, dims = EPILOGUES[call.epilogue], len(call.shape)
    return expression_of(
        call.op, case.function, dtype_of(call.dtype), case.extras, dims if case.index else None
    )


def tensors_of(call: Call, world: int, rank: int, device: torch.device) -> Fields:
    """A rank's tensors, dense, on a device."""
    data = data_of(call, world)
    found = {"input": data.inputs[rank], "weight": data.weight}
    if data.residuals is not None:
        found["residual"] = data.residuals[rank]
    if data.bias is not None:
        found["bias"] = data.bias
    if data.scale is not None:
        found["scale"] = data.scale
    found.update({f"extras_{i}": extra for i, extra in enumerate(data.extras[rank])})
    return {name: tensor.to(device, copy=True) for name, tensor in found.items()}


def _function_call(
    communicator: Any, call: Call, given: Fields, outs: Tensors
) -> tuple[Callable[..., Any], Fields]:
    """The function in collx, and its arguments by name."""
    import collx

    scaled = scale_options(call) if quantizes(call.op) else {}
    mine = {k: v for k, v in given.items() if k != "group_name" and k not in scaled}
    if call.epilogue:
        case = EPILOGUES[call.epilogue]
        del mine["expression"]
        mine.update(epilogue=case.function, index=case.index)
    if scaled:
        kind = call.op.rpartition("_")[2]
        mine["quantization"] = collx.Quantization(kind, **scaled)
        mine["keep_norm"] = call.keep_norm
    if call.form != "python":
        mine["out"] = outs[0] if len(outs) == 1 else outs
    return getattr(collx, family_of(call.op)), {**mine, "group": communicator}


def _function_results(call: Call, outs: Tensors, result: Any) -> Tensors:
    results: Tensors = result if isinstance(result, tuple) else (result,)
    if call.form == "python":
        return results
    assert all(got is want for got, want in zip(results, outs, strict=True)), "not what was given"
    return outs


def make(communicator: Any, call: Call, given: Fields, outs: Tensors) -> Tensors:
    """Makes a call in its form, with these arguments; the tensors that hold the results."""
    if call.form.startswith("python"):
        function, mine = _function_call(communicator, call, given, outs)
        return _function_results(call, outs, function(**mine))
    if call.form == "functional":
        result = overload(call.op, call.keep_norm, False)(**given)
        return result if isinstance(result, tuple) else (result,)
    names = outputs_of(call.op, call.keep_norm)
    by_name = dict(zip(names, outs, strict=True))
    assert overload(call.op, call.keep_norm, True)(**given, **by_name) is None
    return outs


class Prepared:
    """A call whose tensors lie in poisoned memory. `at`: where in the arenas, in bytes."""

    def __init__(self, rank: Rank, communicator: Any, call: Call, at: int = 0) -> None:
        self.call = call
        self.communicator = communicator
        data = data_of(call, communicator.world_size)
        self.expected = data.expected[communicator.rank]
        self._device = rank.device
        tensors = tensors_of(call, communicator.world_size, communicator.rank, rank.device)
        memory = arenas_of(rank, communicator).input[at:] if call.symmetric else None
        self.read: dict[str, Placed] = {}
        for name, tensor in tensors.items():
            strides = strides_of(call.layout, tuple(tensor.shape))
            own = memory if name == "input" else None
            placed = self._placed(tensor.dtype, tensor.shape, strides, call.input_offset, own)
            placed.view.copy_(tensor)
            self.read[name] = placed
        self.outs = self._outputs()
        views = {name: placed.view for name, placed in self.read.items()}
        self.given = arguments_of(call, communicator.name, views)
        self._read_before = {name: placed.whole.cpu().clone() for name, placed in self.read.items()}
        self._outs_before = [placed.whole.cpu().clone() for placed in self.outs]

    def _placed(
        self, dtype: torch.dtype, shape: Any, strides: Any, offset: int, memory: Any = None
    ) -> Placed:
        return Placed.poisoned(dtype, tuple(shape), tuple(strides), offset, memory, self._device)

    def _outputs(self) -> list[Placed]:
        call = self.call
        placed = []
        for name, want in zip(outputs_of(call.op, call.keep_norm), self.expected, strict=True):
            if name == "residual_out" and call.form == "updated":
                placed.append(self.read["residual"])
                continue
            natural = call.output_layout == "natural"
            strides = want.stride() if natural else strides_of(call.output_layout, want.shape)
            placed.append(self._placed(want.dtype, want.shape, strides, call.output_offset))
        return placed

    def make(self) -> Tensors:
        """Makes the call, where memory that is free holds NaN: what is not given is not read."""
        poison = [torch.full_like(placed.whole, 0).fill_(_NAN) for placed in self._floats()]
        del poison
        return make(self.communicator, self.call, self.given, tuple(o.view for o in self.outs))

    def post(self) -> Callable[[], Tensors]:
        """Posts the call, of a form that Python has; a function that waits for the results."""
        outs = tuple(o.view for o in self.outs)
        function, mine = _function_call(self.communicator, self.call, self.given, outs)
        handle = function(**mine, async_op=True)
        return lambda: _function_results(self.call, outs, handle.wait())

    def _floats(self) -> list[Placed]:
        wide = (torch.float32, torch.float16, torch.bfloat16)
        return [placed for placed in (*self.read.values(),) if placed.whole.dtype in wide]

    def wrong(self, results: Tensors, input_kept: bool = True) -> str:
        """What is wrong after the call; `input_kept`: nobody has written to its tensors since."""
        call = self.call
        wrong = wrong_results(call, results, self.expected)
        for placed, before in zip(self.outs, self._outs_before, strict=True):
            if call.form not in NEW_TENSORS:
                wrong = wrong or bytes_around(placed, before)
        for name, placed in self.read.items():
            updated = call.form == "updated" and name == "residual"
            if wrong or updated or not input_kept:
                continue
            if bool(unequal(placed.whole.cpu(), self._read_before[name]).any()):
                wrong = f"the {name} changed"
        if not wrong and call.form in NEW_TENSORS:
            wrong = self._wrong_tensors(results)
        return wrong

    def _wrong_tensors(self, results: Tensors) -> str:
        for number, (result, want) in enumerate(zip(results, self.expected, strict=True)):
            if result.stride() != want.stride():
                return f"result {number} has strides {result.stride()} instead of {want.stride()}"
            others = [*(placed.view for placed in self.read.values()), *results[:number]]
            if result._base is not None or any(share_memory(result, other) for other in others):
                return f"result {number} shares memory"
        return ""


_NAN = float("nan")


def run_norm(rank: Rank, communicator: Any, call: Call) -> str:
    """Makes one call on this rank. Returns what is wrong, or an empty text."""
    prepared = Prepared(rank, communicator, call)
    return prepared.wrong(prepared.make())


def run_norms(rank: Rank, calls: Iterable[Call], key: str = "default") -> list[str]:
    """A job: makes the calls one after the other; what went wrong, one line each."""
    return run_each(rank, calls, run_norm, key)
