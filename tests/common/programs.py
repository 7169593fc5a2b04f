"""Programs of two ranks on the CPU, as torchrun starts them.

Its agent and each rank would take seconds to import PyTorch. Here the ranks are forked from a
process that has done so, like those of a pool; test_readme.py goes the long way.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist

from .pool import forking
from .rank import redirect_output

RANKS = 2
SECONDS = 480  # two ranks compile in half a minute, and in minutes on busy cores


def run_program(program: Path, *arguments: str, **environment: str) -> str:
    """What it prints, by rank. AssertionError if a rank fails, or is not at its end in time."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        **environment,
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(server.port),
        # The store that is there already, as torchrun's agent has one.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    with TemporaryDirectory() as folder:
        logs = [Path(folder) / f"rank{rank}" for rank in range(RANKS)]
        ranks = [
            forking().Process(
                target=_become,
                args=(str(program), arguments, {**shared, "RANK": str(r), "LOCAL_RANK": str(r)}),
                kwargs={"log": str(log)},
            )
            for r, log in enumerate(logs)
        ]
        try:
            for rank in ranks:
                rank.start()
            _wait_for(ranks)
            codes = [rank.exitcode for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
        printed, errors = (
            "".join(f.read_text() for log in logs if (f := log.with_suffix(suffix)).exists())
            for suffix in (".out", ".err")
        )
    assert codes == [0] * RANKS, f"{program} ended with {codes}\n{printed}\n{errors}"
    return printed


def _wait_for(ranks: list[Any]) -> None:
    """Until all have ended, or one has failed."""
    end = time.monotonic() + SECONDS
    running = {rank.sentinel: rank for rank in ranks}
    while running and (left := end - time.monotonic()) > 0:
        for sentinel in wait(list(running), timeout=left):
            rank = running.pop(sentinel)
            rank.join()
            if rank.exitcode:
                return


def _become(
    program: str, arguments: tuple[str, ...], environment: dict[str, str], log: str
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    redirect_output(f"{log}.out", f"{log}.err")
    sys.argv = [program, *arguments]
    sys.path.insert(0, str(Path(program).parent))
    runpy.run_path(program, run_name="__main__")
