"""The measured cases: calls of public functions on tensors of one size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

import collx
from collx._explanation import Explanation
from collx._extension import extension
from collx._tune.options import Options
from collx.communicator import Communicator

_REDUCTIONS = ("allreduce", "reducescatter", "reduce")
_PART_IN = ("allgather", "gather")  # the input is a part of the full tensor
_PART_OUT = ("reducescatter", "scatter")
_DIVIDED = (*_PART_IN, *_PART_OUT, "alltoall")
_GRIDS = (4, 8, 16, 32, 64)  # values of max_blocks on CUDA


class Choice(NamedTuple):
    """Options of a call. With `max_blocks` 0, the size determines the grid."""

    algorithm: str
    max_blocks: int = 0

    def __str__(self) -> str:
        return self.algorithm + (f", {self.max_blocks} blocks" if self.max_blocks else "")


BUILT_IN = Choice("auto")


@dataclass(frozen=True)
class Case:
    op: str
    dtype: torch.dtype
    symmetric: bool
    nbytes: int
    """The size of the full tensor."""

    @property
    def numel(self) -> int:
        return self.nbytes // self.dtype.itemsize

    @property
    def dtype_name(self) -> str | None:
        """The name of the dtype as in an entry of a table."""
        return str(self.dtype).removeprefix("torch.") if self.op in _REDUCTIONS else None


def cases(options: Options) -> Iterator[Case]:
    """Yields the cases in the order of measurement. Copies are measured with one dtype, because
    their speed does not depend on it."""
    for op in options.ops:
        dtypes = options.dtypes if op in _REDUCTIONS else options.dtypes[:1]
        for dtype in (getattr(torch, name) for name in dtypes):
            unit = dtype.itemsize * (options.ranks if op in _DIVIDED else 1)
            for symmetric in (False, True) if options.symmetric else (False,):
                for nbytes in options.sizes(unit):
                    yield Case(op, dtype, symmetric, nbytes)


def tensors_of(case: Case, communicator: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns input and output. The values differ between the ranks. Collective if the tensors are
    symmetric."""
    part = case.numel // communicator.world_size
    sizes = [part if case.op in which else case.numel for which in (_PART_IN, _PART_OUT)]
    if case.symmetric:
        x, y = (communicator.empty(numel, dtype=case.dtype) for numel in sizes)
    else:
        x, y = (torch.empty(n, dtype=case.dtype, device=communicator.device) for n in sizes)
    torch.manual_seed(communicator.rank)
    if case.dtype.is_floating_point:
        x.normal_()
    else:
        x.random_(0, 100)
    return x, y


def call_of(
    case: Case, choice: Choice, communicator: Communicator, x: torch.Tensor, y: torch.Tensor
) -> Callable[[], Any]:
    function = getattr(collx, case.op)
    return partial(
        function,
        x,
        group=communicator,
        out=y,
        algorithm=choice.algorithm,
        max_blocks=choice.max_blocks,
    )


def explained(case: Case, choice: Choice, communicator: Communicator) -> Explanation:
    """Explains a call with that choice. Raises the errors of the call, on all ranks."""
    return communicator.explain(
        case.op,
        case.numel,
        case.dtype,
        input_symmetric=case.symmetric,
        output_symmetric=case.symmetric,
        algorithm=choice.algorithm,
        max_blocks=choice.max_blocks,
    )


def candidates(case: Case, communicator: Communicator) -> list[Choice]:
    """Returns the built-in choice, followed by every choice that executes the call differently."""
    device = communicator.device.type
    names = extension.tunable_algorithms(
        case.op, device, case.symmetric, communicator.deterministic
    )
    grids = [n for n in _GRIDS if n <= communicator.max_blocks] if device == "cuda" else []
    given = [BUILT_IN, *(Choice(name, grid) for name in names for grid in (0, *grids))]
    found: dict[tuple[str, int, int], Choice] = {}
    for choice in given:
        try:
            plan = explained(case, choice, communicator)
        except (ValueError, NotImplementedError):
            continue
        found.setdefault((plan.executed_by, plan.blocks, plan.threads), choice)
    return list(found.values())
