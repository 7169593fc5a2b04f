"""Collectives of tensor-parallel layers, each with the backward that its place in a layer needs.

The pairs are those of Megatron-LM (megatron/core/tensor_parallel/mappings.py), whose name each
function's text has:

    function                forward              backward
    copy_to_ranks           identity             allreduce(sum)
    reduce_from_ranks       allreduce(sum)       identity
    gather_from_ranks       allgather            this rank's part
    split_to_ranks          this rank's part     allgather
    gather_from_sequence    allgather            reducescatter(sum)
    scatter_to_sequence     reducescatter(sum)   allgather

The first four stand between tensors that all ranks have alike, gradients included, and tensors
that differ from rank to rank: a column-parallel layer begins with copy_to_ranks, a row-parallel one
ends with reduce_from_ranks. The last two take their places where each rank has its part of the
sequence outside of the layers.

Axes are divided among the ranks as `reducescatter` does, so sizes need not be divisible by their
number. All ranks call the same functions in the same order, and so do their backward passes.
"""

from __future__ import annotations

from typing import Any

import torch

from collx._groups import Group, get, name_of
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
    """Hands what all ranks have to computations that differ from rank to rank.

    Forward: `x` itself. Backward: allreduce(sum), since every rank's computation adds to the
    gradient. Megatron-LM: copy_to_tensor_model_parallel_region.

    Args:
        x: the same on all ranks.
        group: the communicator, as in `collx.allreduce`.
    """
    result: torch.Tensor = _Copy.apply(x, name_of(group))
    return result


def reduce_from_ranks(x: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Adds up what the ranks have computed.

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
    """Joins the ranks' parts of a tensor.

    Forward: allgather along `axis`. Backward: this rank's part, since all ranks have the same
    gradient. Megatron-LM: gather_from_tensor_model_parallel_region, where `axis` is the last one.

    Args:
        x: this rank's part.
        group: the communicator, as in `collx.allreduce`.
        axis: the dimension to join.
        total: its size in the result, if the parts are not all equal.
    """
    result: torch.Tensor = _Gather.apply(x, name_of(group), axis, total)
    return result


def split_to_ranks(x: torch.Tensor, group: Group = None, axis: int = -1) -> torch.Tensor:
    """Takes this rank's part of a tensor that all ranks have.

    Forward: a contiguous copy of this rank's part of `axis`. Backward: allgather. Megatron-LM:
    scatter_to_tensor_model_parallel_region, where `axis` is the last one.

    Args:
        x: the same on all ranks.
        group: the communicator, as in `collx.allreduce`.
        axis: the dimension to divide.
    """
    result: torch.Tensor = _Split.apply(x, name_of(group), axis)
    return result


def gather_from_sequence(
    x: torch.Tensor, group: Group = None, axis: int = 0, total: int | None = None
) -> torch.Tensor:
    """Joins the ranks' parts of the sequence in front of a layer that every rank computes its share
    of, in place of copy_to_ranks.

    Forward: allgather along `axis`. Backward: reducescatter(sum). Megatron-LM:
    gather_from_sequence_parallel_region.

    Args:
        x: this rank's part.
        group: the communicator, as in `collx.allreduce`.
        axis: the dimension to join.
        total: its size in the result, if the parts are not all equal.
    """
    return allgather(x, group, axis=axis, total=total)


def scatter_to_sequence(x: torch.Tensor, group: Group = None, axis: int = 0) -> torch.Tensor:
    """Adds up what the ranks have computed and divides the sequence, in place of
    reduce_from_ranks.

    Forward: reducescatter(sum) along `axis`. Backward: allgather. Megatron-LM:
    reduce_scatter_to_sequence_parallel_region.

    Args:
        x: this rank's summand, of full size.
        group: the communicator, as in `collx.allreduce`.
        axis: the dimension to divide.
    """
    return reducescatter(x, "sum", group, axis=axis)


# Each backward is the other function of the pair, so gradients of gradients are right, too.


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str) -> torch.Tensor:
        ctx.name = name
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return reduce_from_ranks(gradient, ctx.name), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str) -> torch.Tensor:
        ctx.name = name
        return allreduce(x, "sum", name)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return copy_to_ranks(gradient, ctx.name), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str, axis: int, total: int | None) -> torch.Tensor:
        ctx.name, ctx.axis = name, axis
        return allgather(x, name, axis=axis, total=total)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return split_to_ranks(gradient, ctx.name, ctx.axis), None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str, axis: int) -> torch.Tensor:
        ctx.name, ctx.axis, ctx.total = name, axis, x.size(axis)
        start, count = _own_part(ctx.total, name)
        # Always a copy: PyTorch 2.11 loses the gradient of a view of the input when compiled.
        return x.narrow(axis, start, count).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gather_from_ranks(gradient, ctx.name, ctx.axis, ctx.total), None, None


def _own_part(n: int, name: str) -> tuple[int, int]:
    """(start, count) of this rank's part, in operations that the compiler can trace."""
    communicator = get(name)
    rank, world = communicator.rank, communicator.world_size
    quotient, remainder = n // world, n % world
    return rank * quotient + min(rank, remainder), quotient + (1 if rank < remainder else 0)
