"""The torch.distributed backend "collx", which an existing program selects by its name.

    import collx.backend
    torch.distributed.init_process_group("collx")

Collectives on CPU and CUDA tensors run on communicators of collx, one for each kind of device. A
communicator is created at the first collective of the group, or with the group if `device_id` is
given. An inner process group of the same ranks (Gloo on the CPU, NCCL on CUDA) runs the calls that
collx has no kernel for: `send` and `recv`, sparse tensors, other reductions and dtypes. It runs all
calls if the ranks cannot access each other's memory, and for more than 8 GPUs or 16 processes on
the CPU.

`async_op=True` posts a call, as `collx.post` does. Without it a call runs on the current stream.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

import collx  # noqa: F401  # loads the library
from collx._bootstrap.options import MAX_RANKS, Members, group_named, group_of_backend
from collx._extension import extension
from collx._init import make
from collx._memory import SymmetricMemory
from collx.communicator import Communicator, live, of_group
from collx.errors import InitError

__all__ = ["NAME", "Options"]

NAME = "collx"

Options = extension.BackendOptions
Options.__name__ = Options.__qualname__ = "Options"
Options.__module__ = __name__
Options.__doc__ = """Options of the backend "collx", for `pg_options` of `init_process_group` and
`new_group`.

Args:
    payload_bytes: the maximum size of the region of each communicator on each rank, in bytes; by
        default 128 MiB on CUDA and 16 MiB on the CPU.
    max_blocks: as in `collx.init`; by default half of the blocks that the device can run at once.
    symmetric_bytes: the maximum size of the memory of `allocate_tensor` for each kind of device on
        each rank, in bytes; by default 4 GiB on CUDA and 256 MiB on the CPU. The memory is
        allocated when it is needed. 0 disables it.
    deterministic, check, watchdog, overlap: as in `collx.init`.
    tuning: the file of a tuning table; by default the environment variable COLLX_TUNING names it.
        Communicators with another world size or kind of device do not use the table.

