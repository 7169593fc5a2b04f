"""Times matrix products and collectives that run at the same time.

    torchrun --standalone --nproc-per-node 2 benchmarks/products.py --json products.json

Two tables. All values are microseconds: medians of the rounds, on the slowest rank. The rounds
alternate between the rows.

- A product of [n, n] x [n, n] in bfloat16 while all-gathers are in flight from before its start to
  after its end, and the time of one of these all-gathers alone: with copy engines, with few thread
  blocks, with all of them, and with PyTorch's backend.
- `collx.nn.allgather_matmul` and `collx.nn.matmul_reducescatter` of [n, n] x [n, n / world size],
  compared with the two steps one after the other, PyTorch's fused operators, and the product alone.

On the CPU, only the second table exists, because no collectives run during a product there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import collx
from collx._bench.cuda_timing import time_in_a_row

Call = Callable[[], Any]


class Clock:
    """Times calls on all ranks at once."""

    def __init__(self, device: torch.device, rounds: int) -> None:
        self.device = device
        self.rounds = rounds

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    def compare(self, calls: dict[str, Call], before: dict[str, Call] | None = None) -> Any:
        """Returns the times of consecutive calls, by name. `before`: functions that are called
        before each call and are not timed."""
        times = 10 if before is None else 1
        seen: dict[str, list[float]] = {name: [] for name in calls}
        for number in range(self.rounds + 2):
            for name, call in calls.items():
                self.synchronize()
                if before is not None:
                    before[name]()
                us = time_in_a_row(call, times, self.device)
                self.synchronize()
                if number > 1:  # the first two rounds are warm-ups
                    seen[name].append(us)
        medians = torch.tensor([statistics.median(seen[name]) for name in calls])
        slowest = medians.to(self.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return {name: round(us, 1) for name, us in zip(calls, slowest.tolist(), strict=True)}


def beside(clock: Clock, n: int, nbytes: int, overlap: collx.Communicator) -> dict[str, Any]:
    """Returns the first table: by row, the times of the product and the all-gather."""
    device, world, rank = clock.device, dist.get_world_size(), dist.get_rank()
    dtype = torch.bfloat16
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(a)
    shard = torch.zeros(nbytes // world, dtype=torch.uint8, device=device)
    whole = torch.empty(shard.numel() * world, dtype=torch.uint8, device=device)
    symmetric = overlap.empty(shard.numel() * world, dtype=torch.uint8)
    own = symmetric[rank * shard.numel() : (rank + 1) * shard.numel()]
    gather = collx.allgather
    gathers: dict[str, Call] = {
        "copy engines, in place": lambda: gather(own, overlap, out=symmetric),
        "copy engines": lambda: gather(shard, overlap, out=symmetric),
        "8 blocks": lambda: gather(shard, out=whole, max_blocks=8),
        "16 blocks": lambda: gather(shard, out=whole, max_blocks=16),
        "all blocks": lambda: gather(shard, out=whole),
        dist.get_backend(): lambda: dist.all_gather_into_tensor(whole, shard),
    }
    alone = clock.compare(gathers)
    multiply: Call = lambda: torch.mm(a, b, out=product)  # noqa: E731
    longest = clock.compare({"product": multiply})["product"]

    def started(name: str) -> Call:
        times = 2 + int(1.5 * longest / alone[name])

        def start() -> None:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(times):
                    gathers[name]()
            # The product starts while the all-gathers run.
            torch.cuda._sleep(100_000)

        return start

    side = torch.cuda.Stream(priority=-1)
    rows = ["alone", *gathers]
    before = {"alone": lambda: None, **{name: started(name) for name in gathers}}
    products = clock.compare(dict.fromkeys(rows, multiply), before)
    return {name: {"product": products[name], "all-gather": alone.get(name)} for name in rows}


def fused(clock: Clock, n: int, communicator: collx.Communicator) -> dict[str, dict[str, float]]:
    """Returns the second table: by operator, the times of the calls."""
    device, world = clock.device, dist.get_world_size()
    dtype = torch.bfloat16
    group = dist.group.WORLD
    assert group is not None

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    x, w = random(n // world, n), random(n, n // world)
    h, v = random(n, n // world), random(n // world, n)
    whole, own = random(n, n), random(n // world, n)
    backend = dist.get_backend()

    def gather_then_multiply() -> torch.Tensor:
        dist.all_gather_into_tensor(whole, x)
        return whole @ w

    def multiply_then_reduce() -> None:
        dist.reduce_scatter_tensor(own, h @ v)

    nn = collx.nn
    gathering: dict[str, Call] = {
        "collx.nn": lambda: nn.allgather_matmul(x, w, communicator),
        "collx, two steps": lambda: collx.allgather(x, communicator) @ w,
        f"{backend}, two steps": gather_then_multiply,
        "product alone": lambda: whole @ w,
    }
    reducing: dict[str, Call] = {
        "collx.nn": lambda: nn.matmul_reducescatter(h, v, communicator),
        "collx, two steps": lambda: collx.reducescatter(h @ v, "sum", communicator),
        f"{backend}, two steps": multiply_then_reduce,
        "product alone": lambda: h @ v,
    }
    if device.type == "cuda":
        name, ops = group.group_name, torch.ops.symm_mem
        gathering["torch, fused"] = lambda: ops.fused_all_gather_matmul(x, [w], 0, name)
        reducing["torch, fused"] = lambda: ops.fused_matmul_reduce_scatter(h, v, "sum", 0, name)
    return {
        "allgather_matmul": clock.compare(gathering),
        "matmul_reducescatter": clock.compare(reducing),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--n", type=int, help="of the matrices; 8192 on CUDA, 512 on the CPU")
    parser.add_argument("--bytes", type=int, help="of the gathered tensor")
    parser.add_argument("--json", type=Path, help="file for the figures")
    given = parser.parse_args()
    cuda = given.device == "cuda" or (given.device == "auto" and torch.cuda.is_available())
    rank = int(os.environ.get("RANK", "0"))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else "cpu"
    device = torch.device(device)
    if cuda:
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    communicator = collx.init(timeout=30)
    overlap = collx.init(name="overlap", overlap=True, timeout=30)
    clock = Clock(device, given.rounds)
    n = given.n or (8192 if cuda else 512)
    nbytes = given.bytes or ((128 << 20) if cuda else (1 << 20))
    figures: dict[str, Any] = {
        "world": dist.get_world_size(),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
        "n": n,
        "bytes": nbytes,
        "fused": fused(clock, n, communicator),
    }
    if cuda:
        figures["beside"] = beside(clock, n, nbytes, overlap)
    if rank == 0:
        report(figures)
        if given.json is not None:
            given.json.write_text(json.dumps(figures, indent=1) + "\n")
    overlap.destroy()
    communicator.destroy()
    dist.destroy_process_group()
    return 0


def report(figures: dict[str, Any]) -> None:
    n, mib = figures["n"], figures["bytes"] / (1 << 20)
    print(f"{figures['world']} ranks, {figures['device']}, microseconds")
    if "beside" in figures:
        print(
            f"\nproduct of [{n}, {n}] x [{n}, {n}] while all-gathers of {mib:g} MiB are in flight"
        )
        alone = figures["beside"]["alone"]["product"]
        print(f"{'all-gather by':<24} {'product':>9} {'slower':>8} {'all-gather alone':>17}")
        for name, row in figures["beside"].items():
            more = f"{(row['product'] / alone - 1) * 100:.1f} %"
            gather = "" if row["all-gather"] is None else f"{row['all-gather']:.1f}"
            print(f"{name:<24} {row['product']:>9.1f} {more:>8} {gather:>17}")
    for name, calls in figures["fused"].items():
        print(f"\n{name}")
        for call, us in calls.items():
            print(f"{call:<24} {us:>9.1f}")


if __name__ == "__main__":
    sys.exit(main())
