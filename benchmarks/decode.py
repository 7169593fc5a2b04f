"""Times a decoding step of a compiled Llama that is split over ranks, with collx and its peers.

    torchrun --nproc-per-node 2 benchmarks/decode.py --rows 1,16,64
    torchrun --nproc-per-node 2 benchmarks/decode.py --device cpu --mode eager --hidden 64 --rows 2

The model is that of examples/tensor_parallel_llama.py, with random weights. After each attention
and each MLP, the products of the ranks are summed, the residual is added and the sum is normalized.
The implementations only differ in these steps. "rewritten" is a model that calls PyTorch's
functional all_reduce and is compiled with collx's backend; all others are compiled by Inductor.
--mode graph captures each compiled step in one CUDA graph, for all implementations; the other modes
are those of Inductor.

Prints the microseconds per step (the median of alternating turns, on the slowest rank), the ratio
to the fastest peer, and the difference of the logits from those of the uncompiled model with collx,
relative to the largest logit. Exits with 1 if the difference exceeds 5e-2.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from transformers import LlamaForCausalLM

import collx
from _shared import llama
from _shared.devices import start_ranks
from collx._arguments import columns, row_counts
from collx._bench.functional_peers import SumAndNorm, all_reduces, fused_norms
from collx._bench.job import Case, GlooRanks, Job
from collx._bench.ops import OPS
from collx._bench.timing import UNTIMED_STEPS, Turn, time_by_turns

MODES = ("graph", "reduce-overhead", "default", "max-autotune-no-cudagraphs", "eager")
FAR = 5e-2
LENGTH, POSITION = 64, 40  # length of the caches, and position of the step

Run = Callable[[], Tensor]


class Way(NamedTuple):
    """The sums and norms of an implementation."""

    make_norm: llama.MakeNorm
    backend: Any = "inductor"
    captured: Callable[[], None] | None = None  # called between capture and first replay


class PeerNorm(nn.Module):
    """A norm of the model that calls a fused kernel of another library."""

    def __init__(self, norm: nn.Module, kernel: SumAndNorm) -> None:
        super().__init__()
        self.weight = norm.get_parameter("weight")
        self.eps: Any = norm.variance_epsilon
        self.kernel = kernel

    def forward(self, product: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return self.kernel(product, residual, self.weight, self.eps)


def parse_arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    p.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    p.add_argument("--mode", choices=MODES, default=MODES[0], help="how steps are compiled")
    p.add_argument("--rows", type=row_counts, default=[1, 16, 64], help="sequences at once")
    p.add_argument("--hidden", type=columns, default=8192)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--steps", type=int, default=20, help="in a turn")
    return p.parse_args()


def implementations(case: Case, options: argparse.Namespace) -> dict[str, Way]:
    comm = case.job.comm
    plain = partial(functional.all_reduce, reduceOp="sum", group=case.job.group)

    def fused(norm: nn.Module) -> nn.Module:
        return collx.nn.TensorParallelRMSNorm.from_module(
            norm, group=comm, rounding="parity_weight"
        )

    def unfused(all_reduce: Callable[[Tensor], Tensor]) -> llama.MakeNorm:
        return lambda norm: llama.UnfusedNorm(norm, all_reduce)

    of_collx = partial(collx.allreduce, reduce_op="sum", group=comm)
    found = {
        "collx, fused": Way(fused),
        "collx, rewritten": Way(unfused(plain), collx.compile.backend),
        "collx, unfused": Way(unfused(of_collx)),
        case.job.group.name(): Way(unfused(plain)),
    }
    # Inductor's CUDA graphs do not support code that keeps tensors of their pool, such as these
    # launchers.
    if options.device == "cuda" and options.mode != "reduce-overhead":
        sums, captured = all_reduces(case)
        for name, all_reduce in sums.items():
            found[name] = Way(unfused(all_reduce), captured=captured if name == "vllm" else None)
        for name, kernel in fused_norms(case).items():
            found[f"{name}, fused"] = Way(partial(PeerNorm, kernel=kernel))
    if options.mode == "eager":
        del found["collx, rewritten"]
    return found


def prepared(way: Way, shard: llama.Shard, mode: str, given: tuple[Tensor, Tensor]) -> Run:
    """Returns a step that has been run once."""
    run: Callable[..., Tensor] = llama.Decoder(shard, way.make_norm)
    if mode != "eager":
        own = "default" if mode == "graph" else mode
        run = torch.compile(run, fullgraph=True, dynamic=False, mode=own, backend=way.backend)

    def step() -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return run(*given)

    for _ in range(UNTIMED_STEPS):
        step()
    if mode != "graph":
        return step
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = run(*given)
    if way.captured is not None:
        way.captured()

    def replay() -> Tensor:
        graph.replay()
        return logits

    return replay


def measure(
    job: Job,
    ways: dict[str, Way],
    full: LlamaForCausalLM,
    size: llama.Size,
    rows: int,
    options: argparse.Namespace,
) -> bool:
    """Measures all implementations with a number of rows. Returns whether the logits are
    correct."""
    torch._dynamo.config.recompile_limit = 64  # one for each implementation
    shard = llama.Shard(full, size, rows, job.ranks.world, job.ranks.rank)
    shard.to(job.device, job.dtype)
    ids = torch.arange(rows, device=job.device)[:, None] % size.vocabulary
    position = torch.tensor([POSITION], device=job.device)
    reference = llama.Decoder(shard, ways["collx, unfused"].make_norm)(ids, position)
    steps: dict[str, Run] = {}
    far: dict[str, float] = {}
    for name, way in ways.items():
        outcome = job.ranks.attempt(partial(prepared, way, shard, options.mode, (ids, position)))
        if outcome.error is not None:
            show(job, f"{name}: left out, {outcome.error}")
            continue
        steps[name] = outcome.unwrap()
        own = (steps[name]() - reference).abs().max() / reference.abs().max()
        [far[name]] = job.ranks.maximum([own.item()])
    turns = {name: Turn(step) for name, step in steps.items()}
    us = time_by_turns(turns, options.steps, job.ranks, job.synchronize)
    fastest = min(time for name, time in us.items() if not name.startswith("collx"))
    show(job, f"\n{rows} rows of {size.hidden}, {size.layers} layers, {job.ranks.world} ranks")
    for name, time_of_one in us.items():
        ratio = f"{fastest / time_of_one:8.3f}x"
        show(job, f"  {name:34} {time_of_one:10.1f} us {ratio} {far[name]:10.1e}")
    torch._dynamo.reset()  # NCCL does not shut down while graphs of its calls exist
    return max(far.values()) <= FAR


def show(job: Job, text: str) -> None:
    if job.ranks.rank == 0:
        print(text, flush=True)


@torch.no_grad()
def main() -> int:
    options = parse_arguments()
    device, _ = start_ranks(options.device)
    on_gpu = device.type == "cuda"
    heads = max(dist.get_world_size(), options.hidden // 128)
    size = llama.Size(
        vocabulary=2048,
        hidden=options.hidden,
        intermediate=options.hidden * 7 // 2,
        layers=options.layers,
        heads=heads,
        kv_heads=max(dist.get_world_size(), heads // 8),
        length=LENGTH,
    )
    with device:
        full: Any = llama.seeded(size, 0)
        full.to(torch.bfloat16)
    with collx.init(device=device) as comm:
        job = Job(
            reduce_op="sum",
            root=0,
            dtype=torch.bfloat16,
            device=device,
            group=comm.group,
            ranks=GlooRanks(),
            comm=comm,
            init_seconds=0.0,
            has_nccl=on_gpu,
            cols=options.hidden,
            rounding="parity_weight",
            max_bytes=max(options.rows) * options.hidden * 2,
        )
        ways = implementations(Case(job, OPS["allreduce"], job.max_bytes), options)
        good = [measure(job, ways, full, size, rows, options) for rows in options.rows]
    dist.destroy_process_group()
    return int(not all(good))


if __name__ == "__main__":
    sys.exit(main())
