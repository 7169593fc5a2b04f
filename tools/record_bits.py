"""Writes hashes of the results of every operator with every algorithm and dtype, one per line.

    torchrun --standalone --nproc-per-node 2 tools/record_bits.py --device cuda before.txt

Two builds or two devices that compute the same bits write the same file, so `diff` compares them.
Inputs are derived from a seed: random bits, including NaNs, with lengths around and above the
borders of vectors, tiles and chunks. All NaNs of a reduction count as equal, since their bits may
differ between devices and algorithms. --short uses one dtype and few lengths. This is sufficient
for a checker to run the code of every kernel. With --offset, tensors begin at other addresses than
allocations, which must not change the bits. Without PyTorch's cache of device memory, the checker
detects each access past the end of an ordinary tensor. With the first variable, any number of ranks
may share a GPU.

    TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 PYTORCH_NO_CUDA_MEMORY_CACHING=1 \\
        compute-sanitizer --target-processes all torchrun --standalone --nproc-per-node 4 \\
        tools/record_bits.py --device cuda --short --offset 1 a.txt
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import collx
from collx._extension import extension

DTYPES = ("float32", "float16", "bfloat16", "float64", "int32", "int64", "int8", "uint8")
NORMALIZED = DTYPES[:3]
LENGTHS = (5, 4096, 100_003, 3 << 20)  # elements
SHORT = (5, 4096, 100_003)
PAYLOAD_BYTES = 8 << 20  # small, so that the longest calls are divided into chunks

Call = Callable[..., Any]
OPS: dict[str, tuple[Call, bool]] = {  # the call, and whether it has a reduce op
    "allreduce": (lambda x, o, **k: collx.allreduce(x, o, **k), True),
    "reducescatter": (lambda x, o, **k: collx.reducescatter(x, o, **k), True),
    "reduce": (lambda x, o, **k: collx.reduce(x, o, 1, **k), True),
    "allgather": (lambda x, o, **k: collx.allgather(x, **k), False),
    "broadcast": (lambda x, o, **k: collx.broadcast(x, 1, **k), False),
    "gather": (lambda x, o, **k: collx.gather(x, 1, **k), False),
    "scatter": (lambda x, o, **k: collx.scatter(x, 1, **k), False),
    "alltoall": (lambda x, o, **k: collx.alltoall(x, **k), False),
}
SPLITS: dict[str, Callable[[int, int, int], int]] = {  # about n rows from one rank to another
    "even": lambda n, sender, receiver: n,
    "uneven": lambda n, sender, receiver: n * (1 + sender + 2 * receiver) // 3,
    "zeros": lambda n, sender, receiver: n if sender <= receiver else 0,
}
NORMS: dict[str, dict[str, Any]] = {
    "none": {},
    "parity": {"rounding": "parity_weight"},
    "fp8": {"quantization": collx.Quantization("fp8")},
    "int8": {"quantization": collx.Quantization("int8"), "keep_norm": True},
}


def random_bits(dtype: torch.dtype, length: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = (length * dtype.itemsize,)
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=generator).view(dtype)


def digest(results: Any) -> str:
    found = hashlib.sha256()
    for result in results if isinstance(results, tuple) else (results,):
        if result.dtype in (torch.float64, *(getattr(torch, name) for name in NORMALIZED)):
            result = result.masked_fill(result.isnan(), torch.nan)
        found.update(result.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()[:16]


def empty(
    length: int, dtype: torch.dtype, device: torch.device, symmetric: bool, offset: int
) -> torch.Tensor:
    """Returns a tensor that begins `offset` elements after its allocation, and ends with it."""
    if symmetric:
        return collx.empty(length + offset, dtype=dtype)[offset:]
    return torch.empty(length + offset, dtype=dtype, device=device)[offset:]


def collectives(
    rank: int,
    world: int,
    device: torch.device,
    lengths: Sequence[int],
    dtypes: Sequence[str],
    offset: int,
) -> Iterator[tuple[str, str]]:
    for op, (call, reduces) in OPS.items():
        for name in dtypes if reduces else ("uint8", "int64"):
            dtype = getattr(torch, name)
            whole = [o for o in ("sum", "max", "prod") if reduces] or [""]
            for length in lengths:
                # Operators that accept any length use it unchanged.
                n = (
                    length
                    if op in ("allreduce", "reduce", "broadcast")
                    else length // world * world
                )
                given = random_bits(dtype, n, 1000 * rank + length)
                for symmetric in (False, True):
                    x = empty(n, dtype, device, symmetric, offset).copy_(given)
                    for algorithm in ("auto", *extension.algorithms(op)):
                        for which in whole:
                            out = None
                            if symmetric:
                                made = call(x, which, algorithm="fallback")
                                out = empty(made.numel(), dtype, device, True, offset)
                                out = out.view(made.shape).zero_()
                            elif algorithm in ("direct", "pull_push", "copy_engine"):
                                continue
                            result = call(x, which, algorithm=algorithm, out=out)
                            what = f"{op} {algorithm} {name} {n} {which} {int(symmetric)}"
                            yield what, digest(result)


def alltoallv(
    rank: int, world: int, device: torch.device, lengths: Sequence[int], offset: int
) -> Iterator[tuple[str, str]]:
    for name in ("uint8", "int64"):
        dtype = getattr(torch, name)
        for length in lengths:
            for kind, rows in SPLITS.items():
                n = -(-length // world)
                sent = [rows(n, rank, peer) for peer in range(world)]
                received = [rows(n, peer, rank) for peer in range(world)]
                x = empty(sum(sent), dtype, device, False, offset)
                x.copy_(random_bits(dtype, sum(sent), 1000 * rank + length))
                on_device = torch.tensor(sent, device=device)
                arrived = torch.empty_like(on_device)
                rows_here, capacity = sum(received), sum(received) + 3
                room = empty(n * world**2 + 3, dtype, device, True, offset)
                for algorithm in ("auto", *extension.algorithms("alltoallv")):
                    what = f"alltoallv {algorithm} {name} {n} {kind}"
                    direct = algorithm == "direct"
                    out = room[:rows_here] if direct else None
                    result = collx.alltoallv(x, received, sent, algorithm=algorithm, out=out)
                    yield f"{what} host", digest(result)
                    results = collx.alltoallv(
                        x,
                        arrived if direct else None,
                        device_splits=on_device,
                        capacity=capacity,
                        out=room[:capacity] if direct else None,
                        algorithm=algorithm,
                    )
                    yield f"{what} device", digest(results)


def norms(rank: int, device: torch.device, dtypes: Sequence[str]) -> Iterator[tuple[str, str]]:
    for name in [name for name in NORMALIZED if name in dtypes]:
        dtype = getattr(torch, name)
        for rows, cols in ((1, 64), (7, 1000), (130, 8192)):
            generator = torch.Generator().manual_seed(rank)
            x = torch.randn(rows, cols, generator=generator).to(dtype).to(device)
            generator.manual_seed(99)
            residual = torch.randn(rows, cols, generator=generator).to(dtype).to(device)
            weight = torch.randn(cols, generator=generator).to(dtype).to(device)
            for kind, options in NORMS.items():
                for algorithm in ("auto", *extension.algorithms("allreduce_residual_rmsnorm")):
                    result = collx.allreduce_rmsnorm(
                        x, weight, 1e-6, residual=residual, algorithm=algorithm, **options
                    )
                    yield f"norm {algorithm} {name} {rows}x{cols} {kind}", digest(result)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, help="each rank writes FILE.RANK")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--short", action="store_true", help="one dtype, few lengths")
    parser.add_argument("--offset", type=int, default=0, help="elements; not for norms (0)")
    asked = parser.parse_args()
    lengths, dtypes = (SHORT, ("bfloat16",)) if asked.short else (LENGTHS, DTYPES)
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu")
    if asked.device == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # does not add in the order of the ranks
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    with (
        collx.init(device=device, payload_bytes=PAYLOAD_BYTES),
        asked.file.with_suffix(f".{rank}").open("w") as file,
    ):
        for found in (
            collectives(rank, world, device, lengths, dtypes, asked.offset),
            alltoallv(rank, world, device, lengths, asked.offset),
            norms(rank, device, dtypes),
        ):
            for what, bits in found:
                file.write(f"{bits} {what}\n")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
