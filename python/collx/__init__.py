"""Collectives between the ranks of one machine, over symmetric memory, as PyTorch operators.

    import torch, torch.distributed as dist, collx

    dist.init_process_group()
    comm = collx.init()                                  # collective
    x = collx.empty(4, 8192, dtype=torch.bfloat16)       # collective: a symmetric tensor
    y = torch.ops.collx.allreduce(x, "sum", comm.name)   # any tensor is accepted
    collx.allreduce(x, out=y)                            # the same, with defaults filled in

The operators are torch.ops.collx.*. `collx.reference` states in plain PyTorch what they compute.
`collx.nn` has layers and functions for tensor-parallel models.
"""

import contextlib
import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from collx import flight_recorder, nn
from collx._explanation import Explanation, workspace_bytes
from collx._extension import Build, build, extension
from collx._groups import Group, get, is_initialized
from collx._init import init
from collx._patch import Patch, patch
from collx._statistics import Statistics
from collx._version import VERSION
from collx.communicator import Communicator
from collx.compile import marks, registration
from collx.epilogues import Epilogue
from collx.errors import (
    CollectiveError,
    CollectiveMismatch,
    CollectiveOverlap,
    CollectiveTimeout,
    CommunicatorPoisoned,
    InitError,
)
from collx.ops import functions
from collx.ops.arguments import ReduceOp
from collx.ops.collectives import (
    allgather,
    allreduce,
    allreduce_,
    alltoall,
    alltoall_,
    alltoallv,
    barrier,
    broadcast,
    broadcast_,
    gather,
    reduce,
    reduce_,
    reducescatter,
    scatter,
)
from collx.ops.functions import Handle, post
from collx.ops.norms import allreduce_layernorm, allreduce_rmsnorm, reducescatter_rmsnorm
from collx.ops.quantization import Quantization
from collx.ops.symmetric import empty, empty_like, register, zeros
from collx.ops.warm_up import warm_up

if TYPE_CHECKING:
    from collx import reference

__version__ = VERSION

cuda_built: bool = build.cuda is not None
"""Whether this build has CUDA kernels. Without them, `init` only supports the CPU."""

# Enables torch.distributed._symmetric_memory on the CPU. If another package has registered an
# allocator, init on the CPU tries again and reports the error.
with contextlib.suppress(RuntimeError):
    extension.register_cpu_allocator()
marks.register()
registration.register()
functions.register()
extension.after_failure(flight_recorder.after_failure)

__all__ = [
    "Build",
    "CollectiveError",
    "CollectiveMismatch",
    "CollectiveOverlap",
    "CollectiveTimeout",
    "Communicator",
    "CommunicatorPoisoned",
    "Epilogue",
    "Explanation",
    "Group",
    "Handle",
    "InitError",
    "Patch",
    "Quantization",
    "ReduceOp",
    "Statistics",
    "__version__",
    "allgather",
    "allreduce",
    "allreduce_",
    "allreduce_layernorm",
    "allreduce_rmsnorm",
    "alltoall",
    "alltoall_",
    "alltoallv",
    "barrier",
    "broadcast",
    "broadcast_",
    "build",
    "cuda_built",
    "empty",
    "empty_like",
    "flight_recorder",
    "gather",
    "get",
    "init",
    "is_initialized",
    "nn",
    "patch",
    "post",
    "reduce",
    "reduce_",
    "reducescatter",
    "reducescatter_rmsnorm",
    "reference",
    "register",
    "scatter",
    "warm_up",
    "workspace_bytes",
    "zeros",
]


def __getattr__(name: str) -> ModuleType:
    # The reference is for tests and readers, so it is only imported on access.
    if name == "reference":
        return importlib.import_module("collx.reference")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
