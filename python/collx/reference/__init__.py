"""What every operator computes, in plain PyTorch: the oracle that every kernel is compared with.

`inputs` always holds one tensor a rank, all of one dtype and device. `allreduce` returns the one
result that every rank gets; the others return a list with every rank's own output, contiguous and
sharing memory with nothing. ValueError and TypeError say what does not fit together.

Operators that copy move bits unchanged, NaN payloads too. The others keep the numeric contract:
sum, avg and prod start as rank 0's value and accumulate the other ranks in order, in float32
(float64 for float64; integers wrap in their own width), and round once to the dtype, to nearest
even. avg divides the float32 sum by the number of ranks before that rounding. max and min
propagate NaN, order +0 above -0, and are exact. Only the payload of a NaN is left open.

`allreduce` and `reducescatter` take an epilogue, as the functions of collx do, and apply the
function itself to the reduced value: what the operators compute wherever its ops are arithmetic,
comparisons and casts; exp, tanh and their like are PyTorch's.

Those fused with a normalization compute in float32, too, and round where `rounding` says; what
they do step by step is in docs/numerics.md. `row_sum` is the order in which they sum up a row, and
`unfused_rmsnorm` and `unfused_layernorm` are the models' own sequences that the parity modes keep
to. Quantized values and scales are defined to the bit, NaN included.

Every step is one correctly rounded IEEE operation, so the same bits come out on CPU and CUDA
tensors, and with `torch.set_flush_denormal(True)` too: that switch is off while these functions
compute.
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
