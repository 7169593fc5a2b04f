"""What a pool of ranks looks like: device, number of ranks, and whether they share a GPU."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

CPU_WORLDS = (1, 2, 3, 4, 8, 16)
MOST_USUAL_RANKS = 3  # without --full, since the C++ tests run 16 ranks as threads
CUDA_WORLDS = (1, 2, 3, 4, 8)

NEEDS_GPU = "needs a GPU"
SHARE_OF_GPU = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"

# COLLX_TEST_MULTICAST=1: the tests of multicast run on the switch of this machine.
HARDWARE = os.environ.get("COLLX_TEST_MULTICAST") == "1"

# Otherwise multicast is never used: machines that share a switch are not ours to configure.
MULTICAST_OFF = {
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
}


@dataclass(frozen=True)
class World:
    """One kind of pool. `gpus` is how many GPUs the ranks are spread over; 0 on CPU."""

    device: str
    size: int
    gpus: int = 0

    @property
    def shared(self) -> bool:
        """Whether several ranks use one GPU."""
        return self.device == "cuda" and self.size > self.gpus

    @property
    def takes_turns(self) -> bool:
        """Whether they do so for some milliseconds each: then a call takes tens of them. CUDA's
        multi-process service, told the share of each rank, lets them run at once."""
        return self.shared and SHARE_OF_GPU not in os.environ

    @property
    def backend(self) -> str:
        """The process group's backend. NCCL refuses two ranks on one GPU."""
        return "gloo" if self.device == "cpu" or self.shared else "cpu:gloo,cuda:nccl"

    def __str__(self) -> str:
        return f"{self.device}{self.size}" + ("shared" if self.shared else "")


def gpu_count() -> int:
    """GPUs of this machine, found without creating a CUDA context here."""
    return torch.cuda.device_count()


def cpu_worlds(sizes: tuple[int, ...] | None, full: bool) -> list[World]:
    """The pools of CPU ranks that a test wants: all sizes, if it does not name any. Without
    `full`, a test that runs in three worlds or more has the small ones of them."""
    wanted = sizes or CPU_WORLDS
    if not full and len(wanted) > 2:
        wanted = tuple(size for size in wanted if size <= MOST_USUAL_RANKS) or wanted
    return [World("cpu", size) for size in wanted]


def cuda_worlds(sizes: tuple[int, ...] | None) -> list[World]:
    """The pools of CUDA ranks that this machine can have, a GPU each where there are enough."""
    gpus = gpu_count()
    wanted = [size for size in sizes or CUDA_WORLDS if size <= max(CUDA_WORLDS)]
    return [World("cuda", size, min(size, gpus)) for size in wanted] if gpus else []


def rank_environment(world: World) -> dict[str, str]:
    """Environment that a rank sets for itself before anything of CUDA or NCCL starts."""
    environment = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    environment.update({} if HARDWARE else MULTICAST_OFF)
    environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    # PyTorch's flight recorder would write a file before a failure is raised, for seconds.
    environment["TORCH_FR_DUMP_ON_TIMEOUT"] = "0"
    if world.shared:
        environment["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    return environment


def seed_from_environment() -> int:
    """The seed of the fuzz tests: COLLX_FUZZ_SEED, or always the same."""
    given = os.environ.get("COLLX_FUZZ_SEED")
    return int(given) if given else 20_240_607
