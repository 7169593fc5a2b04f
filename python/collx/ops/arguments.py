"""What all functions here do with their arguments before an operator is called."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from collx.communicator import find

__all__ = ["ReduceOp", "group_size_of", "name_of_reduce_op"]

ReduceOp = str | dist.ReduceOp | dist.ReduceOp.RedOpType
"""The name of a reduction, or PyTorch's value for it."""

_NAMES: tuple[tuple[Any, str], ...] = (
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.AVG, "avg"),
    (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.MIN, "min"),
    (dist.ReduceOp.PRODUCT, "prod"),
)


def name_of_reduce_op(op: str, given: ReduceOp) -> str:
    """What the operators call a reduction. `op`: whose argument it is."""
    if isinstance(given, str):
        return given
    for known, name in _NAMES:
        if given == known:
            return name
    message = (
        f"collx.{op}: reduce_op: got {_repr(given)}; accepted: sum, avg, max, min, prod, as a "
        "string or as torch.distributed.ReduceOp.SUM, AVG, MAX, MIN, PRODUCT"
    )
    raise (ValueError if isinstance(given, dist.ReduceOp) else TypeError)(message)


def _repr(given: Any) -> str:
    premultiplied: Any = dist.ReduceOp.PREMUL_SUM  # whose values have no words of their own
    if isinstance(given, dist.ReduceOp) and given == premultiplied:
        return "ReduceOp.PREMUL_SUM"
    return f"ReduceOp.{given.name}" if isinstance(given, dist.ReduceOp.RedOpType) else repr(given)


def group_size_of(op: str, name: str) -> int:
    """The number of ranks, which the schemas have so that Meta needs no communicator."""
    communicator = find(name)
    if communicator is None:
        raise ValueError(
            f'collx.{op}: group_name: "{name}" names no communicator of this process. '
            "Communicators are made by collx.init(); destroy() removes them"
        )
    return communicator.world_size
