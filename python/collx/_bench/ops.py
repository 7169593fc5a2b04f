"""Descriptions of all operators.

The calls of the peers are in the modules of the libraries: torch_dist.py, cuda_peers.py,
norm_peers.py, mpi_job.py.
"""

from __future__ import annotations

from collx import reference
from collx._bench.op import Given, Op, Share
from collx._bench.ops_norm import NORM_OPS


def _all_but_own(world: int, at_root: bool) -> float:
    return (world - 1) / world


def _rooted_parts(world: int, at_root: bool) -> float:
    return (world - 1) / world if at_root else 1 / world


def _once(world: int, at_root: bool) -> float:
    return 1.0


def even_splits(case: Given) -> list[int]:
    return [case.numel // case.world] * case.world


_ALL = (
    Op(
        "allreduce",
        Share.WHOLE,
        Share.WHOLE,
        lambda inputs, reduce_op, _: [reference.allreduce(inputs, reduce_op)] * len(inputs),
        lambda case: (case.reduce_op, case.comm.name),
        lambda world, at_root: 2 * (world - 1) / world,
        symmetric_only="pull_push",
        reduces=True,
        symmetric_above=8 << 20,
    ),
    Op(
        "reducescatter",
        Share.WHOLE,
        Share.PART,
        lambda inputs, reduce_op, _: reference.reducescatter(inputs, reduce_op),
        lambda case: (case.reduce_op, case.world, case.comm.name),
        _all_but_own,
        symmetric_only="direct",
        reduces=True,
        divided=True,
    ),
    Op(
        "allgather",
        Share.PART,
        Share.WHOLE,
        lambda inputs, *_: reference.allgather(inputs),
        lambda case: (case.world, case.comm.name),
        _all_but_own,
        symmetric_only="direct",
        divided=True,
    ),
    Op(
        "broadcast",
        Share.WHOLE,
        Share.WHOLE,
        lambda inputs, _, root: reference.broadcast(inputs, root),
        lambda case: (case.root, case.comm.name),
        _once,
        rooted=True,
    ),
    Op(
        "reduce",
        Share.WHOLE,
        Share.WHOLE,
        lambda inputs, reduce_op, root: reference.reduce(inputs, reduce_op, root),
        lambda case: (case.reduce_op, case.root, case.comm.name),
        _once,
        symmetric_only="direct",
        reduces=True,
        result_at_root=True,
        rooted=True,
    ),
    Op(
        "gather",
        Share.PART,
        Share.WHOLE,
        lambda inputs, _, root: reference.gather(inputs, root),
        lambda case: (case.root, case.world, case.comm.name),
        _rooted_parts,
        symmetric_only="direct",
        divided=True,
        result_at_root=True,
        rooted=True,
    ),
    Op(
        "scatter",
        Share.WHOLE,
        Share.PART,
        lambda inputs, _, root: reference.scatter(inputs, root),
        lambda case: (case.root, case.world, case.comm.name),
        _rooted_parts,
        symmetric_only="direct",
        divided=True,
        rooted=True,
    ),
    Op(
        "alltoall",
        Share.WHOLE,
        Share.WHOLE,
        lambda inputs, *_: reference.alltoall(inputs),
        lambda case: (case.world, case.comm.name),
        _all_but_own,
        symmetric_only="direct",
        divided=True,
    ),
    Op(
        "alltoallv",
        Share.WHOLE,
        Share.WHOLE,
        lambda inputs, *_: reference.alltoall(inputs),  # all splits are equal
        lambda case: (even_splits(case), even_splits(case), case.comm.name),
        _all_but_own,
        symmetric_only="direct",
        divided=True,
    ),
    Op(
        "barrier",
        Share.NONE,
        Share.NONE,
        lambda inputs, *_: inputs,
        lambda case: (case.comm.name,),
        lambda world, at_root: 0.0,
    ),
)

OPS = {op.name: op for op in (*_ALL, *NORM_OPS)}
