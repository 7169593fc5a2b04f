"""A pool of rank processes that is kept between tests.

USAGE      pool.run(function, *arguments) calls function(rank, *arguments) on every rank, where
           `rank` is a `Rank`, and returns the list of results by rank. Function and arguments are
           pickled, so the function must be defined at module level. A test that does no more
           than that is itself the job, with the decorator `on_ranks`.
FAILURE    If a rank raises, exits or exceeds the deadline, the call fails with PoolError, which
           shows the state of every rank. The processes are then killed, and the next call starts
           new ones, because the collectives of the ranks may not match any more.
LIFETIME   The processes exit with the owner of the pool, when their pipe closes.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from .rank import Rank, serve
from .worlds import World, gpu_count

START_DEADLINE = 180.0  # seconds for all ranks to import, start and meet
JOB_DEADLINE = 240.0  # seconds for a job, by default
GRACE = 10.0  # seconds that the other ranks have after one has failed
PRELOADED = ["numpy", "torch", "torch.distributed._symmetric_memory", "pytest"]
# Their import takes several seconds of CPU time. With a GPU, it may initialize CUDA, and processes
# that are forked from the server could then not use CUDA.
COMPILER = ["torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.tensor"]

_generations = itertools.count()


class PoolError(AssertionError):
    """One or several ranks of a job failed. The message contains the errors of all of them."""

    def __init__(self, world: World, failures: dict[int, str]) -> None:
        self.failures = failures
        ranks_by_text: dict[str, list[int]] = {}
        for rank, what in sorted(failures.items()):
            ranks_by_text.setdefault(what, []).append(rank)
        parts = [
            f"--- rank {', '.join(map(str, ranks))} of {world}:\n{what}"
            for what, ranks in ranks_by_text.items()
        ]
        super().__init__("\n".join([f"{len(failures)} of {world.size} ranks failed", *parts]))


def compiler() -> list[str]:
    """Returns the modules of the compiler that a process may import before it forks others."""
    return [] if gpu_count() else COMPILER


def forking() -> Any:
    """Returns a multiprocessing context. Processes are forked from a server that has imported
    PyTorch, but neither collx nor tests, so they start in milliseconds and have no state of the
    tests."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED + compiler())
    return context


