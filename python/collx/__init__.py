"""Collectives between the ranks of one machine, over symmetric memory, as PyTorch operators.

    import torch, torch.distributed as dist, collx

    dist.init_process_group()
    comm = collx.init()                                  # collective
    x = collx.empty(4, 8192, dtype=torch.bfloat16)       # collective: a symmetric tensor
    y = torch.ops.collx.allreduce(x, "sum", comm.name)   # any tensor is accepted
    collx.allreduce(x, out=y)                            # the same, with defaults filled in

The operators are torch.ops.collx.*; `collx.reference` says in plain PyTorch what they compute.
`collx.nn` has the pairs of collectives that tensor-parallel layers are built of.
"""

import contextlib
from importlib.metadata import PackageNotFoundError, version

from collx import _effects, nn, reference
from collx._explain import Explanation
from collx._extension import extension
from collx.collectives import (
    allgather,
    allreduce,
    allreduce_,
    alltoall,
    alltoall_,
    alltoallv,
    alltoallv_device,
    barrier,
    broadcast,
    broadcast_,
    gather,
    reduce,
    reduce_,
    reducescatter,
    scatter,
)
from collx.communicator import Communicator
from collx.errors import (
    CollectiveMismatch,
    CollectiveOverlap,
    CollectiveTimeout,
    CommunicatorPoisoned,
    InitError,
)
from collx.functional import (
    empty,
    get,
    init,
    is_initialized,
    register,
    workspace_bytes,
)
from collx.norms import (
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

try:
    __version__ = version("collx")
except PackageNotFoundError:  # imported from a tree that was never installed
    __version__ = "unknown"

cuda_built: bool = extension.cuda_built
"""Whether this build has the CUDA kernels. Without them `init` takes the CPU alone, GPUs or not."""

# So that torch.distributed._symmetric_memory serves the CPU as soon as collx is imported. Where
# another package does so already, init on the CPU tries again and says so.
with contextlib.suppress(RuntimeError):
    extension.register_cpu_allocator()
_effects.register()

__all__ = [
    "CollectiveMismatch",
    "CollectiveOverlap",
    "CollectiveTimeout",
    "Communicator",
    "CommunicatorPoisoned",
    "Explanation",
    "InitError",
    "__version__",
    "allgather",
    "allreduce",
    "allreduce_",
    "allreduce_layernorm",
    "allreduce_residual_layernorm",
    "allreduce_residual_rmsnorm",
    "allreduce_residual_rmsnorm_fp8",
    "allreduce_residual_rmsnorm_int8",
    "allreduce_rmsnorm",
    "allreduce_rmsnorm_fp8",
    "allreduce_rmsnorm_int8",
    "alltoall",
    "alltoall_",
    "alltoallv",
    "alltoallv_device",
    "barrier",
    "broadcast",
    "broadcast_",
    "cuda_built",
    "empty",
    "gather",
    "get",
    "init",
    "is_initialized",
    "nn",
    "reduce",
    "reduce_",
    "reducescatter",
    "reducescatter_residual_rmsnorm",
    "reducescatter_residual_rmsnorm_fp8",
    "reference",
    "register",
    "scatter",
    "workspace_bytes",
]
