"""Linear layers that are split over the ranks, as Megatron-LM splits them.

A column-parallel layer keeps some of the outputs: a rank computes its own attention heads, or its
own part of an MLP's hidden units, from the whole input. The row-parallel layer behind it keeps the
weights of the matching inputs; its products are summands of the whole output.

A new layer draws the whole weight and bias as torch.nn.Linear does, and keeps this rank's part. So
the ranks together have the layer that torch.nn.Linear makes, provided that all of them draw from
the same seed, on devices of one kind. Their random number generators then stand where they would
behind that layer. On the "meta" device nothing is drawn, and the whole weight takes no memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from collx._groups import Group, get, name_of
from collx.nn.pairs import copy_to_ranks, gather_from_ranks, reduce_from_ranks
from collx.nn.products import allgather_matmul, matmul_reducescatter

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "part"]


def part(count: int, world_size: int, rank: int) -> slice:
    """The units of `rank` when `count` are divided: low ranks get the remainder, as in
    `collx.reducescatter`."""
    quotient, remainder = divmod(count, world_size)
    start = rank * quotient + min(rank, remainder)
    return slice(start, start + quotient + (rank < remainder))


class ColumnParallelLinear(nn.Module):
    """Computes this rank's outputs of a linear layer: [..., in_features] -> [..., its outputs].

    Its input is the same on all ranks, and so is the gradient of it. With `gather_output` the
    outputs of all ranks are joined, [..., out_features]. With `overlap` the input is this rank's
    equal part of the first axis, as with sequence parallelism: [its rows, ..., in_features] ->
    [rows, ..., its outputs]. The parts are gathered while the product runs.

    The state is `weight`, [its outputs, in_features], and `bias`, [its outputs], or None.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Group = None,
        units: slice | None = None,
        gather_output: bool = False,
        overlap: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """
        Args:
            in_features, out_features: of the whole layer.
            bias: whether there is one.
            group: the communicator, which has to exist, as in `collx.allreduce`.
            units: which of the outputs are this rank's; by default its `part`.
            gather_output: join the outputs, of which each rank then has its `part`.
            overlap: gather the input, by `allgather_matmul`.
            device, dtype: of weight and bias.

        Raises:
            ValueError: no communicator, or `units` besides `gather_output`.
        """
        super().__init__()
        if gather_output and units is not None:
            raise ValueError(
                "ColumnParallelLinear: units: given with gather_output, which joins equal parts"
            )
        self.in_features = in_features
        self.out_features = out_features
        self.gather_output = gather_output
        self.overlap = overlap
        self.group = None if group is None else name_of(group)
        self.units = _units(units, out_features, group)
        rows = self.units.stop - self.units.start
        self.weight = nn.Parameter(torch.empty(rows, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(rows, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    @classmethod
    def from_module(
        cls,
        full: nn.Linear,
        *,
        group: Group = None,
        units: slice | None = None,
        gather_output: bool = False,
        overlap: bool = False,
    ) -> ColumnParallelLinear:
        """This rank's part of a layer, of which it keeps a copy. Arguments as above."""
        made = cls(
            full.in_features,
            full.out_features,
            full.bias is not None,
            group=group,
            units=units,
            gather_output=gather_output,
            overlap=overlap,
            device="meta",
        )
        made.weight = _kept(full.weight[made.units])
        made.bias = None if full.bias is None else _kept(full.bias[made.units])
        return made.train(full.training)

    def reset_parameters(self) -> None:
        """Draws the whole weight and bias as torch.nn.Linear does, and keeps this rank's part."""
        weight, bias = _drawn(self.in_features, self.out_features, self.weight, self.bias)
        with torch.no_grad():
            self.weight.copy_(weight[self.units])
            if self.bias is not None and bias is not None:
                self.bias.copy_(bias[self.units])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """
        Args:
            x: [..., in_features], the same on all ranks; with `overlap` this rank's rows.

        Returns:
            [..., this rank's outputs], or [..., out_features] with `gather_output`.
        """
        if self.overlap:
            y = allgather_matmul(x, self.weight.t(), self.group)
            y = y if self.bias is None else y + self.bias
        else:
            if torch.is_grad_enabled():
                x = copy_to_ranks(x, self.group)
            y = functional.linear(x, self.weight, self.bias)
        if not self.gather_output:
            return y
        return gather_from_ranks(y, self.group, axis=-1, total=self.out_features)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={len(self.weight)} of "
            f"{self.out_features}, bias={self.bias is not None}"
        )


class RowParallelLinear(nn.Module):
    """Takes this rank's inputs of a linear layer: [..., its inputs] -> [..., out_features].

    The ranks' products are added up, and then the bias, which is the same on all of them. With
    `overlap` each rank gets its equal part of the first axis of the sum, as with sequence
    parallelism: [rows, ..., its inputs] -> [its rows, ..., out_features]. Parts of the sum travel
    while the product runs.

    The state is `weight`, [out_features, its inputs], and `bias`, [out_features], or None.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Group = None,
        units: slice | None = None,
        reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
        overlap: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """
        Args:
            in_features, out_features: of the whole layer.
            bias: whether there is one.
            group: the communicator, which has to exist, as in `collx.allreduce`.
            units: which of the inputs are this rank's; by default its `part`.
            reduce: sums [..., out_features] over the ranks; by default `reduce_from_ranks`. In
                front of a TensorParallelRMSNorm, which sums by itself, give one that returns its
                argument, and no bias.
            overlap: reduce by `matmul_reducescatter`.
            device, dtype: of weight and bias.

        Raises:
            ValueError: no communicator, or `reduce` besides `overlap`.
        """
        super().__init__()
        if overlap and reduce is not None:
            raise ValueError("RowParallelLinear: reduce: given with overlap, which reduces itself")
        self.in_features = in_features
        self.out_features = out_features
        self.reduce = reduce
        self.overlap = overlap
        self.group = None if group is None else name_of(group)
        self.units = _units(units, in_features, group)
        columns = self.units.stop - self.units.start
        self.weight = nn.Parameter(torch.empty(out_features, columns, device=device, dtype=dtype))
        self.bias = (
            nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        )
        self.reset_parameters()

    @classmethod
    def from_module(
        cls,
        full: nn.Linear,
        *,
        group: Group = None,
        units: slice | None = None,
        reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
        overlap: bool = False,
    ) -> RowParallelLinear:
        """This rank's part of a layer, of which it keeps a copy. Arguments as above."""
        made = cls(
            full.in_features,
            full.out_features,
            full.bias is not None,
            group=group,
            units=units,
            reduce=reduce,
            overlap=overlap,
            device="meta",
        )
        made.weight = _kept(full.weight[:, made.units])
        made.bias = None if full.bias is None else _kept(full.bias)
        return made.train(full.training)

    def reset_parameters(self) -> None:
        """Draws the whole weight and bias as torch.nn.Linear does, and keeps this rank's part of
        the weight. All ranks must draw from the same seed, since all add the same bias."""
        weight, bias = _drawn(self.in_features, self.out_features, self.weight, self.bias)
        with torch.no_grad():
            self.weight.copy_(weight[:, self.units])
            if self.bias is not None and bias is not None:
                self.bias.copy_(bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """
        Args:
            x: [..., this rank's inputs].

        Returns:
            [..., out_features], the same on all ranks; with `overlap` this rank's rows.
        """
        if self.overlap:
            own = matmul_reducescatter(x, self.weight.t(), self.group)
            if self.bias is None:
                return own
            # The other ranks add it to their rows.
            return own + copy_to_ranks(self.bias, self.group)
        product = functional.linear(x, self.weight)
        if self.reduce is not None:
            total = self.reduce(product)
        else:
            total = reduce_from_ranks(product, self.group)
        return total if self.bias is None else total + self.bias

    def extra_repr(self) -> str:
        return (
            f"in_features={self.weight.size(1)} of {self.in_features}, "
            f"out_features={self.out_features}, bias={self.bias is not None}"
        )


def _units(units: slice | None, count: int, group: Group) -> slice:
    if units is not None:
        return slice(*units.indices(count)[:2])
    communicator = get(group)
    return part(count, communicator.world_size, communicator.rank)


def _drawn(
    in_features: int, out_features: int, weight: nn.Parameter, bias: nn.Parameter | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias of a new torch.nn.Linear, of the dtype and on the device of these."""
    whole = nn.Linear(
        in_features, out_features, bias is not None, device=weight.device, dtype=weight.dtype
    )
    return whole.weight, whole.bias


def _kept(values: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(values.detach().clone(memory_format=torch.contiguous_format))
