"""Scales of rows and groups, and the quantization with them: csrc/protocol/norm.h in PyTorch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from typing_extensions import TypedDict

    class ScaleOptions(TypedDict, total=False):
        """Options of the quantizing operators, with the same defaults."""

        scale_ub: float | None
        scale_mode: str
        scale: torch.Tensor | None
        quant_group_size: int
        ue8m0: bool
        scale_dtype: str
        scale_layout: str


__all__ = ["FORMATS", "Quantizer", "power_of_two_above"]

# The largest value of each format, and its dtype.
FORMATS = {
    "e4m3fn": (448.0, torch.float8_e4m3fn),
    "e5m2": (57344.0, torch.float8_e5m2),
    "int8": (127.0, torch.int8),
}
_MODES, _LAYOUTS = ("row", "tensor", "group"), ("row", "column")
_SCALE_DTYPES = ("float32", "input", "float8_e8m0fnu")
_SMALLEST_GROUP, _LARGEST_GROUP = 16, 4096
_LEAST_OF_GROUP = 1e-10  # lower bound of the largest magnitude of a group
_FP8_NAN, _E8M0_NAN = 0x7F, 0xFF
_SMALLEST_NORMAL_BITS = 0x00800000


def power_of_two_above(values: torch.Tensor) -> torch.Tensor:
    """Rounds float32 values >= 0 up to powers of two. Keeps 0, infinity and NaN."""
    bits = values.contiguous().view(torch.int32)
    above = _up(bits).view(torch.float32)
    # The bits of a subnormal count units of the smallest one. float32 represents them exactly.
    units = _up(bits.to(torch.float32).view(torch.int32)).view(torch.float32)
    subnormal = torch.where(bits < _SMALLEST_NORMAL_BITS, units, torch.zeros_like(units)).to(
        torch.int32
    )
    above = torch.where(bits < _SMALLEST_NORMAL_BITS, subnormal.view(torch.float32), above)
    return torch.where((bits == 0) | ~values.isfinite(), values, above)  # NaN may be negative


def _up(bits: torch.Tensor) -> torch.Tensor:
    """Rounds the bits of normal floats up to those of powers of two."""
    return (bits + 0x007FFFFF) & 0x7F800000


@dataclass(frozen=True)
class Quantizer:
    """The quantization of an operator. `checked` creates it."""

    limit: float
    dtype: torch.dtype
    mode: str
    given: torch.Tensor | None
    groups: int  # per row
    scale_ub: float
    ue8m0: bool
    scale_dtype: torch.dtype
    column_major: bool

    @staticmethod
    def checked(
        op: str,
        first: torch.Tensor,
        target: str,
        scale_ub: float | None = None,
        scale_mode: str = "row",
        scale: torch.Tensor | None = None,
        quant_group_size: int = 128,
        ue8m0: bool = False,
        scale_dtype: str = "float32",
        scale_layout: str = "row",
    ) -> Quantizer:
        """Checks the arguments of an operator with inputs like `first`, and returns its
        quantizer."""
        _one_of(op, "fp8_dtype", target, ("int8",) if op.endswith("int8") else ("e4m3fn", "e5m2"))
        _one_of(op, "scale_mode", scale_mode, _MODES)
        _one_of(op, "scale_dtype", scale_dtype, _SCALE_DTYPES)
        _one_of(op, "scale_layout", scale_layout, _LAYOUTS)
        cols = first.shape[-1]
        if scale_ub is not None and not scale_ub >= 0:
            raise ValueError(f"{op}: scale_ub {scale_ub} is negative or NaN")
        if scale_dtype == "float8_e8m0fnu" and not ue8m0:
            raise ValueError(f"{op}: scale_dtype float8_e8m0fnu requires ue8m0=True")
        if scale_layout == "column" and scale_mode != "group":
            raise ValueError(f"{op}: scale_layout column requires scale_mode group")
        if (scale is None) == (scale_mode == "tensor"):
            raise ValueError(
                f"{op}: scale: accepted: a tensor with scale_mode 'tensor', otherwise None"
            )
        if scale is not None:
            if scale.dtype != torch.float32:
                raise TypeError(f"{op}: scale is {scale.dtype}; accepted: float32")
            if scale.numel() != 1:
                raise ValueError(f"{op}: scale has {scale.numel()} elements; accepted: one")
            if scale_ub is not None or ue8m0 or scale_dtype != "float32":
                raise ValueError(
                    f"{op}: scale_ub, ue8m0 and scale_dtype do not apply to a given scale"
                )
        if scale_mode == "group":
            power = quant_group_size > 0 and quant_group_size & (quant_group_size - 1) == 0
            if not (power and _SMALLEST_GROUP <= quant_group_size <= _LARGEST_GROUP):
                raise ValueError(
                    f"{op}: quant_group_size: got {quant_group_size}; accepted: a power of two "
                    "from 16 to 4096"
                )
            if cols % quant_group_size != 0:
                raise ValueError(
                    f"{op}: got {cols} columns; accepted: a multiple of quant_group_size, "
                    f"{quant_group_size}"
                )
        limit, dtype = FORMATS[target]
        stored = {"float32": torch.float32, "input": first.dtype}
        return Quantizer(
            limit,
            dtype,
            scale_mode,
            scale,
            cols // quant_group_size if scale_mode == "group" else 1,
            math.inf if scale_ub is None else scale_ub,
            ue8m0,
            stored.get(scale_dtype, torch.float8_e8m0fnu),
            scale_layout == "column",
        )

    def scales(self, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the scales for these largest magnitudes of rows or groups, as they are stored
        (float8 as bytes), and the factors that the values are multiplied by."""
        if self.mode == "group":
            least = torch.full_like(largest, _LEAST_OF_GROUP)
            largest = torch.where(largest < least, least, largest)
        bound = torch.full_like(largest, self.scale_ub)
        bound = torch.where(largest > bound, bound, largest)
        scale = bound / torch.full_like(bound, self.limit)
        if self.ue8m0:
            scale = power_of_two_above(scale)
        scale = _nan_for(scale.isnan(), scale)
        stored = scale
        if self.scale_dtype == torch.float8_e8m0fnu:
            stored = _to_e8m0(scale)
            scale = _from_e8m0(stored)
        elif self.scale_dtype != torch.float32:
            stored = _nan_for(scale.isnan(), scale.to(self.scale_dtype))
            scale = stored.to(torch.float32)
        inverse = torch.ones_like(scale) / scale
        usable = (scale != 0) & inverse.isfinite()
        return stored, torch.where(usable, inverse, torch.zeros_like(inverse))

    def quantized(self, values: torch.Tensor) -> torch.Tensor:
        """Converts scaled values to the format (float8 as bytes)."""
        clamped = values.clamp(-self.limit, self.limit)
        if self.dtype == torch.int8:
            whole = clamped.round()  # to nearest even
            return torch.where(whole.isnan(), torch.zeros_like(whole), whole).to(torch.int8)
        codes = clamped.to(self.dtype).view(torch.uint8)
        return torch.where(clamped.isnan(), torch.full_like(codes, _FP8_NAN), codes)

    def arranged(self, stored: torch.Tensor, leading: tuple[int, ...]) -> torch.Tensor:
        """Arranges scales [rows, groups] as the operator returns them."""
        if self.mode == "row":
            stored = stored.reshape(leading)
        elif self.column_major:
            # Not contiguous(), which does not change the strides of dimensions of size 1.
            columns = torch.empty((stored.shape[1], *leading), dtype=stored.dtype)
            columns = columns.to(stored.device).copy_(stored.t().reshape(columns.shape))
            stored = columns.movedim(0, -1)
        else:
            stored = stored.reshape(*leading, self.groups)
        return stored.view(self.scale_dtype)


def _one_of(op: str, what: str, given: str, accepted: tuple[str, ...]) -> None:
    if given not in accepted:
        raise ValueError(f"{op}: {what}: got {given!r}; accepted: {', '.join(accepted)}")


def _nan_for(where: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Writes the only NaN that a scale can have at the given positions."""
    return values.masked_fill(where, math.nan)


def _to_e8m0(powers: torch.Tensor) -> torch.Tensor:
    """Returns the exponents that represent powers of two, 0, infinity and NaN."""
    bits = powers.contiguous().view(torch.int32) & 0x7FFFFFFF
    return (bits >> 23).to(torch.uint8)


def _from_e8m0(codes: torch.Tensor) -> torch.Tensor:
    bits = codes.to(torch.int32) << 23
    bits = torch.where(codes == 0, torch.full_like(bits, 0x00400000), bits)  # 2^-127
    return _nan_for(codes == _E8M0_NAN, bits.view(torch.float32))
