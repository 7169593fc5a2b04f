"""A normalized sum of rows: its tensors, its results, and the unfused steps after an all-reduce.

Peers reduce in the dtype of the input and round like the unfused model, so they compute the
"parity" rounding if collx computes "fp32".
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
from collx._bench import checks, data
from collx._bench.ops_norm import NormOp

EPS = 1e-5
DTYPES = ("float32", "float16", "bfloat16")
STATIC_SCALE = 0.0625  # supports values up to 28, which is not exceeded here
STEPS = {"": 0.0, "fp8": 0.13, "int8": 0.0}  # relative step size of quantized values
COMPILATIONS = 64  # one for each shape
_RESIDUAL, _WEIGHT = -1, -2  # numbers of random blocks that no rank uses

Results = tuple[Tensor, ...]
Sequence = Callable[[Tensor, Tensor | None, Tensor], Results]


@dataclass(frozen=True)
class Problem:
    op: NormOp
    nbytes: int
    cols: int
    dtype: torch.dtype
    device: torch.device
    rounding: str
    world: int

    @property
    def rows(self) -> int:
        return self.nbytes // (self.cols * self.dtype.itemsize)

    def input_of(self, rank: int) -> Tensor:
        """Returns the input of a rank, [rows, cols]."""
        return self._values(rank, self.rows * self.cols).view(self.rows, self.cols)

    @property
    def residual(self) -> Tensor | None:
        return self.input_of(_RESIDUAL) if self.op.residual else None

    @property
    def weight(self) -> Tensor:
        return self._values(_WEIGHT, self.cols)

    @property
    def scale(self) -> Tensor | None:
        """The given scale, None with one scale for each row."""
        if self.op.scale_mode == "row":
            return None
        return torch.full((1,), STATIC_SCALE, device=self.device)

    @property
    def options(self) -> dict[str, Any]:
        """The options of the operator that are not the default."""
        scale = self.scale
        return {} if scale is None else {"scale_mode": "tensor", "scale": scale}

    def expected(self) -> Results:
        """Returns the results of the reference, in the order of `op.results`."""
        inputs = [self.input_of(rank) for rank in range(self.world)]
        residual = self.residual
        tensors = (self.weight,) if residual is None else (residual, self.weight)
        function = getattr(reference, self.op.operator)
        found: Any = function(inputs, *tensors, EPS, rounding=self.rounding, **self.options)
        return found if isinstance(found, tuple) else (found,)

    def inexact(self, results: Results, expected: Results) -> int:
        """Counts the elements of all results whose bits differ from the reference."""
        return sum(
            checks.other_bits(a, b) if a.itemsize > 1 else checks.other_bytes(a, b)
            for a, b in zip(results, expected, strict=True)
        )

    def far(self, results: Results, expected: Results) -> int:
        """Counts the wrong elements of a peer's results. The tolerance allows any order and
        precision of the sum, and one step of the format for quantized values."""
        got, want = self._readable(results), self._readable(expected)
        bound = 4 * self.world * torch.finfo(self.dtype).eps
        found = 0
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            step = STEPS[self.op.kind] if i == 0 else 0.0
            scale = max(1.0, b.abs().max().item())
            smallest = bound * scale
            if i == 0 and self.op.kind == "int8":
                smallest += want[1].max().item()  # one step is the scale of the row
            found += int((~torch.isclose(a, b, rtol=bound + step, atol=smallest)).sum())
        return found

    def _readable(self, results: Results) -> list[Tensor]:
        """Returns the results in float32. Quantized values are multiplied by their scales."""
        wide = [result.float() for result in results]
        if self.op.kind:
            wide[1] = wide[1].reshape(-1)
            wide[0] = wide[0] * wide[1].unsqueeze(-1)
        return wide

    def steps(self) -> Sequence:
        """Returns a function that adds, normalizes and quantizes after an all-reduce, as single
        operations."""
        return _steps(self.op, self.rounding, self.device)

    def compiled(self) -> Sequence:
        """Returns the function of `steps`, compiled at the first call for each shape."""
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
    config.fail_on_recompile_limit_hit = True  # otherwise it would continue without compilation
    function: Sequence = torch.compile(_steps(op, rounding, device), fullgraph=True, dynamic=False)
    return function


def _already_summed(total: Tensor) -> Tensor:
    return total
