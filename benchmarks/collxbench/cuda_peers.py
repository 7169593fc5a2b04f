"""Peers on GPUs: NCCL, NCCL on symmetric memory, PyTorch's symm_mem ops, FlashInfer.

None of PyTorch's multimem ops is here: they need NVLink multicast, which collx is compared without.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from collxbench.cpu_peers import TORCH_OPS
from collxbench.implementation import Call, Implementation
from collxbench.job import Case, Job

SYMM_MEM_DTYPES = (torch.bfloat16, torch.float32)
FLASHINFER_UP_TO = 2 << 20  # bytes; its one-shot form is meant for less
FLASHINFER_DIMS = 4096


class Nccl(Implementation):
    name = "nccl"

    def unfit(self, case: Case) -> str | None:
        return None if case.job.has_nccl else "more ranks than GPUs"

    def prepare(self, case: Case) -> Call:
        return in_place(case, case.empty())


class NcclSymmetric(Nccl):
    """The same call on a tensor in a window that is registered with NCCL on all ranks."""

    name = "nccl-symmetric"

    def __init__(self) -> None:
        self._pool: torch.cuda.MemPool | None = None
        self._buffer: Tensor | None = None

    def prepare(self, case: Case) -> Call:
        if self._buffer is None:
            self._buffer = self._registered(case.job)
        return in_place(case, self._buffer[: case.nbytes].view(case.job.dtype))

    def _registered(self, job: Job) -> Tensor:
        warm = torch.zeros(1, device=job.device)  # the communicator must exist
        dist.all_reduce(warm)
        torch.cuda.synchronize()
        backend: Any = nccl_backend(job)
        self._pool = torch.cuda.MemPool(backend.mem_allocator)
        with torch.cuda.use_mem_pool(self._pool):
            buffer = torch.empty(job.max_bytes, dtype=torch.uint8, device=job.device)
        backend.register_mem_pool(self._pool, symm=True)
        return buffer

    def close(self, job: Job) -> None:
        if self._pool is not None and self._buffer is not None:
            torch.cuda.synchronize()
            backend: Any = nccl_backend(job)
            backend.deregister_mem_pool(self._pool)
        self._buffer = self._pool = None


class TorchSymmMem(Implementation):
    """An op of torch.ops.symm_mem on a symmetric tensor of PyTorch's own."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def unfit(self, case: Case) -> str | None:
        if case.job.reduce_op != "sum":
            return "sum only"
        if case.job.dtype not in SYMM_MEM_DTYPES:
            return "bfloat16 and float32 only"
        return "whole 16-byte vectors only" if case.nbytes % 16 else None

    def symmetric(self, case: Case) -> Tensor:
        if self._buffer is None:
            import torch.distributed._symmetric_memory as symm_mem

            numel = case.job.max_bytes // case.job.dtype.itemsize
            buffer = symm_mem.empty(numel, dtype=case.job.dtype, device=case.job.device)
            symm_mem.rendezvous(buffer, case.job.group)
            self._buffer = buffer
        return self._buffer[: case.numel]

    def close(self, job: Job) -> None:
        self._buffer = None


class TorchOneshot(TorchSymmMem):
    name = "torch-oneshot"

    def prepare(self, case: Case) -> Call:
        x, y = self.symmetric(case), case.empty()
        group = case.job.group.group_name
        op = torch.ops.symm_mem.one_shot_all_reduce_out
        return Call(lambda: op(x, "sum", group, y), lambda: case.load(x), lambda: y)


class TorchTwoshot(TorchSymmMem):
    name = "torch-twoshot"

    def prepare(self, case: Case) -> Call:
        x = self.symmetric(case)
        group = case.job.group.group_name
        op = torch.ops.symm_mem.two_shot_all_reduce_
        return Call(lambda: op(x, "sum", group), lambda: case.load(x), lambda: x, in_place=True)


class FlashInfer(Implementation):
    """TensorRT-LLM's one-shot kernel with dependent launch, as FlashInfer offers it."""

    name = "flashinfer"

    def __init__(self) -> None:
        self._workspace: Any = None

    def unfit(self, case: Case) -> str | None:
        if case.job.reduce_op != "sum":
            return "sum only"
        if case.job.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return "bfloat16, float16 and float32 only"
        if case.nbytes % 16:
            return "whole 16-byte vectors only"
        return f"one-shot up to {FLASHINFER_UP_TO >> 20} MiB" if too_large(case) else None

    def prepare(self, case: Case) -> Call:
        import flashinfer.comm as fi
        from flashinfer.comm.mnnvl import TorchDistBackend

        self.close(case.job)
        dims = FLASHINFER_DIMS if case.numel % FLASHINFER_DIMS == 0 else case.numel
        rows = case.numel // dims
        workspace = fi.create_allreduce_fusion_workspace(
            backend="trtllm",
            world_size=case.job.ranks.world,
            rank=case.job.ranks.rank,
            max_token_num=rows,
            hidden_dim=dims,
            dtype=case.job.dtype,
            comm_backend=TorchDistBackend(group=case.job.group),
        )
        self._workspace = workspace
        x, y = case.empty().view(rows, dims), case.empty().view(rows, dims)
        pattern = fi.AllReduceFusionPattern.kAllReduce

        def run() -> None:
            fi.allreduce_fusion(
                input=x,
                workspace=workspace,
                pattern=pattern,
                launch_with_pdl=True,
                output=y,
                use_oneshot=True,
                fp32_acc=True,
            )

        return Call(run, lambda: case.load(x.view(-1)), lambda: y.view(-1))

    def close(self, job: Job) -> None:
        if self._workspace is not None:
            torch.cuda.synchronize()
            self._workspace.destroy()
            self._workspace = None


def in_place(case: Case, x: Tensor) -> Call:
    op = TORCH_OPS[case.job.reduce_op]
    return Call(lambda: dist.all_reduce(x, op), lambda: case.load(x), lambda: x, in_place=True)


def nccl_backend(job: Job) -> Any:
    return job.group._get_backend(job.device)


def too_large(case: Case) -> bool:
    return case.nbytes > FLASHINFER_UP_TO


PEERS: dict[str, type[Implementation]] = {
    "nccl": Nccl,
    "nccl-symmetric": NcclSymmetric,
    "torch-oneshot": TorchOneshot,
    "torch-twoshot": TorchTwoshot,
    "flashinfer": FlashInfer,
}
