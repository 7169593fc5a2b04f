"""Peers on the CPU that run in this process, and the time of a plain copy. MPI: mpi_run.py."""

import torch
import torch.distributed as dist

from collxbench.implementation import Call, Implementation, Kind
from collxbench.job import Case
from collxbench.records import wire_bytes

TORCH_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
}


class Gloo(Implementation):
    name = "gloo"

    def prepare(self, case: Case) -> Call:
        x = case.empty()
        op = TORCH_OPS[case.job.reduce_op]
        return Call(lambda: dist.all_reduce(x, op), lambda: case.load(x), lambda: x, in_place=True)


class Memcpy(Implementation):
    """Copies the bytes that an all-reduce must move between the ranks, on every rank at once."""

    name = "memcpy"
    kind = Kind.FLOOR

    def prepare(self, case: Case) -> Call:
        nbytes = max(1, int(wire_bytes(case.nbytes, case.job.ranks.world)))
        source = torch.zeros(nbytes, dtype=torch.uint8)
        target = torch.ones_like(source)
        return Call(lambda: target.copy_(source), lambda: None, lambda: target)


PEERS: dict[str, type[Implementation]] = {"gloo": Gloo, "memcpy": Memcpy}
