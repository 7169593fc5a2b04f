"""Gathers facts about the machine, the container and the environment."""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import resource
import socket
from collections.abc import Callable
from pathlib import Path

import torch

import collx
from collx import _launch
from collx._doctor.facts import Machine, Versions
from collx._extension import extension

_PREFIXES = ("COLLX_", "TORCH_SYMM", "NCCL_", "GLOO_", "CUDA_", "NVSHMEM_")
_NAMES = ("TMPDIR", "OMP_NUM_THREADS")
_UNLIMITED = 1 << 60  # larger limits of control groups mean no limit


def versions(gpu_driver: str | None, cuda_driver: str | None) -> Versions:
    return Versions(
        collx=collx.__version__,
        built_for_torch=collx.build.torch,
        built_for_cuda=collx.build.cuda,
        architectures=list(collx.build.architectures),
        python=platform.python_version(),
        torch=str(torch.__version__),
        cuda_runtime=torch.version.cuda,
        gpu_driver=gpu_driver,
        cuda_driver=cuda_driver,
        system=_system(),
        kernel=f"{platform.system()} {platform.release()} {platform.machine()}",
        libc=" ".join(platform.libc_ver()),
    )


def environment() -> dict[str, str]:
    """Returns the variables that collx, PyTorch's symmetric memory or a process group reads."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_PREFIXES) or name in _NAMES
    }


def machine() -> Machine:
    memory_limit, memory_used = _memory_of_group()
    found = Machine(
        cores=_launch.cores(),
        cpu_limit=_cpu_limit(),
        memory=_pages("SC_PHYS_PAGES"),
        memory_limit=memory_limit,
        memory_used=memory_used,
        locked_memory=_limit(resource.RLIMIT_MEMLOCK),
        open_files=_limit(resource.RLIMIT_NOFILE),
        seccomp=_seccomp(),
        memfd_error=_error_of(_try_memfd),
        descriptors_error=_error_of(_try_descriptors),
        loopback_error=_error_of(_launch.connect),
    )
    with contextlib.suppress(OSError):
        shm = os.statvfs("/dev/shm")
        found.shm_size, found.shm_free = shm.f_blocks * shm.f_frsize, shm.f_bavail * shm.f_frsize
    found.boot_id = _error_of(extension.boot_id) is None
    return found


def _system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()


def _pages(name: str) -> int | None:
    try:
        return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _seccomp() -> int | None:
    for line in _read("/proc/self/status").splitlines():
        if line.startswith("Seccomp:"):
            return int(line.split()[1])
    return None


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _group(controller: str) -> Path:
    """Returns the folder of this process's control group, of version 2 or 1."""
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" and Path("/sys/fs/cgroup/cgroup.controllers").exists():
            root = Path("/sys/fs/cgroup")
        elif controller in controllers.split(","):
            root = Path("/sys/fs/cgroup", controller)
        else:
            continue
        inside = root / path.lstrip("/")
        return inside if inside.exists() else root  # in a container, the path may be the host's
    return Path("/sys/fs/cgroup")


def _memory_of_group() -> tuple[int | None, int | None]:
    folder = _group("memory")
    limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
    used = _read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")
    numbers = [int(text) if text.strip().isdigit() else None for text in (limit, used)]
    if numbers[0] is not None and numbers[0] > _UNLIMITED:
        numbers[0] = None
    return numbers[0], numbers[1]


def _cpu_limit() -> float | None:
    folder = _group("cpu")
    quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
    if not quota:
        quota = _read(folder / "cpu.cfs_quota_us").strip()
        period = _read(folder / "cpu.cfs_period_us").strip()
    if quota.isdigit() and period.isdigit():
        return int(quota) / int(period)
    return None


def _error_of(action: Callable[[], object]) -> str | None:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _try_memfd() -> None:
    """Creates and maps memory as collx's symmetric memory for the CPU does."""
    descriptor = os.memfd_create("collx-doctor", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, mmap.PAGESIZE)
        with mmap.mmap(descriptor, mmap.PAGESIZE) as memory:
            memory[0] = 1
    finally:
        os.close(descriptor)


def _try_descriptors() -> None:
    """Sends a descriptor over an abstract Unix socket, as the ranks do on the CPU."""
    address = f"\0collx-doctor-{os.getpid()}-{os.urandom(4).hex()}"
    kind = socket.SOCK_SEQPACKET
    with (
        socket.socket(socket.AF_UNIX, kind) as listener,
        socket.socket(socket.AF_UNIX, kind) as sender,
    ):
        listener.bind(address)
        listener.listen()
        sender.settimeout(5)
        listener.settimeout(5)
        sender.connect(address)
        receiver, _ = listener.accept()
        with receiver:
            socket.send_fds(sender, [b"x"], [sender.fileno()])
            _, descriptors, _, _ = socket.recv_fds(receiver, 1, 1)
    if not descriptors:
        raise OSError("no descriptor arrived")
    os.close(descriptors[0])
