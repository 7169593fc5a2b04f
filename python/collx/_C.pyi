# ruff: noqa: N999  (the name that PyTorch gives to extension modules)
"""The compiled extension: operators (torch.ops.collx.*), and its interface for the Python code."""

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend as _Backend
from torch._C._distributed_c10d import ErrorType

built_for: tuple[str, str | None, str | None]
"""PyTorch's version, CUDA's, and the architectures, by commas; None without kernels."""
version: str
"""The version of collx, without the label that setup.py adds for a build."""

def raise_as(
    timeout: type[Exception],
    mismatch: type[Exception],
    overlap: type[Exception],
    poisoned: type[Exception],
) -> None:
    """Sets the exceptions that the operators raise: class(message, communicator's name, record or
    None). The record has the format of Communicator.status."""

def after_failure(function: Callable[[str], None]) -> None:
    """Sets the function that is called with the communicator's name before an error with a record
    is raised."""

def register_cpu_allocator() -> None:
    """Registers collx's SymmetricMemoryAllocator for the CPU with PyTorch. A second call does
    nothing."""

def region_layout(device_type: str, world_size: int, payload_bytes: int) -> dict[str, int]:
    """Returns the bytes of every part of a rank's region by name. "total" is the size to allocate.

    Raises ValueError if payload_bytes is less than the smallest region."""

def initialize_region(ptr: int, device: torch.device, world_size: int, payload_bytes: int) -> None:
    """Initializes this rank's region (on CUDA: on the current stream, synchronized)."""

def load_kernels(
    device: torch.device, world_size: int, clusters: bool = True, simulated: bool = False
) -> dict[str, int]:
    """Loads every CUDA kernel. Returns the capabilities of the device: "blocks", the number of
    resident blocks of 512 threads, and other values of which the ranks take the minimum.
    `clusters`: False behaves as without hardware for clusters of blocks. `simulated`: loads the
    kernels with which tests simulate multicast instead of those for a switch."""

def held_at_once(
    wanted: dict[str, int],
    regions: Sequence[int],
    device: torch.device,
    rank: int,
    number: int,
    limit_ms: int,
    timeout_ms: int,
) -> dict[str, int]:
    """Launches the "clusters of ..." of `wanted` on all ranks at once. Returns the numbers that
    were all resident at the same time within `limit_ms`, and 0 for the others. Collective.
    `number`: the number of trials of this communicator."""

def boot_id() -> str:
    """Returns an id of this machine. Containers on the same machine have the same id."""

def workspace_bytes(
    op: str,
    numel: int,
    cols: int,
    dtype: torch.dtype,
    world_size: int,
    algorithm: str,
    symmetric: bool,
) -> int: ...
def algorithms(op: str, multicast: bool = False) -> list[str]:
    """Returns the algorithms that an operator accepts, except "auto". `multicast`: includes those
    that need multicast."""

def tunable_operators() -> list[str]:
    """Returns the operators for which a tuning table can have entries."""

def tunable_algorithms(
    op: str, device_type: str, symmetric: bool, deterministic: bool
) -> list[str]:
    """Returns the algorithms that an entry of an operator may select."""

class GettingReady:
    """A context manager in which calls of this thread with an epilogue prepare their kernels, but
    launch nothing."""

    def __init__(self) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, kind: object, value: object, traceback: object) -> None: ...

def made_kernels() -> tuple[int, int]:
    """Returns the number of kernels that this process has compiled for epilogues, and the number
    that it found on disk."""

def read_kernel(folder: str, name: str) -> bytes:
    """Returns a file of the cache of compiled kernels; b"" if there is none that can be trusted."""

def keep_kernel(folder: str, name: str, code: bytes, most_bytes: int = ...) -> None: ...
def epilogue_program(
    expression: str,
    dtype: torch.dtype,
    kernel: str,
    has_simple: bool,
    world: int,
    simple: bool,
    has_worlds: bool = True,
    rows: bool = False,
    multicast: bool = False,
    simulated: bool = False,
    layer: bool = False,
    groups: bool = False,
    steps: bool = False,
    whole: Sequence[int] | None = None,
    keeps: bool = False,
) -> tuple[str, str]:
    """Returns the program for an epilogue in a kernel of a template, and the name of the kernel in
    it. `whole`: if the output and all extras consist of whole vectors, the dimensions in which each
    extra lies; 0 for one that is the same for a whole vector."""

