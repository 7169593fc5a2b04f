"""The MPI peer: a program of its own, started by mpi_run.py under mpiexec.

Takes the case as JSON in its only argument; rank 0 appends one JSON line a size to the file that
it names: {"bytes", "us", "us_min", "us_max", "correct"}, or {"error"} and no more.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from mpi4py import MPI

import collx.reference
from collxbench import data, timing

OPS = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN, "prod": MPI.PROD}
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


class MpiRanks:
    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def barrier(self) -> None:
        self._comm.Barrier()

    def maximum(self, values: Sequence[float]) -> list[float]:
        return [self._comm.allreduce(value, op=MPI.MAX) for value in values]


def measure(job: dict[str, Any], comm: Any, nbytes: int) -> dict[str, Any]:
    dtype, reduce_op = getattr(torch, job["dtype"]), job["reduce_op"]
    numel = nbytes // dtype.itemsize
    datatype, op = TYPES[job["dtype"]], OPS[reduce_op]
    x = data.tiled(data.block(comm.rank, numel, dtype), numel)
    y = torch.zeros_like(x)
    send, receive = ([t.view(torch.uint8).numpy(), numel, datatype] for t in (x, y))

    def run() -> None:
        comm.Allreduce(send, receive, op=op)

    run()
    expected = data.expected_block(comm.size, numel, dtype, reduce_op, collx.reference.allreduce)
    right = data.close(y, data.tiled(expected, numel), comm.size)
    correct = comm.allreduce(int(right), op=MPI.MIN) == 1
    if not correct:
        return {"bytes": nbytes, "correct": False}
    calls = timing.calls_of(nbytes, job["iterations"])
    result = timing.time_batches(run, calls, job["warmup"], MpiRanks(comm))
    return {"bytes": nbytes, "correct": True, **vars(result)}


def main() -> None:
    torch.set_num_threads(1)
    job = json.loads(sys.argv[1])
    comm = MPI.COMM_WORLD
    with open(job["output"], "a") as output:
        for nbytes in job["sizes"]:
            line: dict[str, Any]
            if job["reduce_op"] not in OPS:
                line = {"error": f"MPI has no {job['reduce_op']}"}
            elif TYPES[job["dtype"]] == MPI.DATATYPE_NULL:
                line = {"error": f"this MPI has no {job['dtype']}"}
            else:
                line = measure(job, comm, nbytes)
            if comm.rank == 0:
                output.write(json.dumps(line) + "\n")
                output.flush()
            if "error" in line:
                return


if __name__ == "__main__":
    main()
