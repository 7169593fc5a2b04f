"""Tests that the programs of epilogues compile at run time: with every op in every type, every
kernel and every GPU generation, and only with collx's own headers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from collx._extension import extension
from collx.epilogues import Epilogue, expression_of

from ..common.epilogues import bias_relu, causal, halved, integers, positive, smooth, soft_cap
from ..common.run_time import SOURCES, compile_at_run_time

nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="PyTorch was built without CUDA")

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
PTX = "compute_90"  # fast, since PTX is neither optimized nor assembled
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
# For each kernel: whether it has a version for simple calls, whether it has one version for each
# world size, and whether it normalizes rows.
KERNELS = {
    "allreduce_oneshot_push": (True, True, False),
    "allreduce_twoshot_push": (True, True, False),
    "allreduce_lanes": (True, True, False),
    "allreduce_oneshot_pull": (False, True, False),
    "allreduce_twoshot_pull": (False, True, False),
    "gather_scatter_staged": (True, True, False),
    "exchange_lanes": (True, True, False),
    "reducescatter_direct": (False, True, False),
    "norm_oneshot_push": (True, True, True),
    "norm_twoshot_push": (True, True, True),
    "norm_twoshot_push_sums": (True, True, True),
    "norm_oneshot_pull": (False, False, True),
    "norm_twoshot_pull": (False, False, True),
    "norm_local": (False, False, True),
    "allreduce_multimem_oneshot": (False, False, False),
    "allreduce_multimem_twoshot": (False, False, False),
    "allreduce_multimem_gather": (False, True, False),
    "reducescatter_multimem": (False, False, False),
    "norm_multimem_twoshot": (False, False, True),
}


def of_reals(v: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Uses every op of floating-point types."""
    made = (v + other) * (v - other) / -v.abs()
    made = torch.minimum(made, other) + torch.maximum(made, v).clamp(-1, 2) + torch.relu(v)
    chosen = (v < other) & (v <= 1) | ~(v > other) ^ (v >= 2)
    made = torch.where(chosen | (v == 3) | (v != v), made, other.clamp_min(0).clamp_max(1))
    made = made.sqrt() + v.rsqrt() + v.exp() + v.log() + v.tanh() + v.sigmoid() + v.erf()
    made = made + torch.nn.functional.silu(v) + torch.nn.functional.gelu(v)
    made = made + torch.nn.functional.gelu(v, approximate="tanh") + v.reciprocal() + v**3
    for dtype in (*FLOATS, *INTEGERS, torch.int16, torch.bool):
        made = made + v.to(dtype)
    return made


