"""A BERT that is split over ranks: column-parallel and row-parallel layers in turn.

The ranks add up the products of row-parallel layers twice in a transformer layer, after attention
and after the MLP. What a rank has between a row-parallel layer and the next column-parallel one,
where residuals are added and normalized, is up to an `Exchange`. `Replicated` is the plain one.
"""

import copy
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import BertModel

from collx.nn import ColumnParallelLinear, RowParallelLinear, shard_range

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
    mine = shard_range(heads, world_size, rank)
    head_units = slice(mine.start * head_size, mine.stop * head_size)
    mlp_units = shard_range(full.config.intermediate_size, world_size, rank)

    model = copy.deepcopy(full)
    layer: Any
    for layer in model.encoder.layer:
        attention = layer.attention
        for name in ("query", "key", "value"):
            projection = getattr(attention.self, name)
            split = ColumnParallelLinear.from_module(projection, units=head_units)
            setattr(attention.self, name, split)
        attention.output.dense = RowParallelLinear.from_module(
            attention.output.dense, units=head_units, reduce=exchange.reduce
        )
        layer.intermediate.dense = ColumnParallelLinear.from_module(
            layer.intermediate.dense, units=mlp_units
        )
        layer.output.dense = RowParallelLinear.from_module(
            layer.output.dense, units=mlp_units, reduce=exchange.reduce
        )
        # In front of the three projections, which share their input, not of each.
        change_input(attention.self, exchange.gather)
        change_input(layer.intermediate, exchange.gather)
    # Not right behind the embeddings: the attention mask is made from their shape.
    change_input(model.encoder.layer[0], exchange.split)
    model.encoder.layer[-1].register_forward_hook(lambda _, inputs, output: exchange.gather(output))
    return model
