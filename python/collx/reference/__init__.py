"""The reference: every operator in plain PyTorch. Tests compare every kernel with it.

`inputs` is a list with one tensor for each rank, all with the same dtype and device. `allreduce`
returns the result that every rank gets. The other functions return a list with the output of each
rank; the outputs are contiguous and share no memory. Arguments that do not match raise ValueError
or TypeError.

Operators that copy do not change bits, including the payloads of NaN. Reductions follow the
numeric contract: sum, avg and prod start with the value of rank 0 and accumulate the other ranks in
order, in float32 (float64 for float64; integers wrap in their own width), and round once to the
dtype, to nearest even. avg divides the float32 sum by the number of ranks before that rounding. max
and min propagate NaN, order +0 above -0, and are exact. Only the payload of a NaN is unspecified.

`allreduce` and `reducescatter` accept an epilogue, as the functions of collx do, and apply the
function itself to the reduced value. If its ops are arithmetic, comparisons and casts, the result
is that of the operators; exp, tanh and similar functions are those of PyTorch.

The fused normalizations also compute in float32 and round as `rounding` specifies;
docs/internals/numerics.md defines each step. `row_sum` defines the order in which a row is summed.
`unfused_rmsnorm` and `unfused_layernorm` are the sequences of models that the parity modes follow.
Quantized values and scales are defined to the bit, including NaN.

Every step is one correctly rounded IEEE operation, so CPU and CUDA tensors give the same bits. The
functions disable `torch.set_flush_denormal(True)` while they compute.
"""

from collx.reference._rows import ROUNDINGS, row_sum
from collx.reference.collectives import (
    REDUCE_OPS,
    allgather,
    allreduce,
    alltoall,
    alltoallv,
    broadcast,
    equal_bytes,
    gather,
    parts,
    reduce,
    reducescatter,
    same_bits,
    scatter,
)
from collx.reference.norms import (
    allreduce_layernorm,
    allreduce_residual_layernorm,
    allreduce_residual_rmsnorm,
    allreduce_residual_rmsnorm_fp8,
    allreduce_residual_rmsnorm_int8,
    allreduce_rmsnorm,
    allreduce_rmsnorm_fp8,
    allreduce_rmsnorm_int8,
    reducescatter_residual_rmsnorm,
    reducescatter_residual_rmsnorm_fp8,
)
from collx.reference.unfused import unfused_layernorm, unfused_rmsnorm

__all__ = [
    "REDUCE_OPS",
    "ROUNDINGS",
    "allgather",
    "allreduce",
    "allreduce_layernorm",
    "allreduce_residual_layernorm",
    "allreduce_residual_rmsnorm",
    "allreduce_residual_rmsnorm_fp8",
    "allreduce_residual_rmsnorm_int8",
    "allreduce_rmsnorm",
    "allreduce_rmsnorm_fp8",
    "allreduce_rmsnorm_int8",
    "alltoall",
    "alltoallv",
    "broadcast",
    "equal_bytes",
    "gather",
    "parts",
    "reduce",
    "reducescatter",
    "reducescatter_residual_rmsnorm",
    "reducescatter_residual_rmsnorm_fp8",
    "row_sum",
    "same_bits",
    "scatter",
    "unfused_layernorm",
    "unfused_rmsnorm",
]
