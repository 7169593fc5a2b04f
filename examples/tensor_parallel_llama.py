"""Greedy decoding by a Llama that is split over ranks, with all-reduce, residual and norm fused.

    torchrun --nproc-per-node 2 examples/tensor_parallel_llama.py

Attention heads and MLPs are split. Behind each, twice a layer, the ranks' products are added up,
the residual is added and the sum is normalized: one operator of collx here, beside the same in
three steps over collx and over torch.distributed. Weights are random, from a seed.

Exits with 1 when a check fails: the fused model chooses the tokens of the unfused one in --dtype,
and in float32 those of the unsplit model of transformers. On GPUs a decoding step is timed in a
CUDA graph, too. Ranks that share a GPU (--device cuda with fewer GPUs than ranks) meet through
gloo.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read by transformers when it is imported

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaForCausalLM

import collx
from _shared import llama
from _shared.devices import usable_gpus

LOGITS = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""How far logits may differ, as a share of the largest one."""

SHARING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


def parse_arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    p.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    p.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    sizes = {
        "seed": (0, "of weights and prompts"),
        "layers": (4, ""),
        "hidden-size": (512, ""),
        "intermediate-size": (1408, "units of an MLP"),
        "heads": (8, "of queries"),
        "kv-heads": (4, "of keys and values; at least one a rank"),
        "vocabulary": (2048, "tokens"),
        "batch-size": (4, "prompts"),
        "prompt": (16, "tokens of a prompt"),
        "tokens": (32, "to add to each prompt"),
        "rounds": (3, "timed passes"),
    }
    for name, (default, text) in sizes.items():
        p.add_argument(f"--{name}", type=int, default=default, help=f"{text} ({default})".strip())
    arguments = p.parse_args()
    if "LOCAL_RANK" not in os.environ:
        p.error("start the ranks with torchrun: torchrun --nproc-per-node 2 " + sys.argv[0])
    least = {name.replace("-", "_"): 1 for name in sizes} | {"seed": 0, "tokens": 2}
    for name, smallest in least.items():
        if getattr(arguments, name) < smallest:
            p.error(f"--{name.replace('_', '-')} is at least {smallest}")
    if arguments.heads % arguments.kv_heads or arguments.hidden_size % (2 * arguments.heads):
        p.error("--kv-heads must divide --heads, and twice --heads --hidden-size")
    return arguments


def start_ranks(wanted: str) -> tuple[torch.device, str]:
    """This rank's device, and the backend of the process group that it has joined."""
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
    """The largest of the ranks' values."""
    result = torch.tensor(value, dtype=torch.float64, device=device if backend == "nccl" else "cpu")
    dist.all_reduce(result, dist.ReduceOp.MAX)
    return result.item()


