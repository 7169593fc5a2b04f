"""Calls that are expected to fail: what was raised, what it said, and how long it took."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .rank import Rank

CALLS_BEFORE_A_WORD = 20


@dataclass(frozen=True)
class Attempt:
    """How a call went. `error` is the exception's class name, "" if there was none. When it
    `started` is a time that all processes share."""

    error: str
    message: str
    seconds: float
    bases: tuple[str, ...] = ()
    started: float = 0.0


def attempt(function: Callable[[], Any]) -> Attempt:
    """Runs `function` and tells how it went."""
    started = time.monotonic()
    try:
        function()
    except Exception as error:
        bases = tuple(base.__name__ for base in type(error).__mro__)
        name, seconds = type(error).__name__, time.monotonic() - started
        return Attempt(name, str(error), seconds, bases, started)
    return Attempt("", "", time.monotonic() - started, (), started)


def call_until_failure(rank: Rank, call: Callable[[], Any], word: str = "calling") -> Attempt:
    """Calls again and again, and returns how the last one went. Once all ranks have told `word`,
    each of them is in the midst of it."""
    for _ in range(CALLS_BEFORE_A_WORD):
        call()
    rank.tell(word)
    last = attempt(call)
    while not last.error:
        last = attempt(call)
    return last


def finish(communicator: Any) -> None:
    """Waits for the device, and raises what was recorded meanwhile."""
    communicator.synchronize()


def allreduce(
    communicator: Any,
    tensor: torch.Tensor,
    algorithm: str = "auto",
    reduce_op: str = "sum",
    max_blocks: int = 0,
) -> torch.Tensor:
    """The functional op, with all arguments."""
    result: torch.Tensor = torch.ops.collx.allreduce(
        tensor, reduce_op, communicator.name, algorithm, max_blocks
    )
    return result


def ones(rank: Rank, numel: int = 1000, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of ones on the rank's device."""
    return torch.ones(numel, dtype=dtype, device=rank.device)


def works(rank: Rank, communicator: Any, algorithm: str = "auto") -> bool:
    """Whether an all-reduce gives what it should."""
    result = allreduce(communicator, ones(rank), algorithm)
    finish(communicator)
    return bool((result == communicator.world_size).all())


def in_a_child(action: Callable[[], Any]) -> str:
    """What happens in a forked child: the class and text of the error, or "works"."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        found = attempt(action)
        os.write(writer, f"{found.error}: {found.message}".encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return text
