"""One run of the benchmark as a rank sees it, and agreement between the ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

import collx
from collxbench import data

T = TypeVar("T")


class GlooRanks:
    """Agreement through a gloo group of its own, apart from what is measured."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()

    def barrier(self) -> None:
        dist.barrier(self._group)

    def maximum(self, values: Sequence[float]) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group)
        return tensor.tolist()

    def all(self, value: bool) -> bool:
        return self.maximum([0.0 if value else 1.0]) == [0.0]

    def from_first(self, value: T) -> T:
        """Rank 0's value."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group, device=torch.device("cpu"))
        return box[0]

    def attempt(self, action: Callable[[], T]) -> "Outcome[T]":
        """Runs `action` everywhere; where it fails on one rank it has failed on all."""
        value, error = None, None
        try:
            value = action()
        except Exception as reason:
            first_line = (str(reason).strip() or "no message").splitlines()[0]
            error = f"{type(reason).__name__}: {first_line[:160]}"
        errors: list[str | None] = [None] * self.world
        dist.all_gather_object(errors, error, group=self._group)
        failed = [f"rank {rank}: {e}" for rank, e in enumerate(errors) if e is not None]
        return Outcome(None, failed[0]) if failed else Outcome(value, None)


@dataclass(frozen=True)
class Outcome(Generic[T]):
    value: T | None
    error: str | None

    def unwrap(self) -> T:
        """The value of an attempt that has no error; None only if the action returned it."""
        assert self.error is None
        return self.value  # type: ignore[return-value]


@dataclass(frozen=True)
class Job:
    op: str
    reduce_op: str
    dtype: torch.dtype
    device: torch.device
    group: dist.ProcessGroup
    ranks: GlooRanks
    comm: collx.Communicator
    has_nccl: bool
    max_bytes: int  # of the largest case


class Case:
    """One size."""

    def __init__(self, job: Job, nbytes: int) -> None:
        self.job = job
        self.nbytes = nbytes
        self.numel = nbytes // job.dtype.itemsize
        self._input = data.block(job.ranks.rank, self.numel, job.dtype).to(job.device)
        self._expected = data.expected_block(
            job.ranks.world, self.numel, job.dtype, job.reduce_op, collx.reference.allreduce
        ).to(job.device)

    def empty(self) -> Tensor:
        return torch.empty(self.numel, dtype=self.job.dtype, device=self.job.device)

    def load(self, into: Tensor) -> None:
        """Writes this rank's input."""
        into.copy_(data.tiled(self._input, self.numel))

    def input(self) -> Tensor:
        return data.tiled(self._input, self.numel)

    def correct(self, result: Tensor, exact: bool) -> bool:
        """Whether `result` is right: by every bit, or as close as another order of adding is."""
        expected = data.tiled(self._expected, self.numel)
        if exact:
            return collx.reference.same_bits(result, expected)
        return data.close(result, expected, self.job.ranks.world)
