"""A case of a fused normalization: several tensors go in and come out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from collxbench.call import Call, Kind
from collxbench.job import Case, Job
from collxbench.norm_problem import Problem, Results
from collxbench.op import Op
from collxbench.ops import OPS
from collxbench.ops_norm import NormOp


@dataclass(frozen=True)
class NormCall(Call):
    results: Callable[[], Results] = tuple
    """All of them, in the order of `NormOp.results`; none before the first call that makes them."""


class NormCase(Case):
    """One fused operator on rows of the job's number of columns."""

    problem: Problem
    residual: Tensor | None
    weight: Tensor
    wanted_results: Results

    def _expect(self, inputs: list[Tensor]) -> None:
        job, op = self.job, self.op
        assert isinstance(op, NormOp)
        self.problem = Problem.of_bytes(
            op, self.nbytes, job.cols, job.dtype, job.device, job.rounding, self.world
        )
        self.residual, self.weight = self.problem.residual, self.problem.weight
        self.wanted_results = self.problem.expected()

    @functools.cached_property
    def allreduce(self) -> Case:
        """The reduction alone: a sum of the same inputs."""
        return Case(self.job, OPS["allreduce"], self.nbytes)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.problem.rows, self.problem.cols)

    @property
    def where(self) -> str:
        return f"{self.problem.rows} x {self.problem.cols}"

    def as_rows(self, tensor: Tensor) -> Tensor:
        return tensor.view(self.shape)

    def check(self, call: Call, kind: Kind) -> int:
        assert isinstance(call, NormCall)
        call.load()
        for result in call.results():
            result.view(torch.uint8).fill_(0x55)  # what no rank's output is made of
        call.run()
        return self.wrong(call, kind)

    def wrong(self, call: Call, kind: Kind) -> int:
        assert isinstance(call, NormCall)
        wrong = self.problem.inexact if kind is Kind.OURS else self.problem.far
        return wrong(call.results(), self.wanted_results)


def case_of(job: Job, op: Op, nbytes: int) -> Case:
    return NormCase(job, op, nbytes) if isinstance(op, NormOp) else Case(job, op, nbytes)
