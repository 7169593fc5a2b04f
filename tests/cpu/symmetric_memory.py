"""Helpers for the tests of CPU symmetric memory: tensors, groups with their own store, and the
resources that a process holds."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch._C import _distributed_c10d as c10d

from collx import _C
from tests.common.rank import Rank


def allocate(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns a symmetric tensor on the CPU from PyTorch's own function."""
    _C.register_cpu_allocator()
    return symm_mem.empty(numel, dtype=dtype, device=torch.device("cpu"))


def rendezvous(tensor: torch.Tensor, group: Any) -> Any:
    """Calls PyTorch's rendezvous. Returns Any, because its handles have more members than its
    stubs declare."""
    return symm_mem.rendezvous(tensor, group)


def world_group() -> Any:
    """Returns the process group of all ranks of the pool."""
    return dist.group.WORLD


def world_store() -> dist.Store:
    """Returns the store of all ranks of the pool."""
    return dist.distributed_c10d._get_process_group_store(world_group())


class HookedStore(dist.Store):
    """Forwards to `store` and calls `before` and `after` around the actions of a rank."""

    def __init__(self, store: dist.Store, seconds: float) -> None:
        super().__init__()
        self._store = store
        self.set_timeout(timedelta(seconds=seconds))

    def before(self, action: str, key: str) -> None:
        """Is called with "set", "get" or "add", and the key."""

    def after(self, action: str, key: str, value: bytes) -> None:
        """Is called with "set" or "get", the key, and the value that was written or read."""

    # PyTorch's C++ code looks the methods up by these names.

    def set(self, key: str, value: str | bytes) -> None:
        self.before("set", key)
        self._store.set(key, value)  # type: ignore[arg-type]
        self.after("set", key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        self.before("get", key)
        value = self._store.get(key)
        self.after("get", key, value)
        return value

    def add(self, key: str, value: int) -> int:
        self.before("add", key)
        return self._store.add(key, value)

    def deleteKey(self, key: str) -> bool:  # noqa: N802
        return self._store.delete_key(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        assert timeout is not None, "a wait without a limit"
        self._store.wait(keys, timeout)


def lend_group(rank: Rank, name: str, store: dist.Store) -> str:
    """Registers a group of all ranks that only has this store. Does not communicate. Returns the
    group's name."""
    group = c10d.ProcessGroup(store, rank.rank, rank.size)
    c10d._register_process_group(dist.distributed_c10d.GroupName(name), group)
    _lent.append((group, store))
    return name


_lent: list[Any] = []  # kept alive: C++ owns neither the group nor the Python part of a store


@dataclass(frozen=True)
class Holdings:
    """Resources that may leak. `named`: what this process has open or mapped in /dev/shm."""

    descriptors: tuple[str, ...]
    segments: int
    threads: int
    named: tuple[str, ...]

    def beyond(self, before: Holdings) -> list[str]:
        """Returns what has been added since `before`. Removals are ignored: sockets to peers that
        died may be closed."""
        more = [*(Counter(self.descriptors) - Counter(before.descriptors)).elements()]
        more += [f"{self.segments - before.segments} segments"] * (self.segments > before.segments)
        more += [f"{self.threads - before.threads} threads"] * (self.threads > before.threads)
        return more + [name for name in self.named if name not in before.named]


def holdings() -> Holdings:
    """Returns the open files, mapped segments and threads of this process."""
    files = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            files.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    with open("/proc/self/maps") as maps:
        mapped = maps.read().splitlines()
    segments = sum("memfd:collx" in line for line in mapped)
    named = tuple(sorted(name for name in [*files, *mapped] if "/dev/shm/" in name))
    return Holdings(tuple(sorted(files)), segments, threading.active_count(), named)


def orphans_in_shm() -> set[str]:
    """Returns the files of this user in /dev/shm that no running process has mapped. A killed
    process leaves such files. Semaphores of Python's multiprocessing are ignored, because they
    have a name for a moment, also in other tests."""
    # The files are listed first, so that files created in the meantime are ignored.
    files = [file for file in Path("/dev/shm").iterdir() if not file.name.startswith("sem.mp-")]
    held = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # the process has exited, or belongs to another user
            held += "".join(line for line in maps.open() if "/dev/shm/" in line)
    orphans = set()
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            if file.stat().st_uid == os.getuid() and str(file) not in held:
                orphans.add(file.name)
    return orphans
