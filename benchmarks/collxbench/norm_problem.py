"""A sum of rows, normalized: its tensors, what it gives, and the same in steps after an all-reduce.

Peers reduce in the input's dtype and round where the unfused model does, so theirs is the "parity"
of the same norm where collx is asked for "fp32".
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import collx
from collx import reference
from collxbench import checks, data
from collxbench.ops_norm import NormOp

EPS = 1e-5
DTYPES = ("float32", "float16", "bfloat16")
ROUNDINGS = ("fp32", "parity", "parity_weight")
STATIC_SCALE = 0.0625  # values up to 28 fit, and these stay below
STEPS = {"": 0.0, "fp8": 0.13, "int8": 0.0}  # of a quantized value, as a share of it
COMPILATIONS = 64  # one a shape
_RESIDUAL, _WEIGHT = -1, -2  # which random block: no rank's

Results = tuple[Tensor, ...]
Sequence = Callable[[Tensor, Tensor | None, Tensor], Results]


@dataclass(frozen=True)
class Problem:
    op: NormOp
    rows: int
    cols: int
    dtype: torch.dtype
    device: torch.device
    rounding: str
    world: int

    @classmethod
    def of_bytes(
        cls,
        op: NormOp,
        nbytes: int,
        cols: int,
        dtype: torch.dtype,
        device: torch.device,
        rounding: str,
        world: int,
    ) -> Problem:
        rows = nbytes // (cols * dtype.itemsize)
        return cls(op, rows, cols, dtype, device, rounding, world)

    def input_of(self, rank: int) -> Tensor:
        """[rows, cols]"""
        return self._values(rank, self.rows * self.cols).view(self.rows, self.cols)

    @property
    def residual(self) -> Tensor | None:
        return self.input_of(_RESIDUAL) if self.op.residual else None

    @property
    def weight(self) -> Tensor:
        return self._values(_WEIGHT, self.cols)

    @property
    def scale(self) -> Tensor | None:
        """The one that is given."""
        if self.op.scale_mode == "row":
            return None
        return torch.full((1,), STATIC_SCALE, device=self.device)

    @property
    def options(self) -> dict[str, Any]:
        """Of the operator, where they are not the default."""
        scale = self.scale
        return {} if scale is None else {"scale_mode": "tensor", "scale": scale}

    def expected(self) -> Results:
        """The reference's results, in the order of `op.results`."""
        inputs = [self.input_of(rank) for rank in range(self.world)]
        residual = self.residual
        tensors = (self.weight,) if residual is None else (residual, self.weight)
        function = getattr(reference, self.op.operator)
        found: Any = function(inputs, *tensors, EPS, rounding=self.rounding, **self.options)
        return found if isinstance(found, tuple) else (found,)

    def inexact(self, results: Results, expected: Results) -> int:
        """Elements of all results that are not the reference's, by their bits."""
        return sum(
            checks.other_bits(a, b) if a.itemsize > 1 else checks.other_bytes(a, b)
            for a, b in zip(results, expected, strict=True)
        )

    def far(self, results: Results, expected: Results) -> int:
        """Elements of a peer's results that are wrong: for any order and precision of the sum, by
        more than a step of their format where they are quantized."""
        got, want = self._readable(results), self._readable(expected)
        bound = 4 * self.world * torch.finfo(self.dtype).eps
        found = 0
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            step = STEPS[self.op.kind] if i == 0 else 0.0
            scale = max(1.0, b.abs().max().item())
            smallest = bound * scale
            if i == 0 and self.op.kind == "int8":
                smallest += want[1].max().item()  # a step is the row's scale
            found += int((~torch.isclose(a, b, rtol=bound + step, atol=smallest)).sum())
        return found

    def _readable(self, results: Results) -> list[Tensor]:
        """In float32, quantized values as a reader gets them."""
        wide = [result.float() for result in results]
        if self.op.kind:
            wide[1] = wide[1].reshape(-1)
            wide[0] = wide[0] * wide[1].unsqueeze(-1)
        return wide

    def steps(self) -> Sequence:
        """Add, norm and quantize, behind an all-reduce, operation by operation."""
        return _steps(self.op, self.rounding, self.device)

    def compiled(self) -> Sequence:
        """The same, compiled into one function when it is first called with a shape."""
        return _compiled(self.op, self.rounding, self.device)

    def _values(self, rank: int, numel: int) -> Tensor:
        return data.input_of(rank, numel, self.dtype, self.device)


@functools.cache
def _steps(op: NormOp, rounding: str, device: torch.device) -> Sequence:
    quantization = collx.Quantization(op.kind, scale_mode=op.scale_mode) if op.kind else None
    static = op.scale_mode == "tensor"
    scale = torch.full((1,), STATIC_SCALE, device=device) if static else None

    def steps(total: Tensor, residual: Tensor | None, weight: Tensor) -> Results:
        results = collx.nn.unfused_rmsnorm(
            total,
            residual,
            weight,
            EPS,
            rounding="parity" if rounding == "fp32" else rounding,
            quantization=quantization,
            scale=scale,
            reduce=_already_summed,
        )
        return results if isinstance(results, tuple) else (results,)

    return steps


@functools.cache
def _compiled(op: NormOp, rounding: str, device: torch.device) -> Sequence:
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, COMPILATIONS)
    config.fail_on_recompile_limit_hit = True  # else it would go on uncompiled
    function: Sequence = torch.compile(_steps(op, rounding, device), fullgraph=True, dynamic=False)
    return function


def _already_summed(total: Tensor) -> Tensor:
    return total
