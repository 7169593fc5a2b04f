# ruff: noqa: N999  (the name that PyTorch gives to extension modules)
"""The compiled extension: operators (torch.ops.collx.*), and what the Python side needs of it."""

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

def raise_as(
    timeout: type[Exception],
    mismatch: type[Exception],
    overlap: type[Exception],
    poisoned: type[Exception],
) -> None:
    """What the operators raise from now on: class(message, communicator's name, record or None),
    the record as Communicator.status gives it."""

def register_cpu_allocator() -> None:
    """Registers collx's SymmetricMemoryAllocator for the CPU with PyTorch. Twice is harmless."""

def region_layout(device_type: str, world_size: int, payload_bytes: int) -> dict[str, int]:
    """Name to bytes of every part of a rank's region; "total" is what has to be allocated.

    ValueError when payload_bytes is less than the smallest region."""

def initialize_region(ptr: int, device: torch.device, world_size: int, payload_bytes: int) -> None:
    """Makes this rank's region ready for use (on CUDA: on the current stream, synchronized)."""

def load_kernels(
    device: torch.device, world_size: int, clusters: bool = True, simulated: bool = False
) -> dict[str, int]:
    """Loads every CUDA kernel; returns what the device offers: "blocks" of 512 threads that it
    holds resident, and what else the ranks agree on by taking the smallest of each.
    `clusters`: False: as if it had no hardware for clusters of blocks. `simulated`: with the
    kernels by which tests simulate multicast, in place of those for a switch."""

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
    `number`: how many trials this communicator has had."""

def boot_id() -> str:
    """What tells this machine from others, containers of one machine being one."""

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
    """The names that an operator accepts, "auto" apart. `multicast`: with those that need it."""

class GettingReady:
    """While entered, calls of this thread with an epilogue get ready what they need, and launch
    nothing."""

    def __init__(self) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, kind: object, value: object, traceback: object) -> None: ...

def made_kernels() -> tuple[int, int]:
    """How many kernels this process has compiled for epilogues, and how many it found on disk."""

def read_kernel(folder: str, name: str) -> bytes:
    """A file of the cache of compiled kernels; b"" where there is none that can be trusted."""

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
    """The program that is compiled for an epilogue in a kernel of that template, and the kernel's
    name in it. `whole`: where the output and all extras are of whole vectors, the dimensions in
    which each extra lies; 0 for one that is the same for a whole vector."""

class Communicator:
    """One rank's view of a communicator; entered into the C++ registry under `name`."""

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
    ) -> None:
        """`regions`: address of every rank's region as mapped here; empty: fallback only.
        `agreed`: of what every rank offers (load_kernels) the smallest; "blocks" of 512 threads
        this communicator may use at once. `spare_blocks`: more of them, for algorithms that push,
        while it is alone on the device. `multicast`: the regions of all ranks at one address, or
        0, and `multicast_unavailable_reason` says why. `simulated`: for tests: it is the address of
        this rank's own region. `deterministic`: "auto" only selects algorithms that reduce in the
        order of the ranks.
        `fallback_group`: serves the fallback instead of the process group of `group_name`, and is
        kept until destroy. `watchdog`: a thread of the process logs calls that wait for long.
        `overlap`: "auto" takes copy engines for large copies between symmetric tensors."""

    name: str
    group_name: str
    rank: int
    world_size: int
    blocks: int
    pdl: str  # settable: "off", "end", "early"
    deterministic: bool  # settable; the same on every rank
    def set_timeout(self, milliseconds: int) -> None:
        """Of the calls that follow. Waits for a call on the CPU that is under way."""

    poisoned: bool
    destroyed: bool
    multicast_unavailable_reason: str  # why the ranks have none; empty where they do

    def check(self, wait: bool = True) -> None:
        """Raises the failure that has been recorded, if any. `wait`: for what the peers have to say
        of a time-out, so that it names the same rank everywhere."""

    def status(self) -> dict[str, Any] | None:
        """The recorded failure as a dict, or None."""

    def report_absent(self, rank: int, peer: int) -> None:
        """Poisons the communicator, here and at the peers: `rank` waited in vain for `peer` to
        vote (-1: nobody knows for whom)."""

    def register(
        self, tensor: torch.Tensor, pointers: list[int], nbytes: int, key: int, multicast: int = 0
    ) -> None:
        """Enters the allocation under `tensor`'s storage, held weakly. `pointers[r]` is where the
        byte at the storage's start (nbytes of it) of rank r is mapped here; `key` is the agreed
        id of the allocation, `multicast` all of them at one address, if there is one."""

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
        """{"algorithm", "blocks", "threads", "chunks", "bytes", "workspace_bytes"} of a call."""

    def tune(self, blocks: int, threads: int) -> None:
        """For tuners: the grid of every later call on CUDA, in place of the selected one; zeros
        give the choice back. The same on every rank, between calls. ValueError for more blocks
        than the device holds resident at once."""

    def destroy(self) -> None:
        """Leaves the registry; later calls by name raise. Local, never waits for a peer."""

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
    """The built-in function of a name, with these parameters: the first `positional` ones by
    position, too, and `defaults` with Ellipsis for a parameter that must be given. `declaration`
    raises TypeError for arguments that the function does not take, `twin` takes the calls that the
    function leaves to Python, and `conversions` is collx.ops.arguments."""

class Handle:
    def wait(self, timeout: float | timedelta | None = None) -> Any: ...
    def is_completed(self) -> bool: ...
    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]: ...
    def __enter__(self) -> Handle: ...
    def __exit__(self, kind: object, error: object, traceback: object) -> None: ...

class BackendOptions(_Backend.Options):
    """Options of the backend "collx", as `pg_options` of torch.distributed takes them.

    Args:
        max_blocks: as of `collx.init`; by default half of what the device holds.
        payload_bytes: bytes of each communicator's region; by default 128 MiB on CUDA and 16 MiB on
            the CPU.
        deterministic, check, watchdog: as of `collx.init`.
        symmetric_bytes: bytes of symmetric memory, for each kind of device, from which
            `allocate_tensor` of the group's backend takes tensors; by default 4 GiB on CUDA and
            256 MiB on the CPU. They are allocated when they are needed. 0 disables it.
    """

    max_blocks: int | None
    payload_bytes: int | None
    symmetric_bytes: int | None
    deterministic: bool
    check: bool | None
    watchdog: bool
    def __init__(
        self,
        *,
        max_blocks: int | None = None,
        payload_bytes: int | None = None,
        deterministic: bool = True,
        check: bool | None = None,
        watchdog: bool = False,
        symmetric_bytes: int | None = None,
    ) -> None: ...
    def __copy__(self) -> BackendOptions: ...
    def __deepcopy__(self, memo: dict[int, object]) -> BackendOptions: ...

class Backend(_Backend):
    """The backend "collx" of one group. `inner`: what carries out the rest. `maker`: makes the
    group's communicators, as collx.backend._Maker does."""

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

def variants(function: str) -> list[tuple[tuple[str, ...], str, str, bool]]:
    """The overloads that a function calls: what the call is given, operator, overload, and whether
    it is a fused normalization."""

def make_by(function: Callable[[str], Communicator]) -> None:
    """What C++ calls, as collx::registry::make, for the communicator of a process group's name."""

def lookup(name: str) -> Communicator | None: ...
def part_of(numel: int, world_size: int, rank: int) -> tuple[int, int]:
    """(start, count) of a rank's part: csrc/protocol/partition.h."""
