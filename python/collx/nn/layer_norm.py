"""LayerNorm after a row-parallel layer: one operator for the sum over the ranks, the residual and
the norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from collx._groups import Group, name_of
from collx.nn import gradients
from collx.nn.known_norms import placed
from collx.nn.mappings import reduce_from_ranks
from collx.ops.norms import Results, allreduce_layernorm
from collx.ops.quantization import ROUNDINGS

__all__ = ["TensorParallelLayerNorm"]

_OPTIONS = ("eps", "group", "rounding", "algorithm", "max_blocks")
"""The arguments of the constructor that are also attributes."""


class TensorParallelLayerNorm(nn.Module):
    """Replaces the all-reduce, the residual addition and torch.nn.LayerNorm after a row-parallel
    layer.

        y = norm(residual + all_reduce(partial))      # before
        y, residual = norm(partial, residual)         # after

    If no gradients are needed, a call is one fused operator: `collx.allreduce_layernorm`. Otherwise
    it is an all-reduce in the dtype of the input, an addition and PyTorch's layer norm, rounded as
    "parity", so the module can be trained. If the weight is float32, the norm is computed in
    float32. On both paths, also under autocast, the results have the dtype of the input. All ranks
    must take the same path.

    The state is `weight` and `bias`, or only `weight`, as in torch.nn.LayerNorm.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        size: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        group: Group = None,
        rounding: str = "fp32",
        algorithm: str = "auto",
        max_blocks: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """
        Args:
            size: the number of columns.
            eps: is added to the variance.
            bias: whether the norm has a bias.
            group: the communicator, as in `collx.allreduce`; it is looked up in each call.
            rounding: "fp32", "parity" or "parity_weight" (docs/internals/numerics.md).
            algorithm, max_blocks: as in `collx.allreduce_layernorm`.
            device, dtype: the device and dtype of weight and bias.

        Raises:
            ValueError: an unknown rounding.
        """
        super().__init__()
        if rounding not in ROUNDINGS:
            raise ValueError(
                f"TensorParallelLayerNorm: rounding: got {rounding!r}; accepted: "
                f"{', '.join(ROUNDINGS)}"
            )
        self.eps = eps
        self.group = None if group is None else name_of(group)
        self.rounding = rounding
        self.algorithm = algorithm
        self.max_blocks = max_blocks
        self.weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(size, device=device, dtype=dtype)) if bias else None
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
    ) -> TensorParallelLayerNorm:
        """Replaces a norm, and shares its weight and bias.

        Args:
            norm: a torch.nn.LayerNorm over the last dimension, with a weight; or a
                TensorParallelLayerNorm, whose options are kept.
            rounding: by default that of the norm; "parity" for torch.nn.LayerNorm.
            device, dtype: by default those of the norm. With others, weight and bias are copies.
            options: other arguments of the constructor, except `bias`, which the norm decides.

        Raises:
            TypeError: the class of the norm is unknown, so it may compute something else.
        """
        weight: Any = getattr(norm, "weight", None)
        if type(norm) in (TensorParallelLayerNorm, cls):
            kept = {name: getattr(norm, name) for name in _OPTIONS}
        elif type(norm) is nn.LayerNorm and weight is not None and weight.dim() == 1:
            kept = {"eps": norm.eps, "rounding": "parity"}
        else:
            raise TypeError(
                f"TensorParallelLayerNorm.from_module: norm: got {norm!r}; accepted: "
                "torch.nn.LayerNorm over the last dimension, with a weight; "
                "TensorParallelLayerNorm"
            )
        bias: Any = norm.bias
        given = options if rounding is None else {"rounding": rounding, **options}
        made = cls(weight.numel(), bias=bias is not None, device="meta", **{**kept, **given})
        made.weight = placed(weight, device, dtype)
        made.bias = None if bias is None else placed(bias, device, dtype)
        return made.train(norm.training)

    def reset_parameters(self) -> None:
        """Sets the weight to 1 and the bias to 0."""
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, partial: torch.Tensor, residual: torch.Tensor | None = None) -> Results:
        """
        Args:
            partial: a tensor [..., cols] of at least two dimensions, with dtype float32, float16 or
                bfloat16: this rank's summand.
            residual: a tensor of that shape and dtype, the same on all ranks; or None.

        Returns:
            The normalized tensor; with a residual, a tuple of it and the sum plus the residual.

        Raises the errors of `collx.allreduce`.
        """
        if gradients.wanted(self, partial, residual, self.weight, self.bias):
            gradients.check_residual("TensorParallelLayerNorm", partial, residual)
            total = reduce_from_ranks(partial, self.group)
            if residual is not None:
                total = total + residual
            # On CUDA, PyTorch's layer norm needs one dtype, and autocast returns float32.
            wide = torch.promote_types(total.dtype, self.weight.dtype)
            normalized = nn.functional.layer_norm(
                total.to(wide),
                self.weight.shape,
                self.weight.to(wide),
                None if self.bias is None else self.bias.to(wide),
                self.eps,
            ).to(total.dtype)
            return normalized if residual is None else (normalized, total)
        # The operator always adds a bias. Only -0 changes no value: adding 0 turns -0 into 0.
        bias = torch.full_like(self.weight, -0.0) if self.bias is None else self.bias
        return allreduce_layernorm(
            partial,
            self.weight,
            bias,
            self.eps,
            self.group,
            residual=residual,
            rounding=self.rounding,
            algorithm=self.algorithm,
            max_blocks=self.max_blocks,
        )

    def extra_repr(self) -> str:
        without = ", bias=False" if self.bias is None else ""
        return f"{self.weight.numel()}, eps={self.eps}{without}, rounding={self.rounding!r}"
