"""Greedy decoding with a Llama that is split over ranks, with fused all-reduce, residual and norm.

    torchrun --nproc-per-node 2 examples/tensor_parallel_llama.py
    torchrun --nproc-per-node 2 examples/tensor_parallel_llama.py --model DIRECTORY --compile

Attention heads and MLPs are split. After each of them, twice per layer, the products of the ranks
are summed, the residual is added and the sum is normalized. This is one operator of collx, which is
compared with three steps on collx and on torch.distributed. Weights are random, from a seed, or
those of --model.

--compile adds decoders with steps that torch.compile compiles: the fused decoder, and one that does
not use collx, but PyTorch's functional all_reduce and plain norms. The latter is compiled by
Inductor without changes, and by collx, which replaces all-reduce, residual and norm with the fused
operator. With an installed collx, torch.compile(model, backend="collx") does so. The function of
this backend, collx.compile.backend, also works from a checkout that is not installed.

Exits with 1 if a check fails: all decoders choose the tokens of the unfused decoder in --dtype, the
fused decoder in float32 chooses those of the unsplit model of transformers, and collx has fused all
norms. On GPUs, a decoding step is also timed in a CUDA graph. Ranks that share a GPU (--device cuda
with fewer GPUs than ranks) use gloo.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # transformers reads it at import

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from transformers import LlamaForCausalLM

import collx
from _shared import checkpoint, llama
from _shared.decoding import (
    Checks,
    Compile,
    Greedy,
    captured,
    decode,
    greedy_of_transformers,
    with_logits,
)
from _shared.devices import largest, start_ranks
from _shared.sentences import SENTENCES, read_sentences

REWRITTEN = "rewritten to collx"

OF_MODEL = {
    "layers": (4, ""),
    "hidden-size": (512, ""),
    "intermediate-size": (1408, "units of an MLP"),
    "heads": (8, "of queries"),
    "kv-heads": (4, "of keys and values; at least one a rank"),
    "vocabulary": (2048, "tokens"),
}
OF_RUN = {
    "seed": (0, "of weights and prompts"),
    "batch-size": (4, "prompts"),
    "prompt": (16, "tokens of a prompt; of a sentence, at most"),
    "tokens": (32, "to add to each prompt"),
    "rounds": (3, "timed passes"),
}


def parse_arguments() -> argparse.Namespace:
    """Parses the arguments. The result includes the `size` of the model."""
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    p.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    p.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    p.add_argument(
        "--compile",
        action="store_true",
        help="compiled decoders, too; off by default, as compiling takes minutes on a few cores",
    )
    p.add_argument(
        "--model",
        type=Path,
        help="directory of a Llama as transformers saves it, in place of random weights; with a"
        " tokenizer the prompts are sentences, else random tokens",
    )
    p.add_argument(
        "--sentences",
        type=Path,
        help="text file with a prompt a line, for --model (default: sentences.txt beside this)",
    )
    for name, (default, text) in {**OF_MODEL, **OF_RUN}.items():
        p.add_argument(f"--{name}", type=int, help=f"{text} ({default})".strip())
    arguments = p.parse_args()
    if "LOCAL_RANK" not in os.environ:
        p.error("start the ranks with torchrun: torchrun --nproc-per-node 2 " + sys.argv[0])
    given = vars(arguments)
    if arguments.model is not None:
        for name in OF_MODEL:
            if given[name.replace("-", "_")] is not None:
                p.error(f"--{name}: the config.json of --model says it")
    elif arguments.sentences is not None:
        p.error("--sentences needs the tokenizer of a --model")
    for name, (default, _) in {**OF_MODEL, **OF_RUN}.items():
        key, smallest = name.replace("-", "_"), {"seed": 0, "tokens": 2}.get(name, 1)
        given[key] = default if given[key] is None else given[key]
        if given[key] < smallest:
            p.error(f"--{name} is at least {smallest}")
    try:
        arguments.size = size_of(arguments)
    except ValueError as wrong:
        p.error(str(wrong))
    return arguments


def size_of(arguments: argparse.Namespace) -> llama.Size:
    length, ranks = arguments.prompt + arguments.tokens, int(os.environ["WORLD_SIZE"])
    if arguments.model is None:
        if arguments.heads % arguments.kv_heads or arguments.hidden_size % (2 * arguments.heads):
            raise ValueError("--kv-heads must divide --heads, and twice --heads --hidden-size")
        size = llama.Size(
            vocabulary=arguments.vocabulary,
            hidden=arguments.hidden_size,
            intermediate=arguments.intermediate_size,
            layers=arguments.layers,
            heads=arguments.heads,
            kv_heads=arguments.kv_heads,
            length=length,
        )
    else:
        size = checkpoint.size_of(checkpoint.config_of(arguments.model), length)
    if ranks > size.kv_heads:
        raise ValueError(f"{size.kv_heads} key-value heads cannot be split over {ranks} ranks")
    return size


class Way(NamedTuple):
    """The norms of a decoder, and its compilation."""

    make_norm: llama.MakeNorm
    compiled: Compile | None = None


def ways(comm: collx.Communicator, backend: str, compiled: bool) -> dict[str, Way]:
    def fused(norm: nn.Module) -> nn.Module:
        return collx.nn.TensorParallelRMSNorm.from_module(
            norm, group=comm, rounding="parity_weight"
        )

    def over_torch(x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    over_collx = partial(collx.allreduce, reduce_op="sum", group=comm)
    found = {
        "collx, fused": Way(fused),
        "collx, unfused": Way(lambda norm: llama.UnfusedNorm(norm, over_collx)),
        f"{backend}, unfused": Way(lambda norm: llama.UnfusedNorm(norm, over_torch)),
    }
    if compiled:
        # The all-reduce of a model that does not use collx. A compiler can trace it.
        plain = partial(functional.all_reduce, reduceOp="sum", group=comm.group)
        inductor = partial(torch.compile, fullgraph=True)
        rewriting = partial(
            inductor,
            backend=collx.compile.backend,
            options={"fx_graph_cache": False},  # report() does not count graphs from this cache
        )

        def unfused(norm: nn.Module) -> nn.Module:
            return llama.UnfusedNorm(norm, plain)

        found["collx, fused, compiled"] = Way(fused, inductor)
        found[f"{backend}, unfused, compiled"] = Way(unfused, inductor)
        found[REWRITTEN] = Way(unfused, rewriting)
    return found


def prompts_of(arguments: argparse.Namespace) -> tuple[Tensor, Any]:
    """Returns prompts [batch, tokens], and the tokenizer that created them from sentences, None if
    there is none."""
    folder, count = arguments.model, arguments.batch_size
    tokenizer = None if folder is None else checkpoint.tokenizer_of(folder)
    if tokenizer is not None:
        sentences = read_sentences(arguments.sentences or SENTENCES, count)[:count]
        return checkpoint.prompts_of(tokenizer, sentences, arguments.prompt), tokenizer
    if arguments.sentences is not None:
        raise SystemExit(f"--sentences: there is no tokenizer in {folder}")
    torch.manual_seed(arguments.seed)
    return torch.randint(arguments.size.vocabulary, (count, arguments.prompt)), None


def check_float32(
    full: LlamaForCausalLM,
    shard: llama.Shard,
    fused: llama.MakeNorm,
    prompts: Tensor,
    count: int,
    checks: Checks,
) -> None:
    greedy = Greedy(llama.Decoder(shard, fused), prompts, count)
    decode(greedy, greedy.step)
    expected = greedy_of_transformers(full, prompts, count)
    checks.add("fused against the unsplit model of transformers, float32", greedy, expected)


def check_rewritten(layers: int, checks: Checks, largest: Callable[[float], float]) -> None:
    norms = sum(collx.compile.report().norms.values())
    missing = largest(2 * layers - norms)
    checks.judge(missing == 0, f"{2 * layers - missing:.0f} of {2 * layers} norms rewritten")


def measure(
    decoders: dict[str, Greedy], arguments: argparse.Namespace, checks: Checks
) -> dict[str, list[float]]:
    """Returns the seconds of each pass, by name. The tokens of a previous warm-up pass are
    compared."""
    expected = with_logits(decoders["collx, unfused"])
    steps: dict[str, tuple[Greedy, Callable[[], object]]] = {}
    for name, greedy in decoders.items():
        decode(greedy, greedy.step)
        if name == "collx, fused" or greedy.compiled is not greedy.model:
            checks.add(f"{name}, against unfused, {arguments.dtype}", greedy, expected)
        steps[name] = greedy, greedy.step
    if expected.tokens.is_cuda:
        for name, greedy in decoders.items():
            if not name.startswith("gloo"):  # gloo runs on the host
                steps[f"{name}, CUDA graph"] = greedy, captured(greedy).replay
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(arguments.rounds):
        for name, (greedy, step) in steps.items():
            seconds[name].append(decode(greedy, step))
            if step != greedy.step and len(seconds[name]) == 1:
                checks.add(f"{name}, against unfused", greedy, expected)
    return seconds


@torch.no_grad()
def main() -> int:
    arguments = parse_arguments()
    size: llama.Size = arguments.size
    device, backend = start_ranks(arguments.device)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    slowest = partial(largest, device=device, backend=backend)
    torch.backends.cuda.matmul.allow_tf32 = False  # the comparison needs full float32 precision
    full: Any = (
        llama.seeded(size, arguments.seed)
        if arguments.model is None
        else checkpoint.load(arguments.model, rank == 0)
    )
    given, tokenizer = prompts_of(arguments)
    prompts = given.to(device)
    full.to(device)
    dtype = getattr(torch, arguments.dtype)

    with collx.init(device=device) as comm:
        made = ways(comm, backend, arguments.compile)
        shard = llama.Shard(full, size, len(prompts), world_size, rank).to(device)
        checks = Checks(slowest)
        if rank == 0:
            print(f"{world_size} ranks on {device.type}, {size.layers} layers of {size.hidden}")
        fused = made["collx, fused"].make_norm
        check_float32(full, shard, fused, prompts, arguments.tokens, checks)
        shard.to(dtype)
        for norm in [shard.first_norm, *shard.norms]:
            norm.to(dtype)
        decoders = {
            name: Greedy(
                llama.Decoder(shard, way.make_norm), prompts, arguments.tokens, way.compiled
            )
            for name, way in made.items()
        }
        seconds = measure(decoders, arguments, checks)
        if REWRITTEN in made:
            check_rewritten(size.layers, checks, slowest)

    rates = {}
    for name, passes in seconds.items():
        rates[name] = len(prompts) * (arguments.tokens - 1) / slowest(statistics.median(passes))
    if rank == 0:
        if REWRITTEN in made:
            print(f"\n{REWRITTEN} by torch.compile, {collx.compile.report()}")
        print(f"\ntokens a second of {len(prompts)} prompts at once, {arguments.dtype}:")
        for name, rate in rates.items():
            print(f"  {name:36} {rate:10.0f}")
        show(prompts, decoders["collx, fused"].answer, tokenizer, full.config.eos_token_id)
    dist.destroy_process_group()
    return 0 if checks.good else 1


def show(prompts: Tensor, answers: Tensor, tokenizer: Any, ends: int | list[int] | None) -> None:
    if tokenizer is None:
        print(f"\nfirst tokens of the first answer: {' '.join(map(str, answers[0, :12].tolist()))}")
        return
    print("\nprompts | and what follows:")
    for prompt, answer in zip(prompts.tolist(), answers.tolist(), strict=True):
        said = checkpoint.text_of(tokenizer, answer, ends)
        print(f"  {tokenizer.decode(prompt, skip_special_tokens=True)} | {said}")


if __name__ == "__main__":
    sys.exit(main())
