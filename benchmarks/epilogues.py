"""Compares collectives without and with an epilogue, alternately in one process, on CPU or GPUs.

    torchrun --nproc-per-node 2 benchmarks/epilogues.py
    torchrun --nproc-per-node 2 benchmarks/epilogues.py --device cpu --sizes 4K,1M

Times all-reduce and reduce-scatter followed by bias and relu, and the fused norm, without
quantization and with FP8, followed by a clamp; in bfloat16, with rows of --hidden. A turn consists
of several calls, on GPUs of several replays of a graph of calls. Prints the microseconds per call
without and with an epilogue (the median of the turns, on the slowest rank), and the ratio.
"""

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import torch
import torch.distributed as dist

import collx
from _shared.devices import start_ranks
from collx._arguments import columns, count, row_counts, size_list
from collx._bench.cuda_timing import capture
from collx._bench.job import GlooRanks
from collx._bench.timing import Turn, calls_of, time_by_turns

Call = partial[Any]
EPS = 1e-6
REPLAYS = 5  # per turn


def parse_arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    p.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    p.add_argument("--sizes", type=size_list, default=[1 << 14, 1 << 16, 1 << 20, 1 << 22, 1 << 24])
    p.add_argument("--rows", type=row_counts, default=[1, 16, 64, 512], help="of the norms")
    p.add_argument("--hidden", type=columns, default=8192)
    p.add_argument("-n", "--iterations", type=count, default=0, help="calls a turn")
    return p.parse_args()


def bias_and_relu(value: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.relu(value + bias)


def clamped(value: torch.Tensor) -> torch.Tensor:
    return value.clamp(-3, 3)


def cases(options: argparse.Namespace, device: torch.device) -> dict[str, tuple[int, Call, Call]]:
    """Returns, by name, the bytes of the input, the call without an epilogue, and that with it."""
    new = partial(torch.randn, device=device, dtype=torch.bfloat16)
    world = dist.get_world_size()
    found: dict[str, tuple[int, Call, Call]] = {}
    for nbytes in options.sizes:
        cols = min(options.hidden, nbytes // 2)
        x, bias = new(nbytes // 2 // cols, cols), new(cols)
        given = {"epilogue": bias_and_relu, "extras": (bias,)}
        call: Call = partial(collx.allreduce, x, out=torch.empty_like(x))
        found[f"allreduce {nbytes}"] = nbytes, call, partial(call, **given)
        if len(x) % world == 0:
            out = torch.empty_like(x[: len(x) // world])
            call = partial(collx.reducescatter, x, out=out)
            found[f"reducescatter {nbytes}"] = nbytes, call, partial(call, **given)
    for rows in options.rows:
        x, weight = new(rows, options.hidden), new(options.hidden)
        for kind in (None, "fp8"):
            call = partial(collx.allreduce_rmsnorm, x, weight, EPS, quantization=kind)
            name = f"rmsnorm, {kind or 'no quantization'}, {rows} rows"
            found[name] = x.nbytes, call, partial(call, epilogue=clamped)
    return found


def turn(run: Call, calls: int, on_gpu: bool) -> Turn:
    if on_gpu:
        return Turn(capture(run, calls, 1).replay)

    def repeat() -> None:
        for _ in range(calls):
            run()

    return Turn(repeat)


def main() -> int:
    options = parse_arguments()
    device, _ = start_ranks(options.device)
    on_gpu = device.type == "cuda"
    ranks = GlooRanks()
    if on_gpu:
        torch.cuda.set_stream(torch.cuda.Stream())
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    # Ranks wait for the compilers of other ranks, which can take minutes on a loaded machine.
    with collx.init(device=device, timeout=300.0):
        for name, (nbytes, plain, mapped) in cases(options, device).items():
            collx.warm_up(mapped.func, *mapped.args, **mapped.keywords)
            calls = calls_of(nbytes, options.iterations)
            turns = {"plain": turn(plain, calls, on_gpu), "mapped": turn(mapped, calls, on_gpu)}
            us = time_by_turns(turns, REPLAYS, ranks, synchronize)
            before, after = us["plain"] / calls, us["mapped"] / calls
            if ranks.rank == 0:
                print(f"{name:36} {before:9.2f} us {after:9.2f} us {after / before:6.3f}x")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