class Pool:
    """The rank processes of one `World`."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        self._folder: Path | None = None
        self._server: dist.TCPStore | None = None
        self._store: dist.Store | None = None
        self._busy: set[int] = set()  # ranks whose answer has not been read

    @property
    def size(self) -> int:
        return self.world.size

    @property
    def takes_turns(self) -> bool:
        """Whether ranks share a GPU by time slices. Tests then run fewer cases."""
        return self.world.takes_turns

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        deadline: float = JOB_DEADLINE,
        **options: Any,
    ) -> list[Any]:
        """Runs a job on all ranks. Returns the results by rank. Raises PoolError if it fails."""
        self.submit(function, *arguments, **options)
        return self.collect(deadline=deadline)

    def submit(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        ranks: Iterable[int] | None = None,
        **options: Any,
    ) -> None:
        """Starts a job on `ranks` (by default all) without waiting. `collect` waits for it."""
        if self._busy:
            # A test failed before it collected all results. The state of its ranks is unknown.
            self.kill()
        self.start()
        for rank in self._ranks(ranks):
            self._connections[rank].send((function, arguments, options))
            self._busy.add(rank)

    def collect(
        self, ranks: Iterable[int] | None = None, deadline: float = JOB_DEADLINE
    ) -> list[Any]:
        """Returns the results of the submitted job on `ranks` (by default all), in their order.
        Raises PoolError if it failed."""
        wanted = self._ranks(ranks)
        results, failures = self._answers(wanted, deadline)
        if failures:
            self._explain_missing(wanted, results, failures)
            self.kill()
            raise PoolError(self.world, failures)
        return [results[rank] for rank in wanted]

    def wait_for(self, word: str, seconds: float = 60.0) -> None:
        """Waits until every rank has sent `word` in its job."""
        assert self._store is not None
        keys = [f"{word}/{rank}" for rank in range(self.size)]
        self._store.wait(keys, timedelta(seconds=seconds))

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Sends a signal to the process of a rank."""
        pid = self._processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def start(self) -> None:
        """Starts the processes if they are not running."""
        if self._processes:
            return
        self._folder = Path(tempfile.mkdtemp(prefix="collx-pool-"))
        self._server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = forking()
        prefix = f"pool-{next(_generations)}"
        self._store = dist.PrefixStore(prefix, self._server)
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(
                target=serve,
                args=(there, self.world, rank, self._server.port, prefix, str(self._log(rank))),
                daemon=True,
            )
            process.start()
            there.close()
            self._processes.append(process)
            self._connections.append(here)
        self.collect(deadline=START_DEADLINE)

    def kill(self) -> None:
        """Kills all processes. The next job starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        self._store = self._server = None
        self._busy.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _ranks(self, ranks: Iterable[int] | None) -> list[int]:
        return list(range(self.size)) if ranks is None else list(ranks)

    def _log(self, rank: int) -> Path:
        assert self._folder is not None
        return self._folder / f"rank{rank}.log"

    def _answers(self, wanted: list[int], deadline: float) -> tuple[dict[int, Any], dict[int, str]]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        pending = {self._connections[rank]: rank for rank in wanted}
        end = time.monotonic() + deadline
        while pending and (left := end - time.monotonic()) > 0:
            for ready in wait(list(pending), timeout=left):
                assert isinstance(ready, Connection)
                rank = pending.pop(ready)
                self._busy.discard(rank)
                try:
                    fine, value = ready.recv()
                except (EOFError, ConnectionError):
                    fine, value = False, self._obituary(rank)
                if fine:
                    results[rank] = value
                else:
                    failures[rank] = value
                    end = min(end, time.monotonic() + GRACE)
        return results, failures if not pending else {**failures, **self._hung(pending.values())}

    def _obituary(self, rank: int) -> str:
        self._processes[rank].join(5)
        code = self._processes[rank].exitcode
        return f"died with exit code {code}\n{self._tail(rank)}"

    def _hung(self, ranks: Iterable[int]) -> dict[int, str]:
        hung = list(ranks)
        for rank in hung:
            self.signal(rank, signal.SIGUSR1)
        time.sleep(1.0)
        return {rank: f"did not answer in time\n{self._tail(rank)}" for rank in hung}

    def _tail(self, rank: int) -> str:
        log = self._log(rank)
        return log.read_text(errors="replace")[-4000:] if log.exists() else ""

    def _explain_missing(
        self, wanted: list[int], results: dict[int, Any], failures: dict[int, str]
    ) -> None:
        for rank in wanted:
            if rank in results:
                failures.setdefault(rank, "finished without an error")


def some_stand_for_all(ranks: Pool | Rank, run_where_shared: bool) -> None:
    """Skips a case if ranks share a GPU, unless it is one of the representative cases. On a shared
    GPU, a call and especially an init takes a hundred times as long."""
    if ranks.world.takes_turns and not run_where_shared:
        pytest.skip("ranks share a GPU: other cases of this test stand for this one")


class _Skipped(NamedTuple):
    """Why a job has skipped its test. The exception of pytest cannot be pickled."""

    reason: str


def _run_job(rank: Rank, test: Any, *arguments: Any) -> Any:
    try:
        return test.job(rank, *arguments)
    except pytest.skip.Exception as skipped:
        return _Skipped(str(skipped.msg))


def on_ranks(job: Any = None, *, deadline: float = JOB_DEADLINE) -> Any:
    """Makes a job a test: each rank of the fixture `pool` runs it, for at most `deadline` seconds.
    A job that does not return None returns a list or a string, which must be empty on all ranks. A
    job may skip the test on all ranks."""
    if job is None:
        return functools.partial(on_ranks, deadline=deadline)
    _, *parameters = inspect.signature(job).parameters.values()
    expected: Any = {"None": None, "str": ""}.get(job.__annotations__["return"], [])

    @functools.wraps(job)
    def test(pool: Pool, **given: Any) -> None:
        # The name of the job is that of the test, so the ranks unpickle the test.
        arguments = (given[each.name] for each in parameters)
        results = pool.run(_run_job, test, *arguments, deadline=deadline)
        if all(isinstance(found, _Skipped) for found in results):
            pytest.skip(results[0].reason)
        wrong = {rank: found for rank, found in enumerate(results) if found != expected}
        assert not wrong, "\n".join(f"rank {rank}: {found}" for rank, found in wrong.items())

    first = inspect.Parameter("pool", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    test.__signature__ = inspect.Signature([first, *parameters])  # type: ignore[attr-defined]
    test.job = job  # type: ignore[attr-defined]
    return test


class Pools:
    """All pools of a test run, by world. They are created on demand."""

    def __init__(self) -> None:
        self._pools: dict[World, Pool] = {}

    def get(self, world: World) -> Pool:
        return self._pools.setdefault(world, Pool(world))

    def close(self) -> None:
        for pool in self._pools.values():
            pool.kill()
        self._pools.clear()
