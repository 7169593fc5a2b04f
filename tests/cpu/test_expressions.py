"""Tests of epilogues without ranks: the texts of functions, their results, and refused texts."""

from __future__ import annotations

import functools
import gc
import math
import subprocess
import sys
import types
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import collx  # noqa: F401  (loads the operators)
from collx.epilogues import expression_of

from ..common.check import differences
from ..common.expressions import (
    REAL,
    Function,
    error_of_real,
    is_near_gelu,
    most_ulp,
    wrong_random_functions,
)


def apply(
    text: str, value: torch.Tensor, *extras: torch.Tensor, numbers: Sequence[float] = ()
) -> torch.Tensor:
    result: torch.Tensor = torch.ops.collx.epilogue(
        value, text, list(extras), numbers=[float(number) for number in numbers]
    )
    return result


# --- the texts of functions -----------------------------------------------------------------------


def test_arithmetic_of_narrow_types_is_in_float32_and_rounded_once() -> None:
    text = expression_of("allreduce", lambda v, b: torch.relu(v + b), torch.bfloat16, 1)
    assert text == (
        "value.bfloat16;cast.float32 0;extra.bfloat16 0;cast.float32 2;add.float32 1 3;"
        "relu.float32 4;cast.bfloat16 5"
    )


def test_the_last_cast_names_the_dtype_of_the_result() -> None:
    half = torch.bfloat16
    assert expression_of("allreduce", lambda v: v.float(), half).endswith("cast.float32 0")
    assert expression_of("allreduce", lambda v: (v > 0).to(torch.int8), half).endswith(
        "cast.int8 3"
    )
    assert expression_of("allreduce", lambda v: v > 0, half).endswith("cast.bfloat16 3")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int8])
def test_type_is_a_cast(dtype: torch.dtype) -> None:
    """Also to the type in which the function computes."""
    texts = [
        expression_of("allreduce", f, torch.bfloat16)
        for f in (lambda v: v.type(dtype), lambda v: v.to(dtype))
    ]
    assert texts[0] == texts[1]


def test_functions_that_do_the_same_have_one_text() -> None:
    def twice(v: torch.Tensor) -> torch.Tensor:
        unused = v * 7  # noqa: F841
        return (v + 1) * (v + 1)

    def once(v: torch.Tensor) -> torch.Tensor:
        w = 1 + v
        return w * w

    texts = [expression_of("allreduce", f, torch.float32) for f in (twice, once)]
    assert texts[0] == "value.float32;constant.float32 3f800000;add.float32 0 1;mul.float32 2 2"
    assert texts[1] == texts[0]


def test_a_product_that_is_added_is_two_statements() -> None:
    """Newer compilers keep it as one op. PyTorch multiplies by `value` first."""
    text = expression_of("allreduce", lambda v, b: torch.addcmul(b, v, b), torch.float32, 1)
    assert text == "value.float32;extra.float32 0;mul.float32 0 1;add.float32 1 2"
    text = expression_of("allreduce", lambda v: torch.addcmul(v, v, v, value=2), torch.float32)
    assert text == (
        "value.float32;constant.float32 40000000;mul.float32 1 0;mul.float32 2 0;add.float32 0 3"
    )


TRANSFORMS: dict[str, Any] = {
    "grad": torch.func.grad,
    "vjp": lambda f: lambda x: torch.func.vjp(f, x)[1](torch.tensor(1.0))[0],
    "jacrev": torch.func.jacrev,
    "jacfwd": torch.func.jacfwd,
    "vmap": torch.func.vmap,
    "vmap of grad": lambda f: torch.func.vmap(torch.func.grad(f)),
}


