"""A case of a fused normalization, which has several inputs and outputs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from collx._bench.call import Call, Kind
from collx._bench.job import Case, Job
from collx._bench.norm_problem import Problem, Results
from collx._bench.op import Op
from collx._bench.ops import OPS
from collx._bench.ops_norm import NormOp


@dataclass(frozen=True)
class NormCall(Call):
    results: Callable[[], Results] = tuple
    """Returns all results in the order of `NormOp.results`, or () before they are created."""


class NormCase(Case):
    """One fused operator on rows with the job's number of columns."""

    problem: Problem
    residual: Tensor | None
    weight: Tensor
    wanted_results: Results

    def _expect(self, inputs: list[Tensor]) -> None:
        job, op = self.job, self.op
        assert isinstance(op, NormOp)
        self.problem = Problem(
            op, self.nbytes, job.cols, job.dtype, job.device, job.rounding, self.world
        )
        self.residual, self.weight = self.problem.residual, self.problem.weight
        self.wanted_results = self.problem.expected()

    @functools.cached_property
    def allreduce(self) -> Case:
        """The all-reduce of the same inputs without the norm."""
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
            result.view(torch.uint8).fill_(0x55)  # differs from the output of every rank
        call.run()
        return self.wrong(call, kind)

    def wrong(self, call: Call, kind: Kind) -> int:
        assert isinstance(call, NormCall)
        wrong = self.problem.inexact if kind is Kind.OURS else self.problem.far
        return wrong(call.results(), self.wanted_results)


def case_of(job: Job, op: Op, nbytes: int) -> Case:
    return NormCase(job, op, nbytes) if isinstance(op, NormOp) else Case(job, op, nbytes)
