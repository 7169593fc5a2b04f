"""Calls that are expected to fail: the exception, its message, and the duration."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .rank import Rank

CALLS_BEFORE_A_WORD = 20
SCHEDULING = Path("/proc/thread-self/schedstat")  # not on every kernel


@dataclass(frozen=True)
class Attempt:
    """The outcome of a call. `error` is the exception's class name, "" if there was none. `started`
    is a time of a clock that all processes share. `held_up` are the seconds in which other threads
    used the cores."""

    error: str
    message: str
    seconds: float
    bases: tuple[str, ...] = ()
    started: float = 0.0
    held_up: float = 0.0


def _held_up() -> float:
    """Returns the seconds for which this thread has been runnable, but not running."""
    if not SCHEDULING.exists():
        return 0.0
    return int(SCHEDULING.read_text().split()[1]) / 1e9


def attempt(function: Callable[[], Any]) -> Attempt:
    """Runs `function` and returns the outcome."""
    name, message = "", ""
    bases: tuple[str, ...] = ()
    held_up, started = _held_up(), time.monotonic()
    try:
        function()
    except Exception as error:
        name, message = type(error).__name__, str(error)
        bases = tuple(base.__name__ for base in type(error).__mro__)
    seconds = time.monotonic() - started
    return Attempt(name, message, seconds, bases, started, _held_up() - held_up)


def assert_raised(found: Attempt, error: str, *words: str) -> None:
    """Fails unless the call raised this class of error, with these words in its message."""
    assert found.error == error, found
    for word in words:
        assert word in found.message, (word, found)


def call_until_failure(rank: Rank, call: Callable[[], Any], word: str = "calling") -> Attempt:
    """Repeats a call until it fails, and returns the outcome of the last one. After all ranks have
    sent `word`, each of them is making calls."""
    for _ in range(CALLS_BEFORE_A_WORD):
        call()
    rank.tell(word)
    last = attempt(call)
    while not last.error:
        last = attempt(call)
    return last


def finish(communicator: Any) -> None:
    """Waits for the device, and raises a recorded failure."""
    communicator.synchronize()


def allreduce(
    communicator: Any,
    tensor: torch.Tensor,
    algorithm: str = "auto",
    reduce_op: str = "sum",
    max_blocks: int = 0,
) -> torch.Tensor:
    """Calls the functional operator with all arguments."""
    result: torch.Tensor = torch.ops.collx.allreduce(
        tensor, reduce_op, communicator.name, algorithm, max_blocks
    )
    return result


def ones(rank: Rank, numel: int = 1000, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns a tensor of ones on the rank's device."""
    return torch.ones(numel, dtype=dtype, device=rank.device)


def works(rank: Rank, communicator: Any, algorithm: str = "auto") -> bool:
    """Whether an all-reduce returns the correct result."""
    result = allreduce(communicator, ones(rank), algorithm)
    finish(communicator)
    return bool((result == communicator.world_size).all())


def in_a_child(action: Callable[[], Any]) -> str:
    """Runs an action in a forked child. Returns the class and text of the error, or "works"."""
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