def ways(comm: collx.Communicator, backend: str) -> dict[str, llama.MakeNorm]:
    """What makes a norm of the split model from one of the unsplit model."""

    def fused(norm: nn.Module) -> nn.Module:
        return collx.nn.TensorParallelRMSNorm.from_module(
            norm, group=comm, rounding="parity_weight"
        )

    def over_torch(x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    over_collx = partial(collx.allreduce, reduce_op="sum", group=comm)
    return {
        "collx, fused": fused,
        "collx, unfused": lambda norm: llama.UnfusedNorm(norm, over_collx),
        f"{backend}, unfused": lambda norm: llama.UnfusedNorm(norm, over_torch),
    }


def decode(greedy: llama.Greedy, count: int, step: Callable[[], object]) -> float:
    """Seconds of all tokens but the first, which comes with the prompt."""
    synchronize = torch.cuda.synchronize if greedy.tokens.is_cuda else lambda: None
    greedy.begin()
    synchronize()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(count - 1):
        step()
    synchronize()
    return time.perf_counter() - start


def captured(greedy: llama.Greedy) -> torch.cuda.CUDAGraph:
    """A decoding step as a CUDA graph; behind a pass that was not captured."""
    greedy.begin()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        greedy.step()
    return graph


class Checks:
    """What was compared, on this rank and on all."""

    def __init__(self, device: torch.device, backend: str) -> None:
        self._largest = partial(largest, device=device, backend=backend)
        self.good = True

    def add(self, what: str, got: llama.Greedy, tokens: Tensor, logits: Tensor) -> None:
        """Compares what was decoded with expected tokens and last logits, on all ranks."""
        wrong = self._largest((got.answer != tokens).sum().item())
        scale = logits.abs().max().clamp(min=1e-30)
        off = ((got.logits - logits).abs().max() / scale).nan_to_num(nan=float("inf"))
        difference, bound = self._largest(off.item()), LOGITS[logits.dtype]
        fine = wrong == 0 and difference <= bound
        self.good = self.good and fine
        if dist.get_rank() == 0:
            print(
                f"  {'ok' if fine else 'WRONG':5}  {what}: {wrong:.0f} of {tokens.numel()} tokens"
                f" differ, logits by {difference:.1e} of the largest (at most {bound:.0e})"
            )


def check_float32(
    full: LlamaForCausalLM,
    shard: llama.Shard,
    fused: llama.MakeNorm,
    prompts: Tensor,
    count: int,
    checks: Checks,
) -> None:
    greedy = llama.Greedy(llama.Decoder(shard, fused), prompts, count)
    decode(greedy, count, greedy.step)
    expected = llama.greedy_of_transformers(full, prompts, count)
    checks.add("fused against the unsplit model of transformers, float32", greedy, *expected)


def measure(
    decoders: dict[str, llama.Greedy], arguments: argparse.Namespace, checks: Checks
) -> dict[str, list[float]]:
    """Seconds of each pass, by name, after one to warm up, whose tokens are compared."""
    count = arguments.tokens
    for greedy in decoders.values():
        decode(greedy, count, greedy.step)
    fused, unfused, *_ = decoders.values()
    what = f"fused against unfused, {arguments.dtype}"
    checks.add(what, fused, unfused.answer, unfused.logits)
    steps: dict[str, tuple[llama.Greedy, Callable[[], object]]] = {
        name: (greedy, greedy.step) for name, greedy in decoders.items()
    }
    if fused.tokens.is_cuda:
        for name, greedy in decoders.items():
            if not name.startswith("gloo"):  # which works on the host
                steps[f"{name}, CUDA graph"] = greedy, captured(greedy).replay
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(arguments.rounds):
        for name, (greedy, step) in steps.items():
            seconds[name].append(decode(greedy, count, step))
            if name == "collx, fused, CUDA graph" and len(seconds[name]) == 1:
                checks.add(f"{name}, against unfused", greedy, unfused.answer, unfused.logits)
    return seconds


@torch.no_grad()
def main() -> int:
    arguments = parse_arguments()
    device, backend = start_ranks(arguments.device)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    size = llama.Size(
        vocabulary=arguments.vocabulary,
        hidden=arguments.hidden_size,
        intermediate=arguments.intermediate_size,
        layers=arguments.layers,
        heads=arguments.heads,
        kv_heads=arguments.kv_heads,
        length=arguments.prompt + arguments.tokens,
    )
    if world_size > size.kv_heads:
        raise SystemExit(f"--kv-heads: {size.kv_heads} cannot be split over {world_size} ranks")
    torch.backends.cuda.matmul.allow_tf32 = False  # float32 means float32 here
    full: Any = llama.seeded(size, arguments.seed)
    shape = (arguments.batch_size, arguments.prompt)
    prompts = torch.randint(size.vocabulary, shape).to(device)
    full.to(device)
    dtype = getattr(torch, arguments.dtype)

    with collx.init(device=device) as comm:
        made = ways(comm, backend)
        shard = llama.Shard(full, size, arguments.batch_size, world_size, rank).to(device)
        checks = Checks(device, backend)
        if rank == 0:
            print(f"{world_size} ranks on {device.type}, {size.layers} layers of {size.hidden}")
        check_float32(full, shard, made["collx, fused"], prompts, arguments.tokens, checks)
        shard.to(dtype)
        for norm in [shard.first_norm, *shard.norms]:
            norm.to(dtype)
        decoders = {
            name: llama.Greedy(llama.Decoder(shard, make), prompts, arguments.tokens)
            for name, make in made.items()
        }
        seconds = measure(decoders, arguments, checks)

    rates = {}
    for name, passes in seconds.items():
        slowest = largest(statistics.median(passes), device, backend)
        rates[name] = arguments.batch_size * (arguments.tokens - 1) / slowest
    if rank == 0:
        print(f"\ntokens a second of {arguments.batch_size} prompts at once, {arguments.dtype}:")
        for name, rate in rates.items():
            print(f"  {name:28} {rate:10.0f}")
        first = " ".join(map(str, decoders["collx, fused"].answer[0, :12].tolist()))
        print(f"\nfirst tokens of the first answer: {first}")
    dist.destroy_process_group()
    return 0 if checks.good else 1


if __name__ == "__main__":
    sys.exit(main())
