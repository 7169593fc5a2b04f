"""Kernels that FlashInfer includes: TensorRT-LLM's all-reduce, plain and fused with a norm, and
vLLM's custom all-reduce. Kernels that need NVLink multicast are excluded."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from collx._bench.call import Call
from collx._bench.implementation import Implementation
from collx._bench.job import Case, Job
from collx._bench.norm_case import NormCall, NormCase
from collx._bench.norm_problem import EPS, Results

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
VECTOR = 16  # bytes
ONESHOT_UP_TO = 16 << 20  # bytes; two-shot is faster well below this size
COLUMNS = 4096  # of the rows that a plain tensor is divided into
PLAIN, NORM, STATIC_FP8, DYNAMIC_FP8 = 0, 1, 2, 10  # values of FlashInfer's fusion patterns
TENSORS = ("residual_in", "residual_out", "norm_out", "quant_out", "scale_out", "rms_gamma")

VLLM_WORLDS = (2, 4, 6, 8)
VLLM_BLOCKS = 36  # the maximum, which vLLM also passes
VLLM_GRAPHS = 16 << 20  # size in bytes of the table of the buffers in graphs


def unfit_sum(case: Case) -> str | None:
    if case.reduce_op != "sum":
        return "sum only"
    if case.job.dtype not in DTYPES:
        return "bfloat16, float16 and float32 only"
    return "whole 16-byte vectors only" if case.nbytes % VECTOR else None


class FlashInfer(Implementation):
    """A variant of TensorRT-LLM's kernel, with dependent launch and sums in float32."""

    ops = ("allreduce",)
    oneshot = True
    at_end = False  # whether the next kernel may only start at the end
    form = "function, out"

    def __init__(self) -> None:
        self._workspace: Any = None

    def unfit(self, case: Case) -> str | None:
        if self.oneshot and case.nbytes > ONESHOT_UP_TO:
            return f"up to {ONESHOT_UP_TO >> 20} MiB"
        if not self.oneshot and self.rows_of(case)[0] <= case.world:
            return "needs more rows than ranks"
        return unfit_sum(case)

    def rows_of(self, case: Case) -> tuple[int, int]:
        cols = math.gcd(case.numel, COLUMNS)
        return case.numel // cols, cols

    def prepare(self, case: Case) -> Call:
        shape = self.rows_of(case)
        x, y = case.empty(case.numel), case.empty(case.numel)
        run = self.call(case, x.view(shape), PLAIN, allreduce_out=y.view(shape))
        return Call.of(case, run, x, y)

    def call(
        self, case: Case, x: Tensor, pattern: int, scale: Tensor | None = None, **options: Any
    ) -> Callable[[], object]:
        from flashinfer.comm import trtllm_ar

        rows, cols = x.shape
        _, pointers, metadata = self._opened(case, cols)
        return partial(
            trtllm_ar.trtllm_allreduce_fusion,
            allreduce_in=x,
            world_size=case.world,
            world_rank=case.job.ranks.rank,
            token_num=rows,
            hidden_dim=cols,
            workspace_ptrs=pointers,
            launch_with_pdl=True,
            trigger_completion_at_end=self.at_end,
            fp32_acc=True,
            pattern_code=pattern,
            use_oneshot=self.oneshot,
            **{"allreduce_out": None, "rms_eps": EPS, **dict.fromkeys(TENSORS), **options},
            scale_factor=scale,
            layout_code=None,
            metadata=metadata,
        )

    def _opened(self, case: Case, cols: int) -> Any:
        """Returns the workspace, with memory for the largest case."""
        if self._workspace is None:
            from flashinfer.comm import trtllm_ar

            job = case.job
            room = min(job.max_bytes, ONESHOT_UP_TO) if self.oneshot else job.max_bytes
            self._workspace = trtllm_ar.trtllm_create_ipc_workspace_for_all_reduce_fusion(
                job.ranks.rank,
                case.world,
                -(-room // (cols * job.dtype.itemsize)),
                cols,
                use_fp32_lamport=job.dtype == torch.float32,
                group=job.group,
                create_metadata=True,
            )
            torch.cuda.synchronize()
            job.ranks.barrier()  # no rank writes before all have cleared their workspace
        return self._workspace

    def close(self, job: Job) -> None:
        if self._workspace is not None:
            from flashinfer.comm import trtllm_ar

            torch.cuda.synchronize()
            trtllm_ar.trtllm_destroy_ipc_workspace_for_all_reduce_fusion(self._workspace[0])
            self._workspace = None


class FlashInferOneshot(FlashInfer):
    name = "flashinfer-oneshot"


class FlashInferOneshotEnd(FlashInfer):
    name = "flashinfer-oneshot-end"
    at_end = True


class FlashInferTwoshot(FlashInfer):
    name = "flashinfer-twoshot"
    oneshot = False


class FlashInferNorm(Implementation):
    """The variant of a kernel that is fused with a norm."""

    form = FlashInfer.form

    def __init__(self, kernel: type[FlashInfer]) -> None:
        self.name = kernel.name
        self._kernel = kernel()

    def unfit(self, case: Case) -> str | None:
        assert isinstance(case, NormCase)
        op = case.problem.op
        if not op.residual or op.kind == "int8":
            return "with a residual and without int8 only"
        if case.job.dtype.itemsize != 2:
            return "bfloat16 and float16 only"
        if not self._kernel.oneshot and case.problem.rows <= case.world:
            return "needs more rows than ranks"
        return self._kernel.unfit(case.allreduce)

    def prepare(self, case: Case) -> NormCall:
        assert isinstance(case, NormCase)
        problem = case.problem
        x = case.as_rows(case.empty(case.numel))
        given, results = problem.scale, [torch.empty_like(r) for r in case.wanted_results]
        tensors = {
            "residual_in": case.residual,
            "rms_gamma": case.weight,
            "residual_out": results[-1],
            "quant_out" if problem.op.kind else "norm_out": results[0],
        }
        pattern = NORM
        if problem.op.kind:
            pattern = DYNAMIC_FP8 if given is None else STATIC_FP8
            tensors["scale_out"] = results[1] if given is None else None
        run = self._kernel.call(case, x, pattern, scale=given, **tensors)

        def found() -> Results:
            scale = results[1:-1] if given is None else [given.clone()]
            return (results[0], *scale, results[-1])

        return NormCall(run, lambda: case.load(x), lambda: results[0], results=found)

    def close(self, job: Job) -> None:
        self._kernel.close(job)


class VllmRegistered(Implementation):
    """vLLM's kernels on the caller's tensors, which are registered with the other ranks after the
    capture of a graph. Eager calls copy their input to a buffer that is already registered."""

    name = "vllm-registered"
    ops = ("allreduce",)
    form = "function, out"
    copies = False  # whether graphs also copy the input

    def __init__(self) -> None:
        self._handle: int | None = None
        self._shared: list[list[int]] = []

    def unfit(self, case: Case) -> str | None:
        return unfit_sum(case) if case.world in VLLM_WORLDS else "2, 4, 6 or 8 ranks only"

    def prepare(self, case: Case) -> Call:
        x, y = case.empty(case.numel), case.empty(case.numel)
        run = partial(self.reduce, case, x, y)
        return Call.of(case, run, x, y, captured=partial(self.exchange, case))

    def reduce(self, case: Case, x: Tensor, y: Tensor) -> None:
        from flashinfer.comm import vllm_ar

        handle, room = self._opened(case), case.job.max_bytes
        buffer = self._shared[-1][case.job.ranks.rank]
        if not self.copies and torch.cuda.is_current_stream_capturing():
            buffer = room = 0
        vllm_ar.all_reduce(handle, x, y, buffer, room, VLLM_BLOCKS)

    def exchange(self, case: Case) -> None:
        """Registers the buffers of a graph (the copy buffer or tensors) with all ranks."""
        from flashinfer.comm import vllm_ar

        found: list[Any] = [None] * case.world
        dist.all_gather_object(found, vllm_ar.get_graph_buffer_ipc_meta(self._handle))
        handles, offsets = ([list(one) for one in part] for part in zip(*found, strict=True))
        vllm_ar.register_graph_buffers(self._handle, handles, offsets)
        torch.cuda.synchronize()
        case.job.ranks.barrier()

    def _opened(self, case: Case) -> int:
        from flashinfer.comm import cuda_ipc, vllm_ar

        if self._handle is None:
            job, rank = case.job, case.job.ranks.rank
            flags = vllm_ar.meta_size() + job.max_bytes  # with the data that two stages exchange
            self._shared = [
                cuda_ipc.create_shared_buffer(nbytes, job.group)
                for nbytes in (flags, job.max_bytes)
            ]
            cuda_ipc.cudart.cudaMemset(self._shared[0][rank], 0, flags)
            torch.cuda.synchronize()
            job.ranks.barrier()
            self._table = torch.empty(VLLM_GRAPHS, dtype=torch.uint8, device=job.device)
            self._handle = vllm_ar.init_custom_ar(self._shared[0], self._table, rank, True)
            vllm_ar.register_buffer(self._handle, self._shared[1])
            job.ranks.barrier()
        return self._handle

    def close(self, job: Job) -> None:
        if self._handle is not None:
            from flashinfer.comm import cuda_ipc, vllm_ar

            torch.cuda.synchronize()
            job.ranks.barrier()
            vllm_ar.dispose(self._handle)
            self._handle = None
        while self._shared:
            cuda_ipc.free_shared_buffer(self._shared.pop(), job.group)


class Vllm(VllmRegistered):
    """vLLM's kernels with a copy of the input before each call, also in graphs."""

    name = "vllm"
    copies = True


PEERS: tuple[type[Implementation], ...] = (
    FlashInferOneshot,
    FlashInferOneshotEnd,
    FlashInferTwoshot,
    Vllm,
    VllmRegistered,
)
NORM_KERNELS = (FlashInferOneshot, FlashInferOneshotEnd, FlashInferTwoshot)
