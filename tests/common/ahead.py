"""Runs work that tests need, such as builds and model checkers, while other tests run.

Many tests wait for a timeout and leave the cores idle. For a test marked

    @pytest.mark.ahead(work=function)

function(its parameters) is called ahead of the test, in a background thread, in the order of the
tests. The fixture `ahead` is the result of the function. An exception of the function, including a
skip, is raised in the test. In a worker of pytest-xdist, the function is called when the test runs.
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
        """Starts the work of the marked tests."""
        for item in items:
            if item.get_closest_marker("ahead") is not None:
                self._begun[item.nodeid] = self._submit(item)

    def _submit(self, item: pytest.Item) -> Future[Any]:
        mark = item.get_closest_marker("ahead")
        assert mark is not None, "the fixture needs the mark `ahead`"
        work: Callable[..., Any] = mark.kwargs["work"]
        parametrized = getattr(item, "callspec", None)
        given = {} if parametrized is None else parametrized.params
        return self._workers.submit(work, **given)

    def result(self, item: pytest.Item) -> Any:
        future = self._begun.pop(item.nodeid, None) or self._submit(item)
        # With the idle policy, a waiting test might wait forever on a busy machine.
        while not future.done():
            _background.schedule(os.SCHED_OTHER)
            wait([future], timeout=0.5)
        _background.schedule(os.SCHED_IDLE)
        return future.result()

    def end(self) -> None:
        """Cancels work that has not started, and kills all commands of `quietly` in this process.
        Called at the end of a test run."""
        self._workers.shutdown(wait=False, cancel_futures=True)
        _background.kill()
        self._workers.shutdown(wait=True)


def quietly(command: list[str], where: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a command on idle cores only, until a test waits for it. `stdout` contains both of its
    streams."""
    process = _started(command, where)
    with _background.holding(process.pid):
        output, _ = process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, output)


def _started(command: list[str], where: Path | None) -> subprocess.Popen[str]:
    """Starts a command. Retries for some seconds: once, on a busy machine, a program that had just
    been linked could not be executed. The cause is unknown."""
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
    """The running commands. Each is a session of processes.

    A lower priority is not sufficient: ranks that switch a thousand times per second would each
    time wait for the time slice of a compiler. Every other process preempts SCHED_IDLE immediately.
    But Linux may schedule each session as a group ("autogroup"). The policy then only counts within
    the session, so the group needs the lowest priority, too.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: set[int] = set()

    def schedule(self, policy: int) -> None:
        """Sets the policy of all processes. Processes that they start later inherit it."""
        with self._lock:
            for session in self._sessions:
                with suppress(OSError):  # it has ended, or there are no such groups
                    group = Path(f"/proc/{session}/autogroup")
                    group.write_text("19" if policy == os.SCHED_IDLE else "0")
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
        """Registers a running command."""
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
            # The fields after the name, which may contain any text: state, parent, group, session.
            if int(stat.read_text().rpartition(")")[2].split()[3]) == session:
                yield int(stat.parent.name)


_background = _Background()