def of_integers(own: torch.dtype) -> Epilogue:
    """Returns a function with the ops of integers, for tensors of this dtype."""

    def f(v: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        made = (v + other) * (v - other) + -v.abs()
        made = torch.minimum(made, other) + torch.maximum(made, v).clamp(1, 2) + torch.relu(v)
        made = torch.where((v < other) | (v == 3), made // 7 + made % 5, other)
        for dtype in (*FLOATS, *INTEGERS, torch.int16, torch.bool):
            made = made + v.to(dtype).to(own)
        return made

    return f


def _compiled(
    f: Epilogue,
    dtype: torch.dtype,
    architecture: str,
    kernel: str = "allreduce_oneshot_push",
    world: int = 2,
    simple: bool = True,
    extras: int = 1,
    dims: int | None = None,
    **form: Any,
) -> str:
    text = expression_of("allreduce", f, dtype, extras, dims)
    has_simple, has_worlds, rows = KERNELS[kernel]
    source, name = extension.epilogue_program(
        text,
        dtype,
        kernel,
        has_simple,
        world,
        simple and has_simple,
        has_worlds,
        rows,
        multicast="multimem" in kernel,
        simulated=not simple,
        **form,
    )
    return compile_at_run_time(nvrtc, source, SOURCES, kernel=name, architecture=architecture)


@pytest.mark.parametrize("architecture", ["sm_80", PTX, "sm_100"])
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
def test_every_op_of_a_type_compiles(dtype: torch.dtype, architecture: str) -> None:
    f = of_reals if dtype.is_floating_point else of_integers(dtype)
    said = _compiled(f, dtype, architecture)
    assert not said, said


def _versions() -> list[Any]:
    """Returns all versions of every kernel for one architecture. Each of the other architectures
    has one version: with any dimensions of the extra on the older architecture, and with known
    dimensions on the newer one. --full adds the other version of each."""
    found: list[Any] = []
    for kernel, (_, has_worlds, _) in KERNELS.items():
        for whole, usual in ((False, "sm_80"), (True, "sm_100")):
            for architecture in ARCHITECTURES:
                marks = [] if architecture in ("sm_90", usual) else [pytest.mark.full]
                found.append(pytest.param(kernel, 2, True, whole, architecture, marks=marks))
            if has_worlds or "multimem" in kernel:
                found.append((kernel, 4, False, whole, PTX))
        if has_worlds:
            found.append((kernel, 0, False, False, PTX))
    return found


@pytest.mark.parametrize(("kernel", "world", "simple", "whole", "architecture"), _versions())
def test_every_kernel_compiles(
    kernel: str, world: int, simple: bool, whole: bool, architecture: str
) -> None:
    """`whole`: the number of dimensions of the extra is known, and it consists of whole vectors."""
    dims = [2] if whole else None
    said = _compiled(bias_relu, torch.bfloat16, architecture, kernel, world, simple, whole=dims)
    assert not said, said


@pytest.mark.parametrize("dims", [0, 2, 3, 4])
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
def test_what_is_known_of_extras_compiles(dtype: torch.dtype, dims: int) -> None:
    said = _compiled(bias_relu, dtype, PTX, whole=[dims], keeps=True)
    assert not said, said


@pytest.mark.parametrize("kernel", [name for name, (*_, rows) in KERNELS.items() if rows])
def test_the_whole_of_a_norm_compiles(kernel: str) -> None:
    """The programs of actual calls are a part of this one."""
    whole = {"layer": True, "groups": True, "steps": True}
    said = _compiled(bias_relu, torch.float16, "sm_90", kernel, 2, simple=False, **whole)
    assert not said, said


@pytest.mark.parametrize(
    ("f", "dtype", "extras", "dims"),
    [
        (causal, torch.float16, 0, 2),
        (positive, torch.float64, 0, None),
        (positive, torch.int64, 0, None),
        (halved, torch.float32, 0, None),
        (soft_cap, torch.bfloat16, 0, None),
        (smooth, torch.float32, 1, None),
        (integers, torch.int8, 1, None),
        (lambda v: v.to(torch.float64), torch.int8, 0, None),
    ],
)
def test_results_of_every_width_compile(
    f: Epilogue, dtype: torch.dtype, extras: int, dims: int | None
) -> None:
    for simple in (True, False):
        said = _compiled(f, dtype, "sm_90", simple=simple, extras=extras, dims=dims)
        assert not said, said


def scaled(v: torch.Tensor, other: torch.Tensor, by: float, times: int) -> torch.Tensor:
    return torch.relu(v * by + other * times) * (1 - by)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kernel", ["allreduce_oneshot_push", "norm_oneshot_push"])
def test_numbers_are_arguments_of_the_kernel(kernel: str, architecture: str) -> None:
    """The program does not contain the numbers, so that it is the same for all of them."""
    kinds = ("tensor", "float", "int")
    text = expression_of("allreduce", scaled, torch.bfloat16, kinds)
    rows = KERNELS[kernel][2]
    source, name = extension.epilogue_program(
        text, torch.bfloat16, kernel, True, 2, True, rows=rows, whole=[2]
    )
    for slot in range(3):  # one for each type of a number
        assert source.count(f"arguments.number[{slot}]") == 1
    assert "number[3]" not in source
    said = compile_at_run_time(nvrtc, source, SOURCES, kernel=name, architecture=architecture)
    assert not said, said


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
def test_numbers_of_every_type_compile(dtype: torch.dtype) -> None:
    for kind in ("float", "int", "bool"):
        text = expression_of("allreduce", lambda v, n: v * n, dtype, (kind,))
        source, name = extension.epilogue_program(
            text, dtype, "allreduce_twoshot_pull", False, 2, False
        )
        said = compile_at_run_time(nvrtc, source, SOURCES, kernel=name, architecture=PTX)
        assert not said, said


def test_a_program_that_is_wrong_does_not_compile() -> None:
    text = expression_of("allreduce", bias_relu, torch.float32, 1)
    source, name = extension.epilogue_program(
        text, torch.float32, "allreduce_oneshot_push", True, 2, True
    )
    broken = source.replace("values::relu", "values::nothing")
    assert "nothing" in compile_at_run_time(nvrtc, broken, SOURCES, kernel=name)
