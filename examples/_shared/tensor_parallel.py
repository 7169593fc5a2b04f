"""A BERT that is split over ranks into alternating column-parallel and row-parallel layers.

The ranks sum the products of row-parallel layers twice in a transformer layer, after attention and
after the MLP. An `Exchange` defines which tokens a rank has between a row-parallel layer and the
next column-parallel layer, where residuals are added and normalized. `Replicated` is the plain
exchange.
"""

import copy
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import BertModel

from collx.nn import ColumnParallelLinear, RowParallelLinear, shard_range

Change = Callable[[Tensor], Tensor]


class Exchange(Protocol):
    """The communication around the split layers. Tensors are [sentences, tokens, units]."""

    def split(self, x: Tensor) -> Tensor:
        """Returns this rank's part of the input of the first layer, which all ranks have."""

    def gather(self, x: Tensor) -> Tensor:
        """Returns all tokens, from the parts of the ranks: the input of a column-parallel layer."""

    def reduce(self, x: Tensor) -> Tensor:
        """Returns this rank's part of the sum of `x` over the ranks. `x` is the output of a
        row-parallel layer."""


class Replicated:
    """Every rank has all tokens. `all_reduce` sums a tensor over the ranks."""

    def __init__(self, all_reduce: Change) -> None:
        self.reduce = all_reduce

    def split(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor) -> Tensor:
        return x


def change_input(module: nn.Module, change: Change) -> None:
    """Applies `change` to the first argument of the module."""
    module.register_forward_pre_hook(lambda _, inputs: (change(inputs[0]), *inputs[1:]))


def split_bert(full: BertModel, world_size: int, rank: int, exchange: Exchange) -> BertModel:
    """Returns a copy of `full` with this rank's heads and MLP units. Does not change `full`.

    All ranks have the whole input and output.

    Raises ValueError if there are more ranks than attention heads.
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
        # Before all three projections, which share their input, instead of before each of them.
        change_input(attention.self, exchange.gather)
        change_input(layer.intermediate, exchange.gather)
    # Not directly after the embeddings, because the attention mask is created from their shape.
    change_input(model.encoder.layer[0], exchange.split)
    model.encoder.layer[-1].register_forward_hook(lambda _, inputs, output: exchange.gather(output))
    return model
