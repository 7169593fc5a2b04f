"""Linear layers that are split over the ranks, as Megatron-LM splits them.

A column-parallel layer keeps a part of the outputs: each rank computes its own attention heads, or
its own part of the hidden units of an MLP, from the whole input. The row-parallel layer that
follows keeps the weights of the matching inputs; its products are summands of the whole output.

A new layer draws the whole weight and bias as torch.nn.Linear does, and keeps this rank's part.
Together, the ranks then hold the layer that torch.nn.Linear creates, provided that all ranks use
the same seed and the same kind of device. The random number generators are afterwards in the state
in which torch.nn.Linear leaves them. On the "meta" device nothing is drawn, and the whole weight
takes no memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from collx._groups import Group, name_of, rank_and_size
from collx.nn.mappings import copy_to_ranks, gather_from_ranks, reduce_from_ranks
from collx.nn.products import allgather_matmul, matmul_reducescatter

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "shard_range"]


def shard_range(count: int, world_size: int, rank: int) -> slice:
    """Returns the slice of `count` units that belongs to `rank`. If `world_size` does not divide
    `count`, the first ranks get one more unit, as in `collx.reducescatter`.

    Raises:
        ValueError: `rank` is not a rank.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"shard_range: rank: got {rank}; accepted: 0 to {world_size - 1}")
    quotient, remainder = divmod(count, world_size)
    start = rank * quotient + min(rank, remainder)
    return slice(start, start + quotient + (rank < remainder))


class ColumnParallelLinear(nn.Module):
    """A linear layer whose outputs are divided among the ranks: [..., in_features] -> [..., this
    rank's outputs].

    The input and its gradient are the same on all ranks. With `gather_output`, the outputs of all
    ranks are concatenated, [..., out_features]. With `overlap`, the input is this rank's
    equal part of the first axis, as in sequence parallelism: [this rank's rows, ..., in_features]
    -> [rows, ..., this rank's outputs]. The parts are gathered while the product runs.

    The state is `weight`, [this rank's outputs, in_features], and `bias`, [this rank's outputs] or
    None.
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
            in_features, out_features: the sizes of the whole layer.
            bias: whether the layer has a bias.
            group: the communicator, as in `collx.allreduce`. With `overlap`, it must exist.
            units: the outputs of this rank; by default its `shard_range`.
            gather_output: concatenates the outputs of all ranks. The ranks must then have the
                outputs of `shard_range`.
            overlap: gathers the input with `allgather_matmul`.
            device, dtype: of weight and bias.

        Raises:
            ValueError: there is no communicator, both `units` and `gather_output` are given, or
                `units` are not consecutive.
        """
        super().__init__()
        if gather_output and units is not None:
            raise ValueError(
                "ColumnParallelLinear: units: got a slice with gather_output=True; accepted: None, "
                "since gather_output joins the outputs of shard_range"
            )
        self.in_features = in_features
        self.out_features = out_features
        self.gather_output = gather_output
        self.overlap = overlap
        self.group = None if group is None else name_of(group)
        self.units = _units("ColumnParallelLinear", units, out_features, group)
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
        """Copies this rank's part of a whole layer. The arguments are those of the constructor."""
        _require_linear(cls.__name__, full)
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
        made.weight = _part(full.weight, made.units)
        made.bias = None if full.bias is None else _part(full.bias, made.units)
        return made.train(full.training)

    def reset_parameters(self) -> None:
        """Draws the whole weight and bias as torch.nn.Linear does, and keeps this rank's part."""
        weight, bias = _drawn(self.in_features, self.out_features, self.weight, self.bias)
        _write(self.weight, weight[self.units])
        if self.bias is not None and bias is not None:
            _write(self.bias, bias[self.units])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """
        Args:
            x: a tensor [..., in_features], the same on all ranks; with `overlap`, this rank's
                rows.

        Returns:
            A tensor [..., this rank's outputs], or [..., out_features] with `gather_output`.
        """
        if self.overlap:
            y = allgather_matmul(x, self.weight.t(), self.group)
            y = y if self.bias is None else y + self.bias.to(y.dtype)
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
    """A linear layer whose inputs are divided among the ranks: [..., this rank's inputs] -> [...,
    out_features].

    The products of the ranks are summed; then the bias, which is the same on all ranks, is added.
    With `overlap`, each rank receives its equal part of the first axis of the sum, as in sequence
    parallelism: [rows, ..., this rank's inputs] -> [this rank's rows, ..., out_features]. Parts of
    the sum are transferred while the product runs.

    The state is `weight`, [out_features, this rank's inputs], and `bias`, [out_features] or None.
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
            in_features, out_features: the sizes of the whole layer.
            bias: whether the layer has a bias.
            group: the communicator, as in `collx.allreduce`. With `overlap`, it must exist.
            units: the inputs of this rank; by default its `shard_range`.
            reduce: sums a tensor [..., out_features] over the ranks; by default
                `reduce_from_ranks`. If a TensorParallelRMSNorm follows, which sums itself, pass a
                function that returns its argument, and no bias.
            overlap: reduces with `matmul_reducescatter`.
            device, dtype: of weight and bias.

        Raises:
            ValueError: there is no communicator, `reduce` is given together with `overlap`, or
                `units` are not consecutive.
        """
        super().__init__()
        if overlap and reduce is not None:
            raise ValueError(
                "RowParallelLinear: reduce: got a function with overlap=True; accepted: None, "
                "since overlap reduces with matmul_reducescatter"
            )
        self.in_features = in_features
        self.out_features = out_features
        self.reduce = reduce
        self.overlap = overlap
        self.group = None if group is None else name_of(group)
        self.units = _units("RowParallelLinear", units, in_features, group)
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
        """Copies this rank's part of a whole layer. The arguments are those of the constructor."""
        _require_linear(cls.__name__, full)
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
        made.weight = _part(full.weight, slice(None), made.units)
        made.bias = None if full.bias is None else _part(full.bias)
        return made.train(full.training)

    def reset_parameters(self) -> None:
        """Draws the whole weight and bias as torch.nn.Linear does, and keeps this rank's part of
        the weight. All ranks must use the same seed, since all of them add the same bias."""
        weight, bias = _drawn(self.in_features, self.out_features, self.weight, self.bias)
        _write(self.weight, weight[:, self.units])
        if self.bias is not None and bias is not None:
            _write(self.bias, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """
        Args:
            x: a tensor [..., this rank's inputs].

        Returns:
            A tensor [..., out_features], the same on all ranks; with `overlap`, this rank's rows.
        """
        if self.overlap:
            own = matmul_reducescatter(x, self.weight.t(), self.group)
            if self.bias is None:
                return own
            # Every rank adds the bias to its own rows, so its gradient is summed over the ranks.
            return own + copy_to_ranks(self.bias, self.group).to(own.dtype)
        product = functional.linear(x, self.weight)
        if self.reduce is not None:
            total = self.reduce(product)
        else:
            total = reduce_from_ranks(product, self.group)
        return total if self.bias is None else total + self.bias.to(total.dtype)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.weight.size(1)} of {self.in_features}, "
            f"out_features={self.out_features}, bias={self.bias is not None}"
        )