@pytest.mark.parametrize("which", TRANSFORMS)
def test_transforms_of_the_caller_are_not_traced(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("collx.epilogues._texts", {})
    texts = []

    def f(v: torch.Tensor) -> torch.Tensor:
        return v * torch.tensor(7.0) + 0.5

    def loss(x: torch.Tensor) -> torch.Tensor:
        texts.append(expression_of("allreduce", f, torch.float32))
        return x.sum()

    TRANSFORMS[which](loss)(torch.ones(3))
    monkeypatch.setattr("collx.epilogues._texts", {})
    assert texts == [expression_of("allreduce", f, torch.float32)]


def test_the_default_device_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    for device in ("cpu", "meta"):
        monkeypatch.setattr("collx.epilogues._texts", {})
        with torch.device(device):
            texts.append(
                expression_of(
                    "allreduce",
                    lambda v: v.bfloat16() * 0.7 + torch.tensor(0.3),
                    torch.float32,
                )
            )
    assert texts[0] == texts[1]


def test_what_a_function_holds_is_part_of_it() -> None:
    def scaled(by: float) -> str:
        return expression_of("allreduce", lambda v: v * by, torch.float32)

    assert scaled(2.0) == scaled(2.0) != scaled(3.0)
    assert expression_of("allreduce", lambda v, by=1: v * by, torch.int32) != expression_of(
        "allreduce", lambda v, by=True: v + by, torch.int32
    )


factor = 2.0
table = {"scale": [2.0, 3.0]}


def by_factor(v: torch.Tensor) -> torch.Tensor:
    return v * factor


def scaled_and_shifted(by: float, v: torch.Tensor, *, shift: float = 0.0) -> torch.Tensor:
    return v * by + shift


def countdown(v: torch.Tensor, n: int = 3) -> torch.Tensor:
    return v * factor if n == 0 else countdown(v, n - 1)


READERS: dict[str, Function] = {
    "a global": by_factor,
    "of a nested function": lambda v: sum((lambda w: w * factor)(v) for _ in range(2)),
    "of a function that is called": lambda v: torch.relu(by_factor(v)),
    "of a function that calls itself": countdown,
    "by way of a partial": functools.partial(lambda by, v: by * by_factor(v), 3.0),
    "of a table": lambda v: v * table["scale"][0],
}


@pytest.mark.parametrize("which", READERS)
def test_a_number_that_a_function_reads_is_part_of_it(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    f = READERS[which]
    before = expression_of("allreduce", f, torch.float32)
    monkeypatch.setitem(table, "scale", [5.0, 3.0])
    monkeypatch.setattr(f"{__name__}.factor", 5.0)
    changed = expression_of("allreduce", f, torch.float32)
    monkeypatch.undo()
    assert changed != before
    assert "40a00000" in changed  # 5
    assert expression_of("allreduce", f, torch.float32) == before


def test_a_number_of_another_module_is_part_of_it() -> None:
    settings = types.ModuleType("settings")
    texts = []
    for settings.scale in (2.0, 3.0):  # type: ignore[attr-defined]
        texts.append(expression_of("allreduce", lambda v: v * settings.scale, torch.float32))
    assert texts[0] != texts[1]


def test_a_function_that_takes_the_place_of_another_is_traced() -> None:
    def applied(activation: Function) -> str:
        return expression_of("allreduce", lambda v: activation(v), torch.float32)

    found = [applied(f) for f in (torch.relu, torch.sigmoid, lambda v: v * 2, lambda v: v * 3)]
    assert len(set(found)) == 4


def test_what_a_partial_holds_is_part_of_it() -> None:
    found = [
        expression_of(
            "allreduce", functools.partial(scaled_and_shifted, by, shift=shift), torch.float32
        )
        for by, shift in ((2.0, 0.0), (3.0, 0.0), (2.0, 1.0))
    ]
    assert len(set(found)) == 3


def test_functions_of_pytorch_and_of_python_may_be_read() -> None:
    """Their constants may be read, too. A function of PyTorch can be the epilogue itself."""
    for own in (torch.relu, F.silu, torch.Tensor.abs, functools.partial(torch.clamp, min=0.0)):
        assert expression_of("allreduce", own, torch.float32)

    def f(v: torch.Tensor) -> torch.Tensor:
        w = F.gelu(v, approximate="tanh") * math.pi + torch.finfo(torch.float32).eps
        return functools.reduce(torch.maximum, [w, torch.zeros_like(v), max(1, 2) * v])

    assert expression_of("allreduce", f, torch.float32)


class Holder:
    """A callable object whose result depends on an attribute."""

    scale = 2.0

    def __call__(self, v: torch.Tensor) -> torch.Tensor:
        return v * self.scale

    def method(self, v: torch.Tensor) -> torch.Tensor:
        return v * self.scale


holder, weight = Holder(), torch.ones(3)


def counting(v: torch.Tensor) -> torch.Tensor:
    global factor
    factor = 3.0
    return v


def importing(v: torch.Tensor) -> torch.Tensor:
    import torch.distributed as dist

    return v * dist.get_world_size()


@pytest.mark.parametrize(
    ("f", "words"),
    [
        (holder, ("Holder", "attributes")),
        (holder.method, ("method of Holder",)),
        (torch.nn.ReLU(), ("ReLU", "attributes")),
        (lambda v: v * holder.scale, ("holder.scale", "attribute of Holder", "extras=")),
        (lambda v: holder(v), ("holder", "object of Holder", "extras=")),
        (lambda v: v * Holder.scale, ("Holder.scale", "extras=")),
        (lambda v: v * weight, ("weight", "a tensor", "extras=")),
        (lambda v: v * weight.sum(), ("weight.sum", "a tensor", "extras=")),
        (lambda v, w=weight: v * w, ("default", "a tensor", "extras=")),
        (lambda v: v * [1.0, weight][1], ("weight", "a tensor")),
        (functools.partial(torch.mul, weight), ("a tensor", "extras=")),
        (lambda v: v * torch.distributed.get_world_size(), ("get_world_size",)),
        (lambda v: v * torch.get_num_threads(), ("get_num_threads",)),
        (lambda v: v * eval("factor"), ("eval",)),
        (counting, ("writes factor",)),
        (importing, ("imports torch", "outside of it")),
        (lambda v: v if isinstance(v, torch.FloatTensor) else -v, ("torch.FloatTensor",)),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "f",  # the same in every process
)
def test_what_can_change_unseen_is_refused_by_name(f: Function, words: tuple[str, ...]) -> None:
    with pytest.raises(TypeError) as refused:
        expression_of("allreduce", f, torch.float32)
    for word in ("collx.allreduce", "epilogue", *words):
        assert word in str(refused.value)


def test_nothing_that_a_function_holds_is_kept() -> None:
    def f(v: torch.Tensor, values: Any = (1.0, [2.0])) -> torch.Tensor:
        return v * values[0] * values[1][0]

    expression_of("allreduce", f, torch.float32)
    known = weakref.ref(f)
    del f
    gc.collect()
    assert known() is None


VALUES: tuple[Function, ...] = (
    lambda v: v if v.amax() > 0 else -v,
    lambda v: v * v.mean().item(),
    lambda v: v * int(v[0]),
    lambda v: v * float(v[0]),
    lambda v: v * v.tolist()[0],
    lambda v: v * [1.0, 2.0][v[0].int()],
    lambda v: v if v[0] in (1.0, 2.0) else -v,
)


@pytest.mark.parametrize("f", VALUES, ids=range(len(VALUES)))
def test_what_depends_on_values_is_refused_by_name(f: Function) -> None:
    with pytest.raises(TypeError, match=r"epilogue: <lambda> has .* reads the value of a tensor"):
        expression_of("allreduce", f, torch.float32)


LOOKS: dict[str, Function] = {
    "torch.Tensor.shape": lambda v: v / v.shape[-1],
    "torch.Tensor.dtype": lambda v: v.half().to(v.dtype),
    "torch.Tensor.device": lambda v: v if v.device.type == "cpu" else -v,
    "torch.Tensor.is_cuda": lambda v: v if v.is_cuda else -v,
    "torch.Tensor.ndim": lambda v: v * v.ndim,
    "torch.Tensor.itemsize": lambda v: v * v.itemsize,
    "torch.Tensor.requires_grad": lambda v: v if v.requires_grad else -v,
    "torch.Tensor.grad": lambda v: v if v.grad is None else -v,
    "torch.Tensor.size": lambda v: v / v.size(-1),
    "torch.Tensor.numel": lambda v: v / v.numel(),
    "torch.Tensor.stride": lambda v: v * v.stride(0),
    "torch.Tensor.is_contiguous": lambda v: v if v.is_contiguous() else -v,
    "torch.Tensor.type": lambda v: v if v.type() else -v,
    "torch.Tensor.to": lambda v: v.half().to(v),
    "torch.Tensor.type_as": lambda v: v.half().type_as(v),
    "torch.Tensor.__len__": lambda v: v / len(v),
    "torch.numel": lambda v: v / torch.numel(v),
    "torch.is_floating_point": lambda v: v if torch.is_floating_point(v) else -v,
    "torch.result_type": lambda v: v.to(torch.result_type(v, 1.0)),
    "torch.Tensor.__repr__": lambda v: v * len(repr(v)),
    "torch.Tensor.data_ptr": lambda v: v * v.data_ptr(),
    "torch.Tensor.dim": lambda v: next(iter(v)),  # iter() reads dim
    "torch.Tensor.unbind": lambda v: v.unbind()[0],
}


@pytest.mark.parametrize("name", LOOKS)
def test_what_a_tensor_looks_like_is_refused_by_name(name: str) -> None:
    """The function would get the properties of the tensor that replaces the argument while the
    function is traced."""
    f = LOOKS[name]
    with pytest.raises(TypeError, match=f"epilogue: <lambda> (has|reads) {name}, .*extras="):
        expression_of("allreduce", f, torch.bfloat16)


def test_what_an_extra_looks_like_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"epilogue: <lambda> has torch.Tensor.shape, "):
        expression_of("allreduce", lambda v, e: v * e.shape[0], torch.float32, 1)
    with pytest.raises(TypeError, match=r"epilogue: <lambda> has torch.Tensor.dtype, "):
        expression_of("allreduce", lambda v, row: v * row.dtype.itemsize, torch.float32, dims=1)


@pytest.mark.parametrize("f", [lambda v: v * v.detach(), lambda v: v * v.data])
def test_a_function_that_stops_gradients_is_refused(f: Function) -> None:
    """An expression cannot stop them: its gradient would silently be another one."""
    with pytest.raises(TypeError, match=r"epilogue: <lambda> has .*, which stops gradients"):
        expression_of("allreduce", f, torch.float32)


def test_no_attribute_tells_what_a_tensor_looks_like() -> None:
    """The test tries all attributes of the installed PyTorch."""
    described = []
    for name, attribute in vars(torch._C.TensorBase).items():
        if type(attribute) is types.GetSetDescriptorType and not name.startswith("_"):
            try:
                expression_of("allreduce", lambda v, n=name: (getattr(v, n), v)[1], torch.float32)
            except TypeError:
                continue
            described.append(name)
    assert set(described) <= {"H", "T", "data", "mH", "mT", "real"}  # these return tensors


# --- results --------------------------------------------------------------------------------------


def test_a_number_is_compared_in_the_dtype_of_the_tensor_beside_it() -> None:
    """0.1 as bfloat16 is larger than 0.1."""
    value = torch.tensor([0.09, 0.1, 0.11])

    def equal(v: torch.Tensor) -> torch.Tensor:
        return (v.to(torch.bfloat16) == 0.1) + 2 * (v == 0.1)

    found = apply(expression_of("allreduce", equal, torch.float32), value)
    assert found.tolist() == equal(value).tolist() == [0, 3, 0]


OF_BOOLS: tuple[Function, ...] = (
    lambda v: torch.where(torch.isfinite(v), v, 0),  # a product of bools
    lambda v: v * ((v > 0) * (v < 2)),
    lambda v: v * ((v > 1) + (v < 0)),
    lambda v: v * torch.minimum(v > 0, v < 2),
    lambda v: v * torch.maximum(v > 1, v < 0),
    lambda v: v * torch.full_like(v > 0, 0.5),
    lambda v: v * torch.full_like(v > 0, 2),
)


@pytest.mark.parametrize("f", OF_BOOLS, ids=range(len(OF_BOOLS)))
def test_arithmetic_of_bools_is_logic(f: Function) -> None:
    value = torch.tensor([-1.0, 0.5, 1.5, 3.0, math.inf, math.nan])
    found = apply(expression_of("allreduce", f, torch.float32), value)
    assert differences(found, f(value)) == ""


def test_what_pytorch_does_not_compute_of_bools_is_refused() -> None:
    with pytest.raises(TypeError, match="epilogue: <lambda> has abs of bools"):
        expression_of("allreduce", lambda v: (v > 0).abs(), torch.float32)


WITH_NUMBER: dict[str, Function] = {
    "product": lambda v, n: v * n,
    "difference": lambda v, n: n - v,
    "quotient": lambda v, n: v / (n + 0.1),
    "clamp": lambda v, n: v.clamp(-n, n),
    "clamp with a constant": lambda v, n: v.clamp(0.1, n),
    "largest": lambda v, n: v.clamp(max=n),
    "comparison": lambda v, n: torch.where(v.bfloat16() == n, 1.0, torch.where(v > n, v, -v)),
    "of itself": lambda v, n: v * (1 - n * n) + n / 3 - (n + 1) * v,
    "comparison of itself": lambda v, n: torch.where(torch.as_tensor(n) < 0.3, v, -v),
    "in two types": lambda v, n: (v.double() * n).float() * n,
}


@pytest.mark.parametrize("which", WITH_NUMBER)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.uint8], ids=str
)
def test_a_number_of_the_call_gives_what_a_constant_gives(which: str, dtype: torch.dtype) -> None:
    """The results are bitwise equal, and one text serves all numbers of a kind."""
    f = WITH_NUMBER[which]
    value = (torch.arange(-6, 7) * 0.1 * (1 if dtype.is_floating_point else 30)).to(dtype)
    for kind, numbers in {"float": (0.1, 2.5, 1e-40), "int": (1, 3), "bool": (True, False)}.items():
        if kind == "bool" and which in ("clamp", "of itself"):
            continue  # PyTorch cannot negate a bool, and a product of bools is not an integer
        text = expression_of("allreduce", f, dtype, (kind,))
        for number in numbers:
            constant = expression_of("allreduce", lambda v, n=number: f(v, n), dtype)
            got, want = apply(text, value, numbers=[number]), apply(constant, value)
            assert got.dtype == want.dtype
            assert torch.equal(got, want), (number, got, want)


