"""Starts the ranks of a command on this machine, with PyTorch's own processes."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import multiprocessing as processes

from collx.errors import CollectiveError

__all__ = ["Ranks", "connect", "cores", "default_ranks", "run", "start", "started_ranks", "status"]

_MOST = {"cpu": 4, "cuda": 8}  # maximum number of ranks, unless the user passes a number
_HOST = "127.0.0.1"
_GRACE = 5  # seconds that the other ranks have to exit after one has failed


class Ranks(NamedTuple):
    """The processes that `start` returns."""

    context: processes.ProcessContext
    store: dist.TCPStore
    """The store of the process group. This process hosts it."""


def cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def started_ranks() -> int | None:
    """Returns the number of ranks if a launcher such as torchrun has started this process as one of
    them, otherwise None. A cluster may set some of the variables without starting ranks."""
    launched = {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= os.environ.keys()
    return int(os.environ["WORLD_SIZE"]) if launched else None


def default_ranks(device_type: str) -> int:
    """Returns the default number of ranks: one for each GPU, or for each core of the CPU."""
    if device_type == "cuda":
        return max(1, min(_MOST["cuda"], torch.cuda.device_count()))
    return max(2, min(_MOST["cpu"], cores()))


def connect() -> None:
    """Connects to a socket of this process as the ranks connect to their store. Raises OSError if
    that is not possible. The store itself would try again for minutes."""
    with socket.create_server((_HOST, 0)) as server:
        socket.create_connection(server.getsockname(), timeout=5).close()


def status(function: Callable[..., int | None], *arguments: object) -> int:
    """Calls a command, or a rank of it, and returns its exit status. An error of the system or of
    an argument ends it with status 1 and one line instead of a traceback."""
    try:
        result = function(*arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of a pipe, such as `head`, has ended. Python would fail again when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (OSError, ValueError, CollectiveError) as error:
        prefix = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
        print(f"collx: {prefix}{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return result or 0


def start(function: Callable[..., int | None], ranks: int, *arguments: object) -> Ranks:
    """Starts processes that call `function(*arguments)` and exit with the status that it returns.

    Their environment is the one of torchrun, so `init_process_group()` works. They are forked from
    a server that has imported the module of `function` and has not initialized CUDA. Raises OSError
    if they cannot be started or cannot connect to this process.
    """
    connect()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    multiprocessing.get_context("forkserver").set_forkserver_preload([function.__module__])
    store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    environment = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # connect to the store, do not create one
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    context = processes.start_processes(
        _rank,
        args=(function, arguments, environment),
        nprocs=ranks,
        join=False,
        daemon=True,
        start_method="forkserver",
    )
    return Ranks(context, store)


def _rank(
    rank: int,
    function: Callable[..., int | None],
    arguments: tuple[object, ...],
    environment: dict[str, str],
) -> None:
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    sys.exit(status(function, *arguments))


def run(function: Callable[..., int | None], ranks: int, *arguments: object) -> int:
    """Starts the ranks and waits for them. Returns 0 if all succeed, otherwise 1."""
    started = start(function, ranks, *arguments)
    try:
        while not started.context.join(grace_period=_GRACE):
            pass
    except processes.ProcessRaisedException as error:
        print(error, file=sys.stderr)
        return 1
    except processes.ProcessExitedException as error:
        if error.exit_code != 1:  # with 1, the rank itself has printed the error
            print(f"collx: rank {error.error_index}: {error}", file=sys.stderr)
        return 1
    return 0
