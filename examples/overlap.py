"""Posted calls: collectives that run while the program continues.

    torchrun --nproc-per-node 2 examples/overlap.py

Two parts, each with synchronous and with posted calls:

- Data-parallel training. A hook posts the reduction of a gradient as soon as the backward pass has
  accumulated it, and the optimizer waits for all of them:

      handles.append(collx.allreduce_(parameter.grad, "avg", async_op=True))

- A matrix product during an all-gather of the weights of the next step:

      with collx.post(collx.allgather, shard, out=gathered, max_blocks=16):
          y = x @ w

  On a GPU, both use the multiprocessors, so the all-gather uses few of them.

The table has the time of each part, and of its steps alone. Losses and results of both forms have
the same bits. Exits with 1 if they differ.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

import collx
from _shared.devices import start_ranks


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--layers", type=int, default=8, help="of the trained model (default: 8)")
    parser.add_argument("--width", type=int, help="of a layer (default: 4096, 512 on the CPU)")
    parser.add_argument("--rows", type=int, help="of its input (default: 4096, 256 on the CPU)")
    parser.add_argument("--product", type=int, help="n of n x n matrices (default: 8192, 1024)")
    parser.add_argument("--gathered", type=int, help="MiB of the all-gather (default: 64, 8)")
    parser.add_argument(
        "--max-blocks", type=int, default=16, help="of the posted all-gather (default: 16)"
    )
    parser.add_argument("--rounds", type=int, default=10, help="of each measurement (default: 10)")
    arguments = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        parser.error("start the ranks with torchrun: torchrun --nproc-per-node 2 " + sys.argv[0])
    return arguments


class Trainer:
    """A stack of linear layers with a copy on each rank, and a separate batch for each rank."""

    def __init__(self, layers: int, width: int, rows: int, device: torch.device) -> None:
        torch.manual_seed(0)  # the same layers on all ranks
        self.model = nn.Sequential(
            *(nn.Linear(width, width, bias=False, device=device) for _ in range(layers))
        )
        self.model.to(torch.bfloat16 if device.type == "cuda" else torch.float32)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        torch.manual_seed(1 + dist.get_rank())
        self.batch = torch.randn(rows, width).to(device, next(self.model.parameters()).dtype)

    def step(self, reduce: Callable[[list[Tensor]], None]) -> Tensor:
        """Runs a training step. `reduce` is called with the gradients."""
        self.optimizer.zero_grad()
        loss: Tensor = self.model(self.batch).float().square().mean()
        loss.backward()
        reduce([p.grad for p in self.model.parameters() if p.grad is not None])
        self.optimizer.step()
        return loss.detach()


def synchronous_losses(trainer: Trainer, rounds: int) -> list[Tensor]:
    def reduce(gradients: list[Tensor]) -> None:
        for gradient in gradients:
            collx.allreduce_(gradient, "avg")

    return [trainer.step(reduce) for _ in range(rounds)]


def posted_losses(trainer: Trainer, rounds: int) -> list[Tensor]:
    handles: list[collx.Handle] = []

    def post(parameter: Tensor) -> None:
        handles.append(collx.post(collx.allreduce_, parameter.grad, "avg"))

    hooks = [p.register_post_accumulate_grad_hook(post) for p in trainer.model.parameters()]

    def wait(gradients: list[Tensor]) -> None:
        for handle in handles:
            handle.wait()
        handles.clear()

    losses = [trainer.step(wait) for _ in range(rounds)]
    for hook in hooks:
        hook.remove()
    return losses


def milliseconds(function: Callable[[], object], rounds: int, device: torch.device) -> float:
    """Returns the mean time of a call, without the first call."""

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    function()
    finish()
    collx.barrier()
    finish()
    started = time.perf_counter()
    for _ in range(rounds):
        function()
    finish()
    return (time.perf_counter() - started) / rounds * 1e3


def train(arguments: argparse.Namespace, device: torch.device) -> tuple[dict[str, float], bool]:
    def trainer() -> Trainer:
        return Trainer(arguments.layers, arguments.width, arguments.rows, device)

    losses = [losses(trainer(), 3) for losses in (synchronous_losses, posted_losses)]
    same = all(torch.equal(a, b) for a, b in zip(*losses, strict=True))
    alone, gradients = trainer(), [torch.zeros_like(p) for p in trainer().model.parameters()]

    def reduce_all() -> None:
        for gradient in gradients:
            collx.allreduce_(gradient, "avg")

    rounds = arguments.rounds
    times = {
        "step without a reduction": milliseconds(
            lambda: alone.step(lambda _: None), rounds, device
        ),
        "reductions alone": milliseconds(reduce_all, rounds, device),
    }
    for name, losses_of in {"synchronous": synchronous_losses, "posted": posted_losses}.items():
        step = partial(losses_of, trainer(), 1)
        times[f"step, {name}"] = milliseconds(step, rounds, device)
    return times, same


def multiply(arguments: argparse.Namespace, device: torch.device) -> tuple[dict[str, float], bool]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    n, world = arguments.product, dist.get_world_size()
    x, w, y = (torch.randn(n, n, device=device).to(dtype) for _ in range(3))
    shard = torch.full(
        ((arguments.gathered << 20) // world,), dist.get_rank(), dtype=torch.uint8, device=device
    )
    gathered = [torch.empty(shard.numel() * world, dtype=torch.uint8, device=device) for _ in "ab"]

    def one_after_the_other() -> None:
        collx.allgather(shard, out=gathered[0])
        torch.mm(x, w, out=y)

    def both() -> None:
        blocks = arguments.max_blocks
        with collx.post(collx.allgather, shard, out=gathered[1], max_blocks=blocks):
            torch.mm(x, w, out=y)

    rounds = arguments.rounds
    times = {
        "product alone": milliseconds(lambda: torch.mm(x, w, out=y), rounds, device),
        "all-gather alone": milliseconds(
            lambda: collx.allgather(shard, out=gathered[0]), rounds, device
        ),
        "one after the other": milliseconds(one_after_the_other, rounds, device),
        "posted, then the product": milliseconds(both, rounds, device),
    }
    return times, torch.equal(*gathered)


def main() -> int:
    arguments = parse_arguments()
    device, backend = start_ranks(arguments.device)
    small = device.type == "cpu"
    for name, (on_gpus, on_cpu) in {
        "width": (4096, 512),
        "rows": (4096, 256),
        "product": (8192, 1024),
        "gathered": (64, 8),
    }.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, on_cpu if small else on_gpus)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with collx.init(device=device):
        trained, same_losses = train(arguments, device)
        multiplied, same_bytes = multiply(arguments, device)
    dist.destroy_process_group()
    checks = {
        "posted reductions give the losses of synchronous ones, bit for bit": same_losses,
        "the posted all-gather gives the bytes of the synchronous one": same_bytes,
    }
    if rank == 0:
        print(f"{world_size} ranks on {device.type} ({backend}), milliseconds")
        for name, value in {**trained, **multiplied}.items():
            print(f"  {name:28} {value:9.3f}")
        for what, well in checks.items():
            print(f"  {'ok   ' if well else 'WRONG'} {what}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
