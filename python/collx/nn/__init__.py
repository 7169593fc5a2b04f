"""Layers and functions for tensor-parallel models.

Functions such as `reduce_from_ranks` are collectives with the backward that a layer needs at that
point, as in Megatron-LM. `ColumnParallelLinear` and `RowParallelLinear` are layers that are split
over the ranks. `TensorParallelRMSNorm` and `TensorParallelLayerNorm` replace the all-reduce, the
residual addition and the norm after a split layer. `unfused_rmsnorm` computes the same with the
operations of a plain model.
"""

from collx.nn.layer_norm import TensorParallelLayerNorm
from collx.nn.linear import ColumnParallelLinear, RowParallelLinear, shard_range
from collx.nn.mappings import (
    copy_to_ranks,
    gather_from_ranks,
    gather_from_sequence,
    reduce_from_ranks,
    scatter_to_sequence,
    split_to_ranks,
)
from collx.nn.norm import TensorParallelRMSNorm, unfused_rmsnorm
from collx.nn.products import allgather_matmul, matmul_reducescatter

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "TensorParallelLayerNorm",
    "TensorParallelRMSNorm",
    "allgather_matmul",
    "copy_to_ranks",
    "gather_from_ranks",
    "gather_from_sequence",
    "matmul_reducescatter",
    "reduce_from_ranks",
    "scatter_to_sequence",
    "shard_range",
    "split_to_ranks",
    "unfused_rmsnorm",
]