The constructor raises ValueError or TypeError if a value is invalid on any machine. The first
collective of a group raises the errors of `collx.init` for other invalid values.
"""

_log = logging.getLogger("collx")

# Small on the CPU, because a program may have a dozen groups. On CUDA, large transfers need the
# memory: with a smaller region, they take more steps.
_PAYLOAD_BYTES = {"cpu": 16 << 20, "cuda": 128 << 20}
# A bound, because a block is only reused for allocations of about its own size.
_SYMMETRIC_BYTES = {"cpu": 256 << 20, "cuda": 4 << 30}


class _Maker:
    """Creates and destroys the communicators of one group."""

    def __init__(self, members: Members, options: Options, inner: dist.ProcessGroup) -> None:
        self._members = members
        self._options = options
        self._inner = inner
        self._lock = threading.Lock()
        self._made: dict[str, Communicator | None] = {}
        self._left = False
        self._process = os.getpid()

    def make(self, device: torch.device) -> extension.Communicator | None:
        if os.getpid() != self._process:  # the store of the group is the parent's
            raise ValueError(
                f'collx: process group "{self._members.name}" belongs to the process that this one '
                "was forked from; create a group in this process"
            )
        with self._lock:
            if self._left:  # another thread has shut the group down since the call began
                raise ValueError(f'collx: process group "{self._members.name}" has been shut down')
            if device.type not in self._made:
                self._made[device.type] = self._new(device)
            made = self._made[device.type]
        return None if made is None else made._native

    def _new(self, device: torch.device) -> Communicator | None:
        members, options = self._members, self._options
        if members.size > MAX_RANKS[device.type]:
            return None
        name = f"{members.name}/{device.type}"
        for one in live():  # of groups that were aborted, or that ended without shutdown()
            of_backend = one._group is None
            if of_backend and (
                one.name == name or (one.poisoned and group_named(one.group_name) is None)
            ):
                one._leave()
        made = make(
            members,
            name=name,
            timeout=options._timeout.total_seconds(),
            device=device,
            payload_bytes=(
                _PAYLOAD_BYTES[device.type]
                if options.payload_bytes is None
                else options.payload_bytes
            ),
            check=options.check,
            pdl="early",
            max_blocks=options.max_blocks,
            spare=False,
            deterministic=options.deterministic,
            fallback_group=self._inner,
            watchdog=options.watchdog,
            overlap=options.overlap,
            tuning=options.tuning,
            exact_tuning=False,
        )
        if made.fallback_reason is None:
            return made
        made._leave()
        return None

    def set_timeout(self, seconds: float) -> None:
        with self._lock:
            self._options._timeout = timedelta(seconds=seconds)
            for one in self._made.values():
                if one is not None:
                    one.set_timeout(seconds)

    def words(
        self, device: torch.device, nbytes: int
    ) -> tuple[torch.Tensor, list[int], int] | None:
        memory, most = self._memory(device), self._options.symmetric_bytes
        if most is None:
            most = _SYMMETRIC_BYTES[device.type]
        try:
            return *memory.share_words(nbytes, symmetric_bytes=most), most
        except InitError as reason:
            self._without_symmetric_memory(reason)
            return None

    def segment(self, device: torch.device, nbytes: int) -> torch.Tensor | None:
        try:
            return self._memory(device).empty((nbytes,), torch.uint8)
        except InitError as reason:
            self._without_symmetric_memory(reason)
            return None

    def _without_symmetric_memory(self, reason: InitError) -> None:
        """Handles a failed allocation of symmetric memory. All ranks call this."""
        if self._members.rank == 0:
            _log.warning("%s; new tensors of allocate_tensor are in ordinary memory", reason)

    def _memory(self, device: torch.device) -> SymmetricMemory:
        made = self._made[device.type]
        assert made is not None
        return made._memory

    def leave(self) -> None:
        """Leaves the communicators. Local, because the ranks may shut their groups down in
        different orders. Mappings of the peers remain valid."""
        with self._lock:
            self._left = True
            made = [one for one in self._made.values() if one is not None]
            self._made.clear()
        for one in made:
            if not one.destroyed:
                one._leave()

    def split(
        self, store: dist.Store, ranks: list[int], options: Options
    ) -> extension.Backend | None:
        own = self._members.rank
        if own not in ranks:
            return None
        members = Members(options.group_name, ranks.index(own), len(ranks), store, None)
        return _backend(members, options)


def _inner_group(members: Members, timeout: timedelta) -> dist.ProcessGroup:
    rank, size = members.rank, members.size
    group = dist.ProcessGroup(members.store, rank, size)
    kinds = dist.ProcessGroup.BackendType
    gloo = dist.ProcessGroupGloo(
        dist.PrefixStore("collx/gloo", members.store), rank, size, timeout=timeout
    )
    group._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
    group._set_default_backend(kinds.GLOO)
    if torch.cuda.is_available() and dist.is_nccl_available():
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        store = dist.PrefixStore("collx/nccl", members.store)
        nccl = dist.ProcessGroupNCCL(store, rank, size, options)
        group._register_backend(torch.device("cuda"), kinds.NCCL, nccl)
    return group


def _backend(members: Members, options: Options) -> extension.Backend:
    inner = _inner_group(members, options._timeout)
    maker = _Maker(members, options, inner)
    return extension.Backend(members.rank, members.size, options, inner, maker)


def _create(
    given: torch._C._distributed_c10d._DistributedBackendOptions, options: Options | None
) -> extension.Backend:
    """Creates the backend of a group. PyTorch calls this for each new group."""
    if options is None:
        options = Options()
    elif not isinstance(options, Options):
        raise TypeError(
            f"collx: pg_options is a {type(options).__name__}; accepted: collx.backend.Options"
        )
    options = copy.copy(options)
    options._timeout = given.timeout
    options.group_name = given.group_id  # type: ignore[assignment]
    options.global_ranks_in_group = given.global_ranks_in_group
    members = Members(given.group_id, given.group_rank, given.group_size, given.store, None)
    return _backend(members, options)


def _of_group(name: str, device: torch.device | None) -> extension.Communicator | None:
    """Returns the communicator of the backend of the group with that name. If there is none on the
    device, creates it, collectively over the group. Without a device, returns any, and creates
    none. Returns None for other names, and if the backend does not serve the device."""
    group = group_of_backend(name)
    if group is None:
        return None
    made = of_group(name, None if device is None else device.type)
    if made is None and device is not None and device.type in ("cpu", "cuda"):
        if device == torch.device("cuda"):  # without an index: a call without tensors
            device = torch.device("cuda", torch.cuda.current_device())
        backend = group._get_backend(device)
        if backend.name() == NAME:
            backend.eager_connect_single_device(device)
        made = of_group(name, device.type)
    return None if made is None else made._native


extension.look_up_by(_of_group)
dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
