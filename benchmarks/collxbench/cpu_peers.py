"""Peers on the CPU that run in this process, and the time of a plain copy. MPI: mpi_run.py."""

import torch

from collxbench.implementation import Call, Implementation, Kind
from collxbench.job import Case
from collxbench.ops import OPS
from collxbench.torch_dist import TorchDist


class Gloo(TorchDist):
    name = "gloo"


class Memcpy(Implementation):
    """Copies as many bytes as must cross the link of each rank, on all ranks at once."""

    name = "memcpy"
    kind = Kind.FLOOR
    ops = tuple(op.name for op in OPS.values() if op.has_tensor)

    def prepare(self, case: Case) -> Call:
        nbytes = int(case.op.bytes_on_link(case.nbytes, case.world, case.at_root))
        source = torch.zeros(max(1, nbytes), dtype=torch.uint8)
        target = torch.ones_like(source)
        return Call(lambda: target.copy_(source), lambda: None, lambda: target)


PEERS: dict[str, type[Implementation]] = {"gloo": Gloo, "memcpy": Memcpy}
