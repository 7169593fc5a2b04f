"""The self-test at the end of init: real data through every path that a communicator may take.

Peer access that is advertised and does not deliver (hazard 18) shows here, not in a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from collx._extension import extension

__all__ = ["SAMPLE_BYTES", "run"]

# An odd length, so that vectors, tails, and parts of unequal size all occur.
_NUMEL = 4099
_DTYPES = (torch.float32, torch.bfloat16, torch.int32)

_HALF = 16640  # bytes of one tensor, rounded up to whole cache lines
SAMPLE_BYTES = 2 * _HALF
"""Bytes of symmetric memory that `run` needs: an input and an output."""


def run(
    communicator: extension.Communicator,
    device: torch.device,
    algorithms: Sequence[str],
    sample: torch.Tensor | None,
) -> None:
    """Runs each of `algorithms`. Collective; RuntimeError on wrong data. `sample` is registered
    symmetric memory, without which algorithms that need it must not be asked for."""
    from collx import reference  # not before it is needed

    # A rank that stopped at its first wrong result would let the others wait in the next call.
    wrong: list[str] = []
    for dtype in _DTYPES:
        inputs = [_values(r, dtype) for r in range(communicator.world_size)]
        expected = reference.allreduce(inputs, "sum")
        own = inputs[communicator.rank].to(device)
        for algorithm in algorithms:
            result, given = torch.empty_like(own), own
            if algorithm == "pull_push":
                assert sample is not None
                result = _part(sample, 1, dtype)
                given = _part(sample, 0, dtype).copy_(own)
            torch.ops.collx.allreduce.out(
                given, "sum", communicator.name, algorithm, 0, out=result.fill_(-1)
            )
            got = result.cpu()
            communicator.check()  # on CUDA a call that fails leaves a record and returns
            wrong += _difference(got, expected, algorithm)
        wrong += _one_way(communicator, device, inputs, algorithms)
    if wrong:
        raise RuntimeError(wrong[0])


def _one_way(
    communicator: extension.Communicator,
    device: torch.device,
    inputs: Sequence[torch.Tensor],
    algorithms: Sequence[str],
) -> list[str]:
    """Every rank sends to each over channels, whose memory no all-reduce uses."""
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
    """What is wrong with the result, in words; nothing when its bits are right."""
    from collx import reference

    if reference.same_bits(result, expected):
        return []
    wrong = int((result != expected).nonzero()[0])
    return [
        f"{algorithm} of {expected.dtype} gave {result[wrong].item()} at element {wrong}, "
        f"where {expected[wrong].item()} is right"
    ]


def _values(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Values that tell both the rank and the position that they come from."""
    position = torch.arange(_NUMEL, dtype=torch.int64)
    mixed = (position * 2654435761 + (rank + 1) * 40503) % 65521 - 32760
    return mixed.to(dtype) if dtype == torch.int32 else (mixed.to(torch.float32) / 64).to(dtype)
