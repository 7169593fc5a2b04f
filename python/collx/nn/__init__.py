"""What tensor-parallel layers are made of, over collx's operators.

Functions such as `reduce_from_ranks` are collectives with the backward that their place in a layer
needs, those of Megatron-LM. `ColumnParallelLinear` and `RowParallelLinear` are split layers.
`TensorParallelRMSNorm` and `TensorParallelLayerNorm` stand in for all-reduce, residual and norm
behind a split layer; `unfused_rmsnorm` is the same in the operations of a plain model.
"""

from collx.nn.layer_norm import TensorParallelLayerNorm
from collx.nn.linear import ColumnParallelLinear, RowParallelLinear, part
from collx.nn.norm import TensorParallelRMSNorm, unfused_rmsnorm
from collx.nn.pairs import (
    copy_to_ranks,
    gather_from_ranks,
    gather_from_sequence,
    reduce_from_ranks,
    scatter_to_sequence,
    split_to_ranks,
)
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
    "part",
    "reduce_from_ranks",
    "scatter_to_sequence",
    "split_to_ranks",
    "unfused_rmsnorm",
]
