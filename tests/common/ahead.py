"""Work that tests wait for, done while others run: builds, and model checkers.

Many tests here wait for a time-out, and leave the cores idle. A test marked

    @pytest.mark.ahead(work=function)

has function(its parameters) called before its turn, in a thread beside the tests, in the order of
the tests. Its fixture `ahead` is what that returned; what it raised, a skip included, is raised
there.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Ahead", "quietly"]


class Ahead:
    def __init__(self) -> None:
        self._workers = ThreadPoolExecutor(2, "ahead")
        self._begun: dict[str, Future[Any]] = {}

    def begin(self, items: list[pytest.Item]) -> None:
        """Begins the work of the tests that are marked."""
        for item in items:
            mark = item.get_closest_marker("ahead")
            if mark is not None:
                work: Callable[..., Any] = mark.kwargs["work"]
                parametrized = getattr(item, "callspec", None)
                given = {} if parametrized is None else parametrized.params
                self._begun[item.nodeid] = self._workers.submit(work, **given)

    def result(self, item: pytest.Item) -> Any:
        future = self._begun.pop(item.nodeid)
        # Nothing is to be spared while a test waits, and on a busy machine it would wait for ever.
        while not future.done():
            _background.schedule(os.SCHED_OTHER)
            wait([future], timeout=0.5)
        _background.schedule(os.SCHED_IDLE)
        return future.result()

    def end(self) -> None:
        """What has not begun is left, what runs is killed."""
        self._workers.shutdown(wait=False, cancel_futures=True)
        _background.kill()
        self._workers.shutdown(wait=True)


def quietly(command: list[str], where: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a command on what others leave of the cores, as long as no test waits for it. Both of
    its streams are in `stdout`."""
    process = _started(command, where)
    with _background.holding(process.pid):
        output, _ = process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, output)


def _started(command: list[str], where: Path | None) -> subprocess.Popen[str]:
    """Tried again for some seconds: once, on a busy machine, what had just been linked was not
    executed. Why is not known."""
    tries = 4
    while True:
        try:
            return subprocess.Popen(
                command,
                cwd=where,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        except OSError:
            tries -= 1
            if tries == 0:
                raise
            time.sleep(1)


class _Background:
    """The commands that run, each a session of processes.

    A lower priority would not do: ranks that hand over to each other a thousand times a second
    would wait each time until a compiler has used its slice. To SCHED_IDLE every other process is
    preferred at once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: set[int] = set()

    def schedule(self, policy: int) -> None:
        """For all processes, and those that they start from now on."""
        with self._lock:
            for session in self._sessions:
                for pid in _processes(session):
                    with suppress(ProcessLookupError):
                        os.sched_setscheduler(pid, policy, os.sched_param(0))

    def kill(self) -> None:
        with self._lock:
            for session in self._sessions:
                for pid in _processes(session):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    @contextmanager
    def holding(self, session: int) -> Iterator[None]:
        """Counts it among the commands that run."""
        with self._lock:
            self._sessions.add(session)
        self.schedule(os.SCHED_IDLE)
        try:
            yield
        finally:
            with self._lock:
                self._sessions.remove(session)


def _processes(session: int) -> Iterator[int]:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            # Behind the name, which may hold anything: state, parent, group, session.
            if int(stat.read_text().rpartition(")")[2].split()[3]) == session:
                yield int(stat.parent.name)


_background = _Background()
