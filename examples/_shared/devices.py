"""Selects the devices of an example's ranks, and initializes their process group."""

import os

import torch
import torch.distributed as dist

import collx

SHARING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"

# Disables NVLink multicast. PyTorch, NCCL and NVSHMEM read these variables when they set up memory.
for name, value in (
    ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"),
    ("NCCL_NVLS_ENABLE", "0"),
    ("NVSHMEM_DISABLE_NVLS", "1"),
):
    os.environ.setdefault(name, value)


def usable_gpus(wanted: str) -> int:
    """Returns the number of GPUs that collx can use: 0 if it was built without CUDA kernels, with a
    message. Raises SystemExit in that case if `wanted` is "cuda"."""
    gpus = torch.cuda.device_count()
    if collx.cuda_built or gpus == 0 or wanted == "cpu":
        return gpus
    text = (
        f"collx was built without CUDA kernels, so its ranks cannot use the {gpus} GPUs here "
        "(build it where nvcc is found)"
    )
    if wanted == "cuda":
        raise SystemExit(f"--device cuda: {text}")
    if os.environ["LOCAL_RANK"] == "0":
        print(f"{text}: running on the CPU")
    return 0


def start_ranks(wanted: str) -> tuple[torch.device, str]:
    """Joins the process group. Returns this rank's device and the backend of the group."""
    ranks_here, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), usable_gpus(wanted)
    if wanted == "cpu" or (wanted == "auto" and gpus < ranks_here):
        torch.set_num_threads(1)  # the ranks are the parallelism
        dist.init_process_group("gloo")
        return torch.device("cpu"), "gloo"
    if gpus == 0:
        raise SystemExit("--device cuda: there is no GPU here")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % gpus)
    shared = gpus < ranks_here
    if shared:
        os.environ.setdefault(SHARING, "1")
    torch.cuda.set_device(device)
    if shared:
        dist.init_process_group("gloo")
        return device, "gloo"
    dist.init_process_group("nccl", device_id=device)
    return device, "nccl"


def largest(value: float, device: torch.device, backend: str) -> float:
    """Returns the maximum over the ranks."""
    result = torch.tensor(value, dtype=torch.float64, device=device if backend == "nccl" else "cpu")
    dist.all_reduce(result, dist.ReduceOp.MAX)
    return result.item()
