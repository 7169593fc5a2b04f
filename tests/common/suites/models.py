"""Unchanged models of other libraries, split over ranks by those libraries: with their own
collectives, under `collx.patch`, and rewritten during compilation."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import Graph

import collx

from ..compiling import operators_in, through_pass
from ..pool import on_ranks
from ..rank import Rank
from .patched import far, seen, training_step, world_mesh

COLS = 64
SIZES = {
    "vocab_size": 128,
    "hidden_size": COLS,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 32,
}
FUSED = "allreduce_residual_rmsnorm"
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
CONFIGS: dict[str, dict[str, int]] = {"Llama": SIZES, "Gemma": SIZES, "Mixtral": SIZES | EXPERTS}


def _split_by_transformers(rank: Rank, kind: str, dtype: torch.dtype, folder: str) -> Any:
    """Returns this rank's part of a model with random weights from a seed, split by
    `from_pretrained` with the plan of the model's class."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
    import transformers

    if rank.rank == 0:
        config = getattr(transformers, f"{kind}Config")(**CONFIGS[kind])
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    dist.barrier()
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(folder, tp_plan="auto", dtype=dtype).eval()


def _sums(ops: list[str]) -> list[str]:
    """Returns the ops except gathers, without the suffix of in-place ops: versions of transformers
    differ in it."""
    return [op.rstrip("_") for op in ops if op != "allgather"]


@pytest.mark.skipif(
    find_spec("transformers") is None or find_spec("accelerate") is None,
    reason="transformers or accelerate is not installed",
)
@pytest.mark.worlds(2)
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("Llama", torch.float32), *((kind, torch.bfloat16) for kind in CONFIGS)],
    ids=str,
)
@on_ranks(deadline=300.0)
def test_models_of_transformers_run_without_a_change(
    rank: Rank, kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Results have the bits of the uncompiled model if the dtype has rounding points to keep. In
    float32 the operator may sum a row in another order."""
    ids = torch.randint(128, (2, 7), generator=torch.Generator().manual_seed(3)).to(rank.device)
    graphs: list[Graph] = []
    with rank.new_communicator(None, dist.group.WORLD), torch.no_grad():
        model = _split_by_transformers(rank, kind, dtype, str(tmp_path))

        def logits(run: Callable[..., Any] = model) -> Tensor:
            return run(ids, use_cache=False).logits.float().cpu()

        own = logits()
        with collx.patch(model):
            patched, ops = seen(logits)
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend=through_pass(graphs))
        rewritten = logits(compiled)
    torch._dynamo.reset()
    # Two per layer. Some versions of transformers also split the embedding and the logits.
    sums = _sums(ops)
    assert sums in (["allreduce"] * 4, ["allreduce"] * 5)
    assert _sums(operators_in(graphs)) == [*sums[4:], *[FUSED] * 4]
    scale = own.abs().max()
    assert (patched - own).abs().max() == 0  # the sum of two ranks' values has one order
    assert (rewritten - patched).abs().max() / scale <= (0 if dtype == torch.bfloat16 else 1e-6)
    tokens = [one.argmax(-1).tolist() for one in (own, patched, rewritten)]
    assert tokens == [tokens[0]] * 3
    assert rank.gather(tokens[0]) == [tokens[0]] * rank.size


class Block(nn.Module):
    """A residual block that tensor-parallel plans can split."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(COLS, eps=1e-5)
        self.up, self.down = nn.Linear(COLS, 96, bias=False), nn.Linear(96, COLS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.up(self.norm(x)).relu()
        return x + self.down(hidden)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.RMSNorm(COLS, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(self.blocks(x))
        return result


@pytest.mark.worlds(2)
@pytest.mark.parametrize(
    ("sequence", "ops", "rewritten"),
    [
        (False, ["allreduce"] * 2, [FUSED] * 2),
        (
            True,
            [*["allgather", "reducescatter"] * 2, "allgather"],
            ["allgather", "reducescatter_residual_rmsnorm"] * 2,
        ),
    ],
    ids=["tensor", "sequence"],
)
@on_ranks(deadline=300.0)
def test_modules_that_dtensor_parallelizes(
    rank: Rank, sequence: bool, ops: list[str], rewritten: list[str]
) -> None:
    """The test itself makes the last gather, to compare the whole output."""
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = world_mesh(rank)
    torch.manual_seed(0)
    model = Blocks().to(rank.device)
    x = torch.randn(8, COLS, device=rank.device)
    graphs: list[Graph] = []

    def output(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        with torch.no_grad():
            out = run(x)
        return [out.full_tensor() if isinstance(out, DTensor) else out]

    with rank.new_communicator(None, dist.group.WORLD):
        whole = output(model)
        rows = Shard(0)
        plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        if sequence:
            plan = {
                "norm": SequenceParallel(sequence_dim=0),
                "up": ColwiseParallel(input_layouts=rows),
                "down": RowwiseParallel(output_layouts=rows, use_local_output=False),
            }
            given = PrepareModuleInput(
                input_layouts=Replicate(), desired_input_layouts=rows, use_local_output=False
            )
            ends = {"blocks.0": given, "norm": SequenceParallel(sequence_dim=0)}
            parallelize_module(model, mesh, ends)
        for block in model.blocks:
            parallelize_module(block, mesh, plan)
        with collx.patch(mesh):
            patched, seen_ops = seen(lambda: output(model))
        torch._dynamo.reset()
        compiled = output(torch.compile(model, fullgraph=True, backend=through_pass(graphs)))
    torch._dynamo.reset()
    assert [*far(patched, whole), *far(compiled, whole)] == []
    assert seen_ops == ops
    assert operators_in(graphs) == rewritten


@pytest.mark.worlds(2)
@on_ranks(deadline=300.0)
def test_a_model_that_fsdp2_shards(rank: Rank) -> None:
    """Its blocks are compiled; FSDP gathers and scatters around them, in eager mode."""
    from torch.distributed.fsdp import fully_shard

    mesh = world_mesh(rank)
    torch.manual_seed(0)
    model = Blocks().to(rank.device)
    x = torch.randn(8, COLS, device=rank.device) + rank.rank
    with rank.new_communicator(None, dist.group.WORLD):
        for block in model.blocks:
            block.compile(backend="aot_eager")
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        own = training_step(model, x)
        with collx.patch(model):
            patched, ops = seen(lambda: training_step(model, x))
    torch._dynamo.reset()
    found = {"ops": ops, "far": far(patched, own)}
    assert found["far"] == []
    # Gathers in forward and, except for the last norm, in backward; then the scatters of the
    # gradients.
    assert found["ops"] == [*["allgather"] * 5, *["reducescatter"] * 3]
