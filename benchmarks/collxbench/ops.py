"""The operators, one description each: what a case, a check and a call of it are made from.

The calls of the peers stand with the libraries: torch_dist.py, cuda_peers.py, mpi_job.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from torch import Tensor

from collx import reference

if TYPE_CHECKING:
    from collxbench.job import Case

ROOT = 0


class Share(Enum):
    """How much of the full tensor a rank's input or output is."""

    WHOLE = "whole"
    PART = "part"
    NONE = "none"


@dataclass(frozen=True)
class Op:
    name: str
    takes: Share
    gives: Share
    expect: Callable[[list[Tensor], str], list[Tensor]]
    """Every rank's output, from every rank's input and the reduce op."""
    arguments: Callable[[Case], tuple[Any, ...]]
    """Of collx's operator, between the input and the algorithm."""
    link: Callable[[int, bool], float]
    """What must cross one rank's link in one direction, as a share of the full tensor; from the
    number of ranks, and whether the rank is the root."""
    algorithms: tuple[str, ...] = ()
    symmetric_only: str = ""
    """The algorithm that accepts no other tensors."""
    reduces: bool = False
    divided: bool = False
    """Whether the full tensor is cut into one equal part a rank."""
    result_at_root: bool = False
    """Whether peers give a result on the root alone. collx's is defined on all ranks."""
    symmetric_above: int = 0
    """Bytes up to which collx is no faster on symmetric tensors, and is not measured there."""

    @property
    def has_tensor(self) -> bool:
        return self.takes is not Share.NONE

    def bytes_on_link(self, nbytes: int, world: int, at_root: bool = True) -> float:
        """Of a full tensor of `nbytes`, over the link of the root, which is the busiest, or of
        another rank."""
        return self.link(world, at_root) * nbytes


def _all_but_own(world: int, at_root: bool) -> float:
    return (world - 1) / world


def _rooted_parts(world: int, at_root: bool) -> float:
    return (world - 1) / world if at_root else 1 / world


def _once(world: int, at_root: bool) -> float:
    return 1.0


def even_splits(case: Case) -> list[int]:
    return [case.numel // case.world] * case.world


_STAGED_OR_DIRECT = ("staged", "direct", "fallback")

_ALL = (
    Op(
        "allreduce",
        Share.WHOLE,
        Share.WHOLE,
        lambda inputs, reduce_op: [reference.allreduce(inputs, reduce_op)] * len(inputs),
        lambda case: (case.reduce_op, case.comm.name),
        lambda world, at_root: 2 * (world - 1) / world,
        algorithms=(
            "oneshot_push",
            "twoshot_push",
            "pull_push",
            "oneshot_pull",
            "twoshot_pull",
            "fallback",
        ),
        symmetric_only="pull_push",
        reduces=True,
        symmetric_above=8 << 20,
    ),
    Op(
        "reducescatter",
        Share.WHOLE,
        Share.PART,
        lambda inputs, reduce_op: reference.reducescatter(inputs, reduce_op),
        lambda case: (case.reduce_op, case.world, case.comm.name, 0),
        _all_but_own,
        algorithms=_STAGED_OR_DIRECT,
        symmetric_only="direct",
        reduces=True,
        divided=True,
    ),
    Op(
        "allgather",
        Share.PART,
        Share.WHOLE,
        lambda inputs, _: reference.allgather(inputs),
        lambda case: (case.world, case.comm.name, 0, None),
        _all_but_own,
        algorithms=_STAGED_OR_DIRECT,
        symmetric_only="direct",
        divided=True,
    ),
    Op(
        "broadcast",
        Share.WHOLE,
        Share.WHOLE,
        lambda inputs, _: reference.broadcast(inputs, ROOT),
        lambda case: (ROOT, case.comm.name),
        _once,
        algorithms=("onestage", "twostage", "pipelined", "fallback"),
    ),
    Op(
        "reduce",
        Share.WHOLE,
        Share.WHOLE,
        lambda inputs, reduce_op: reference.reduce(inputs, reduce_op, ROOT),
        lambda case: (case.reduce_op, ROOT, case.comm.name),
        _once,
        algorithms=_STAGED_OR_DIRECT,
        symmetric_only="direct",
        reduces=True,
        result_at_root=True,
    ),
    Op(
        "gather",
        Share.PART,
        Share.WHOLE,
        lambda inputs, _: reference.gather(inputs, ROOT),
        lambda case: (ROOT, case.world, case.comm.name),
        _rooted_parts,
        algorithms=_STAGED_OR_DIRECT,
        symmetric_only="direct",
        divided=True,
        result_at_root=True,
    ),
    Op(
        "scatter",
        Share.WHOLE,
        Share.PART,
        lambda inputs, _: reference.scatter(inputs, ROOT),
        lambda case: (ROOT, case.world, case.comm.name),
        _rooted_parts,
        algorithms=_STAGED_OR_DIRECT,
        symmetric_only="direct",
        divided=True,
    ),
    Op(
        "alltoall",
        Share.WHOLE,
        Share.WHOLE,
        lambda inputs, _: reference.alltoall(inputs),
        lambda case: (case.world, case.comm.name),
        _all_but_own,
        algorithms=_STAGED_OR_DIRECT,
        symmetric_only="direct",
        divided=True,
    ),
    Op(
        "alltoallv",
        Share.WHOLE,
        Share.WHOLE,
        lambda inputs, _: reference.alltoall(inputs),  # the splits are even
        lambda case: (even_splits(case), even_splits(case), case.comm.name),
        _all_but_own,
        algorithms=("staged", "fallback"),
        divided=True,
    ),
    Op(
        "barrier",
        Share.NONE,
        Share.NONE,
        lambda inputs, _: inputs,
        lambda case: (case.comm.name,),
        lambda world, at_root: 0.0,
    ),
)

OPS = {op.name: op for op in _ALL}
