"""Options for the quantization of a fused normalization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["ROUNDINGS", "Quantization"]

ROUNDINGS = ("fp32", "parity", "parity_weight")
"""Where a fused normalization rounds to the dtype (docs/internals/numerics.md)."""

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
    """How a fused normalization quantizes its result: q * scale approximates the normalized tensor.

    Attributes:
        kind: "fp8" or "int8". Values of int8 are in the range from -127 to 127.
        fp8_dtype: "e4m3fn" or "e5m2".
        scale_mode: "row" computes one scale for each row, a tensor [...]. "group" computes one
            scale for each `quant_group_size` columns, [..., cols / quant_group_size]. "tensor"
            uses one scale that the caller passes, [1].
        scale_ub: an upper bound on the magnitude from which a scale is computed.
        quant_group_size: the columns of a group: a power of two from 16 to 4096 that divides
            the number of columns.
        ue8m0: True rounds scales up to powers of two.
        scale_dtype: the dtype of the scales: "float32", "input" for the dtype of the input, or
            "float8_e8m0fnu", which requires `ue8m0`.
        scale_layout: the layout of the scales of groups: "row" for contiguous scales, or "column",
            in which the scales of one group in all rows are contiguous.
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
        """Returns a `Quantization`. The strings "fp8" and "int8" select the defaults. Other
        types raise a TypeError."""
        if isinstance(given, str):
            return _PLAIN.get(given) or Quantization(given)
        if given is not None and not isinstance(given, Quantization):
            raise TypeError(
                f"quantization: got {given!r}; accepted: a collx.Quantization, "
                f"{', '.join(map(repr, _PLAIN))}, or None"
            )
        return given

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of the fused operators by name, without the scale."""
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
        """The dtype of the quantized values."""
        return torch.int8 if self.kind == "int8" else _DTYPES[self.fp8_dtype]

    @property
    def limit(self) -> float:
        """The largest quantized value: 448, 57344 or 127."""
        return 127.0 if self.kind == "int8" else torch.finfo(self.dtype).max


_PLAIN = {kind: Quantization(kind) for kind in _ACCEPTED["kind"]}