def test_extras_and_numbers_are_counted_apart() -> None:
    def f(v: torch.Tensor, a: float, b: torch.Tensor, c: float) -> torch.Tensor:
        return v * a + b * c

    text = expression_of("allreduce", f, torch.float32, ("float", "tensor", "int"))
    got = apply(text, torch.ones(2), torch.full((2,), 10.0), numbers=[2.0, 3])
    assert got.tolist() == [32.0, 32.0]


def test_a_number_has_no_gradient_and_takes_part_in_others() -> None:
    x, b = (torch.rand(4, dtype=torch.float64).requires_grad_() for _ in range(2))
    text = expression_of(
        "allreduce", lambda v, n, b: F.silu(v * n) + b * n * n, torch.float64, ("float", "tensor")
    )
    assert torch.autograd.gradcheck(lambda x, b: apply(text, x, b, numbers=[0.7]), (x, b))
    assert torch.autograd.gradgradcheck(lambda x, b: apply(text, x, b, numbers=[0.7]), (x, b))


def test_numbers_must_be_there_and_fit() -> None:
    text = expression_of("allreduce", lambda v, n: v * n, torch.int32, ("int",))
    with pytest.raises(ValueError, match="epilogue: numbers: got 0; accepted: from 1"):
        apply(text, torch.ones(2, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"numbers\[0\]: got nan; accepted: a number of Int"):
        apply(text, torch.ones(2, dtype=torch.int32), numbers=[math.nan])
    with pytest.raises(ValueError, match="numbers: got 9"):
        apply("value.float32", torch.ones(2), numbers=[1.0] * 9)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64", "int32", "uint8"])
def test_random_functions_have_the_bits_of_the_function(dtype: str) -> None:
    assert wrong_random_functions(apply, getattr(torch, dtype), 150) == []


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_transcendental_functions_are_within_four_ulp(name: str, dtype: torch.dtype) -> None:
    assert error_of_real(apply, name, dtype) <= most_ulp(dtype)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_is_within_its_bound(approximate: str) -> None:
    assert is_near_gelu(apply, approximate)


def test_a_bound_that_its_type_cannot_represent_is_refused() -> None:
    """PyTorch raises an error, while it wraps numbers in arithmetic and comparisons."""
    with pytest.raises(TypeError, match=r"epilogue: <lambda> has clamp to 300: .* overflow"):
        expression_of("allreduce", lambda v: v.clamp(max=300), torch.uint8)


def test_coordinates_are_those_of_the_whole_tensor() -> None:
    text = expression_of("allreduce", lambda v, i, j: v + 100 * i + j, torch.int64, dims=2)
    value = torch.zeros(2, 3, dtype=torch.int64)
    got = torch.ops.collx.epilogue(value, text, [], 0, 5)
    assert got.tolist() == [[500, 501, 502], [600, 601, 602]]


def test_gradients_are_exact() -> None:
    """The first and second derivatives with respect to the value and the extras are exact."""

    def function(v: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        gated = F.silu(v + b) * b.clamp(-0.5, 0.5) + torch.tanh(v / 2) * torch.where(
            v > b, v, b * b
        )
        rest = F.gelu(v) + torch.maximum(v, b).abs().sqrt() + v.sigmoid().log()
        return gated + rest - torch.erf(v) / (b * b + 1) + F.gelu(b, approximate="tanh")

    generator = torch.Generator().manual_seed(2)
    x, b = (
        torch.randn(n, generator=generator, dtype=torch.float64).requires_grad_()
        for n in ((6, 5), (5,))
    )
    text = expression_of("allreduce", function, torch.float64, 1)
    fused: Function = lambda x, b: apply(text, x, b)  # noqa: E731
    assert torch.autograd.gradcheck(fused, (x, b))
    assert torch.autograd.gradgradcheck(fused, (x, b))


def test_gradients_at_corners_are_those_of_the_function() -> None:
    x = torch.tensor([-1.0, 0.0, 1.0, 2.0, math.inf, math.nan], requires_grad=True)
    functions: list[Function] = [
        torch.relu,
        lambda v: v.clamp(0, 1),
        lambda v: torch.maximum(v, torch.where(v > 3, 1.0, v * 0)),
        lambda v: torch.minimum(v, torch.where(v > 3, 1.0, v * 0)),
    ]
    for function in functions:
        text = expression_of("allreduce", function, torch.float32)
        (fused,) = torch.autograd.grad(apply(text, x).sum(), x)
        (own,) = torch.autograd.grad(function(x).sum(), x)
        assert differences(fused, own) == ""


def test_gradients_take_the_branch_of_the_result() -> None:
    """The conversion of numbers outside of the range of the integer type selects the branch."""
    x = torch.tensor([1.0, 1e10, math.inf, -math.inf, math.nan], requires_grad=True)
    text = expression_of("allreduce", lambda v: torch.where(v.int() == 0, v, 2 * v), torch.float32)
    y = apply(text, x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert y[:2].tolist() == (x * gradient)[:2].tolist()
    assert gradient[2:].tolist() == [1, 1, 1]  # int32 keeps the low half of the smallest int64


# --- refused texts --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        "value",
        "value.float64",
        "value.float32;",
        "value.float32 1",
        "value.float32;add.float32 0",
        "value.float32;add.float32 0 1",
        "value.float32;add.float32 0 0 0",
        "value.float32;add.float64 0 0",
        "value.float32;add.bool 0 0",
        "value.float32;lt.float32 0 0",
        "value.float32;and.bool 0 0",
        "value.float32;where.float32 0 0 0",
        "value.float32;cast.float16 0;exp.float16 1",
        "value.float32;constant.float32 3f8",
        "value.float32;constant.float32 3F800000",
        "value.float32;constant.bool 02",
        "value.float32;cast.int32 0;constant.int32 00000000;floor_divide.int32 1 2",
        "value.float32;cast.int32 0;constant.int32 ffffffff;remainder.int32 1 2",
        "value.float32;cast.int32 0;floor_divide.int32 1 1",
        "value.float32;extra.float64 0;cast.float32 1",
        "value.float32;extra.float32 8",
        "value.float32;number.float32 8",
        "value.float32;number.float32",
        "value.float32;number.bfloat16 0;cast.float32 1",
        "value.float32;index.int32 0;cast.float32 1",
        "value.float32;system.float32 0",
        "value.float32;add.float32 0 18446744073709551616",
        ";".join(["value.float32"] * 257),
    ],
)
def test_a_text_that_fits_nothing_is_refused(text: str) -> None:
    """A text is always validated, regardless of where it comes from."""
    with pytest.raises(ValueError, match="epilogue: expression: got"):
        apply(text, torch.ones(3), torch.ones(3))


def test_extras_and_coordinates_must_be_there() -> None:
    with pytest.raises(ValueError, match="extras: got 0 tensors; accepted: at least 1"):
        apply("extra.float32 0", torch.ones(3))
    with pytest.raises(ValueError, match="coordinate 1 of an output of 1 dimensions"):
        apply("index.int64 1;cast.float32 0", torch.ones(3))


_FORKS = """
import os, threading, torch, collx
last = "neg.float32 0"
def texts(first):
    for number in range(first, first + 1000000):
        yield f"value.float32;constant.float32 {number:08x};" + 20 * "add.float32 0 1;" + last
def look_up(first):
    for text in texts(first):
        torch.ops.collx.epilogue(x, text, [])
x = torch.ones(1)
torch.ops.collx.epilogue(x, "value.float32;" + last, [])  # PyTorch prepares a first call
threading.Thread(target=look_up, args=(0,), daemon=True).start()
for number in range(30):
    child = os.fork()
    if child == 0:
        torch.ops.collx.epilogue(x, next(texts(100000000 + number)), [])
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
os._exit(0)
"""


def test_a_child_looks_expressions_up() -> None:
    """A forked child can look up expressions, even if another thread did so during the fork."""
    subprocess.run([sys.executable, "-c", _FORKS], timeout=120, check=True)


_THREADS = """
import sys, threading, torch, collx
from collx.epilogues import expression_of
def trace(first):
    try:
        for number in range(first, first + 15):
            expression_of("allreduce", lambda v, n=number: torch.relu(v * n + n), torch.float32)
    except Exception as error:
        errors.append(error)
errors, call = [], torch.nn.Module.__call__
expression_of("allreduce", torch.relu, torch.float32)  # imports the tracer
sys.setswitchinterval(1e-5)
threads = [threading.Thread(target=trace, args=(100 * number,)) for number in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not errors, errors
assert torch.nn.Module.__call__ is call
"""


def test_threads_trace_functions_at_the_same_time() -> None:
    """PyTorch's tracer patches torch.nn.Module; nothing of it remains."""
    subprocess.run([sys.executable, "-c", _THREADS], timeout=120, check=True)
