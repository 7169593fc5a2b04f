"""The MPI peer: a separate program, which mpi_run.py starts under mpiexec.

The argument followed by the rank is the name of a pipe. Each line of the pipe is an operator, as
JSON. Rank 0 appends the results to the file that this JSON names: a JSON line {"bytes", "result",
"in_place"} for each size, or one line {"error"}, and then END. A result is {"in_place", "wrong",
"times"}, or null if there is none.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from collx._bench import checks, data, timing
from collx._bench.mpi_run import END
from collx._bench.norm_problem import Problem, Results
from collx._bench.op import Op, Share
from collx._bench.ops import OPS
from collx._bench.ops_norm import NormOp

REDUCE_OPS = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN, "prod": MPI.PROD}
# The MPI library determines which of the handles exist.
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
    root: int
    splits: list[int]  # the number of elements of the datatype that each rank sends to each rank

    @property
    def at_root(self) -> bool:
        return bool(self.comm.rank == self.root)

    def split(self, buffer: list[Any]) -> list[Any]:
        return [buffer[0], self.splits, buffer[1]]


CALLS: dict[str, Callable[[Arguments], object]] = {
    "allreduce": lambda a: a.comm.Allreduce(a.x, a.y, a.op),
    "reducescatter": lambda a: a.comm.Reduce_scatter_block(a.x, a.y, a.op),
    "allgather": lambda a: a.comm.Allgather(a.x, a.y),
    "broadcast": lambda a: a.comm.Bcast(a.y, a.root),
    "reduce": lambda a: a.comm.Reduce(a.x, a.y if a.at_root else None, a.op, a.root),
    "gather": lambda a: a.comm.Gather(a.x, a.y if a.at_root else None, a.root),
    "scatter": lambda a: a.comm.Scatter(a.x if a.at_root else None, a.y, a.root),
    "alltoall": lambda a: a.comm.Alltoall(a.x, a.y),
    "alltoallv": lambda a: a.comm.Alltoallv(a.split(a.x), a.split(a.y)),
    "barrier": lambda a: a.comm.Barrier(),
}
ONLY_IN_PLACE = ("broadcast",)
IN_PLACE: dict[str, Callable[[Arguments], object]] = {
    "allreduce": lambda a: a.comm.Allreduce(MPI.IN_PLACE, a.y, a.op),
    "reducescatter": lambda a: a.comm.Reduce_scatter_block(MPI.IN_PLACE, a.y, a.op),
    "allgather": lambda a: a.comm.Allgather(MPI.IN_PLACE, a.y),
    "reduce": lambda a: a.comm.Reduce(
        MPI.IN_PLACE if a.at_root else a.y, a.y if a.at_root else None, a.op, a.root
    ),
    "alltoall": lambda a: a.comm.Alltoall(MPI.IN_PLACE, a.y),
}


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
    op = OPS[job["op"]]
    if isinstance(op, NormOp):
        return {
            "bytes": nbytes,
            "result": measure_norm(op, job, comm, nbytes),
            "in_place": None,
        }
    return {
        "bytes": nbytes,
        "result": measure_form(op, job, comm, nbytes, op.name in ONLY_IN_PLACE),
        "in_place": measure_form(op, job, comm, nbytes, True)
        if job["in_place"] and op.name in IN_PLACE
        else None,
    }


def measure_form(
    op: Op, job: dict[str, Any], comm: Any, nbytes: int, in_place: bool
) -> dict[str, Any]:
    """Measures calls with two tensors, or in-place calls."""
    dtype, ranks = getattr(torch, job["dtype"]), MpiRanks(comm)
    numel = nbytes // dtype.itemsize
    of_share = {Share.WHOLE: numel, Share.PART: numel // comm.size, Share.NONE: 0}
    inputs = [
        data.input_of(rank, of_share[op.takes], dtype, torch.device("cpu"))
        for rank in range(comm.size)
    ]
    expected = op.expect(inputs, job["reduce_op"], job["root"])[comm.rank]
    y = torch.ones(numel if in_place else of_share[op.gives], dtype=dtype)
    x = inputs[comm.rank]
    arguments = prepared(op, comm, x, y, job)
    if in_place:
        (y if op.takes is Share.WHOLE else y.chunk(comm.size)[comm.rank]).copy_(x)
    call = {**CALLS, **IN_PLACE}[op.name] if in_place else CALLS[op.name]

    def run() -> None:
        call(arguments)

    if op.has_tensor:
        run()
        seen = arguments.at_root or not op.result_at_root
        result = y[: of_share[op.gives]]  # also the position of the result in place
        wrong = checks.wrong(op, result, expected, comm.size) if seen else 0
    else:
        wrong = int(not checks.waits(run, ranks))
    return timed(run, wrong, in_place, job, comm, nbytes)


def timed(
    run: Callable[[], None],
    wrong: int,
    in_place: bool,
    job: dict[str, Any],
    comm: Any,
    nbytes: int,
) -> dict[str, Any]:
    wrong = comm.allreduce(wrong)
    if wrong:
        return {"in_place": in_place, "wrong": wrong, "times": None}
    calls = timing.calls_of(nbytes, job["iterations"])
    times = timing.time_batches(run, calls, job["warmup"], MpiRanks(comm))
    return {"in_place": in_place, "wrong": 0, "times": vars(times)}


def measure_norm(op: NormOp, job: dict[str, Any], comm: Any, nbytes: int) -> dict[str, Any]:
    """Measures an all-reduce followed by the other steps, as one compiled function if there is a
    compiler."""
    dtype, cpu = getattr(torch, job["dtype"]), torch.device("cpu")
    problem = Problem(op, nbytes, job["cols"], dtype, cpu, job["rounding"], comm.size)
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
    wrong = problem.far(made[0], problem.expected())
    return timed(run, wrong, False, job, comm, nbytes)


def prepared(op: Op, comm: Any, x: Tensor, y: Tensor, job: dict[str, Any]) -> Arguments:
    """Returns the arguments of the MPI call. Copies use bytes as the datatype."""
    datatype = TYPES[job["dtype"]] if op.reduces else MPI.BYTE
    send, receive = ([t.view(torch.uint8).numpy(), datatype] for t in (x, y))
    splits = [x.numel() * x.itemsize // comm.size] * comm.size
    reduce_op = REDUCE_OPS.get(job["reduce_op"])
    return Arguments(comm, send, receive, reduce_op, job["root"], splits)


def refusal(job: dict[str, Any]) -> str | None:
    if not OPS[job["op"]].reduces:
        return None
    if job["reduce_op"] not in REDUCE_OPS:
        return f"MPI has no {job['reduce_op']}"
    if TYPES[job["dtype"]] == MPI.DATATYPE_NULL:
        return f"this MPI has no {job['dtype']}"
    return None


def serve(job: dict[str, Any], comm: Any) -> None:
    with open(job["output"], "a") as output:
        for nbytes in job["sizes"]:
            error = refusal(job)
            line = measure(job, comm, nbytes) if error is None else {"error": error}
            if comm.rank == 0:
                output.write(json.dumps(line) + "\n")
                output.flush()
            if error is not None:
                break
        if comm.rank == 0:
            output.write(END)


def main() -> None:
    torch.set_num_threads(1)
    comm = MPI.COMM_WORLD
    with open(f"{sys.argv[1]}{comm.rank}") as jobs:  # a pipe, so waiting does not use the CPU
        for line in jobs:
            serve(json.loads(line), comm)


if __name__ == "__main__":
    main()
