"""Collectives of tensor-parallel layers, each with the backward that a layer needs at that point.

The functions correspond to those of Megatron-LM (megatron/core/tensor_parallel/mappings.py); each
docstring names its counterpart:

    function                forward              backward
    copy_to_ranks           identity             allreduce(sum)
    reduce_from_ranks       allreduce(sum)       identity
    gather_from_ranks       allgather            this rank's part
    split_to_ranks          this rank's part     allgather
    gather_from_sequence    allgather            reducescatter(sum)
    scatter_to_sequence     reducescatter(sum)   allgather

The first four functions connect tensors that are the same on all ranks, including their gradients,
with tensors that differ from rank to rank. A column-parallel layer starts with copy_to_ranks, and a
row-parallel layer ends with reduce_from_ranks. The last two functions replace these if each rank
holds its part of the sequence outside of the layers.

Axes are divided among the ranks as in `reducescatter`, so a size need not be divisible by the
number of ranks. All ranks call the same functions in the same order, and so do their backward
passes.
"""

from __future__ import annotations

from typing import Any

import torch

from collx._groups import Group, name_of, rank_and_size
from collx.ops.collectives import allgather, allreduce, reducescatter

__all__ = [
    "copy_to_ranks",
    "gather_from_ranks",
    "gather_from_sequence",
    "reduce_from_ranks",
    "scatter_to_sequence",
    "split_to_ranks",
]


def copy_to_ranks(x: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Passes a tensor that is the same on all ranks to computations that differ from rank to rank.

    Forward: `x` itself. Backward: allreduce(sum), since the computation of every rank contributes
    to the gradient. Megatron-LM: copy_to_tensor_model_parallel_region.

    Args:
        x: a tensor that is the same on all ranks.
        group: the communicator, as in `collx.allreduce`.
    """
    result: torch.Tensor = _Copy.apply(x, name_of(group))
    return result


def reduce_from_ranks(x: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Sums the results of the ranks.

    Forward: allreduce(sum). Backward: identity, since all ranks have the same gradient.
    Megatron-LM: reduce_from_tensor_model_parallel_region.

    Args:
        x: this rank's summand.
        group: the communicator, as in `collx.allreduce`.
    """
    result: torch.Tensor = _Reduce.apply(x, name_of(group))
    return result


def gather_from_ranks(
    x: torch.Tensor, group: Group = None, axis: int = -1, total: int | None = None
) -> torch.Tensor:
    """Concatenates the ranks' parts of a tensor.

    Forward: allgather along `axis`. Backward: this rank's part, since all ranks have the same
    gradient. Megatron-LM: gather_from_tensor_model_parallel_region, where `axis` is the last one.

    Args:
        x: this rank's part.
        group: the communicator, as in `collx.allreduce`.
        axis: the dimension along which the parts are concatenated.
        total: the size of `axis` in the result, if the parts have different sizes.
    """
    result: torch.Tensor = _Gather.apply(x, name_of(group), axis, total)
    return result


def split_to_ranks(x: torch.Tensor, group: Group = None, axis: int = -1) -> torch.Tensor:
    """Takes this rank's part of a tensor that is the same on all ranks.

    Forward: a contiguous copy of this rank's part of `axis`. Backward: allgather. Megatron-LM:
    scatter_to_tensor_model_parallel_region, where `axis` is the last one.

    Args:
        x: a tensor that is the same on all ranks.
        group: the communicator, as in `collx.allreduce`.
        axis: the dimension that is divided.
    """
    result: torch.Tensor = _Split.apply(x, name_of(group), axis)
    return result


def gather_from_sequence(
    x: torch.Tensor, group: Group = None, axis: int = 0, total: int | None = None
) -> torch.Tensor:
    """Concatenates the ranks' parts of the sequence, before a layer that is divided among the
    ranks. Replaces copy_to_ranks in sequence parallelism.

    Forward: allgather along `axis`. Backward: reducescatter(sum). Megatron-LM:
    gather_from_sequence_parallel_region.

    Args:
        x: this rank's part.
        group: the communicator, as in `collx.allreduce`.
        axis: the dimension along which the parts are concatenated.
        total: the size of `axis` in the result, if the parts have different sizes.
    """
    return allgather(x, group, axis=axis, total=total)


def scatter_to_sequence(x: torch.Tensor, group: Group = None, axis: int = 0) -> torch.Tensor:
    """Sums the results of the ranks and divides the sequence. Replaces reduce_from_ranks in
    sequence parallelism.

    Forward: reducescatter(sum) along `axis`. Backward: allgather. Megatron-LM:
    reduce_scatter_to_sequence_parallel_region.

    Args:
        x: this rank's summand, of the full size.
        group: the communicator, as in `collx.allreduce`.
        axis: the dimension that is divided.
    """
    return reducescatter(x, "sum", group, axis=axis)


# Each backward is the other function of the pair, so second derivatives are also correct. Since
# setup_context is separate, and vmap transforms the operators, torch.func supports them too.


class _Mapping(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, ctx.name, *more = inputs
        if more:
            ctx.axis = more[0]
            ctx.total = x.size(ctx.axis)


class _Copy(_Mapping):
    @staticmethod
    def forward(x: torch.Tensor, name: str) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return reduce_from_ranks(gradient, ctx.name), None


class _Reduce(_Mapping):
    @staticmethod
    def forward(x: torch.Tensor, name: str) -> torch.Tensor:
        return allreduce(x, "sum", name)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return copy_to_ranks(gradient, ctx.name), None


class _Gather(_Mapping):
    @staticmethod
    def forward(x: torch.Tensor, name: str, axis: int, total: int | None) -> torch.Tensor:
        return allgather(x, name, axis=axis, total=total)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return split_to_ranks(gradient, ctx.name, ctx.axis), None, None, None


class _Split(_Mapping):
    @staticmethod
    def forward(x: torch.Tensor, name: str, axis: int) -> torch.Tensor:
        start, count = _own_part(x.size(axis), name)
        # Always copied: compiled code of PyTorch 2.11 loses the gradient of a view of the input.
        return x.narrow(axis, start, count).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gather_from_ranks(gradient, ctx.name, ctx.axis, ctx.total), None, None


def _own_part(n: int, name: str) -> tuple[int, int]:
    """Returns (start, count) of this rank's part, with operations that the compiler can trace."""
    rank, world = rank_and_size(name)
    quotient, remainder = n // world, n % world
    return rank * quotient + min(rank, remainder), quotient + (1 if rank < remainder else 0)
