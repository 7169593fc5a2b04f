"""Linear layers that are split over ranks, and a BERT made of them.

A column-parallel layer keeps some of the outputs: each rank computes its own attention heads, or
its own part of an MLP's hidden units, from the whole input. The row-parallel layer behind it keeps
the weights of the matching inputs. Its products are partial sums of the whole output, which one
all-reduce adds up. So a transformer layer needs two all-reduces: after attention, after the MLP.
"""

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from transformers import BertModel

AllReduce = Callable[[Tensor], Tensor]


def part(count: int, world_size: int, rank: int) -> slice:
    """The units of `rank` when `count` are split; low ranks take the remainder."""
    quotient, remainder = divmod(count, world_size)
    start = rank * quotient + min(rank, remainder)
    return slice(start, start + quotient + (rank < remainder))


class ColumnParallelLinear(nn.Module):
    """Computes `units` of a linear layer's outputs: [..., in] -> [..., len(units)]."""

    def __init__(self, full: nn.Linear, units: slice) -> None:
        super().__init__()
        self.weight = nn.Parameter(full.weight.detach()[units].clone())
        self.bias = nn.Parameter(full.bias.detach()[units].clone())

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """Takes `units` of a linear layer's inputs: [..., len(units)] -> [..., out].

    `all_reduce` sums a tensor over the ranks. The bias is added once, after the sum, and every rank
    gets the whole output.
    """

    def __init__(self, full: nn.Linear, units: slice, all_reduce: AllReduce) -> None:
        super().__init__()
        self.weight = nn.Parameter(full.weight.detach()[:, units].clone())
        self.bias = nn.Parameter(full.bias.detach().clone())
        self.all_reduce = all_reduce

    def forward(self, x: Tensor) -> Tensor:
        return self.all_reduce(functional.linear(x, self.weight)) + self.bias


def split_bert(full: BertModel, world_size: int, rank: int, all_reduce: AllReduce) -> BertModel:
    """A copy of `full` that holds this rank's heads and MLP units; `full` stays as it is.

    Raises ValueError when there are more ranks than attention heads.
    """
    heads = full.config.num_attention_heads
    if world_size > heads:
        raise ValueError(f"{heads} attention heads cannot be split over {world_size} ranks")
    head_size = full.config.hidden_size // heads
    mine = part(heads, world_size, rank)
    head_units = slice(mine.start * head_size, mine.stop * head_size)
    mlp_units = part(full.config.intermediate_size, world_size, rank)

    model = copy.deepcopy(full)
    layer: Any
    for layer in model.encoder.layer:
        attention = layer.attention
        for name in ("query", "key", "value"):
            projection = getattr(attention.self, name)
            setattr(attention.self, name, ColumnParallelLinear(projection, head_units))
        attention.output.dense = RowParallelLinear(attention.output.dense, head_units, all_reduce)
        layer.intermediate.dense = ColumnParallelLinear(layer.intermediate.dense, mlp_units)
        layer.output.dense = RowParallelLinear(layer.output.dense, mlp_units, all_reduce)
    return model
