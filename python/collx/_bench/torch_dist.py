"""Calls of torch.distributed, which run on gloo and NCCL."""

from collections.abc import Callable
from functools import partial

import torch.distributed as dist
from torch import Tensor

from collx._bench.call import Call
from collx._bench.implementation import PART_INSIDE, Implementation, ends_inside
from collx._bench.job import Case
from collx._bench.ops import even_splits

REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
}

IN_PLACE = ("allreduce", "broadcast", "reduce")  # these write to their first tensor


def _parts(case: Case, whole: Tensor) -> list[Tensor] | None:
    return list(whole.chunk(case.world)) if case.at_root else None


def _reduce_op(case: Case) -> dist.ReduceOp.RedOpType:
    return REDUCE_OPS[case.reduce_op]


def _barrier(case: Case) -> Callable[[], object]:
    if case.job.device.type == "cpu":
        return dist.barrier
    return partial(dist.barrier, device_ids=[case.job.device.index])


CALLS: dict[str, Callable[[Case, Tensor, Tensor], Callable[[], object]]] = {
    "allreduce": lambda c, x, y: partial(dist.all_reduce, x, _reduce_op(c)),
    "reducescatter": lambda c, x, y: partial(dist.reduce_scatter_tensor, y, x, _reduce_op(c)),
    "allgather": lambda c, x, y: partial(dist.all_gather_into_tensor, y, x),
    "broadcast": lambda c, x, y: partial(dist.broadcast, x, c.root),
    "reduce": lambda c, x, y: partial(dist.reduce, x, c.root, _reduce_op(c)),
    "gather": lambda c, x, y: partial(dist.gather, x, _parts(c, y), c.root),
    "scatter": lambda c, x, y: partial(dist.scatter, y, _parts(c, x), c.root),
    "alltoall": lambda c, x, y: partial(dist.all_to_all_single, y, x),
    "alltoallv": lambda c, x, y: partial(
        dist.all_to_all_single, y, x, even_splits(c), even_splits(c)
    ),
    "barrier": lambda c, x, y: _barrier(c),
}


class TorchDist(Implementation):
    """The call of torch.distributed for an operator, on the default group."""

    form = "function of torch.distributed"

    def prepare(self, case: Case) -> Call:
        x, y = self.tensors(case)
        on_gpu = case.job.device.type == "cuda"
        return Call.of(
            case,
            CALLS[case.op.name](case, x, y),
            x,
            x if case.op.name in IN_PLACE else y,
            eager="it waits on the host" if on_gpu and not case.op.has_tensor else "",
        )

    def in_place(self, case: Case) -> Callable[[], Call] | None:
        return partial(self._part_inside, case) if case.op.name in PART_INSIDE else None

    def _part_inside(self, case: Case) -> Call:
        tensors = self.tensors(case)
        x, y = ends_inside(case, max(tensors, key=Tensor.numel))
        return Call.of(case, CALLS[case.op.name](case, x, y), x, y, in_place=True)

    def tensors(self, case: Case) -> tuple[Tensor, Tensor]:
        """Returns the tensors for input and output. In-place calls do not use the second."""
        return case.empty(case.input_numel), case.empty(case.output_numel)
