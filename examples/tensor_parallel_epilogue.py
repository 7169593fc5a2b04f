"""A tensor-parallel layer whose bias and activation are part of its all-reduce.

    torchrun --nproc-per-node 2 examples/tensor_parallel_epilogue.py
    torchrun --nproc-per-node 2 examples/tensor_parallel_epilogue.py --activation relu

The layer is split along its inputs. Each rank multiplies its part of the inputs by its part of the
weight, the products are summed, and the bias and the activation are applied. Without fusion, these
are three steps; with fusion, they are one call:

    y = collx.allreduce(x @ w.T, epilogue=lambda v, bias: F.gelu(v + bias), extras=(bias,))

Compares the results of both forms with the whole layer in float64. The unfused form rounds to
--dtype after each step, and the fused form only once, so its error is the same or smaller. Also
compares the gradients of both forms. Exits with 1 if a check fails.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import collx
from _shared.devices import start_ranks

ACTIVATIONS = {"relu": torch.relu, "gelu": F.gelu, "silu": F.silu}
SHOWN = 6


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--activation", choices=list(ACTIVATIONS), default="gelu")
    parser.add_argument("--rows", type=int, default=64, help="of the input (default: 64)")
    parser.add_argument("--features", type=int, default=512, help="of each row (default: 512)")
    parser.add_argument("--outputs", type=int, default=256, help="of the layer (default: 256)")
    arguments = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        parser.error("start the ranks with torchrun: torchrun --nproc-per-node 2 " + sys.argv[0])
    if min(arguments.rows, arguments.features, arguments.outputs) < 1:
        parser.error("--rows, --features and --outputs are at least 1")
    return arguments


class Layer(nn.Module):
    """This rank's part of a linear layer that is split along its inputs, and an activation."""

    def __init__(
        self, whole: nn.Linear, part: slice, activation: str, comm: collx.Communicator, fused: bool
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole.weight.detach()[:, part].clone())
        self.bias = nn.Parameter(whole.bias.detach().clone())
        self.activation, self.comm, self.fused = ACTIVATIONS[activation], comm, fused

    def forward(self, x: Tensor) -> Tensor:
        summand = F.linear(x, self.weight)
        if not self.fused:
            return self.activation(collx.allreduce(summand, group=self.comm) + self.bias)
        activation = self.activation
        return collx.allreduce(
            summand,
            group=self.comm,
            epilogue=lambda v, bias: activation(v + bias),
            extras=(self.bias,),
        )


def computed(layer: Layer, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the output, and the gradients of its sum."""
    x = x.clone().requires_grad_()
    y = layer(x)
    y.float().sum().backward()
    named = {"input": x, "weight": layer.weight, "bias": layer.bias}
    return y.detach(), {name: t.grad for name, t in named.items() if t.grad is not None}


def error(y: Tensor, exact: Tensor) -> float:
    """Returns the mean absolute error; infinite if y is not finite."""
    return (y.double() - exact).abs().nan_to_num(nan=float("inf")).mean().item()


def main() -> int:
    arguments = parse_arguments()
    device, backend = start_ranks(arguments.device)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dtype = getattr(torch, arguments.dtype)

    torch.manual_seed(0)  # the same layer and input on all ranks
    whole = nn.Linear(arguments.features, arguments.outputs).to(device, dtype)
    x = torch.randn(arguments.rows, arguments.features).to(device, dtype)
    part = collx.nn.shard_range(arguments.features, world_size, rank)
    with torch.no_grad():
        wide = F.linear(x.double(), whole.weight.double(), whole.bias.double())
        exact = ACTIVATIONS[arguments.activation](wide)

    with collx.init(device=device) as comm:
        results, gradients = {}, {}
        for name in ("fused", "unfused"):
            layer = Layer(whole, part, arguments.activation, comm, name == "fused")
            results[name], gradients[name] = computed(layer, x[:, part])
    dist.destroy_process_group()

    errors = {name: error(y, exact) for name, y in results.items()}
    eps = torch.finfo(dtype).eps
    # In float32, fusion saves no rounding, and functions have errors of some ulp in both forms.
    of_functions = 4 * torch.finfo(torch.float32).eps * exact.abs().mean().item()
    differing = int((results["fused"] != results["unfused"]).sum())
    checks = {
        "the fused result is as near to float64 as the unfused one, or nearer": errors["fused"]
        <= 1.01 * errors["unfused"] + of_functions,
        "both have the same gradients, but for rounding": all(
            torch.allclose(mine.float(), other.float(), 8 * eps, 64 * eps)
            for mine, other in zip(*(each.values() for each in gradients.values()), strict=True)
        ),
    }
    if rank == 0:
        where = f"{world_size} ranks on {device.type} ({backend})"
        print(f"{where}: {arguments.activation}(x @ w.T + bias) in {arguments.dtype}")
        for name, y in {"float64": exact, **results}.items():
            shown = " ".join(f"{v:10.6f}" for v in y.flatten()[:SHOWN].tolist())
            off = f"   mean error {errors[name]:.3e}" if name in errors else ""
            print(f"  {name:8} {shown} ...{off}")
        print(f"  {differing} of {exact.numel()} elements differ between fused and unfused")
        for what, well in checks.items():
            print(f"  {'ok   ' if well else 'WRONG'} {what}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
