"""The MPI peer: a program of its own, started by mpi_run.py under mpiexec.

Takes the case as JSON in its only argument; rank 0 appends one JSON line a size to the file that
it names: {"bytes", "us", "us_min", "us_max", "correct"}, or {"error"} and no more.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from mpi4py import MPI
from torch import Tensor

from collxbench import checks, data, timing
from collxbench.norm_problem import Problem, Results
from collxbench.op import ROOT, Op, Share
from collxbench.ops import OPS
from collxbench.ops_norm import NormOp

REDUCE_OPS = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN, "prod": MPI.PROD}
# Which of the handles exist depends on the MPI library.
TYPES = {
    "float32": MPI.FLOAT,
    "float64": MPI.DOUBLE,
    "float16": getattr(MPI, "FLOAT16_T", MPI.DATATYPE_NULL),
    "bfloat16": getattr(MPI, "BFLOAT16_T", MPI.DATATYPE_NULL),
    "int32": MPI.INT32_T,
    "int64": MPI.INT64_T,
    "int8": MPI.INT8_T,
    "uint8": MPI.UINT8_T,
}


@dataclass(frozen=True)
class Arguments:
    comm: Any
    x: list[Any]
    y: list[Any]
    op: Any
    splits: list[int]  # what each rank sends to each, in elements of the datatype

    @property
    def at_root(self) -> bool:
        return bool(self.comm.rank == ROOT)

    def split(self, buffer: list[Any]) -> list[Any]:
        return [buffer[0], self.splits, buffer[1]]


CALLS: dict[str, Callable[[Arguments], object]] = {
    "allreduce": lambda a: a.comm.Allreduce(a.x, a.y, a.op),
    "reducescatter": lambda a: a.comm.Reduce_scatter_block(a.x, a.y, a.op),
    "allgather": lambda a: a.comm.Allgather(a.x, a.y),
    "broadcast": lambda a: a.comm.Bcast(a.x, ROOT),
    "reduce": lambda a: a.comm.Reduce(a.x, a.y if a.at_root else None, a.op, ROOT),
    "gather": lambda a: a.comm.Gather(a.x, a.y if a.at_root else None, ROOT),
    "scatter": lambda a: a.comm.Scatter(a.x if a.at_root else None, a.y, ROOT),
    "alltoall": lambda a: a.comm.Alltoall(a.x, a.y),
    "alltoallv": lambda a: a.comm.Alltoallv(a.split(a.x), a.split(a.y)),
    "barrier": lambda a: a.comm.Barrier(),
}
IN_PLACE = ("broadcast",)


class MpiRanks:
    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self.rank: int = comm.rank
        self.world: int = comm.size

    def barrier(self) -> None:
        self._comm.Barrier()

    def maximum(self, values: Sequence[float]) -> list[float]:
        return [self._comm.allreduce(value, op=MPI.MAX) for value in values]


def measure(job: dict[str, Any], comm: Any, nbytes: int) -> dict[str, Any]:
    op, dtype, ranks = OPS[job["op"]], getattr(torch, job["dtype"]), MpiRanks(comm)
    if isinstance(op, NormOp):
        return measure_norm(op, {**job, "reduce_op": "sum"}, comm, nbytes)
    numel = nbytes // dtype.itemsize
    of_share = {Share.WHOLE: numel, Share.PART: numel // comm.size, Share.NONE: 0}
    inputs = [
        data.input_of(rank, of_share[op.takes], dtype, torch.device("cpu"))
        for rank in range(comm.size)
    ]
    expected = op.expect(inputs, job["reduce_op"])[comm.rank]
    x = inputs[comm.rank].clone()
    y = x if op.name in IN_PLACE else torch.ones(of_share[op.gives], dtype=dtype)
    arguments = prepared(op, comm, x, y, job)
    call = CALLS[op.name]

    def run() -> None:
        call(arguments)

    if op.has_tensor:
        run()
        seen = comm.rank == ROOT or not op.result_at_root
        right = not seen or checks.right(op, y, expected, comm.size)
    else:
        right = checks.waits(run, ranks)
    if comm.allreduce(int(right), op=MPI.MIN) != 1:
        return {"bytes": nbytes, "correct": False}
    calls = timing.calls_of(nbytes, job["iterations"])
    result = timing.time_batches(run, calls, job["warmup"], ranks)
    return {"bytes": nbytes, "correct": True, **vars(result)}


def measure_norm(op: NormOp, job: dict[str, Any], comm: Any, nbytes: int) -> dict[str, Any]:
    """An all-reduce, then the rest as one compiled function, where there is a compiler."""
    dtype, cpu = getattr(torch, job["dtype"]), torch.device("cpu")
    problem = Problem.of_bytes(op, nbytes, job["cols"], dtype, cpu, job["rounding"], comm.size)
    residual, weight = problem.residual, problem.weight
    x, y = problem.input_of(comm.rank), torch.empty(problem.rows, problem.cols, dtype=dtype)
    arguments = prepared(OPS["allreduce"], comm, x.view(-1), y.view(-1), job)
    rest = problem.compiled()
    try:
        rest(y.zero_(), residual, weight)
    except Exception:
        rest = problem.steps()
    made: list[Results] = [()]

    def run() -> None:
        CALLS["allreduce"](arguments)
        made[0] = rest(y, residual, weight)

    run()
    if comm.allreduce(int(problem.near(made[0], problem.expected())), op=MPI.MIN) != 1:
        return {"bytes": nbytes, "correct": False}
    calls = timing.calls_of(nbytes, job["iterations"])
    result = timing.time_batches(run, calls, job["warmup"], MpiRanks(comm))
    return {"bytes": nbytes, "correct": True, **vars(result)}


def prepared(op: Op, comm: Any, x: Tensor, y: Tensor, job: dict[str, Any]) -> Arguments:
    """What is copied is bytes to MPI."""
    datatype = TYPES[job["dtype"]] if op.reduces else MPI.BYTE
    send, receive = ([t.view(torch.uint8).numpy(), datatype] for t in (x, y))
    splits = [x.numel() * x.itemsize // comm.size] * comm.size
    return Arguments(comm, send, receive, REDUCE_OPS.get(job["reduce_op"]), splits)


def refusal(job: dict[str, Any]) -> str | None:
    if not OPS[job["op"]].reduces:
        return None
    if job["reduce_op"] not in REDUCE_OPS and not isinstance(OPS[job["op"]], NormOp):
        return f"MPI has no {job['reduce_op']}"
    if TYPES[job["dtype"]] == MPI.DATATYPE_NULL:
        return f"this MPI has no {job['dtype']}"
    return None


def main() -> None:
    torch.set_num_threads(1)
    job = json.loads(sys.argv[1])
    comm = MPI.COMM_WORLD
    with open(job["output"], "a") as output:
        for nbytes in job["sizes"]:
            error = refusal(job)
            line = measure(job, comm, nbytes) if error is None else {"error": error}
            if comm.rank == 0:
                output.write(json.dumps(line) + "\n")
                output.flush()
            if error is not None:
                return


if __name__ == "__main__":
    main()
