"""The self-test at the end of init sends real data over every path that a communicator may use.

It detects peer access that is reported as available but does not work (hazard 18)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from collx._extension import extension

# An odd length covers vectors, tails, and parts of unequal size.
_NUMEL = 4099
_DTYPES = (torch.float32, torch.bfloat16, torch.int32)

_HALF = 32896  # bytes of one tensor, rounded up to whole cache lines
SAMPLE_BYTES = 2 * _HALF
"""The bytes of symmetric memory that `run` needs for an input and an output."""


def run(
    communicator: extension.Communicator,
    device: torch.device,
    algorithms: Sequence[str],
    sample: torch.Tensor | None,
) -> None:
    """Runs each of `algorithms`. Collective. Raises RuntimeError if the data is wrong. `sample` is
    registered symmetric memory; without it, `algorithms` must not contain those that need it."""
    # A rank that stopped at its first wrong result would leave the others waiting in the next call.
    wrong: list[str] = []
    for dtype in _DTYPES:
        inputs = [_values(r, dtype) for r in range(communicator.world_size)]
        for algorithm in algorithms:
            memory = sample if algorithm == "pull_push" else None
            wrong += _call(communicator, device, inputs, "allreduce", algorithm, memory)
        wrong += _one_way(communicator, device, inputs, algorithms)
    if wrong:
        raise RuntimeError(wrong[0])


def run_multicast(
    communicator: extension.Communicator, device: torch.device, sample: torch.Tensor
) -> str | None:
    """Runs each algorithm that needs NVLink multicast, on symmetric and on other tensors.
    Collective. Returns a description of the first wrong result, None if all are correct. The sums
    of these values are exact before rounding, so the order of the additions in a switch does not
    matter."""
    wrong: list[str] = []
    for dtype in (*_DTYPES, torch.float16, torch.int64):
        inputs = [_values(r, dtype) for r in range(communicator.world_size)]
        for memory in (None, sample):
            for op in ("allreduce", "reducescatter", "reduce", "allgather", "broadcast"):
                for algorithm in _of_multicast(op):
                    wrong += _call(communicator, device, inputs, op, algorithm, memory)
    return wrong[0] if wrong else None


def _of_multicast(op: str) -> list[str]:
    others = extension.algorithms(op)
    return [name for name in extension.algorithms(op, multicast=True) if name not in others]


def _call(
    communicator: extension.Communicator,
    device: torch.device,
    inputs: Sequence[torch.Tensor],
    op: str,
    algorithm: str,
    sample: torch.Tensor | None,
) -> list[str]:
    """Runs a collective and returns the differences. `sample`: the memory for the tensors."""
    from collx import reference

    world, rank, name = communicator.world_size, communicator.rank, communicator.name
    given, root = list(inputs), world - 1
    if op == "allgather":
        given = list(inputs[0].split(reference.parts(_NUMEL, world)))
    expected, arguments = {
        "allreduce": lambda: ([reference.allreduce(given, "sum")] * world, ("sum", name)),
        "reducescatter": lambda: (reference.reducescatter(given), ("sum", world, name, 0)),
        "reduce": lambda: (reference.reduce(given, "sum", root), ("sum", root, name)),
        "allgather": lambda: (reference.allgather(given), (world, name, 0, _NUMEL)),
        "broadcast": lambda: (reference.broadcast(given, root), (root, name)),
    }[op]()
    own, want = given[rank], expected[rank]
    source, result = own.to(device), torch.empty_like(want, device=device)
    if sample is not None:
        source = _part(sample, 0, own.dtype)[: own.numel()].copy_(own)
        result = _part(sample, 1, want.dtype)[: want.numel()]
    call = getattr(torch.ops.collx, op).out
    call(source, *arguments, algorithm, 0, out=result.fill_(-1))
    got = result.cpu()
    communicator.check()  # on CUDA, a call that fails records the failure and returns
    return _difference(got, want, algorithm if op == "allreduce" else f"{op} by {algorithm}")


def _one_way(
    communicator: extension.Communicator,
    device: torch.device,
    inputs: Sequence[torch.Tensor],
    algorithms: Sequence[str],
) -> list[str]:
    """Broadcasts from every rank. This tests the memory of the channels, which an all-reduce does
    not use."""
    algorithm = "fallback" if algorithms == ("fallback",) else "onestage"
    wrong: list[str] = []
    for root, expected in enumerate(inputs):
        result = inputs[communicator.rank].clone().to(device)
        torch.ops.collx.broadcast_(result, root, communicator.name, algorithm, 0)
        got = result.cpu()
        communicator.check()
        wrong += _difference(got, expected, f"broadcast from rank {root} by {algorithm}")
    return wrong


def _part(sample: torch.Tensor, half: int, dtype: torch.dtype) -> torch.Tensor:
    return sample[half * _HALF : (half + 1) * _HALF].view(dtype)[:_NUMEL]


def _difference(result: torch.Tensor, expected: torch.Tensor, algorithm: str) -> list[str]:
    """Returns a description of the first wrong element; an empty list if all bits are correct."""
    from collx import reference

    if reference.same_bits(result, expected):
        return []
    wrong = int((result != expected).nonzero()[0])
    return [
        f"{algorithm} of {expected.dtype} gave {result[wrong].item()} at element {wrong}, "
        f"where {expected[wrong].item()} is right"
    ]


def _values(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns values that identify both their rank and their position."""
    position = torch.arange(_NUMEL, dtype=torch.int64, device="cpu")
    mixed = (position * 2654435761 + (rank + 1) * 40503) % 65521 - 32760
    if not dtype.is_floating_point:
        return mixed.to(dtype)
    return (mixed.to(torch.float32) / 64).to(dtype)
