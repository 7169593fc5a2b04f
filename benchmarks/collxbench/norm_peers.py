"""Peers of the fused normalisations: an all-reduce of each library, then add, norm and quantise as
one compiled function; and FlashInfer's fused kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from collxbench import cpu_peers, cuda_peers
from collxbench.implementation import Implementation
from collxbench.job import Case, Job
from collxbench.norm_case import NormCall, NormCase
from collxbench.norm_problem import EPS, Results, Sequence
from collxbench.ours import Collx

UNFUSED = "unfused-collx"


class Unfused(Implementation):
    """An all-reduce, and the rest as one compiled function, or step by step where there is no
    compiler for it."""

    def __init__(self, reduction: Implementation, name: str = "") -> None:
        self.name = name or reduction.name
        self._reduction = reduction

    def unfit(self, case: Case) -> str | None:
        assert isinstance(case, NormCase)
        return self._reduction.unfit(case.allreduce)

    def prepare(self, case: Case) -> NormCall:
        assert isinstance(case, NormCase)
        reduced = self._reduction.prepare(case.allreduce)
        rest, self.remark = chosen_steps(case)
        made: list[Results] = [()]

        def run() -> None:
            reduced.run()
            made[0] = rest(case.as_rows(reduced.result()), case.residual, case.weight)

        return NormCall(
            run,
            reduced.load,
            lambda: made[0][0],
            reduced.algorithm,
            eager=reduced.eager,
            results=lambda: made[0],
        )

    def close(self, job: Job) -> None:
        self._reduction.close(job)


def chosen_steps(case: NormCase) -> tuple[Sequence, str]:
    """What follows the all-reduce, ready to be captured; and what is to be said of it."""
    compiled = case.problem.compiled()
    try:
        compiled(case.as_rows(case.empty(case.numel).zero_()), case.residual, case.weight)
    except Exception as reason:
        first_line = (str(reason).strip() or type(reason).__name__).splitlines()[0]
        return (
            case.problem.steps(),
            f"norm not compiled, operation by operation: {first_line[:120]}",
        )
    return compiled, ""


class FlashInferFused(Implementation):
    """TensorRT-LLM's kernel with dependent launch, as FlashInfer offers it, which itself chooses
    between its one-shot and two-shot forms."""

    name = "flashinfer"

    def __init__(self) -> None:
        self._workspace: Any = None

    def unfit(self, case: Case) -> str | None:
        assert isinstance(case, NormCase)
        op, dtype = case.problem.op, case.job.dtype
        if not op.residual or op.kind == "int8":
            return "with a residual and without int8 only"
        return None if dtype.itemsize == 2 else "bfloat16 and float16 only"

    def prepare(self, case: Case) -> NormCall:
        import flashinfer.comm as fi
        from flashinfer.comm.mnnvl import TorchDistBackend

        assert isinstance(case, NormCase)
        self.close(case.job)
        rows, cols = case.problem.rows, case.problem.cols
        patterns = fi.AllReduceFusionPattern
        workspace = fi.create_allreduce_fusion_workspace(
            backend="trtllm",
            world_size=case.world,
            rank=case.job.ranks.rank,
            max_token_num=rows,
            hidden_dim=cols,
            dtype=case.job.dtype,
            comm_backend=TorchDistBackend(group=case.job.group),
        )
        self._workspace = workspace
        x = case.as_rows(case.empty(case.numel))
        residual_out, outputs = torch.empty_like(x), {}
        if case.problem.op.kind:
            pattern = patterns.kARResidualRMSNormDynamicFP8Quant  # a scale a row; in newer ones
            outputs["quant_out"] = torch.empty_like(x, dtype=torch.float8_e4m3fn)
            outputs["scale_out"] = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
        else:
            pattern = patterns.kARResidualRMSNorm
            outputs["norm_out"] = torch.empty_like(x)
        results = (*outputs.values(), residual_out)

        def run() -> None:
            fi.allreduce_fusion(
                input=x,
                workspace=workspace,
                pattern=pattern,
                launch_with_pdl=True,
                residual_in=case.residual,
                residual_out=residual_out,
                rms_gamma=case.weight,
                rms_eps=EPS,
                use_oneshot=None,
                fp32_acc=True,
                **outputs,
            )

        return NormCall(run, lambda: case.load(x), lambda: results[0], results=lambda: results)

    def close(self, job: Job) -> None:
        if self._workspace is not None:
            torch.cuda.synchronize()
            self._workspace.destroy()
            self._workspace = None


def _over_collx() -> Implementation:
    return Unfused(Collx("auto", False, 0, 0), UNFUSED)


CPU_PEERS: dict[str, Callable[[], Implementation]] = {
    "gloo": lambda: Unfused(cpu_peers.Gloo()),
    UNFUSED: _over_collx,
}
CUDA_PEERS: dict[str, Callable[[], Implementation]] = {
    "nccl": lambda: Unfused(cuda_peers.Nccl()),
    "nccl-symmetric": lambda: Unfused(cuda_peers.NcclSymmetric()),
    "torch-oneshot": lambda: Unfused(cuda_peers.TorchOneshot()),
    "torch-twoshot": lambda: Unfused(cuda_peers.TorchTwoshot()),
    UNFUSED: _over_collx,
    "flashinfer": FlashInferFused,
}
