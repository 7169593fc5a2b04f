"""How the result of a fused normalization is quantized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["ROUNDINGS", "Quantization"]

ROUNDINGS = ("fp32", "parity", "parity_weight")
"""Where a fused normalization rounds to the dtype: docs/numerics.md."""

_DTYPES = {"e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_ACCEPTED = {
    "kind": ("fp8", "int8"),
    "fp8_dtype": tuple(_DTYPES),
    "scale_mode": ("row", "tensor", "group"),
    "scale_dtype": ("float32", "input", "float8_e8m0fnu"),
    "scale_layout": ("row", "column"),
}


@dataclass(frozen=True)
class Quantization:
    """A form of q and scale such that q * scale is the normalized tensor.

    Attributes:
        kind: "fp8" or "int8", whose values go from -127 to 127.
        fp8_dtype: "e4m3fn" or "e5m2".
        scale_mode: "row", a scale for each row, [...]; "group", one for each `quant_group_size`
            columns, [..., cols / quant_group_size]; or "tensor", one that is given, [1].
        scale_ub: bounds the largest magnitude that a scale is made for.
        quant_group_size: a power of two from 16 to 4096 that divides the columns.
        ue8m0: scales are rounded up to powers of two.
        scale_dtype: "float32", "input" for the input's, or "float8_e8m0fnu" with ue8m0.
        scale_layout: of groups: "row", contiguous, or "column", all rows of a group side by side.
    """

    kind: str = "fp8"
    fp8_dtype: str = "e4m3fn"
    scale_mode: str = "row"
    scale_ub: float | None = None
    quant_group_size: int = 128
    ue8m0: bool = False
    scale_dtype: str = "float32"
    scale_layout: str = "row"

    def __post_init__(self) -> None:
        for option, values in _ACCEPTED.items():
            given = getattr(self, option)
            if given not in values:
                raise ValueError(
                    f"Quantization: {option}: got {given!r}; accepted: {', '.join(values)}"
                )

    @staticmethod
    def of(given: Quantization | str | None) -> Quantization | None:
        """ "fp8" and "int8" stand for their defaults."""
        if isinstance(given, str):
            return _PLAIN.get(given) or Quantization(given)
        return given

    def arguments(self) -> dict[str, Any]:
        """Of the fused operators, by name; all but the given scale."""
        found = {
            "scale_ub": self.scale_ub,
            "scale_mode": self.scale_mode,
            "quant_group_size": self.quant_group_size,
            "ue8m0": self.ue8m0,
            "scale_dtype": self.scale_dtype,
            "scale_layout": self.scale_layout,
        }
        return {**found, "fp8_dtype": self.fp8_dtype} if self.kind == "fp8" else found

    @property
    def dtype(self) -> torch.dtype:
        """Of the quantized values."""
        return torch.int8 if self.kind == "int8" else _DTYPES[self.fp8_dtype]

    @property
    def limit(self) -> float:
        """The largest quantized value, which is 448, 57344 or 127."""
        return 127.0 if self.kind == "int8" else torch.finfo(self.dtype).max


_PLAIN = {kind: Quantization(kind) for kind in _ACCEPTED["kind"]}
