"""Symmetric memory through PyTorch's interface, with bounded waits and for each communicator.

PyTorch's rendezvous takes the name of a group and exchanges data through the store of that group.
It has two problems. Its waits have no time limit. And its CUDA backend numbers the exchanges of a
process in one sequence for all groups, so ranks that were in different groups before wait for
different keys and never find them (hazard 7). Each communicator therefore passes its own group to
the rendezvous. This group only has a store, which bounds every wait and renumbers those keys. The
store cannot bound the exchange of descriptors on CUDA, which follows the exchange in the store: if
a rank exits in between, its peers may wait there.
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
from collx._bootstrap.store import await_keys, bounded

SHARING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"  # an environment variable of PyTorch

# The number of bytes of the device index, with which a rank's message about its allocation starts.
# PyTorch only uses the indices of the peers to check whether two are equal.
_INDEX_BYTES = 4
_TOLD_APART = 1 << 16  # larger than any index

_PROCESS_WIDE_NUMBER = re.compile(r"^(.*CUDASymmetricMemory/)(\d+)(/\d+)$")

# Additional seconds for the rendezvous after the limit of its waits, so that it can end by itself.
_GRACE = 0.3


class _BoundedStore(dist.Store):
    """Forwards to `store`. Renumbers keys that count all rendezvous of the process, bounds every
    wait, and records the keys that this rank has written.

    PyTorch's rendezvous assumes that equal indices are the same device. This is wrong if each rank
    sees its own GPU through CUDA_VISIBLE_DEVICES (hazard 21). With `same_index`, which init derives
    from the ids of the devices, the store sends another index to the peers. PyTorch's option for
    this case is an environment variable, which a library must not change while other threads read
    it."""

    def __init__(self, store: dist.Store, timeout: float, rank: int = 0) -> None:
        super().__init__()
        self._store = store
        self._rank = rank
        self.same_index: int | None = None  # this rank's index if another rank's device has it too
        self._meeting = 0
        self._first: int | None = None
        self._written: set[str] = set()
        self.limit_waits(timeout)

    def limit_waits(self, seconds: float) -> None:
        """Sets the maximum duration of waits that begin after this call."""
        self._timeout = timedelta(seconds=seconds)
        self.set_timeout(self._timeout)

    def begin(self) -> None:
        """Starts the keys of the next rendezvous."""
        self._meeting += 1
        self._first = None

    def forget(self) -> None:
        """Removes the keys that this rank has written."""
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

    # PyTorch's C++ code calls the methods by these names.

    def set(self, key: str, value: str | bytes) -> None:
        first = self._first is None and _PROCESS_WIDE_NUMBER.match(key) is not None
        if first and self.same_index is not None:
            assert isinstance(value, bytes)
            value = self._told_apart(value)
        key = self._renumbered(key)
        self._written.add(key)
        self._store.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(self._renumbered(key))

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
        keys = [self._renumbered(key) for key in keys]
        if not await_keys(self._store, keys, limit.total_seconds()):
            raise dist.DistStoreError(
                f"wait timeout after {limit / timedelta(milliseconds=1):.0f}ms, keys: "
                + ", ".join(keys)
            )


class Mapped(NamedTuple):
    """The mappings of a storage of every rank in this process."""

    pointers: list[int]  # the first byte of each rank's storage
    offset: int  # the offset of that byte in its allocation
    multicast: int = 0  # the multicast address of all ranks; 0 if there is none


class Rendezvous:
    """Maps the memory of a communicator's peers.

    `name` is equal on all ranks. It is unique to the communicator in the lifetime of the process,
    because PyTorch caches the results of rendezvous by this name."""

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
        """Sends another index to the peers. `index` is this rank's device index, which another rank
        uses for another GPU."""
        if os.environ.get(SHARING) != "1":
            self._store.same_index = index

    def set_timeout(self, seconds: float) -> None:
        """Sets the maximum duration of waits that begin after this call."""
        self._timeout = seconds
        self._store.limit_waits(seconds)

    def exchange(self, tensor: torch.Tensor) -> Mapped:
        """Maps the peers' storages that correspond to that of `tensor`. The mapping is valid as
        long as the storage. Raises ValueError if `tensor` is not symmetric memory, and TimeoutError
        if the rendezvous does not end."""
        base = tensor.untyped_storage().data_ptr()
        if self._world_size == 1:
            return Mapped([base], 0)

        def meet() -> _SymmetricMemory | None:
            if tensor.is_cuda:
                torch.cuda.set_device(tensor.device)  # this is a new thread
            self._store.begin()
            return _SymmetricMemory.rendezvous(tensor, self.name)

        handle = bounded(meet, self._timeout + _GRACE, "rendezvous")
        if handle is None:  # only register passes tensors that collx has not allocated
            raise ValueError(
                "register: tensor: got one that was not allocated as symmetric memory; accepted: "
                "tensors of torch.distributed._symmetric_memory.empty"
            )
        # A storage from a pool starts inside of the block that was exchanged.
        offset = base - handle.buffer_ptrs[handle.rank]
        pointers = [pointer + offset for pointer in handle.buffer_ptrs]
        at_once = multicast.address_of(handle) if offset == 0 else 0
        return Mapped(pointers, offset, at_once)

    def forget(self) -> None:
        """Removes this rank's keys from the store. No rank may need them any more."""
        with contextlib.suppress(Exception):  # A store that no longer exists keeps no keys.
            bounded(self._store.forget, self._timeout, "store")

    def close(self) -> None:
        """Unregisters the group. A second call does nothing."""
        if self._group is not None:
            c10d._unregister_process_group(dist.distributed_c10d.GroupName(self.name))
            self._group = None


def refuse_in_capture(call: str, device: torch.device) -> None:
    """Raises NotImplementedError during the capture of a CUDA graph: the call waits for the other
    ranks on the host, and its allocations would end the capture with an error of the driver."""
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
    """Returns a contiguous tensor with its own allocation. Does not use PyTorch's symm_mem.empty,
    because offsets in its pool depend on what each rank freed before (hazard 16)."""
    strides = [math.prod(size[i + 1 :]) for i in range(len(size))]
    tensor = _SymmetricMemory.empty_strided_p2p(tuple(size), tuple(strides), dtype, device)
    if device.type == "cuda":
        # PyTorch 2.11 clears the memory with cudaMemset on the default stream, which can return
        # before the memory is clear. It could then overwrite the first writes of another stream,
        # such as those of init to the slots. This is frequent if processes share a GPU.
        torch.cuda.default_stream(device).synchronize()
    return tensor


def backend(device: torch.device) -> str | None:
    """Returns the name of PyTorch's symmetric-memory backend for the device, None if it has
    none."""
    return _SymmetricMemory.get_backend(device)
