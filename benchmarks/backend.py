"""Compares the torch.distributed backend "collx" with PyTorch's backend for the device.

    torchrun --standalone --nproc-per-node 2 benchmarks/backend.py --json backend.json

Both groups have the same ranks, and each measurement alternates between them. Two tables:

- The time of a call in microseconds, by size, for `all_reduce`, `all_gather_into_tensor` and
  `reduce_scatter_tensor`: consecutive synchronous calls, timed on the device of each rank (on the
  CPU, on the host). The table has the median of the rounds on the slowest rank. The size is that of
  the full tensor.
- The host time of a call of `all_reduce` on 16 elements, on a group of one rank: the backend;
  PyTorch's fake backend, which does nothing; only the operator of collx; the other backend. The
  first minus the second and third is the overhead of the backend itself.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import collx
import collx.backend
from collx._bench.cuda_timing import time_in_a_row

SIZES = tuple(1 << power for power in range(10, 28))
COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")


def call_of(name: str, nbytes: int, device: torch.device) -> Callable[[Any], None]:
    """Returns the collective on bfloat16 tensors as a function of the group."""
    whole = torch.zeros(nbytes // 2, dtype=torch.bfloat16, device=device)
    part = torch.zeros(nbytes // 2 // dist.get_world_size(), dtype=torch.bfloat16, device=device)
    if name == "all_reduce":
        return lambda group: dist.all_reduce(whole, group=group)
    if name == "all_gather_into_tensor":
        return lambda group: dist.all_gather_into_tensor(whole, part, group=group)
    return lambda group: dist.reduce_scatter_tensor(part, whole, group=group)


def by_size(groups: dict[str, Any], device: torch.device, rounds: int) -> list[dict[str, Any]]:
    rows = []
    gloo = dist.group.WORLD
    for name in COLLECTIVES:
        for nbytes in SIZES if device.type == "cuda" else SIZES[:15]:
            call = call_of(name, nbytes, device)
            times = max(5, min(200, (256 << 20) // nbytes // (1 if device.type == "cuda" else 16)))
            seen: dict[str, list[float]] = {backend: [] for backend in groups}
            for number in range(rounds + 1):
                for backend, group in groups.items():
                    dist.barrier(group=gloo)
                    us = time_in_a_row(lambda: call(group), times, device)  # noqa: B023
                    if number > 0:  # the first round is a warm-up
                        seen[backend].append(us)
            measured = [statistics.median(seen[backend]) for backend in groups]
            slowest = torch.tensor(measured, dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=gloo)
            us_of = dict(zip(groups, slowest.tolist(), strict=True))
            rows.append({"collective": name, "bytes": nbytes, **us_of})
    return rows


def host_times(device: torch.device, other: str) -> dict[str, float]:
    """Measures the host times. Collective, because all ranks create the group of each rank."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers "fake"

    alone = [[rank] for rank in range(dist.get_world_size())]
    groups = {
        name: [dist.new_group(ranks, backend=name) for ranks in alone][dist.get_rank()]
        for name in ("collx", "fake", other)
    }
    x = torch.zeros(16, device=device)
    calls: dict[str, Callable[[], None]] = {
        name: lambda group=group: dist.all_reduce(x, group=group)  # type: ignore[misc]
        for name, group in groups.items()
    }
    calls["collx"]()  # creates the communicator
    name = collx.get(groups["collx"]).name
    operator = torch.ops.collx.allreduce_.default
    calls["operator"] = lambda: operator(x, "sum", name)
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(9):
        for what, call in calls.items():
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            began = time.perf_counter()
            for _ in range(500):
                call()
            best[what] = min(best[what], (time.perf_counter() - began) / 500 * 1e6)
    return best


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--max-blocks", type=int, help="of the backend; by default its own")
    parser.add_argument("--payload-bytes", type=int, help="likewise")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    kind = asked.device or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    other = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group("gloo")
    options = collx.backend.Options(max_blocks=asked.max_blocks, payload_bytes=asked.payload_bytes)
    groups = {
        "collx": dist.new_group(backend="collx", pg_options=options),
        other: dist.new_group(backend=other),
    }
    rows = by_size(groups, device, asked.rounds)
    host = host_times(device, other)
    if dist.get_rank() == 0:
        for row in rows:
            print(
                f"{row['collective']:24} {row['bytes']:>11} B  collx {row['collx']:9.2f} us  "
                f"{other} {row[other]:9.2f} us  {row[other] / row['collx']:6.2f} times"
            )
        own = host["collx"] - host["fake"] - host["operator"]
        print("host time, us: " + ", ".join(f"{k} {v:.2f}" for k, v in host.items()))
        print(f"of the backend itself: {own:.2f} us")
        if asked.json is not None:
            asked.json.write_text(json.dumps({"rows": rows, "host": host}, indent=1) + "\n")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
