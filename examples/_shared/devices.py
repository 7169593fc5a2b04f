"""Which GPUs the ranks of an example can have."""

import os

import torch

import collx


def usable_gpus(wanted: str) -> int:
    """How many GPUs collx can use here: none where it was built without its CUDA kernels, which is
    said. Raises SystemExit when `wanted` is "cuda" all the same."""
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
