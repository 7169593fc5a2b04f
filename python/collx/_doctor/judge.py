"""Derives findings from facts, without access to the machine."""

from __future__ import annotations

from collections.abc import Iterator

from collx._doctor import judge_gpus, judge_run, judge_variables
from collx._doctor.facts import Facts, Finding, error, warning

# Minor versions of PyTorch 2, as in setup.py.
OLDEST_TORCH, NEWEST_TORCH = 11, 15
_RANK_BYTES = 512 << 20  # memory of a process with PyTorch and a region on the CPU
_DESCRIPTORS = 64  # approximate number of descriptors that a process of PyTorch has open
_NCCL_SHM = 64 << 20  # bytes in /dev/shm that NCCL may need for two ranks


def judge(facts: Facts) -> list[Finding]:
    """Returns the findings, errors first."""
    found = [
        *judge_run.findings(facts),
        *judge_gpus.findings(facts),
        *_versions(facts),
        *_machine(facts),
        *judge_variables.findings(facts),
    ]
    return sorted(found, key=lambda finding: finding.level != "error")


def _versions(facts: Facts) -> Iterator[Finding]:
    versions = facts.versions
    major, minor = (int(part) for part in versions.torch.split(".")[:2])
    if major != 2 or not OLDEST_TORCH <= minor <= NEWEST_TORCH:
        yield warning(
            "torch-version",
            f"PyTorch {versions.torch} is outside of the supported range "
            f"2.{OLDEST_TORCH} to 2.{NEWEST_TORCH}",
            "install a supported version, and build collx for it",
        )


def _machine(facts: Facts) -> Iterator[Finding]:
    machine, run = facts.machine, facts.run
    ranks = len(run.ranks)
    if not machine.boot_id:
        yield error(
            "boot-id",
            "/proc/sys/kernel/random/boot_id cannot be read, so ranks cannot tell whether they "
            "are on one machine",
            "mount /proc in the container",
        )
    if machine.loopback_error is not None:
        yield error(
            "loopback",
            f"processes cannot connect over 127.0.0.1: {machine.loopback_error}; the ranks of a "
            "process group connect over a network interface",
            "enable the loopback interface: ip link set lo up",
        )
    if run.device == "cpu":
        yield from _cpu_ranks(facts)
    if machine.memory_limit is not None:
        free = machine.memory_limit - (machine.memory_used or 0)
        if free < ranks * _RANK_BYTES:
            yield warning(
                "memory-limit",
                f"the control group has {free >> 20} MiB of memory left for {ranks} ranks, which "
                f"need about {_RANK_BYTES >> 20} MiB each",
                "raise the memory limit of the container, or start fewer ranks",
            )
    needed = _DESCRIPTORS + 4 * ranks
    if machine.open_files is not None and machine.open_files < needed:
        yield warning(
            "open-files",
            f"a process may open {machine.open_files} files; a rank needs about {needed}, and "
            "the rendezvous fails with 'too many open files' otherwise",
            "raise the limit: ulimit -n 4096",
        )
    small = machine.shm_size is not None and machine.shm_size < _NCCL_SHM * max(1, ranks // 2)
    if run.device == "cuda" and run.fallback_reason is not None and small:
        yield warning(
            "small-shm",
            f"/dev/shm has {(machine.shm_size or 0) >> 20} MiB, which may be too small for NCCL "
            "between GPUs without peer access; collx itself does not use it",
            "start the container with --shm-size=1g or --ipc=host",
        )


def _cpu_ranks(facts: Facts) -> Iterator[Finding]:
    machine, ranks = facts.machine, len(facts.run.ranks)
    if ranks > machine.cores:
        yield warning(
            "more-ranks-than-cores",
            f"{ranks} ranks share {machine.cores} cores: ranks that wait take time from those "
            "that work, and calls become slower",
            "start at most one rank for each core, or allow more cores (taskset, cpuset)",
        )
    elif machine.cpu_limit is not None and ranks > machine.cpu_limit:
        yield warning(
            "cpu-limit",
            f"the control group allows {machine.cpu_limit:g} cores for {ranks} ranks: the kernel "
            "stops them regularly, for as long as 100 ms",
            "raise the CPU limit of the container, or start fewer ranks",
        )
    filtered = " (a seccomp filter is active)" if machine.seccomp == 2 else ""
    if machine.memfd_error is not None:
        yield error(
            "memfd",
            f"memfd_create does not work{filtered}: {machine.memfd_error}; collx takes the shared "
            "memory of the CPU from it",
            "allow memfd_create, ftruncate and mmap in the seccomp profile, and check ulimit -f "
            "and the memory limit",
        )
    if machine.descriptors_error is not None:
        yield error(
            "descriptors",
            "descriptors cannot be sent over abstract Unix sockets"
            f"{filtered}: {machine.descriptors_error}; ranks on the CPU map their memory that way",
            "allow Unix sockets in the seccomp and AppArmor profiles of the container",
        )
