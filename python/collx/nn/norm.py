"""RMSNorm after a row-parallel layer: the sum over the ranks, the residual and the norm. They are
one operator, or the operations of a plain model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from collx._groups import Group, name_of
from collx.nn import gradients
from collx.nn.known_norms import ACCEPTED, form_of, placed
from collx.nn.mappings import reduce_from_ranks
from collx.nn.quantized import quantized
from collx.ops.norms import Results, allreduce_rmsnorm
from collx.ops.quantization import ROUNDINGS, Quantization

__all__ = ["TensorParallelRMSNorm", "unfused_rmsnorm"]

_OPTIONS = (
    "eps",
    "group",
    "weight_offset",
    "rounding",
    "quantization",
    "scale",
    "keep_norm",
    "algorithm",
    "max_blocks",
)
"""The arguments of the constructor that are also attributes."""


def unfused_rmsnorm(
    partial: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    group: Group = None,
    *,
    weight_offset: float = 0.0,
    rounding: str = "fp32",
    quantization: Quantization | None = None,
    scale: torch.Tensor | None = None,
    keep_norm: bool = False,
    reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Results:
    """Computes what the fused operators compute, as a model does: all-reduce, add, norm, quantize.

    The order in which a row is summed differs from that of the fused operators, so results differ
    by at most one rounding of the norm. All results have gradients except the quantized values and
    their scale.

    Args:
        partial: a floating-point tensor [..., cols]: this rank's summand.
        residual: a tensor of that shape and dtype, the same on all ranks; or None.
        weight: a tensor [cols] of that dtype or float32.
        eps: is added to the mean of the squares.
        group: the communicator, as in `collx.allreduce`.
        weight_offset: is added to the weight; 1 for Gemma.
        rounding: "fp32" rounds once, at the end, and sums over the ranks in float32. "parity"
            rounds as torch.nn.RMSNorm after an all-reduce. "parity_weight" rounds as LlamaRMSNorm.
        quantization: how the result is quantized; None: it is not quantized.
        scale: a float32 tensor with one element: the scale of `scale_mode="tensor"`.
        keep_norm: with a quantization, also returns the normalized tensor.
        reduce: sums a tensor over the ranks; by default `reduce_from_ranks`.

    Returns:
        The normalized tensor, or the quantized tensor and its scale; then, with a residual, the
        sum of both; then the normalized tensor if `keep_norm`. One result is a tensor, several
        results are a tuple.

    Raises:
        ValueError: an unknown rounding, `keep_norm` without `quantization`, a scale that does not
            fit it, or a residual of another shape.
        TypeError: a residual of another dtype.
    """
    _check_options("unfused_rmsnorm", rounding, quantization, keep_norm)
    gradients.check_residual("unfused_rmsnorm", partial, residual)
    dtype = partial.dtype
    wide = torch.promote_types(dtype, torch.float32)
    once = rounding == "fp32"
    if reduce is None:
        total = reduce_from_ranks(partial.to(wide) if once else partial, group)
    else:
        total = reduce(partial.to(wide) if once else partial)
    if residual is not None:
        total = total + residual
    kept = total.to(dtype)
    values = total.to(wide)
    mean = values.pow(2).mean(-1, keepdim=True)
    norm = torch.rsqrt(mean + (_rounded(eps, dtype, mean) if once else eps))
    gain = weight.to(wide)
    if weight_offset != 0:
        gain = gain + _rounded(weight_offset, dtype, gain)
    if rounding == "parity_weight":
        y = (values * norm).to(dtype) * gain.to(dtype)
    else:
        y = values * norm * gain
    normalized = y.to(dtype)
    results = [normalized]
    if quantization is not None:
        results = list(quantized(y if once else normalized, quantization, scale, dtype))
    if residual is not None:
        results.append(kept)
    if keep_norm:
        results.append(normalized)
    return results[0] if len(results) == 1 else tuple(results)


class TensorParallelRMSNorm(nn.Module):
    """Replaces the all-reduce, the residual addition, RMSNorm and quantization after a row-parallel
    layer.

        y = norm(residual + all_reduce(partial))      # before
        y, residual = norm(partial, residual)         # after

    If no gradients are needed (under torch.no_grad or torch.inference_mode, or if no tensor of the
    call requires a gradient), a call is one fused operator: `collx.allreduce_rmsnorm`. Otherwise it
    is `unfused_rmsnorm`, so the module can be trained: the gradient of `partial` is that of the
    sum, and every rank has the whole gradient of the weight. All ranks must take the same path. In
    eval mode the unfused path is rarely intended, so the process gets one warning.

    The state is `weight`, as in torch.nn.RMSNorm. A given scale is not part of the state. It moves
    with the module and stays float32. After `to_empty` from the meta device, set its value.
    """

    weight: nn.Parameter
    scale: torch.Tensor | None

    def __init__(
        self,
        size: int,
        eps: float | None = 1e-6,
        *,
        group: Group = None,
        weight_offset: float = 0.0,
        rounding: str = "fp32",
        quantization: Quantization | str | None = None,
        scale: torch.Tensor | None = None,
        keep_norm: bool = False,
        algorithm: str = "auto",
        max_blocks: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """
        Args:
            size: the number of columns.
            eps: is added to the mean of the squares. None stands for the epsilon of float32, as in
                torch.nn.RMSNorm.
            group: the communicator, as in `collx.allreduce`; it is looked up in each call.
            weight_offset: is added to the weight; 1 for Gemma.
            rounding: "fp32", "parity" or "parity_weight" (docs/internals/numerics.md).
            quantization: a `collx.Quantization`; "fp8" or "int8" for its defaults; or None for a
                result that is not quantized.
            scale: a float32 tensor with one element: the scale of `scale_mode="tensor"`.
            keep_norm: with a quantization, also returns the normalized tensor.
            algorithm, max_blocks: as in `collx.allreduce_rmsnorm`.
            device, dtype: the device and dtype of the weight.

        Raises:
            ValueError: an unknown option, or options that do not match.
        """
        super().__init__()
        quantization = Quantization.of(quantization)
        _check_options("TensorParallelRMSNorm", rounding, quantization, keep_norm)
        given = quantization is not None and quantization.scale_mode == "tensor"
        if given != (scale is not None):
            raise ValueError(
                f"TensorParallelRMSNorm: scale: got {'None' if scale is None else 'a tensor'}; "
                'accepted: a tensor if quantization has scale_mode="tensor", otherwise None'
            )
        self.eps = eps
        self.group = None if group is None else name_of(group)
        self.weight_offset = weight_offset
        self.rounding = rounding
        self.quantization = quantization
        self.keep_norm = keep_norm
        self.algorithm = algorithm
        self.max_blocks = max_blocks
        self.weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.register_buffer("scale", scale, persistent=False)
        self.reset_parameters()

    @classmethod
    def from_module(
        cls,
        norm: nn.Module,
        *,
        rounding: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> TensorParallelRMSNorm:
        """Replaces a norm, and shares its weight.

        Args:
            norm: a torch.nn.RMSNorm; an RMSNorm of transformers (of Llama, Qwen, Mistral, Gemma and
                others; the error for an unknown class lists them); or a TensorParallelRMSNorm,
                whose options are kept.
            rounding: by default that of the norm.
            device, dtype: by default those of the norm. With others, the weight is a copy. The
                scale stays float32.
            options: other arguments of the constructor. `weight_offset` is by default that of the
                norm, which is 1 for Gemma. A new `quantization` replaces `scale` and `keep_norm`
                too.

        Raises:
            TypeError: the class of the norm is unknown, so it may compute something else.
        """
        if type(norm) in (TensorParallelRMSNorm, cls):
            kept = {name: getattr(norm, name) for name in _OPTIONS}
            if "quantization" in options:
                del kept["scale"], kept["keep_norm"]
        elif (form := form_of(norm)) is not None:
            kept = form._asdict()
        else:
            raise TypeError(
                f"TensorParallelRMSNorm.from_module: norm: got a {type(norm).__name__}; accepted: "
                f"{ACCEPTED}. For another RMSNorm, call TensorParallelRMSNorm(cols, eps, "
                "weight_offset=..., rounding=...) with the options that match its forward, and "
                "assign its weight"
            )
        weight: Any = norm.weight
        given = options if rounding is None else {"rounding": rounding, **options}
        made = cls(weight.numel(), device="meta", **{**kept, **given})
        made.weight = placed(weight, device, dtype)
        if made.scale is not None:
            made.scale = made.scale.to(device=device)
        return made.train(norm.training)

    def reset_parameters(self) -> None:
        """Sets the weight to 1, or to 1 - weight_offset."""
        nn.init.constant_(self.weight, 1 - self.weight_offset)

    def forward(self, partial: torch.Tensor, residual: torch.Tensor | None = None) -> Results:
        """
        Args:
            partial: a tensor [..., cols] of at least two dimensions, with dtype float32, float16 or
                bfloat16: this rank's summand.
            residual: a tensor of that shape and dtype, the same on all ranks; or None.

        Returns:
            The results of `collx.allreduce_rmsnorm`: the normalized tensor, or the quantized tensor
            and its scale; then, with a residual, the sum of both; then the normalized tensor if
            `keep_norm`.

        Raises the errors of `collx.allreduce`.
        """
        eps = self.eps
        if eps is None:
            eps = torch.finfo(torch.promote_types(partial.dtype, torch.float32)).eps
        if gradients.wanted(self, partial, residual, self.weight):
            return unfused_rmsnorm(
                partial,
                residual,
                self.weight,
                eps,
                self.group,
                weight_offset=self.weight_offset,
                rounding=self.rounding,
                quantization=self.quantization,
                scale=self.scale,
                keep_norm=self.keep_norm,
            )
        return allreduce_rmsnorm(
            partial,
            self.weight,
            eps,
            self.group,
            residual=residual,
            weight_offset=self.weight_offset,
            rounding=self.rounding,
            quantization=self.quantization,
            scale=self.scale,
            keep_norm=self.keep_norm,
            algorithm=self.algorithm,
            max_blocks=self.max_blocks,
        )

    def extra_repr(self) -> str:
        parts = [f"{self.weight.numel()}, eps={self.eps}, rounding={self.rounding!r}"]
        if self.weight_offset != 0:
            parts.append(f"weight_offset={self.weight_offset}")
        if self.quantization is not None:
            parts.append(
                f"quantization={self.quantization.kind!r} by {self.quantization.scale_mode}"
            )
        return ", ".join(parts)

    def _apply(
        self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> TensorParallelRMSNorm:
        scale = self.scale
        super()._apply(fn, recurse)
        if scale is not None and self.scale is not None:
            # A change of dtype only applies to the weight. A meta tensor has no values to copy.
            place = self.scale.device
            made = torch.empty_like(scale, device=place) if scale.is_meta else scale.to(place)
            self.scale = made
        return self


def _check_options(
    where: str, rounding: str, quantization: Quantization | None, keep_norm: bool
) -> None:
    if rounding not in ROUNDINGS:
        raise ValueError(f"{where}: rounding: got {rounding!r}; accepted: {', '.join(ROUNDINGS)}")
    if keep_norm and quantization is None:
        raise ValueError(
            f"{where}: keep_norm: got True without quantization; accepted: False, since the result "
            "already is the normalized tensor"
        )


def _rounded(value: float, dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    """Returns the nearest value of `dtype` as a scalar tensor with the dtype and device of
    `like`."""
    return like.new_full((), value, dtype=dtype).to(like.dtype)