class Communicator:
    """One rank's view of a communicator. The C++ registry contains it under `name`."""

    def __init__(
        self,
        *,
        name: str,
        group_name: str,
        device: torch.device,
        rank: int,
        world_size: int,
        regions: list[int],
        payload_bytes: int,
        timeout_ms: int,
        pdl: str,
        check: bool,
        agreed: dict[str, int],
        spare_blocks: int = 0,
        multicast: int = 0,
        multicast_unavailable_reason: str = ...,
        simulated: bool = False,
        deterministic: bool = True,
        fallback_group: dist.ProcessGroup | None = None,
        watchdog: bool = False,
        overlap: bool = False,
        tuning: Sequence[tuple[str, str, bool, int, int, str, int, int]] = ...,
        global_ranks: Sequence[int] = ...,
    ) -> None:
        """
        Args:
            regions: the address of every rank's region in this process; empty: fallback only.
            agreed: the minimum over the ranks of the values of load_kernels. "blocks" is the number
                of blocks of 512 threads that this communicator may use at once.
            spare_blocks: additional blocks for algorithms that push, while the device has no other
                communicator.
            multicast: the address of the regions of all ranks, or 0.
            multicast_unavailable_reason: the reason if `multicast` is 0.
            simulated: for tests: `multicast` is the address of this rank's own region.
            deterministic: "auto" only selects algorithms that reduce in the order of the ranks.
            fallback_group: runs the fallback instead of the process group of `group_name`. The
                communicator holds a reference until destroy.
            watchdog: a thread of the process logs calls that wait for a long time.
            overlap: "auto" uses copy engines for large copies between symmetric tensors.
            tuning: the entries that replace built-in choices: operator, dtype ("" for copies),
                symmetric, first and last number of bytes, algorithm, max_blocks, threads.
            global_ranks: the ranks in the default process group, if they are known.
        """

    name: str
    group_name: str
    global_ranks: list[int]
    rank: int
    world_size: int
    blocks: int
    pdl: str  # settable: "off", "end", "early"
    deterministic: bool  # settable; the same on every rank
    def set_timeout(self, milliseconds: int) -> None:
        """Sets the timeout of subsequent calls. Waits for a call on the CPU that is in progress."""

    poisoned: bool
    destroyed: bool
    multicast_unavailable_reason: str  # why the ranks have no multicast; empty if they have it

    def refuse_if_forked(self, op: str) -> None:
        """Raises RuntimeError in a forked child."""

    def check(self, wait: bool = True) -> None:
        """Raises the recorded failure, if any. `wait`: waits for the reports of the peers about a
        timeout, so that it names the same rank on all ranks."""

    def status(self) -> dict[str, Any] | None:
        """Returns the recorded failure as a dict, or None."""

    calls: int  # made by this process; replays of graphs are not counted
    has_captured: bool  # graphs contain calls
    def recent_calls(self) -> list[dict[str, Any]]:
        """Returns the last 1,000 calls, oldest first, with the keys of `CollectiveError.call`,
        "number", "function", "input_bytes" and "created_ns" (since the epoch). Any thread may call
        it, also during a call."""

    def tallies(self) -> dict[str, tuple[int, int]]:
        """Returns the number of calls and the bytes of their inputs, by function."""

    def progress(self) -> list[tuple[int, bool]]:
        """Returns for each rank the number of completed calls, and whether the next call is in
        progress. Empty without regions, and after destroy. Any thread may call it."""

    def waited(self) -> list[int]:
        """Returns the nanoseconds that calls of this rank have waited for each rank. Empty on
        CUDA without a watchdog, without regions, and after destroy. Any thread may call it."""

    def report_absent(self, rank: int, peer: int) -> None:
        """Poisons the communicator on this rank and on the peers, because `rank` waited for `peer`
        to vote until the timeout (-1: the peer is unknown)."""

    def abort_posted(self) -> None:
        """Poisons the communicator on this rank and on the peers if `destroy` would wait for posted
        calls."""

    def register(
        self, tensor: torch.Tensor, pointers: list[int], nbytes: int, key: int, multicast: int = 0
    ) -> None:
        """Registers the allocation of `tensor`'s storage with a weak reference. `pointers[r]` is
        the address in this process of the storage of rank r, which has `nbytes` bytes. `key` is the
        agreed id of the allocation, `multicast` the address of all storages, if there is one."""

    def explain(
        self,
        op: str,
        numel: int,
        cols: int,
        dtype: torch.dtype,
        input_symmetric: bool,
        output_symmetric: bool,
        algorithm: str,
        max_blocks: int,
        rounding: str,
        scale_mode: str,
        quant_group_size: int,
        keep_norm: bool,
    ) -> dict[str, Any]:
        """Returns {"algorithm", "executed_by", "blocks", "threads", "chunks", "bytes",
        "workspace_bytes", "tuned"} of a call. "tuned": the first and the last number of bytes of
        the entry of the tuning table that selected the algorithm, or None."""

    def tune(self, blocks: int, threads: int) -> None:
        """Sets the grid of all subsequent calls on CUDA, for tuning. Zeros restore the automatic
        selection. All ranks must set the same grid, between calls. Raises ValueError for more
        blocks than the device holds resident at once."""

    def destroy(self) -> None:
        """Removes the communicator from the registry. Later calls by name raise. Local; never waits
        for a peer."""

