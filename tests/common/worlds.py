"""Describes pools of ranks: device, number of ranks, and whether they share a GPU."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

CPU_WORLDS = (1, 2, 3, 4, 8, 16)
MOST_USUAL_RANKS = 3  # without --full, because the C++ tests run 16 ranks as threads
CUDA_WORLDS = (1, 2, 3, 4, 8)

NEEDS_GPU = "needs a GPU"
SHARE_OF_GPU = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"

# COLLX_TEST_MULTICAST=1 runs the multicast tests on the switch of this machine.
HARDWARE = os.environ.get("COLLX_TEST_MULTICAST") == "1"

# Otherwise multicast is never used, because tests must not configure a shared switch.
MULTICAST_OFF = {
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
}


@dataclass(frozen=True)
class World:
    """A kind of pool. `gpus` is the number of GPUs for the ranks; 0 on the CPU."""

    device: str
    size: int
    gpus: int = 0

    @property
    def shared(self) -> bool:
        """Whether several ranks use one GPU."""
        return self.device == "cuda" and self.size > self.gpus

    @property
    def takes_turns(self) -> bool:
        """Whether ranks share a GPU by time slices of some milliseconds, so that a call takes tens
        of milliseconds. CUDA's Multi-Process Service runs them concurrently if it is configured
        with the share of each rank."""
        return self.shared and SHARE_OF_GPU not in os.environ

    @property
    def backend(self) -> str:
        """The backend of the process group. NCCL does not support two ranks on one GPU."""
        return "gloo" if self.device == "cpu" or self.shared else "cpu:gloo,cuda:nccl"

    def __str__(self) -> str:
        return f"{self.device}{self.size}" + ("shared" if self.shared else "")


def gpu_count() -> int:
    """Returns the number of GPUs without creating a CUDA context."""
    return torch.cuda.device_count()


def cpu_worlds(sizes: tuple[int, ...] | None, full: bool) -> list[World]:
    """Returns the pools of CPU ranks for a test: those of `sizes`, or all. Without `full`, a test
    with three or more worlds only uses the small ones."""
    wanted = sizes or CPU_WORLDS
    if not full and len(wanted) > 2:
        wanted = tuple(size for size in wanted if size <= MOST_USUAL_RANKS) or wanted
    return [World("cpu", size) for size in wanted]


def cuda_worlds(sizes: tuple[int, ...] | None) -> list[World]:
    """Returns the pools of CUDA ranks that this machine supports. Each rank has its own GPU if
    there are enough."""
    gpus = gpu_count()
    wanted = [size for size in sizes or CUDA_WORLDS if size <= max(CUDA_WORLDS)]
    return [World("cuda", size, min(size, gpus)) for size in wanted] if gpus else []


def rank_environment(world: World) -> dict[str, str]:
    """Returns the environment variables that a rank sets before CUDA or NCCL is initialized."""
    environment = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    environment.update({} if HARDWARE else MULTICAST_OFF)
    # Otherwise PyTorch's flight recorder writes a file for seconds before it raises a failure.
    environment["TORCH_FR_DUMP_ON_TIMEOUT"] = "0"
    if world.shared:
        environment["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    return environment


def seed_from_environment() -> int:
    """Returns the seed of the fuzz tests: COLLX_FUZZ_SEED, or a fixed seed."""
    given = os.environ.get("COLLX_FUZZ_SEED")
    return int(given) if given else 20_240_607
