"""Peers on GPUs: NCCL, NCCL on symmetric memory, PyTorch's symm_mem ops.

PyTorch's multimem ops are not included: they need NVLink multicast, and the comparison runs without
it. The ops over NVSHMEM (all_to_all_vdev, nvshmem_broadcast, tile_reduce, ...) are not included
either: a process has one symmetric allocator, and collx's region comes from the CUDA allocator.
"""

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from collx._bench import flashinfer_peers
from collx._bench.call import Call
from collx._bench.implementation import Implementation
from collx._bench.job import Case, Job
from collx._bench.torch_dist import TorchDist

SYMM_MEM_DTYPES = (torch.bfloat16, torch.float32)
VECTOR = 16  # bytes
LEAST = 4096  # minimum size of a buffer in bytes
# Values in nccl.h.
NCCL_DTYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
NCCL_OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}


class Nccl(TorchDist):
    name = "nccl"

    def unfit(self, case: Case) -> str | None:
        return None if case.job.has_nccl else "more ranks than GPUs"


class NcclOut(Nccl):
    """Out-of-place calls of NCCL for collectives that torch.distributed only has in place. Uses the
    library that PyTorch has loaded, its communicator and the current stream."""

    name = "nccl-out"
    ops = ("broadcast", "reduce")
    form = "function, out"

    def prepare(self, case: Case) -> Call:
        x, y = case.empty(case.numel), case.empty(case.numel)
        warm = torch.zeros(1, device=case.job.device)  # the communicator must exist
        dist.all_reduce(warm)
        library = ctypes.CDLL("libnccl.so.2")
        comm = ctypes.c_void_p(nccl_backend(case.job)._comm_ptr())
        if not comm:
            raise RuntimeError("PyTorch has no communicator of NCCL")
        tensors = (ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()))
        count, dtype = ctypes.c_size_t(case.numel), NCCL_DTYPES[case.job.dtype]
        options: tuple[int, ...]
        if case.op.reduces:
            call, options = library.ncclReduce, (dtype, NCCL_OPS[case.reduce_op], case.root)
        else:
            call, options = library.ncclBroadcast, (dtype, case.root)

        def run() -> None:
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            error = call(*tensors, count, *options, comm, stream)
            if error != 0:
                raise RuntimeError(f"NCCL's error {error}")

        return Call.of(case, run, x, y)