def built_in(
    *,
    name: str,
    module: str,
    doc: str,
    names: tuple[str, ...],
    defaults: tuple[Any, ...],
    positional: int,
    declaration: Callable[..., Any],
    twin: Callable[..., Any],
    conversions: ModuleType,
) -> Any:
    """Creates a built-in function with these parameters. The first `positional` ones may be passed
    by position. `defaults` contains Ellipsis for a required parameter. `declaration` raises
    TypeError for unexpected arguments. `twin` is called for arguments that the function does not
    handle itself, and `conversions` is collx.ops.arguments."""

def built_in_post(*, module: str, doc: str, twin: Callable[..., Any]) -> Any:
    """Creates `collx.post`. `twin` is called for arguments that it does not handle itself."""

class Handle:
    def wait(self, timeout: float | timedelta | None = None) -> Any: ...
    def is_completed(self) -> bool: ...
    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]: ...
    def __enter__(self) -> Handle: ...
    def __exit__(self, kind: object, error: object, traceback: object) -> None: ...

def work_of(handle: Handle | None, output: torch.Tensor) -> dist.Work:
    """Returns the work of a posted call that writes `output`. Without a handle, the call is already
    ordered on the current stream."""

class BackendOptions(_Backend.Options):
    """See `collx.backend.Options`."""

    max_blocks: int | None
    payload_bytes: int | None
    symmetric_bytes: int | None
    deterministic: bool
    check: bool | None
    watchdog: bool
    tuning: str | None
    overlap: bool
    def __init__(
        self,
        *,
        max_blocks: int | None = None,
        payload_bytes: int | None = None,
        deterministic: bool = True,
        check: bool | None = None,
        watchdog: bool = False,
        symmetric_bytes: int | None = None,
        tuning: str | os.PathLike[str] | None = None,
        overlap: bool = False,
    ) -> None: ...
    def __copy__(self) -> BackendOptions: ...
    def __deepcopy__(self, memo: dict[int, object]) -> BackendOptions: ...

class Backend(_Backend):
    """The backend "collx" of one group. `inner`: the process group that runs unsupported calls.
    `maker`: creates the communicators of the group, such as collx.backend._Maker."""

    options: BackendOptions
    def __init__(
        self,
        rank: int,
        size: int,
        options: BackendOptions,
        inner: dist.ProcessGroup,
        maker: object,
    ) -> None: ...
    def get_error(self) -> ErrorType: ...
    def perform_nocolor_split(self, device: torch.device) -> None: ...

def variants(function: str) -> list[tuple[tuple[str, ...], str, str, bool]]:
    """Returns the overloads that a function calls: the features of the call, the operator, the
    overload, and whether it is a fused normalization."""

def make_by(function: Callable[[str], Communicator]) -> None:
    """Sets the function that C++ calls (collx::registry::make) to create the communicator for the
    name of a process group."""

def look_up_by(function: Callable[[str, torch.device | None], Communicator | None]) -> None:
    """Sets the function that C++ calls (collx::registry::look_up) for the name of a process group
    that is not the name of a communicator."""

def lookup(name: str) -> Communicator | None: ...
def part_of(numel: int, world_size: int, rank: int) -> tuple[int, int]:
    """Returns (start, count) of a rank's part, as in csrc/protocol/partition.h."""
