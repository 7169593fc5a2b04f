"""Runs programs of two ranks on the CPU in the environment of torchrun.

The agent of torchrun and each rank would take seconds to import PyTorch. Here the ranks are forked
from a process that has imported it, as in a pool. Only the tests of the README's example and of
benchmarks/turns.py start new processes.
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
SECONDS = 480  # two ranks compile in half a minute, or in minutes on busy cores


def run_program(program: Path, *arguments: str, **environment: str) -> str:
    """Runs a program and returns its output, by rank. Raises AssertionError if a rank fails or
    exceeds the time limit."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        **environment,
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(server.port),
        # The ranks use the existing store, like that of torchrun's agent.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    with TemporaryDirectory() as folder:
        where = Path(folder)
        ranks = []
        try:
            for r in range(RANKS):
                own = {**shared, "RANK": str(r), "LOCAL_RANK": str(r)}
                given = (str(program), arguments, own, f"{where}/{r}.out", f"{where}/{r}.err")
                ranks.append(forking().Process(target=_become, args=given))
                ranks[-1].start()
            _wait_for(ranks)
            codes = [rank.exitcode for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
        printed, errors = (
            "".join(file.read_text() for file in sorted(where.glob(pattern)))
            for pattern in ("*.out", "*.err")
        )
    assert codes == [0] * RANKS, f"{program} ended with {codes}\n{printed}\n{errors}"
    return printed


def _wait_for(ranks: list[Any]) -> None:
    """Waits until all ranks have ended, or one has failed."""
    end = time.monotonic() + SECONDS
    running = {rank.sentinel: rank for rank in ranks}
    while running and (left := end - time.monotonic()) > 0:
        for sentinel in wait(list(running), timeout=left):
            rank = running.pop(sentinel)
            rank.join()
            if rank.exitcode:
                return


def _become(
    program: str,
    arguments: tuple[str, ...],
    environment: dict[str, str],
    output: str,
    errors: str,
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    redirect_output(output, errors)
    sys.argv = [program, *arguments]
    sys.path.insert(0, str(Path(program).parent))
    runpy.run_path(program, run_name="__main__")
