"""The facts that the doctor gathers, and its findings. The field names are the keys of its JSON
output."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass
class Versions:
    collx: str
    built_for_torch: str
    built_for_cuda: str | None  # None: no kernels
    architectures: list[str]  # compute capabilities that the kernels support
    python: str
    torch: str
    cuda_runtime: str | None  # of PyTorch; None: PyTorch without CUDA
    gpu_driver: str | None
    cuda_driver: str | None  # the newest CUDA that the driver supports
    system: str
    kernel: str
    libc: str


@dataclass
class Machine:
    """Sizes are in bytes. None means no limit, or that the value cannot be read."""

    cores: int  # that this process may use
    cpu_limit: float | None = None  # CPU time in cores, of the control group
    memory: int | None = None
    memory_limit: int | None = None  # of the control group
    memory_used: int | None = None  # by the control group
    shm_size: int | None = None
    shm_free: int | None = None
    locked_memory: int | None = None
    open_files: int | None = None
    seccomp: int | None = None  # 0: off; 1: strict; 2: a filter
    boot_id: bool = True  # whether it can be read
    memfd_error: str | None = None  # why memory cannot be created as collx does on the CPU
    descriptors_error: str | None = None  # why descriptors cannot be sent as collx does
    loopback_error: str | None = None  # why processes cannot connect over 127.0.0.1


@dataclass
class Gpu:
    """A GPU as nvidia-smi reports it, whether or not this process may use it."""

    index: str
    name: str
    uuid: str
    mig: str
    compute_mode: str


@dataclass
class Gpus:
    usable: int = 0  # by PyTorch in this process
    seen: list[Gpu] = field(default_factory=list)
    smi_error: str | None = None  # why nvidia-smi failed
    links: dict[str, dict[str, str]] = field(default_factory=dict)  # GPU to GPU: "NV18", "SYS"
    mps: bool = False  # whether CUDA's Multi-Process Service is running


@dataclass
class Device:
    """A GPU as PyTorch reports it."""

    index: int
    name: str
    uuid: str
    capability: str
    memory: int
    multicast: bool | None  # whether the driver supports NVLink multicast


@dataclass
class Rank:
    rank: int
    stage: str = "start"  # the last stage that it has begun; "done" at the end
    device: str = ""
    error: str | None = None  # the error that it raised in that stage
    ended: str | None = None  # how its process ended, if it did not exit by itself


@dataclass
class Timing:
    """The time of an all-reduce of float32: the median on the slowest rank. Rates are in 10^9
    bytes/s."""

    bytes: int
    algorithm: str
    us: float
    busbw_gbs: float
    link_gbs: float | None  # rate of a plain copy of the transferred bytes, on all ranks at once


@dataclass
class Run:
    device: str  # "cpu" or "cuda"
    timeout: float
    ranks: list[Rank]
    timed_out: bool = False
    devices: list[Device] = field(default_factory=list)
    peers: list[list[bool]] = field(default_factory=list)  # by the indices of the devices
    init_seconds: float | None = None
    fallback_reason: str | None = None
    multicast_unavailable_reason: str | None = None
    algorithms: dict[str, dict[str, str | None]] = field(default_factory=dict)
    """For each operator and algorithm, the reason why it is unavailable, or None."""
    timings: list[Timing] = field(default_factory=list)


@dataclass
class Facts:
    versions: Versions
    machine: Machine
    gpus: Gpus
    environment: dict[str, str]  # the relevant variables that are set
    run: Run


@dataclass(frozen=True)
class Finding:
    """A finding. `id` is the kind of finding and does not change between versions. An error means
    that collx does not work, or only through the process group. A warning is a limitation of this
    run or possibly of another program."""

    id: str
    level: Literal["error", "warning"]
    what: str
    fix: str


def error(id: str, what: str, fix: str) -> Finding:
    return Finding(id, "error", what, fix)


def warning(id: str, what: str, fix: str) -> Finding:
    return Finding(id, "warning", what, fix)
