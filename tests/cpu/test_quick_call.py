"""Operators called by the extension: what it does itself, and what it leaves to PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import collx  # noqa: F401  (loads the operators)
from collx._extension import extension
from collx.epilogues import expression_of
from collx.ops.arguments import quick

EPILOGUE = torch.ops.collx.epilogue.default
NORM = torch.ops.collx.allreduce_residual_rmsnorm
TEXT = expression_of("epilogue", lambda v, e: v + e, torch.float32, 1)
VALUE = torch.arange(4.0)


class Subclass(torch.Tensor):
    pass


class Usual:
    """PyTorch's own call, which notes that it was made."""

    def __init__(self, overload: Any) -> None:
        self.calls = 0
        self._op = overload._op
        self.quick = extension.quick_call(
            overload._schema.name, overload._schema.overload_name, self
        )

    def __call__(self, *given: Any, **named: Any) -> Any:
        self.calls += 1
        return self._op(*given, **named)


def rows(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="meta")


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ((VALUE, TEXT, [VALUE]), {}),
        ((VALUE, TEXT, (VALUE,)), {}),
        ((torch.nn.Parameter(VALUE, requires_grad=False), TEXT, [VALUE], 0), {"start": 0}),
    ],
)
def test_plain_arguments_go_to_the_operator(
    given: tuple[Any, ...], options: dict[str, Any]
) -> None:
    usual = Usual(EPILOGUE)
    assert torch.equal(usual.quick(*given, **options), VALUE + VALUE)
    assert usual.calls == 0


def test_the_last_text_is_not_taken_for_another_one() -> None:
    """By turns, in an equal text that is another object, and behind one that was refused."""
    product = expression_of("epilogue", lambda v, e: v * e, torch.float32, 1)
    usual = Usual(EPILOGUE)
    for text, want in ((TEXT, VALUE + VALUE), (product, VALUE * VALUE)) * 2:
        for same in (text, text, "".join(list(text))):
            assert torch.equal(usual.quick(VALUE, same, [VALUE]), want)
        with pytest.raises(ValueError, match="expression"):
            usual.quick(VALUE, text + "?", [VALUE])
    assert usual.calls == 0


def test_results_are_a_tuple_or_the_given_tensors() -> None:
    given = (rows(2, 8), rows(2, 8), rows(8), 1e-6, "nobody")
    usual = Usual(NORM.default)
    assert [r.shape for r in usual.quick(*given, rounding="parity")] == [(2, 8), (2, 8)]
    assert usual.calls == 0
    usual = Usual(NORM.out)
    assert usual.quick(*given, rows(2, 8), rows(2, 8)) is None
    name = "".join(["rounding"])  # an equal name that is another object
    assert usual.quick(*given, rows(2, 8), rows(2, 8), **{name: "parity"}) is None
    assert usual.calls == 0


def test_given_tensors_are_left_to_pytorch_by_name() -> None:
    given = (rows(2, 8), rows(2, 8), rows(8), 1e-6, "nobody")
    usual = Usual(NORM.out)
    outs = rows(2, 8), rows(2, 8).as_subclass(Subclass)
    assert usual.quick(*given, *outs, rounding="parity") is None
    assert usual.calls == 1
    with pytest.raises(TypeError, match="missing"):
        usual.quick(outs[0])


@pytest.mark.parametrize("where", ["value", "extras"])
def test_a_subclass_is_left_to_pytorch(where: str) -> None:
    other = VALUE.as_subclass(Subclass)
    usual = Usual(EPILOGUE)
    given = (other, TEXT, [VALUE]) if where == "value" else (VALUE, TEXT, [other])
    assert type(usual.quick(*given)) is Subclass
    assert usual.calls == 1


def test_a_mode_sees_the_call() -> None:
    class Seeing(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list[Any] = []
    call = quick(EPILOGUE)
    with Seeing():
        call(VALUE, TEXT, [VALUE])
    assert seen == [EPILOGUE]


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ((VALUE, 5, [VALUE]), {}),
        ((VALUE, TEXT), {}),
        ((VALUE, TEXT, [5]), {}),
        ((VALUE, TEXT, [[VALUE]]), {}),
        ((VALUE, TEXT, [VALUE], 0, 0, 0), {}),
        ((VALUE, TEXT, [VALUE]), {"axis": "first"}),
        ((VALUE, TEXT, [VALUE]), {"unknown": 0}),
        ((VALUE, TEXT, [VALUE], 0), {"axis": 0}),
        ((VALUE, "nonsense", [VALUE]), {}),
        ((VALUE.to(torch.complex64), TEXT, [VALUE]), {}),
    ],
)
def test_refusals_are_those_of_the_overload(
    given: tuple[Any, ...], options: dict[str, Any]
) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError)) as wanted:
        EPILOGUE(*given, **options)
    with pytest.raises(wanted.type) as got:
        quick(EPILOGUE)(*given, **options)
    assert str(got.value) == str(wanted.value)
