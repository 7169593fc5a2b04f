"""One rank of a pool: the process that runs the jobs, and its interface for the jobs."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import traceback
from bisect import bisect_left
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

from .worlds import World, rank_environment

SMALL_PAYLOAD = "small"  # key of a communicator with a payload that divides nearly every call
PAYLOAD_BYTES = 8 << 20
TIMEOUT = 60.0  # seconds; long, because there are more ranks than cores


class Rank:
    """The first argument of a job."""

    def __init__(self, rank: int, world: World, store: dist.Store | None = None) -> None:
        self.rank = rank
        self.world = world
        self.size = world.size
        self.device = torch.device("cpu")
        if world.device == "cuda":
            self.device = torch.device("cuda", rank % world.gpus)
            torch.cuda.set_device(self.device)
        self.store = store
        self.arenas: dict[str, Any] = {}  # by communicator, for the checks of cases
        self._communicators: dict[str, Any] = {}
        # A separate group for the tests: a timeout in gloo closes the connections of a group.
        self._harness: Any = None
        self._fresh: set[str] = set()  # names: a reference would keep connections open

    def communicator(self, key: str = "default", **options: Any) -> Any:
        """Returns the communicator with this key. The first job that needs it creates it.
        Collective."""
        if key not in self._communicators:
            self._communicators[key] = self.new_communicator(key, **options)
        return self._communicators[key]

    def small_communicator(self) -> Any:
        """Returns a communicator with the smallest payload, which runs calls in chunks.
        Collective."""
        return self.communicator(SMALL_PAYLOAD, payload_bytes=self.smallest_payload())

    def smallest_payload(self) -> int:
        """Returns the smallest payload_bytes that a communicator of this world accepts."""
        from collx._extension import extension

        def accepted(payload: int) -> bool:
            try:
                extension.region_layout(self.device.type, self.size, payload)
            except ValueError:
                return False
            return True

        return bisect_left(range(PAYLOAD_BYTES), True, key=accepted)

    def new_communicator(
        self,
        key: str | None,
        group: Any = None,
        call_timeout: float | None = None,
        **options: Any,
    ) -> Any:
        """Creates a communicator over the whole pool (or `group`). Without `key`, it has the name
        of the group. Collective. `call_timeout`: the timeout of its calls, for tests in which a
        rank waits for a missing rank. The timeout of init is long enough for any machine."""
        import collx

        settings: dict[str, Any] = {"payload_bytes": PAYLOAD_BYTES, "timeout": TIMEOUT}
        settings.update(options)
        settings.setdefault("device", self.device)
        name = None if key is None else f"test-{key}"
        communicator = collx.init(group, name=name, **settings)
        if call_timeout is not None:
            communicator.set_timeout(call_timeout)
        return communicator

    def fresh_group(self) -> Any:
        """Returns an unused process group of all ranks. Failures in it do not affect other
        groups."""
        group = dist.new_group(backend=self.world.backend)
        self._fresh.add(group.group_name)
        return group

    def drop(self, key: str) -> None:
        """Destroys a communicator that `communicator` made. Collective."""
        communicator = self._communicators.pop(key)
        self.arenas.pop(communicator.name, None)
        communicator.destroy()

    def only_communicator(self, key: str, **options: Any) -> Any:
        """Returns a communicator that is the only one of the device, so that no other communicator
        limits it. Collective."""
        for other in list(self._communicators):
            self.drop(other)
        return self.communicator(key, **options)

    def tell(self, word: str) -> None:
        """Sends a word. `Pool.wait_for(word)` returns after every rank has sent it."""
        assert self.store is not None
        self.store.set(f"{word}/{self.rank}", "")

    def meet(self) -> None:
        """Creates the group for `barrier` and `gather`. Must be called once, after initialization
        of the process group."""
        self._harness = dist.new_group(backend="gloo")

    def end_groups(self) -> None:
        """Destroys the fresh groups that the previous jobs have left, except those of the
        communicators that jobs share. Each group of gloo has a thread that wakes up a hundred times
        per second; hundreds of them would take half of the processor time. Other groups remain,
        because DTensor caches meshes and finds their groups by name."""
        used = {communicator.group_name for communicator in self._communicators.values()}
        ended = self._fresh - used if self.device.type == "cpu" else set()
        for group, name in list(dist.distributed_c10d._world.pg_names.items()):
            if name in ended:
                dist.destroy_process_group(group)
        self._fresh &= used

    def barrier(self) -> None:
        """Waits for all ranks through gloo, without the code under test."""
        dist.all_reduce(torch.zeros(1), group=self._harness)

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, on every rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._harness)
        return values

    def synchronize(self) -> None:
        """Waits for this rank's device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def redirect_output(log: str, errors: str = "") -> None:
    """Redirects standard output and standard error to files, or to the same file without
    `errors`."""
    for descriptor, file in ((1, log), (2, errors or log)):
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(sys.stderr)
    # Prints the stacks of a rank that hangs before it is killed.
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)


def serve(
    connection: Connection, world: World, rank: int, port: int, prefix: str, log: str
) -> None:
    """Joins the process group and runs jobs until the other end of `connection` closes."""
    os.environ.update(rank_environment(world))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world.size), LOCAL_RANK=str(rank))
    redirect_output(log)
    gc.freeze()  # each full collection would visit all objects of PyTorch
    torch.set_num_threads(1)
    try:
        server = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        store = dist.PrefixStore(prefix, server)
        context = Rank(rank, world, store)
        dist.init_process_group(
            world.backend,
            store=store,
            rank=rank,
            world_size=world.size,
        )
        context.meet()
    except Exception:
        connection.send((False, traceback.format_exc()))
        return
    connection.send((True, os.getpid()))
    _run_jobs(connection, context)
    # Peers may have exited or been killed, so nothing collective may run at exit.
    os._exit(0)


def _run_jobs(connection: Connection, context: Rank) -> None:
    while True:
        try:
            job: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] = connection.recv()
        except EOFError:
            return
        function, arguments, options = job
        torch.manual_seed(0)
        try:
            context.end_groups()
            answer = (True, function(context, *arguments, **options))
        except AssertionError as error:
            answer = (False, _with_locals(error))
        except BaseException:
            answer = (False, traceback.format_exc())
        connection.send(answer)


def _with_locals(error: AssertionError) -> str:
    """Returns the traceback with the values of local variables: pytest rewrites the asserts of
    tests, but not those of a rank."""
    raised = pytest.ExceptionInfo.from_exception(error)
    return str(raised.getrepr(style="short", showlocals=True))
