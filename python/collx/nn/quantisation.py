"""How the result of a norm is quantised, and the same in plain PyTorch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Quantisation", "quantised"]

_DTYPES = {"e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_SMALLEST = 1e-10  # stands for the largest value of a group that has less


@dataclass(frozen=True)
class Quantisation:
    """The options of the fused operators that end in `_fp8` and `_int8`.

    kind: "fp8" or "int8".
    fp8_dtype: "e4m3fn" or "e5m2".
    scale_mode: "row", one scale a row; "group", one for each `group_size` columns; or "tensor", one
        that is given.
    scale_ub: bounds the largest value that a scale is made from.
    group_size: a power of two from 16 that divides the columns.
    ue8m0: scales are rounded up to powers of two.
    scale_dtype: "float32", "input" for the input's, or "float8_e8m0fnu" with ue8m0.
    scale_layout: "row", or "column" for scales of groups of which each column is contiguous.
    """

    kind: str = "fp8"
    fp8_dtype: str = "e4m3fn"
    scale_mode: str = "row"
    scale_ub: float | None = None
    group_size: int = 128
    ue8m0: bool = False
    scale_dtype: str = "float32"
    scale_layout: str = "row"

    def __post_init__(self) -> None:
        accepted = {
            "kind": ("fp8", "int8"),
            "fp8_dtype": tuple(_DTYPES),
            "scale_mode": ("row", "tensor", "group"),
            "scale_dtype": ("float32", "input", "float8_e8m0fnu"),
            "scale_layout": ("row", "column"),
        }
        for option, values in accepted.items():
            given = getattr(self, option)
            if given not in values:
                raise ValueError(
                    f"Quantisation: {option}: got {given!r}; accepted: {', '.join(values)}"
                )

    def arguments(self) -> dict[str, Any]:
        """Of the fused operators, by name; all but the given scale."""
        found = {
            "scale_ub": self.scale_ub,
            "scale_mode": self.scale_mode,
            "group_size": self.group_size,
            "ue8m0": self.ue8m0,
            "scale_dtype": self.scale_dtype,
            "scale_layout": self.scale_layout,
        }
        return {**found, "fp8_dtype": self.fp8_dtype} if self.kind == "fp8" else found

    @property
    def dtype(self) -> torch.dtype:
        """Of the quantised values."""
        return torch.int8 if self.kind == "int8" else _DTYPES[self.fp8_dtype]

    @property
    def limit(self) -> float:
        """The largest quantised value: 448, 57344 or 127."""
        return 127.0 if self.kind == "int8" else torch.finfo(self.dtype).max


def quantised(
    y: torch.Tensor, how: Quantisation, scale: torch.Tensor | None, input_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises rows as a model does, without gradients.

    Args:
        y: [..., cols], floating point.
        how: the form.
        scale: float32, one element, with scale_mode "tensor"; else None.
        input_dtype: what scale_dtype "input" stands for.

    Returns:
        The values, [..., cols]; and the scale: [...], [..., groups] or [1].
    """
    if (scale is not None) != (how.scale_mode == "tensor"):
        raise ValueError(
            f'scale: {"not " if scale is None else ""}given with scale_mode "{how.scale_mode}"; '
            'accepted: a tensor with "tensor", None otherwise'
        )
    y = y.detach().float()
    if scale is not None:
        return _converted(y / scale, how), scale.detach().reshape(1).clone()
    in_groups = how.scale_mode == "group"
    rows = y.unflatten(-1, (-1, how.group_size)) if in_groups else y
    stored = _scale(rows.abs().amax(-1), how, input_dtype)
    used = stored.float()
    inverse = 1 / used
    inverse = inverse.masked_fill((used == 0) | ~inverse.isfinite(), 0)
    q = _converted(rows * inverse.unsqueeze(-1), how)
    if in_groups and how.scale_layout == "column":
        stored = stored.movedim(-1, 0).contiguous().movedim(0, -1)
    return (q.flatten(-2) if in_groups else q), stored


def _scale(largest: torch.Tensor, how: Quantisation, input_dtype: torch.dtype) -> torch.Tensor:
    if how.scale_mode == "group":
        largest = largest.clamp(min=_SMALLEST)
    scale = largest.clamp(max=math.inf if how.scale_ub is None else how.scale_ub) / how.limit
    if how.ue8m0:
        fraction, exponent = torch.frexp(scale)  # fraction in [0.5, 1): 0.5 is a power of two
        power = torch.ldexp(torch.ones_like(scale), exponent - (fraction == 0.5).int())
        scale = torch.where(scale.isfinite() & (scale != 0), power, scale)
    if how.scale_dtype == "float32":
        return scale
    return scale.to(input_dtype if how.scale_dtype == "input" else torch.float8_e8m0fnu)


def _converted(y: torch.Tensor, how: Quantisation) -> torch.Tensor:
    y = y.clamp(-how.limit, how.limit)
    if how.kind == "int8":
        return y.nan_to_num(nan=0.0).round().to(torch.int8)
    return y.to(how.dtype)
