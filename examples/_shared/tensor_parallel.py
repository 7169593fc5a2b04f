"""Linear layers that are split over ranks, and a BERT made of them.

A column-parallel layer keeps some of the outputs: each rank computes its own attention heads, or
its own part of an MLP's hidden units, from the whole input. The row-parallel layer behind it keeps
the weights of the matching inputs. Its products are partial sums of the whole output, which the
ranks add up: twice in a transformer layer, after attention and after the MLP.

What a rank has between a row-parallel layer and the next column-parallel one, where residuals are
added and normalized, is up to an `Exchange`. `Replicated` is the plain one.
"""

import copy
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn import functional
from transformers import BertModel

Change = Callable[[Tensor], Tensor]


class Exchange(Protocol):
    """What the ranks exchange around the split layers. Tensors are [sentences, tokens, units]."""

    def split(self, x: Tensor) -> Tensor:
        """What this rank keeps of the first layer's input, which all ranks have."""

    def gather(self, x: Tensor) -> Tensor:
        """All tokens, from what the ranks keep: input of a column-parallel layer."""

    def reduce(self, x: Tensor) -> Tensor:
        """What this rank keeps of the sum of the ranks' `x`: output of a row-parallel layer."""


class Replicated:
    """Every rank keeps all tokens. `all_reduce` sums a tensor over the ranks."""

    def __init__(self, all_reduce: Change) -> None:
        self.reduce = all_reduce

    def split(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor) -> Tensor:
        return x


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

    `reduce` is an exchange's. The bias is added once, after the sum.
    """

    def __init__(self, full: nn.Linear, units: slice, reduce: Change) -> None:
        super().__init__()
        self.weight = nn.Parameter(full.weight.detach()[:, units].clone())
        self.bias = nn.Parameter(full.bias.detach().clone())
        self.reduce = reduce

    def forward(self, x: Tensor) -> Tensor:
        return self.reduce(functional.linear(x, self.weight)) + self.bias


def change_input(module: nn.Module, change: Change) -> None:
    """Lets `change` make the module's first argument."""
    module.register_forward_pre_hook(lambda _, inputs: (change(inputs[0]), *inputs[1:]))


def split_bert(full: BertModel, world_size: int, rank: int, exchange: Exchange) -> BertModel:
    """A copy of `full` that holds this rank's heads and MLP units; `full` stays as it is.

    All ranks have the whole input and output.

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
        attention.output.dense = RowParallelLinear(
            attention.output.dense, head_units, exchange.reduce
        )
        layer.intermediate.dense = ColumnParallelLinear(layer.intermediate.dense, mlp_units)
        layer.output.dense = RowParallelLinear(layer.output.dense, mlp_units, exchange.reduce)
        # In front of the three projections, which share their input, not of each.
        change_input(attention.self, exchange.gather)
        change_input(layer.intermediate, exchange.gather)
    # Not right behind the embeddings: the attention mask is made from their shape.
    change_input(model.encoder.layer[0], exchange.split)
    model.encoder.layer[-1].register_forward_hook(lambda _, inputs, output: exchange.gather(output))
    return model
