"""Expressions and their expected results, independent of the implementation."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch.nn import functional as F

from collx import reference
from collx.epilogues import expression_of

from .check import differences

Function = Callable[..., torch.Tensor]
Apply = Callable[..., torch.Tensor]  # (text, value, *extras)
REAL: dict[str, Function] = {
    "exp": torch.exp,
    "log": torch.log,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "rsqrt": torch.rsqrt,
    "sqrt": torch.sqrt,
    "erf": torch.erf,
}


def random_function(choose: random.Random, dtype: torch.dtype) -> Function:
    """Draws a function of up to 25 ops whose bits are the same in all implementations."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    float_ops: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
        torch.add,
        torch.sub,
        torch.mul,
        torch.div,
        lambda a, b: -a,
        lambda a, b: a.abs(),
        lambda a, b: a.clamp(-2.5, 7),
        lambda a, b: torch.where(a < b, a, b * 0.3),
        lambda a, b: torch.where((a >= b) & ~(a == 0), b, 1 - a),
        lambda a, b: torch.relu(a) + 1.5,
        lambda a, b: a.to(torch.bfloat16).to(wide),
        lambda a, b: a.double().to(wide),
        lambda a, b: (a != b) * b,
        lambda a, b: a**2,
    ]
    integer_ops: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
        torch.add,
        torch.sub,
        torch.mul,
        lambda a, b: -a,
        lambda a, b: a.abs(),
        lambda a, b: torch.minimum(a, b),
        lambda a, b: torch.maximum(a, b),
        lambda a, b: a // 7,
        lambda a, b: b % 5,
        lambda a, b: torch.where(a <= b, a, b + 3),
        lambda a, b: a + (b > a),
        lambda a, b: a.clamp(-50, 60) if dtype.is_signed else a.clamp(3, 60),
    ]
    ops = float_ops if dtype.is_floating_point else integer_ops
    count = choose.randrange(1, 26)
    steps = [(choose.choice(ops), choose.random(), choose.random()) for _ in range(count)]

    def function(v: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
        values = [v, e]
        for op, first, second in steps:
            a, b = (values[int(at * len(values))] for at in (first, second))
            values.append(op(a, b))
        return values[-1] * 1  # so that the last op is not a cast

    return function


def wrong_random_functions(apply: Apply, kind: torch.dtype, count: int) -> list[str]:
    """Returns the texts of functions whose bits differ from those of the function in the wide type,
    rounded once, on values of all kinds."""
    choose = random.Random(str(kind).removeprefix("torch."))
    generator = torch.Generator().manual_seed(3)
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, 3e38])
    wrong = []
    for _ in range(count):
        function = random_function(choose, kind)
        if kind.is_floating_point:
            pair = [torch.randn(300, generator=generator) * 4 for _ in range(2)]
            pair[0][:7], pair[1][3:10] = special, special
            v, e = (x.to(kind) for x in pair)
        else:
            v, e = (torch.randint(0, 120, (300,), generator=generator).to(kind) for _ in range(2))
        text = expression_of("allreduce", function, kind, 1)
        want = reference.allreduce([v], epilogue=function, extras=[e])
        if differences(apply(text, v, e), want):
            wrong.append(text)
    return wrong


def error_of_real(apply: Apply, name: str, dtype: torch.dtype) -> float:
    """Returns the error in units of the last place, relative to float64; infinite if non-finite
    values differ."""
    generator = torch.Generator().manual_seed(1)
    x = torch.cat(
        [
            torch.randn(20_000, generator=generator, dtype=torch.float64) * 6,
            torch.linspace(-120, 120, 4001, dtype=torch.float64),
            torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan")]).double(),
        ]
    ).to(dtype)
    got = apply(expression_of("allreduce", REAL[name], dtype), x)
    want = REAL[name](x.double())
    finite = want.to(dtype).isfinite()
    if not torch.equal(got[~finite].nan_to_num(), want[~finite].to(dtype).nan_to_num()):
        return float("inf")
    rounded = want[finite].to(dtype).abs()
    # In the subnormal range and at the end of the largest binade, uses the unit of the neighbors.
    unit = (torch.nextafter(rounded, torch.zeros_like(rounded)) - rounded).abs().double()
    unit = unit.clamp(min=torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps)
    error = (got[finite].double() - want[finite]).abs() / unit
    return float(error.max())


def most_ulp(dtype: torch.dtype) -> float:
    """Returns the accepted error. It is larger for float64, because PyTorch's float64 result, which
    is the expected value, also has an error."""
    return 4 if dtype == torch.float32 else 8


def is_near_gelu(apply: Apply, approximate: str) -> bool:
    x = torch.linspace(-30, 30, 60_001)
    text = expression_of("allreduce", lambda v: F.gelu(v, approximate=approximate), torch.float32)
    want = F.gelu(x.double(), approximate=approximate)
    error = (apply(text, x).double() - want).abs()
    return bool((error <= x.double().abs() * 2**-21).all())