def _units(where: str, units: slice | None, count: int, group: Group) -> slice:
    if units is not None:
        start, stop, step = units.indices(count)
        if step != 1 or start > stop:
            raise ValueError(
                f"{where}: units: got {units}; accepted: a slice of consecutive units, with "
                f"0 <= start <= stop <= {count}"
            )
        return slice(start, stop)
    rank, size = rank_and_size(group)
    return shard_range(count, size, rank)


def _require_linear(name: str, full: nn.Linear) -> None:
    """Raises TypeError for another module. A layer that is already divided would be divided again:
    the parts would lack weights, and the sum over the ranks would be wrong without an error."""
    if not isinstance(full, nn.Linear):
        raise TypeError(
            f"{name}.from_module: full: got a {type(full).__name__}; accepted: a torch.nn.Linear"
        )


def _drawn(
    in_features: int, out_features: int, weight: nn.Parameter, bias: nn.Parameter | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns weight and bias of a new torch.nn.Linear, with the dtype and device of `weight`."""
    whole = nn.Linear(
        in_features, out_features, bias is not None, device=weight.device, dtype=weight.dtype
    )
    return whole.weight.detach(), None if whole.bias is None else whole.bias.detach()


@torch.no_grad()
def _write(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Writes the values of a parameter, which is a DTensor if FSDP2 divides the layer further."""
    if type(parameter) is not nn.Parameter:
        from torch.distributed.tensor import DTensor, distribute_tensor

        if isinstance(parameter, DTensor):
            values = distribute_tensor(values, parameter.device_mesh, parameter.placements)
    parameter.copy_(values)


def _part(whole: torch.Tensor, *where: slice) -> nn.Parameter:
    """Returns a copy of a part of a parameter, which is trained if the parameter is."""
    part = whole.detach()[where].clone(memory_format=torch.contiguous_format)
    return nn.Parameter(part, whole.requires_grad)
