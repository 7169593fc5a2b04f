"""Compiled code in CUDA graphs that Inductor captures and replays."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import collx
from tests.common.check import differences
from tests.common.compiling import inductor, needs_compiler
from tests.common.pool import on_ranks
from tests.common.rank import Rank

MODES = ("reduce-overhead", "max-autotune-no-cudagraphs")
STEPS = 6  # Inductor warms up, captures, then replays
HIDDEN = 256


def _program(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, name: str, size: int
) -> tuple[torch.Tensor, ...]:
    """Arithmetic that every compiler computes in the same way, between several collectives."""
    ops = torch.ops.collx
    ops.reduce(x, "sum", 0, name)  # the result is unused
    norm, total = ops.allreduce_residual_rmsnorm(x * 2, residual, weight, 1e-6, name)
    ops.barrier(name)
    q, scale = ops.allreduce_rmsnorm_fp8(total + 1, weight, 1e-6, name)
    whole = ops.allgather(norm * 0.5, size, name)
    return total, ops.reducescatter(whole, "max", size, name), q, scale


@pytest.mark.worlds(1, 2)
@pytest.mark.own_gpu
@pytest.mark.parametrize("backend", ["inductor", "collx"])
@pytest.mark.parametrize("mode", MODES)
@needs_compiler
@on_ranks(deadline=300.0)
def test_compiled_modes_give_the_bits_of_eager_code(rank: Rank, mode: str, backend: str) -> None:
    chosen: Any = collx.compile.backend if backend == "collx" else backend
    name = rank.communicator().name
    weight = torch.linspace(0.5, 2, HIDDEN, device=rank.device)
    wrong = []
    with inductor():
        compiled = torch.compile(_program, fullgraph=True, mode=mode, backend=chosen)
        for step in range(STEPS):
            x = torch.randn(4, HIDDEN, device=rank.device).bfloat16() + rank.rank + step
            residual = torch.full_like(x, step)
            torch.compiler.cudagraph_mark_step_begin()
            given = (x, residual, weight.bfloat16(), name, rank.size)
            found, wanted = compiled(*given), _program(*given)
            pairs = zip(found, wanted, strict=True)
            wrong += [differences(a.float().cpu(), b.float().cpu()) for a, b in pairs]
    assert len(wrong) == 4 * STEPS
    assert not any(wrong)


@pytest.mark.worlds(2)
@pytest.mark.own_gpu
@pytest.mark.parametrize("mode", MODES)
@needs_compiler
@on_ranks(deadline=300.0)
def test_compiled_modes_train_as_eager_code(rank: Rank, mode: str) -> None:
    name, size = rank.communicator().name, rank.size

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ops = torch.ops.collx
        y = ops.allreduce(x * w, "sum", name)
        whole = ops.allgather(y * 2, size, name)
        return ops.reducescatter(whole * whole, "sum", size, name)

    wrong = []
    with inductor():
        compiled = torch.compile(program, fullgraph=True, mode=mode)
        for step in range(STEPS):
            results = []
            for function in (compiled, program):
                x = torch.arange(64.0, device=rank.device).view(4, 16) % (5 + step) + rank.rank
                w = torch.full_like(x, 0.5)
                x.requires_grad_()
                w.requires_grad_()
                torch.compiler.cudagraph_mark_step_begin()
                y = function(x, w)
                y.sum().backward()
                assert x.grad is not None
                assert w.grad is not None
                results.append([t.detach().cpu().clone() for t in (y, x.grad, w.grad)])
            wrong += [differences(a, b) for a, b in zip(*results, strict=True)]
    assert len(wrong) == 3 * STEPS
    assert not any(wrong)
