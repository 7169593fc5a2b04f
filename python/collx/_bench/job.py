"""The state of a benchmark run on one rank, and agreement between the ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

import collx
from collx._bench import checks, data
from collx._bench.call import Call, Kind
from collx._bench.op import Op, Share

T = TypeVar("T")


class GlooRanks:
    """Agreement through a separate gloo group, which is independent of the measured calls."""

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

    def total(self, value: int) -> int:
        tensor = torch.tensor(value)
        dist.all_reduce(tensor, group=self._group)
        return int(tensor.item())

    def from_first(self, value: T) -> T:
        """Returns the value of rank 0."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group, device=torch.device("cpu"))
        return box[0]

    def attempt(self, action: Callable[[], T]) -> "Outcome[T]":
        """Runs `action` on all ranks. If it fails on one rank, the outcome is a failure on all."""
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
        """Returns the value of an attempt without an error. It is only None if the action returned
        None."""
        assert self.error is None
        return self.value  # type: ignore[return-value]


@dataclass(frozen=True)
class Job:
    reduce_op: str
    root: int
    dtype: torch.dtype
    device: torch.device
    group: dist.ProcessGroup
    ranks: GlooRanks
    comm: collx.Communicator
    init_seconds: float  # the duration of collx.init
    has_nccl: bool
    cols: int  # of the matrices whose rows are normalized
    rounding: str  # of the norms
    max_bytes: int  # of the largest case

    def synchronize(self) -> None:
        """Waits for the current stream."""
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()


class Case:
    """One operator at one size of the full tensor."""

    _expected: Tensor

    def __init__(self, job: Job, op: Op, nbytes: int) -> None:
        self.job = job
        self.op = op
        self.nbytes = nbytes
        self.numel: int = nbytes // job.dtype.itemsize
        self.world: int = job.ranks.world
        self.root: int = job.root
        self.at_root = job.ranks.rank == job.root
        self.reduce_op: str = job.reduce_op
        self.comm: collx.Communicator = job.comm
        inputs = [
            data.input_of(rank, self.input_numel, job.dtype, job.device)
            for rank in range(self.world)
        ]
        self._input = inputs[job.ranks.rank]
        self._expect(inputs)

    def _expect(self, inputs: list[Tensor]) -> None:
        """Computes the expected results from the inputs of all ranks."""
        self._expected = self.op.expect(inputs, self.reduce_op, self.root)[self.job.ranks.rank]

    @property
    def input_numel(self) -> int:
        return self._elements(self.op.takes)

    @property
    def output_numel(self) -> int:
        return self._elements(self.op.gives)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the full tensor."""
        return (self.numel,)

    @property
    def where(self) -> str:
        """A description of the size."""
        return f"{self.nbytes} bytes"

    def empty(self, numel: int) -> Tensor:
        return torch.empty(numel, dtype=self.job.dtype, device=self.job.device)

    def load(self, into: Tensor) -> None:
        """Writes this rank's input."""
        into.view(-1).copy_(self._input)

    def part_of(self, whole: Tensor) -> Tensor:
        """Returns this rank's part of the full tensor."""
        return whole.chunk(self.world)[self.job.ranks.rank]

    def check(self, call: Call, kind: Kind) -> int:
        """Makes one call. Returns the number of wrong elements in this rank's result; for a
        barrier, 1 if it did not wait for all ranks."""
        if not self.op.has_tensor:
            return int(not checks.waits(partial(self._run_through, call), self.job.ranks))
        call.result().fill_(1)  # differs from the output of every rank
        call.load()
        call.run()
        return self.wrong(call, kind)

    def wrong(self, call: Call, kind: Kind) -> int:
        """Returns the number of wrong elements in the results of the last call."""
        if not self.op.has_tensor:
            return 0  # there is no result to check
        if kind is Kind.OURS:
            return call.besides() + checks.inexact(self.op, call.result(), self._expected)
        if self.op.result_at_root and not self.at_root:
            return 0
        return checks.wrong(self.op, call.result(), self._expected, self.world)

    def _run_through(self, call: Call) -> None:
        call.run()
        self.job.synchronize()

    def _elements(self, share: Share) -> int:
        return {Share.WHOLE: self.numel, Share.PART: self.numel // self.world, Share.NONE: 0}[share]
