"""What tensor-parallel layers are made of, over collx's operators.

`pairs` has collectives with the backward that their place in a layer needs, those of Megatron-LM.
`TensorParallelRMSNorm` stands in for all-reduce, residual and RMSNorm behind a layer, quantised as
a `Quantisation` says; `unfused_rmsnorm` is the same in the operations of a plain model.
"""

from collx.nn.norm import TensorParallelRMSNorm, unfused_rmsnorm
from collx.nn.pairs import (
    copy_to_ranks,
    gather_from_ranks,
    gather_from_sequence,
    reduce_from_ranks,
    scatter_to_sequence,
    split_to_ranks,
)
from collx.nn.quantisation import Quantisation

__all__ = [
    "Quantisation",
    "TensorParallelRMSNorm",
    "copy_to_ranks",
    "gather_from_ranks",
    "gather_from_sequence",
    "reduce_from_ranks",
    "scatter_to_sequence",
    "split_to_ranks",
    "unfused_rmsnorm",
]
