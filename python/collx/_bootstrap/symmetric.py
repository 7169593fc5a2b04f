"""Symmetric memory through PyTorch's own interface, bounded and per communicator.

PyTorch's rendezvous takes a group's name and exchanges through that group's store. Two properties
of it need care. Its waits have no limit. And its CUDA backend numbers the exchanges of a process
in one sequence for all groups, so ranks that were in different groups before look for different
keys and never find them (hazard 7). Each communicator therefore passes a group of its own to the
rendezvous. The group only has a store, which bounds every wait and renumbers those keys. The store
cannot bound the exchange of descriptors on CUDA, right after all ranks have met in the store: if a
rank dies in between, its peers may wait there.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed._symmetric_memory import _SymmetricMemory

from collx._bootstrap import multicast
from collx._bootstrap.store import bounded

__all__ = ["SHARING", "Mapped", "Rendezvous", "allocate", "backend", "refuse_in_capture"]

SHARING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"  # PyTorch's own switch

# A rank's message about its allocation starts with the index of the device, in this many bytes.
# PyTorch only uses the indices of the peers to check whether two are equal.
_INDEX_BYTES = 4
_TOLD_APART = 1 << 16  # above any index

_PROCESS_WIDE_NUMBER = re.compile(r"^(.*CUDASymmetricMemory/)(\d+)(/\d+)$")

# The rendezvous has this much more than its waits, so that it ends by itself if it can.
_GRACE = 0.3


class _BoundedStore(dist.Store):
    """Forwards to `store`. Renumbers keys that count all rendezvous of the process, bounds every
    wait, and remembers what this rank has written.

    PyTorch's rendezvous takes equal indices for one device, which they are not where each rank sees
    a GPU of its own by CUDA_VISIBLE_DEVICES (hazard 21). With `same_index`, which init finds by the
    devices' ids, peers are told another index. PyTorch's switch for that is a variable of the
    environment, which no library may change while other threads read it."""

    def __init__(self, store: dist.Store, timeout: float, rank: int = 0) -> None:
        super().__init__()
        self._store = store
        self._rank = rank
        self.same_index: int | None = None  # this rank's, if another rank's device has it too
        self._meeting = 0
        self._first: int | None = None
        self._written: set[str] = set()
        self.limit_waits(timeout)

    def limit_waits(self, seconds: float) -> None:
        """Sets the maximum duration of the waits that begin from now on."""
        self._timeout = timedelta(seconds=seconds)
        self.set_timeout(self._timeout)

    def begin(self) -> None:
        """Starts the keys of the next rendezvous."""
        self._meeting += 1
        self._first = None

    def forget(self) -> None:
        """Removes what this rank has written."""
        for key in self._written:
            self._store.delete_key(key)
        self._written.clear()

    def _renumbered(self, key: str) -> str:
        match = _PROCESS_WIDE_NUMBER.match(key)
        if match is None:
            return key
        number = int(match[2])
        if self._first is None:
            self._first = number
        return f"{match[1]}{self._meeting}.{number - self._first}{match[3]}"

    def _told_apart(self, value: bytes) -> bytes:
        index = int.from_bytes(value[:_INDEX_BYTES], sys.byteorder)
        if index != self.same_index:
            raise RuntimeError(
                "this version of PyTorch describes allocations in an unknown format, so collx "
                f"cannot distinguish GPUs of the same index; start the ranks with {SHARING}=1"
            )
        return (_TOLD_APART + self._rank).to_bytes(_INDEX_BYTES, sys.byteorder) + value[
            _INDEX_BYTES:
        ]

    # The names that PyTorch's C++ side looks for.

    def set(self, key: str, value: str | bytes) -> None:
        first = self._first is None and _PROCESS_WIDE_NUMBER.match(key) is not None
        if first and self.same_index is not None:
            assert isinstance(value, bytes)
            value = self._told_apart(value)
        key = self._renumbered(key)
        self._written.add(key)
        self._store.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        key = self._renumbered(key)
        self._store.wait([key], self._timeout)
        return self._store.get(key)

    def add(self, key: str, value: int) -> int:
        self._written.add(key)
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._store.check([self._renumbered(key) for key in keys])

    def deleteKey(self, key: str) -> bool:  # noqa: N802
        self._written.discard(key)
        return self._store.delete_key(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        limit = self._timeout if timeout is None else min(timeout, self._timeout)
        self._store.wait([self._renumbered(key) for key in keys], limit)


class Mapped(NamedTuple):
    """A storage of every rank, as it is mapped here."""

    pointers: list[int]  # the first byte of each rank's
    offset: int  # of that byte in its allocation
    multicast: int = 0  # that of all ranks at one address; 0: there is no such address


class Rendezvous:
    """Maps the memory of a communicator's peers.

    `name` is unique to the communicator, also in the life of the process, and equal on its ranks:
    PyTorch keeps under it what a tensor's rendezvous gave."""

    def __init__(
        self, name: str, store: dist.Store, rank: int, world_size: int, timeout: float
    ) -> None:
        self.name = name
        self._timeout = timeout
        self._world_size = world_size
        self._store = _BoundedStore(dist.PrefixStore(name, store), timeout, rank)
        self._group: c10d.ProcessGroup | None = c10d.ProcessGroup(self._store, rank, world_size)
        c10d._register_process_group(dist.distributed_c10d.GroupName(name), self._group)

    def tell_apart(self, index: int) -> None:
        """This rank's GPU has an index that another rank gives to another GPU."""
        if os.environ.get(SHARING) != "1":
            self._store.same_index = index

    def set_timeout(self, seconds: float) -> None:
        """Sets the maximum duration of the waits that begin from now on."""
        self._timeout = seconds
        self._store.limit_waits(seconds)

    def exchange(self, tensor: torch.Tensor) -> Mapped:
        """Meets the peers over `tensor`'s storage. TimeoutError when it does not end. The mapping
        lasts as long as the storage."""
        base = tensor.untyped_storage().data_ptr()
        if self._world_size == 1:
            return Mapped([base], 0)

        def meet() -> _SymmetricMemory:
            if tensor.is_cuda:
                torch.cuda.set_device(tensor.device)  # the thread is a new one
            self._store.begin()
            return _SymmetricMemory.rendezvous(tensor, self.name)

        handle = bounded(meet, self._timeout + _GRACE, "rendezvous")
        # From a pool, the storage starts inside of the block that was exchanged.
        offset = base - handle.buffer_ptrs[handle.rank]
        pointers = [pointer + offset for pointer in handle.buffer_ptrs]
        at_once = multicast.address_of(handle) if offset == 0 else 0
        return Mapped(pointers, offset, at_once)

    def forget(self) -> None:
        """Removes this rank's keys from the store, when no rank needs them any more."""
        with contextlib.suppress(Exception):  # A store that no longer exists keeps no keys.
            bounded(self._store.forget, self._timeout, "store")

    def close(self) -> None:
        """Unregisters the group. A second call does nothing."""
        if self._group is not None:
            c10d._unregister_process_group(dist.distributed_c10d.GroupName(self.name))
            self._group = None


def refuse_in_capture(call: str, device: torch.device) -> None:
    """NotImplementedError where a CUDA graph is being captured: what meets the other ranks waits
    on the host, and what allocates for it would end the capture with an error of the driver's."""
    if _capturing(device):
        raise NotImplementedError(
            f"{call}: the call waits for the other ranks on the host, which cannot be captured "
            "into a CUDA graph; call it before the capture"
        )


def _capturing(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def allocate(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A contiguous tensor of its own allocation. Not PyTorch's symm_mem.empty, whose pool makes
    offsets depend on what each rank freed before (hazard 16)."""
    strides = [math.prod(size[i + 1 :]) for i in range(len(size))]
    return _SymmetricMemory.empty_strided_p2p(tuple(size), tuple(strides), dtype, device)


def backend(device: torch.device) -> str | None:
    """The name of PyTorch's symmetric-memory backend for the device, if it has one."""
    return _SymmetricMemory.get_backend(device)
