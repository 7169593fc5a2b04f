"""Runs accelerate's own tests of its collectives on a process group of collx, then trains a layer.

On the CPU, accelerate only creates groups of Gloo or MPI, but it uses an existing group."""

from __future__ import annotations

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.test_utils.scripts import test_ops

import collx.backend  # noqa: F401

dist.init_process_group("collx")
accelerator = Accelerator(cpu=True)
assert accelerator.num_processes == 2
for name in ("gather", "gather_object", "gather_non_contiguous", "broadcast"):
    getattr(test_ops, f"test_{name}")(accelerator.state)
for name in ("pad_across_processes", "reduce_sum", "reduce_mean", "reduce_max"):
    getattr(test_ops, f"test_{name}")(accelerator.state)

torch.manual_seed(0)
layer = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
layer, optimizer = accelerator.prepare(layer, optimizer)
torch.manual_seed(dist.get_rank())
for batch in torch.randn(8, 8, 8):
    optimizer.zero_grad()
    accelerator.backward(layer(batch).square().mean())
    optimizer.step()
(weight,) = (p for name, p in layer.named_parameters() if name.endswith("weight"))
weights = accelerator.gather(weight)
assert torch.equal(weights[0], weights[1])
print(f"trained on {dist.get_backend()}")
dist.destroy_process_group()
