"""Times unchanged models of other libraries with the collectives of the process group and of collx.

    torchrun --nproc-per-node 2 benchmarks/models.py
    torchrun --nproc-per-node 2 benchmarks/models.py --device cpu --hidden 64 --rows 2 --no-compile

The models are those of transformers that from_pretrained splits (tp_plan="auto"), blocks that
DTensor's parallelize_module splits, and a training step of blocks that FSDP2 shards. They run in
eager mode without changes and with collx.patch, and compiled by Inductor and with backend="collx".
Weights are random. Prints the microseconds per step (the median of alternating turns, on the
slowest rank), and the time of the process group divided by that of collx.
"""

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # transformers reads it at import
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import collx
from _shared.devices import start_ranks
from collx._arguments import columns, count
from collx._bench.job import GlooRanks
from collx._bench.timing import Turn, time_by_turns

KINDS = ("Llama", "Gemma", "Mixtral")
SUBJECTS = (*KINDS, "DTensor", "FSDP2")
HEAD = 64
BLOCKS = 4

Step = Callable[[], object]


class Block(nn.Module):
    """A residual block that tensor-parallel plans can split."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = nn.functional.silu(self.up(self.norm(x)))
        hidden = self.down(hidden)
        return x + hidden


def blocks(hidden: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(hidden) for _ in range(BLOCKS)))


def of_transformers(kind: str, options: argparse.Namespace, mesh: DeviceMesh) -> nn.Module:
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=2048,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 7 // 2,
        num_hidden_layers=BLOCKS,
        num_attention_heads=options.hidden // HEAD * 2,
        num_key_value_heads=2,
        head_dim=HEAD,
        max_position_embeddings=256,
        **({"num_local_experts": 4} if kind == "Mixtral" else {}),
    )
    box: list[Any] = [None]
    with TemporaryDirectory() as folder:
        if mesh.get_rank() == 0:
            torch.manual_seed(0)
            whole = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            whole.save_pretrained(folder)
            box = [folder]
        dist.broadcast_object_list(box)
        load = transformers.AutoModelForCausalLM.from_pretrained
        model: nn.Module = load(box[0], tp_plan="auto", dtype=torch.bfloat16).eval()
        dist.barrier()
    return model


def parallelized(options: argparse.Namespace, mesh: DeviceMesh) -> nn.Module:
    model = blocks(options.hidden).to(mesh.device_type, torch.bfloat16)
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def sharded(options: argparse.Namespace, mesh: DeviceMesh, compiled: bool) -> nn.Module:
    model = blocks(options.hidden).to(mesh.device_type)
    for block in model:
        if compiled:
            block.compile()
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def inference(
    model: nn.Module, given: dict[str, Any], options: argparse.Namespace
) -> dict[str, Turn]:
    """Returns the steps of a model in all modes. Compiled models share the weights of the eager
    model."""

    def step(run: Callable[..., Any]) -> Step:
        return torch.no_grad()(partial(run, **given))

    patched = partial(collx.patch, dist.group.WORLD)
    found = {"eager": Turn(step(model)), "eager, collx.patch": Turn(step(model), patched)}
    if options.compile:
        over = partial(torch.compile, model, fullgraph=True, dynamic=False)
        found["compiled"] = Turn(step(over()))
        found["compiled, collx"] = Turn(step(over(backend=collx.compile.backend)))
    return found


def training(options: argparse.Namespace, mesh: DeviceMesh) -> dict[str, Turn]:
    x = torch.randn(options.tokens, options.hidden, device=mesh.device_type)
    patched = partial(collx.patch, dist.group.WORLD)
    found: dict[str, Turn] = {}
    for compiled in (False, True)[: 1 + options.compile]:
        model = sharded(options, mesh, compiled)

        def step(model: nn.Module = model) -> None:
            model.zero_grad()
            model(x).square().mean().backward()

        name = "compiled blocks" if compiled else "eager"
        found |= {name: Turn(step), f"{name}, collx.patch": Turn(step, patched)}
    return found


def measured(name: str, options: argparse.Namespace, mesh: DeviceMesh) -> dict[str, Turn]:
    device = mesh.device_type
    if name == "FSDP2":
        return training(options, mesh)
    if name == "DTensor":
        tokens = options.rows * options.tokens
        x = torch.randn(tokens, options.hidden, device=device, dtype=torch.bfloat16)
        return inference(parallelized(options, mesh), {"input": x}, options)
    ids = torch.arange(options.rows * options.tokens, device=device) % 2048
    given = {"input_ids": ids.view(options.rows, -1), "use_cache": False}
    return inference(of_transformers(name, options, mesh), given, options)


def parse_arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    p.add_argument("--models", nargs="+", choices=SUBJECTS, default=SUBJECTS)
    p.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    p.add_argument("--hidden", type=columns, default=4096)
    p.add_argument("--rows", type=columns, default=4, help="sequences at once")
    p.add_argument("--tokens", type=columns, default=4, help="of each")
    p.add_argument("--steps", type=count, default=10, help="in a turn")
    p.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    return p.parse_args()


def main() -> int:
    options = parse_arguments()
    device, _ = start_ranks(options.device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    ranks = GlooRanks()
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    with collx.init(mesh, device=device):
        for name in options.models:
            turns = measured(name, options, mesh)
            us = time_by_turns(turns, options.steps, ranks, synchronize)
            if ranks.rank == 0:
                print(f"\n{name}, {ranks.world} ranks")
                for way, time in us.items():
                    own = us[way.partition(", collx")[0]]
                    print(f"  {way:30} {time:10.1f} us {own / time:8.3f}x", flush=True)
            torch._dynamo.reset()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
