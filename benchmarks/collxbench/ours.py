"""collx, with an algorithm, on ordinary or symmetric tensors."""

import argparse

import torch

from collxbench.implementation import Call, Implementation, Kind
from collxbench.job import Case
from collxbench.options import ORDINARY_UP_TO


class Collx(Implementation):
    kind = Kind.OURS
    exact = True

    def __init__(self, algorithm: str, symmetric: bool, above: int, max_blocks: int) -> None:
        """`above`: bytes up to which it is left out."""
        self.name = "collx-symmetric" if symmetric else "collx"
        self._algorithm = algorithm
        self._symmetric = symmetric
        self._above = above
        self._max_blocks = max_blocks

    @property
    def label(self) -> str:
        mark = "collx(sym)" if self._symmetric else "collx"
        return mark if self._algorithm == "auto" else f"{mark}:{self._algorithm}"

    def wanted(self, case: Case) -> bool:
        return case.nbytes > self._above

    def unfit(self, case: Case) -> str | None:
        if self._algorithm == "fallback" and case.job.device.type == "cuda":
            return "fallback is refused while a CUDA graph is captured"
        return None

    def prepare(self, case: Case) -> Call:
        comm, reduce_op = case.job.comm, case.job.reduce_op
        if self._symmetric:
            x = comm.empty(case.numel, dtype=case.job.dtype)
            y = comm.empty(case.numel, dtype=case.job.dtype)
        else:
            x, y = case.empty(), case.empty()
        allreduce = torch.ops.collx.allreduce.out
        name, algorithm, max_blocks = comm.name, self._algorithm, self._max_blocks

        def run() -> None:
            allreduce(x, reduce_op, name, algorithm, max_blocks, out=y)

        explained = comm.explain(
            case.job.op,
            case.numel,
            case.job.dtype,
            input_symmetric=self._symmetric,
            output_symmetric=self._symmetric,
            algorithm=algorithm,
            max_blocks=max_blocks,
        )
        return Call(run, lambda: case.load(x), lambda: y, str(explained["algorithm"]))


def chosen(options: argparse.Namespace) -> list[Implementation]:
    """Ordinary tensors everywhere and symmetric ones above ORDINARY_UP_TO, or symmetric alone.
    pull_push works on symmetric tensors only."""
    found: list[Implementation] = []
    for algorithm in options.algorithms:
        if not options.symmetric and algorithm != "pull_push":
            found.append(Collx(algorithm, False, 0, options.max_blocks))
        both = options.symmetric or algorithm == "pull_push"
        found.append(Collx(algorithm, True, 0 if both else ORDINARY_UP_TO, options.max_blocks))
    return found
