"""Trains a small transformer on a torch.distributed backend, with DDP, FSDP2 or tensor parallelism.

    torchrun --nproc-per-node 2 examples/train.py --backend collx --parallel fsdp
    torchrun --nproc-per-node 2 examples/train.py --backend gloo --parallel fsdp --device cpu

The program only uses PyTorch's API. `import collx.backend` registers the name "collx". Rank 0
prints the loss of each step, and the median time of a step.
"""

import argparse
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

VOCABULARY = 256


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--backend", choices=["collx", "gloo", "nccl"], default="collx")
    parser.add_argument("--parallel", choices=["ddp", "fsdp", "tp"], default="ddp")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4, help="sequences of each step (default: 4)")
    parser.add_argument("--tokens", type=int, default=64, help="of a sequence (default: 64)")
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args(given)
    if "LOCAL_RANK" not in os.environ:
        parser.error("start the ranks with torchrun: torchrun --nproc-per-node 2 " + sys.argv[0])
    for name in ("layers", "width", "heads", "batch", "tokens", "steps"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} is at least 1")
    if arguments.width % arguments.heads:
        parser.error("--heads must divide --width")
    return arguments


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_size = width // heads
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        # With tensor parallelism, a rank has a part of the heads.
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return result


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False),
            nn.GELU(),
            nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class Transformer(nn.Module):
    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def parallelize(model: Transformer, how: str, mesh: DeviceMesh) -> nn.Module:
    if how == "ddp":
        return DistributedDataParallel(model, process_group=mesh.get_group())
    if how == "fsdp":
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
    # Between layers, the sequence is divided: all-gather before a layer, reduce-scatter after it.
    divided, whole = Shard(1), Replicate()
    gathered = PrepareModuleInput(input_layouts=divided, desired_input_layouts=whole)
    scattered = RowwiseParallel(output_layouts=divided)
    plan = {
        "norm1": SequenceParallel(),
        "attention": gathered,
        **dict.fromkeys(("attention.query", "attention.key", "attention.value"), ColwiseParallel()),
        "attention.out": scattered,
        "norm2": SequenceParallel(),
        "mlp": gathered,
        "mlp.0": ColwiseParallel(),
        "mlp.2": scattered,
    }
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    ends = {
        "embedding": RowwiseParallel(input_layouts=whole, output_layouts=divided),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=divided, output_layouts=whole),
    }
    return parallelize_module(model, mesh, ends)


class Training:
    """A model with random weights, this rank's part of it, and a batch."""

    def __init__(self, arguments: argparse.Namespace, mesh: DeviceMesh, device: torch.device):
        torch.manual_seed(0)  # the same parameters on all ranks
        model = Transformer(arguments.layers, arguments.width, arguments.heads).to(device)
        self.model = parallelize(model, arguments.parallel, mesh)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.group = mesh.get_group()
        # With tensor parallelism, all ranks have the same batch, otherwise each has its own.
        torch.manual_seed(1 if arguments.parallel == "tp" else 1 + dist.get_rank())
        shape = (arguments.batch, arguments.tokens + 1)
        self.tokens = torch.randint(VOCABULARY, shape).to(device)

    def step(self) -> float:
        """Runs a training step. Returns the loss of the batches of all ranks."""
        self.optimizer.zero_grad()
        logits = self.model(self.tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        total = loss.detach()
        dist.all_reduce(total, group=self.group)
        return total.item() / dist.get_world_size()


def main() -> None:
    arguments = parse_arguments()
    if arguments.backend == "collx":
        import collx.backend  # noqa: F401
    local_rank = int(os.environ["LOCAL_RANK"])
    on_cpu = arguments.backend == "gloo" or not torch.cuda.is_available()
    kind = ("cpu" if on_cpu else "cuda") if arguments.device == "auto" else arguments.device
    device = torch.device(kind, local_rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # the ranks are the parallelism
    dist.init_process_group(arguments.backend, device_id=device if kind == "cuda" else None)

    training = Training(arguments, init_device_mesh(kind, (dist.get_world_size(),)), device)
    times = []
    for number in range(arguments.steps):
        start = time.perf_counter()
        loss = training.step()
        times.append(time.perf_counter() - start)
        if dist.get_rank() == 0:
            print(f"step {number:3}  loss {loss!r}")
    if dist.get_rank() == 0:
        print(f"{statistics.median(times) * 1e3:.2f} ms a step, median of {arguments.steps}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