class NcclSymmetric(Nccl):
    """Calls NCCL on tensors in a window that is registered with NCCL on all ranks."""

    name = "nccl-symmetric"
    ops = ("allreduce", "reducescatter", "allgather", "broadcast", "alltoall")

    def __init__(self) -> None:
        self._pool: torch.cuda.MemPool | None = None
        self._buffer: Tensor | None = None

    def tensors(self, case: Case) -> tuple[Tensor, Tensor]:
        if self._buffer is None:
            self._buffer = self._registered(case.job)
        x, y = (half.view(case.job.dtype) for half in self._buffer.chunk(2))
        return x[: case.input_numel], y[: case.output_numel]

    def _registered(self, job: Job) -> Tensor:
        """Returns registered memory for an input and an output."""
        warm = torch.zeros(1, device=job.device)  # the communicator must exist
        dist.all_reduce(warm)
        torch.cuda.synchronize()
        backend: Any = nccl_backend(job)
        self._pool = torch.cuda.MemPool(backend.mem_allocator)
        with torch.cuda.use_mem_pool(self._pool):
            half = -(-job.max_bytes // LEAST) * LEAST
            buffer = torch.empty(2 * half, dtype=torch.uint8, device=job.device)
        backend.register_mem_pool(self._pool, symm=True)
        return buffer

    def close(self, job: Job) -> None:
        if self._pool is not None and self._buffer is not None:
            torch.cuda.synchronize()
            backend: Any = nccl_backend(job)
            backend.deregister_mem_pool(self._pool)
        self._buffer = self._pool = None


class NcclAllreduce(Nccl):
    """An all-reduce of one element, as dist.barrier runs it on the device."""

    name = "nccl-allreduce"
    ops = ("barrier",)

    def prepare(self, case: Case) -> Call:
        x = torch.zeros(1, device=case.job.device)
        return Call.of(case, lambda: dist.all_reduce(x), x, x)


class TorchSymmMem(Implementation):
    """An op of torch.ops.symm_mem on a symmetric tensor of PyTorch."""

    form = "operator, out"

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def symmetric(self, case: Case, numel: int) -> Tensor:
        if self._buffer is None:
            import torch.distributed._symmetric_memory as symm_mem

            room = max(LEAST, case.job.max_bytes) // case.job.dtype.itemsize
            buffer = symm_mem.empty(room, dtype=case.job.dtype, device=case.job.device)
            symm_mem.rendezvous(buffer, case.job.group)
            self._buffer = buffer
        return self._buffer[:numel]

    def close(self, job: Job) -> None:
        self._buffer = None


class TorchReduction(TorchSymmMem):
    def unfit(self, case: Case) -> str | None:
        if case.reduce_op != "sum":
            return "sum only"
        if case.job.dtype not in SYMM_MEM_DTYPES:
            return "bfloat16 and float32 only"
        parts = case.world if case.op.divided else 1
        return "whole 16-byte vectors only" if case.nbytes % (parts * VECTOR) else None


class TorchOneshot(TorchReduction):
    name = "torch-oneshot"
    ops = ("allreduce",)

    def prepare(self, case: Case) -> Call:
        x, y = self.symmetric(case, case.numel), case.empty(case.numel)
        group = case.job.group.group_name
        op = torch.ops.symm_mem.one_shot_all_reduce_out.default
        return Call.of(case, partial(op, x, "sum", group, y), x, y)

    def other_forms(self, case: Case) -> dict[str, Callable[[], object]]:
        op = torch.ops.symm_mem.one_shot_all_reduce.default
        x = self.symmetric(case, case.numel)
        return {"operator, functional": partial(op, x, "sum", case.job.group.group_name)}


class TorchTwoshot(TorchReduction):
    name = "torch-twoshot"
    ops = ("allreduce",)
    form = "operator, in place"

    def prepare(self, case: Case) -> Call:
        x = self.symmetric(case, case.numel)
        group = case.job.group.group_name
        op = torch.ops.symm_mem.two_shot_all_reduce_.default
        return Call.of(case, partial(op, x, "sum", group), x, x)


class TorchReduceScatter(TorchReduction):
    name = "torch-reduce-scatter"
    ops = ("reducescatter",)

    def prepare(self, case: Case) -> Call:
        x, y = self.symmetric(case, case.input_numel), case.empty(case.output_numel)
        group = case.job.group.group_name
        op = torch.ops.symm_mem.reduce_scatter_out.default
        return Call.of(case, partial(op, x, group, False, y), x, y)


class TorchCopyEngine(TorchSymmMem):
    """PyTorch's "low contention" ops: peer copies on a separate stream."""

    name = "torch-low-contention"
    ops = ("allgather", "reducescatter")
    form = "operator, functional"

    def unfit(self, case: Case) -> str | None:
        others = case.op.reduces and case.reduce_op not in ("sum", "avg")
        return "sum and avg only" if others else None

    def prepare(self, case: Case) -> Call:
        x = self.symmetric(case, case.input_numel)
        made = [case.empty(case.output_numel)]  # each call creates its output
        group = case.job.group.group_name
        gather = torch.ops.symm_mem._low_contention_all_gather
        scatter = torch.ops.symm_mem._low_contention_reduce_scatter
        wait = torch.ops._c10d_functional.wait_tensor

        def run() -> None:
            y = scatter(x, case.reduce_op, group) if case.op.reduces else gather(x, group)
            made[0] = wait(y)

        return Call(run, lambda: case.load(x), lambda: made[0])


class TorchBarrier(TorchSymmMem):
    """The barrier of a symmetric tensor's signal pads."""

    name = "torch-barrier"
    ops = ("barrier",)
    form = "method of a handle"

    def prepare(self, case: Case) -> Call:
        import torch.distributed._symmetric_memory as symm_mem

        x = self.symmetric(case, 0)
        assert self._buffer is not None
        handle = symm_mem.rendezvous(self._buffer, case.job.group)
        return Call.of(case, handle.barrier, x, x)


def nccl_backend(job: Job) -> Any:
    return job.group._get_backend(job.device)


_ALL: tuple[type[Implementation], ...] = (
    Nccl,
    NcclOut,
    NcclSymmetric,
    NcclAllreduce,
    TorchOneshot,
    TorchTwoshot,
    TorchReduceScatter,
    TorchCopyEngine,
    TorchBarrier,
    *flashinfer_peers.PEERS,
)
PEERS = {peer.name: peer for peer in _ALL}
