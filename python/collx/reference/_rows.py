"""Normalizes and quantizes rows of a reduction. Follows the steps of docs/internals/numerics.md."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from collx.reference._common import alike, exactly
from collx.reference._epilogues import Extra, Function, applied
from collx.reference._scales import Quantizer
from collx.reference.collectives import parts

if TYPE_CHECKING:
    from collx.reference._scales import ScaleOptions

__all__ = [
    "ROUNDINGS",
    "Layer",
    "Tensors",
    "float32",
    "normalized",
    "own_rows",
    "quantized",
    "reciprocal_root",
    "rounded",
    "row_epilogue",
    "row_sum",
]

ROUNDINGS = ("fp32", "parity", "parity_weight")

Tensors = tuple[torch.Tensor, ...]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_PIECE = 1 << 16  # number of elements that are processed at once


def row_epilogue(
    function: Function | None, extras: Sequence[Extra], index: bool, start: int = 0
) -> RowEpilogue | None:
    return None if function is None else RowEpilogue(function, extras, index, start)


def row_sum(values: torch.Tensor) -> torch.Tensor:
    """Returns the sums over the last dimension, [..., 1]. The elements are added in order by a
    complete binary tree, and padded with zeros to a power of two."""
    cols = values.shape[-1]
    sums = torch.nn.functional.pad(values, (0, (1 << (cols - 1).bit_length()) - cols))
    while sums.shape[-1] > 1:
        sums = sums[..., 0::2] + sums[..., 1::2]
    return sums


@dataclass(frozen=True)
class RowEpilogue:
    """An epilogue of normalized rows. The first of them is row `start` of the whole tensor."""

    function: Function
    extras: Sequence[Extra]
    index: bool
    start: int = 0


@dataclass(frozen=True)
class Layer:
    """A normalization: with a bias it is a layer norm."""

    op: str
    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float
    weight_offset: float
    rounding: str
    epilogue: RowEpilogue | None = None

    def check(self, first: torch.Tensor) -> None:
        """Raises ValueError or TypeError if the layer cannot normalize inputs like `first`."""
        if self.rounding not in ROUNDINGS:
            raise ValueError(
                f"{self.op}: rounding: got {self.rounding!r}; accepted: {', '.join(ROUNDINGS)}"
            )
        if not (self.eps >= 0 and math.isfinite(self.eps)):
            raise ValueError(f"{self.op}: eps {self.eps} is negative or not finite")
        if not math.isfinite(self.weight_offset):
            raise ValueError(f"{self.op}: weight_offset {self.weight_offset} is not finite")
        if first.dtype not in _DTYPES:
            raise TypeError(f"{self.op}: inputs are {first.dtype}; accepted: {_DTYPES}")
        if first.dim() < 2 or first.shape[-1] == 0:
            raise ValueError(f"{self.op}: inputs are {tuple(first.shape)}; accepted: [..., cols]")
        for name, tensor in (("weight", self.weight), ("bias", self.bias)):
            if tensor is None:
                continue
            if tensor.dtype not in (first.dtype, torch.float32) or (
                tensor.dtype != self.weight.dtype
            ):
                raise TypeError(
                    f"{self.op}: {name} is {tensor.dtype}, but inputs are {first.dtype}"
                )
            if tuple(tensor.shape) != (first.shape[-1],):
                raise ValueError(f"{self.op}: {name} is {tuple(tensor.shape)}, not [cols]")

    def applied(self, acc: torch.Tensor, dtype: torch.dtype, groups: int) -> Tensors:
        """Returns y for rows of sums [rows, cols], and the largest magnitudes [rows, groups]."""
        if self.bias is not None:
            return self._centered(acc, dtype), torch.empty(0)
        gain = self.weight.detach().to(torch.float32) + rounded(
            float32(self.weight_offset, acc), dtype
        )
        norm = self._norm(row_sum(acc * acc), acc.shape[-1], dtype)
        if self.rounding == "parity_weight":
            y = rounded(rounded(acc * norm, dtype) * rounded(gain, dtype), dtype)
            return y, _largest(y, groups)
        scaled = acc * gain
        y, largest = scaled * norm, _largest(scaled, groups) * norm
        if self.rounding == "parity":
            y, largest = rounded(y, dtype), rounded(largest, dtype)
        return y, largest

    def _centered(self, acc: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        assert self.bias is not None
        cols = acc.shape[-1]
        weight, bias = (t.detach().to(torch.float32) for t in (self.weight, self.bias))
        mean = row_sum(acc + torch.zeros_like(acc)) / float32(cols, acc)
        centered = acc - mean
        norm = self._norm(row_sum(centered * centered), cols, dtype)
        if self.rounding == "parity_weight":
            weight, bias = rounded(weight, dtype), rounded(bias, dtype)
            weighted = rounded(rounded(centered * norm, dtype) * weight, dtype)
            return rounded(weighted + bias, dtype)
        y = centered * norm * weight + bias
        return rounded(y, dtype) if self.rounding == "parity" else y

    def _norm(self, squares: torch.Tensor, cols: int, dtype: torch.dtype) -> torch.Tensor:
        eps = float32(self.eps, squares)
        if self.rounding == "fp32":
            eps = rounded(eps, dtype)
        return reciprocal_root(squares / float32(cols, squares) + eps)


def reciprocal_root(values: torch.Tensor) -> torch.Tensor:
    """Returns 1 / sqrt(values). The square root and the quotient are both rounded."""
    # PyTorch's float32 root may be off by one ulp. The root of a float32 value is never within one
    # float64 ulp of the midpoint of two float32 values, so rounding the float64 root is correct.
    root = values.to(torch.float64).sqrt().to(torch.float32)
    return torch.ones_like(root) / root


def float32(value: float, like: torch.Tensor) -> torch.Tensor:
    # A tensor, because PyTorch may divide by a scalar as a multiplication by its reciprocal.
    return torch.full((1,), value, dtype=torch.float32, device=like.device)


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return values.to(dtype).to(torch.float32)


def _largest(values: torch.Tensor, groups: int) -> torch.Tensor:
    rows, cols = values.shape
    return values.abs().view(rows, groups, cols // groups).amax(-1)  # propagates NaN


def accumulated(
    values: Sequence[torch.Tensor], residual: torch.Tensor | None, rounding: str
) -> torch.Tensor:
    total = values[0].to(torch.float32)
    for value in values[1:]:
        total = total + value.to(torch.float32)
    dtype = values[0].dtype
    if rounding != "fp32":
        total = rounded(total, dtype)
    if residual is not None:
        total = total + residual.to(torch.float32)
        if rounding != "fp32":
            total = rounded(total, dtype)
    return total


def _checked(
    layer: Layer, inputs: Sequence[torch.Tensor], residual: torch.Tensor | None
) -> torch.Tensor:
    first = alike(layer.op, inputs)
    layer.check(first)
    if residual is not None:
        if residual.dtype != first.dtype:
            raise TypeError(
                f"{layer.op}: residual is {residual.dtype}, but inputs are {first.dtype}"
            )
        if residual.shape != first.shape:
            raise ValueError(
                f"{layer.op}: residual is {tuple(residual.shape)}, not {tuple(first.shape)}"
            )
    return first


def _rows(
    layer: Layer,
    inputs: Sequence[torch.Tensor],
    residual: torch.Tensor | None,
    groups: int,
) -> Iterator[Tensors]:
    """Yields y, the largest magnitudes and the rounded sum for consecutive pieces of rows."""
    dtype, cols = inputs[0].dtype, inputs[0].shape[-1]
    flat = [tensor.detach().reshape(-1, cols) for tensor in inputs]
    added = None if residual is None else residual.detach().reshape(-1, cols)
    step = max(1, _PIECE // cols)
    for start in range(0, max(1, flat[0].shape[0]), step):
        rows = slice(start, start + step)
        acc = accumulated(
            [tensor[rows] for tensor in flat],
            None if added is None else added[rows],
            layer.rounding,
        )
        yield (*layer.applied(acc, dtype, groups), acc.to(dtype))


def _mapped(
    op: str, epilogue: RowEpilogue, pieces: list[Tensors], like: torch.Tensor, groups: int
) -> list[Tensors]:
    """Returns the pieces with y replaced by the result of the epilogue on the rounded y."""
    e = epilogue
    y = torch.cat([piece[0] for piece in pieces]).to(like.dtype).view(like.shape)
    made = applied(op, e.function, y, e.extras, e.index, 0, e.start)
    if made.dtype != like.dtype:
        raise TypeError(f"{op}: the epilogue returns {made.dtype}, but inputs are {like.dtype}")
    rows = made.view(-1, like.shape[-1]).to(torch.float32).split([len(p[0]) for p in pieces])
    return [
        (mapped, _largest(mapped, groups), piece[2])
        for mapped, piece in zip(rows, pieces, strict=True)
    ]


def _computed(
    layer: Layer,
    inputs: Sequence[torch.Tensor],
    residual: torch.Tensor | None,
    quantizer: Quantizer | None,
) -> list[Tensors]:
    """Returns out, residual_out and, with a quantizer, q and scale for each piece of rows."""
    first = inputs[0]
    groups = quantizer.groups if quantizer else 1
    computed = []
    with exactly():
        pieces = list(_rows(layer, inputs, residual, groups))
        if layer.epilogue is not None:
            pieces = _mapped(layer.op, layer.epilogue, pieces, first, groups)
        for y, largest, acc in pieces:
            results: Tensors = (y.to(first.dtype), acc)
            if quantizer is not None and quantizer.given is not None:
                given = quantizer.given.detach().reshape(1)
                results += (quantizer.quantized(y / given), given)
            elif quantizer is not None:
                stored, inverse = quantizer.scales(largest)
                each = inverse.repeat_interleave(first.shape[-1] // groups, dim=1)
                results += (quantizer.quantized(y * each), stored)
            computed.append(results)
    return computed


def _joined(pieces: list[Tensors], which: int, shape: Sequence[int]) -> torch.Tensor:
    return torch.cat([piece[which] for piece in pieces]).reshape(shape)


def normalized(
    layer: Layer,
    inputs: Sequence[torch.Tensor],
    residual: torch.Tensor | None,
) -> Tensors:
    shape = _checked(layer, inputs, residual).shape
    pieces = _computed(layer, inputs, residual, None)
    out = _joined(pieces, 0, shape)
    return (out,) if residual is None else (out, _joined(pieces, 1, shape))


def quantized(
    layer: Layer,
    inputs: Sequence[torch.Tensor],
    residual: torch.Tensor | None,
    target: str,
    keep_norm: bool,
    options: ScaleOptions,
) -> Tensors:
    first = _checked(layer, inputs, residual)
    quantizer = Quantizer.checked(layer.op, first, target, **options)
    pieces = _computed(layer, inputs, residual, quantizer)
    q = _joined(pieces, 2, first.shape).view(quantizer.dtype)
    if quantizer.given is not None:
        scale = pieces[0][3].clone()
    else:
        stored = torch.cat([piece[3] for piece in pieces])
        scale = quantizer.arranged(stored, tuple(first.shape[:-1]))
    results: Tensors = (q, scale)
    if residual is not None:
        results += (_joined(pieces, 1, first.shape),)
    return (*results, _joined(pieces, 0, first.shape)) if keep_norm else results


def own_rows(
    layer: Layer,
    inputs: Sequence[torch.Tensor],
    residuals: Sequence[torch.Tensor],
    epilogue: Function | None,
    extras: Sequence[Sequence[Extra]],
    index: bool,
) -> Iterator[tuple[Layer, list[torch.Tensor], torch.Tensor]]:
    """Yields the layer with its epilogue, the rows of all inputs and the residual of each rank."""
    op = layer.op
    first = alike(op, inputs)
    if first.dim() != 2:
        raise ValueError(f"{op}: inputs are {tuple(first.shape)}; accepted: [rows, cols]")
    if len(residuals) != len(inputs):
        raise ValueError(f"{op}: got {len(inputs)} inputs, but {len(residuals)} residuals")
    own = extras or [()] * len(inputs)
    if len(own) != len(inputs):
        raise ValueError(f"{op}: got {len(inputs)} inputs, but extras of {len(own)} ranks")
    start, counts = 0, parts(first.shape[0], len(inputs))
    for count, residual, mine in zip(counts, residuals, own, strict=True):
        rows = [tensor[start : start + count] for tensor in inputs]
        yield replace(layer, epilogue=row_epilogue(epilogue, mine, index, start)), rows, residual
        start += count
