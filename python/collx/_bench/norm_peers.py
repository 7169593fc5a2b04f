"""Peers of the fused normalizations: an all-reduce of each library, followed by addition, norm and
quantization as one compiled function; and FlashInfer's fused kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from collx._bench import cpu_peers, cuda_peers, flashinfer_peers
from collx._bench.implementation import Implementation
from collx._bench.job import Case, Job
from collx._bench.norm_case import NormCall, NormCase
from collx._bench.norm_problem import Results, Sequence
from collx._bench.ours import Collx

UNFUSED = "unfused-collx"


class Unfused(Implementation):
    """An all-reduce, followed by the other steps as one compiled function, or as single operations
    if they cannot be compiled."""

    def __init__(self, reduction: Implementation, name: str = "") -> None:
        self.name = name or reduction.name
        self.form = f"{reduction.form}, and the rest"
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
            reduced.in_place,
            reduced.eager,
            captured=reduced.captured,
            results=lambda: made[0],
        )

    def close(self, job: Job) -> None:
        self._reduction.close(job)


def chosen_steps(case: NormCase) -> tuple[Sequence, str]:
    """Returns the steps after the all-reduce, ready for capture, and a remark about them."""
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


def _over_collx() -> Implementation:
    return Unfused(Collx("auto", False, 0, 0), UNFUSED)


CPU_PEERS: dict[str, Callable[[], Implementation]] = {
    "gloo": lambda: Unfused(cpu_peers.Gloo()),
    "vllm-shm": lambda: Unfused(cpu_peers.VllmShm()),
    UNFUSED: _over_collx,
}
CUDA_PEERS: dict[str, Callable[[], Implementation]] = {
    "nccl": lambda: Unfused(cuda_peers.Nccl()),
    "nccl-symmetric": lambda: Unfused(cuda_peers.NcclSymmetric()),
    "torch-oneshot": lambda: Unfused(cuda_peers.TorchOneshot()),
    "torch-twoshot": lambda: Unfused(cuda_peers.TorchTwoshot()),
    UNFUSED: _over_collx,
    **{
        kernel.name: partial(flashinfer_peers.FlashInferNorm, kernel)
        for kernel in flashinfer_peers.NORM_KERNELS
    },
}
