"""Computes sentence embeddings with a tensor-parallel transformer that uses collectives of collx.

    torchrun --nproc-per-node 2 examples/tensor_parallel_embedding.py

Attention heads and MLPs of all-MiniLM-L6-v2 are split over the ranks. The embeddings are compared
with those of the unsplit model and searched for nearest neighbors. The time is compared with the
same split model on torch.distributed. Exits with 1 if an embedding differs by more than 1e-5.

With --sequence-parallel, the ranks also divide the tokens outside of the split layers, for
residuals and normalization. Each all-reduce becomes a reduce-scatter and an all-gather.
"""

import argparse
import os
import statistics
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm
from transformers import BertModel

import collx
from _shared import minilm
from _shared.devices import usable_gpus
from _shared.sentences import SENTENCES, read_sentences
from _shared.sequence_parallel import CollxSequence, TorchSequence
from _shared.tensor_parallel import Exchange, Replicated, split_bert

TOLERANCE = 1e-5
SHOWN = 8


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--batch-size", type=int, default=16, help="sentences (default: 16)")
    parser.add_argument("--rounds", type=int, default=3, help="timed passes (default: 3)")
    parser.add_argument(
        "--sentences",
        type=Path,
        default=SENTENCES,
        help="text file with one sentence a line",
    )
    parser.add_argument(
        "--sequence-parallel",
        action="store_true",
        help="divide the tokens between the split layers: reduce-scatter and all-gather in place"
        " of each all-reduce",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--weights", type=Path, help="another safetensors file of a BERT")
    source.add_argument("--seeded", action="store_true", help="small model with random weights")
    arguments = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        parser.error("start the ranks with torchrun: torchrun --nproc-per-node 2 " + sys.argv[0])
    if arguments.batch_size < 1 or arguments.rounds < 1:
        parser.error("--batch-size and --rounds are at least 1")
    for file in (arguments.sentences, arguments.weights):
        if file is not None and not file.is_file():
            parser.error(f"no such file: {file}")
    return arguments


def choose_device(wanted: str) -> torch.device:
    """Returns one GPU for each rank if there are enough, otherwise the CPU with one thread for each
    rank."""
    ranks_here, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), usable_gpus(wanted)
    if wanted == "cpu" or (wanted == "auto" and gpus < ranks_here):
        torch.set_num_threads(1)  # the ranks are the parallelism
        return torch.device("cpu")
    if gpus < ranks_here:
        raise SystemExit(f"--device cuda: {ranks_here} ranks need as many GPUs, {gpus} found")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_tf32 = False  # the comparison needs full float32 precision
    return device


def exchanges(
    comm: collx.Communicator, backend: str, sequence_parallel: bool
) -> dict[str, Exchange]:
    """Returns the exchanges between the ranks, with collx and with torch.distributed."""
    if sequence_parallel:
        return {"collx": CollxSequence(comm), backend: TorchSequence()}

    def torch_sum(x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    return {
        "collx": Replicated(lambda x: collx.allreduce(x, "sum", comm)),
        backend: Replicated(torch_sum),
    }


def run(
    model: BertModel, batches: list[minilm.Batch], progress: "tqdm[NoReturn]"
) -> tuple[Tensor, list[float]]:
    """Returns the embeddings of all batches, and the seconds of each batch."""
    parts, seconds = [], []
    synchronize = torch.cuda.synchronize if batches[0]["input_ids"].is_cuda else lambda: None
    with torch.inference_mode():
        for batch in batches:
            synchronize()
            start = time.perf_counter()
            parts.append(minilm.embed(model, batch))
            synchronize()
            seconds.append(time.perf_counter() - start)
            progress.update()
    return torch.cat(parts), seconds


def largest_difference(a: Tensor, b: Tensor) -> float:
    """Returns the largest absolute difference; infinite if either tensor is not finite."""
    return (a - b).abs().nan_to_num(nan=float("inf")).max().item()


def largest(value: float, device: torch.device) -> float:
    """Returns the maximum over the ranks."""
    result = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(result, dist.ReduceOp.MAX)
    return result.item()


def show_neighbors(sentences: list[str], embeddings: Tensor) -> None:
    similarity = embeddings @ embeddings.T
    similarity.fill_diagonal_(-1)
    best, index = (column.tolist() for column in similarity.max(dim=1))
    print(f"\n{'sentence':52}  {'nearest neighbor':52}  cosine")
    for i in range(0, len(sentences), max(1, len(sentences) // SHOWN)):
        sentence = textwrap.shorten(sentences[i], 52, placeholder="…")
        neighbor = textwrap.shorten(sentences[index[i]], 52, placeholder="…")
        print(f"{sentence:52}  {neighbor:52}  {best[i]:6.3f}")


@dataclass
class Measured:
    embeddings: Tensor  # of the model over collx: float32 [sentences, hidden]
    difference: float  # maximum difference from the unsplit model in all runs
    seconds: dict[str, float]  # median per batch, by model


def measure(models: dict[str, Any], batches: list[minilm.Batch], rounds: int) -> Measured:
    """Runs every model once to warm up, then all models alternately for `rounds` rounds."""
    total = len(models) * len(batches) * (1 + rounds)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    with tqdm(desc="embedding", total=total, unit="batch", disable=dist.get_rank() != 0) as bar:
        first = {name: run(model, batches, bar)[0] for name, model in models.items()}
        difference = largest_difference(first["collx"], first["unsplit"])
        for _ in range(rounds):
            for name, model in models.items():
                embeddings, times = run(model, batches, bar)
                seconds[name] += times
                if name == "collx":
                    difference = max(difference, largest_difference(embeddings, first["unsplit"]))
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return Measured(first["collx"], difference, medians)


def main() -> int:
    arguments = parse_arguments()
    device = choose_device(arguments.device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, device_id=device if device.type == "cuda" else None)
    rank, world_size = dist.get_rank(), dist.get_world_size()

    encoder = minilm.seeded() if arguments.seeded else minilm.load(arguments.weights, rank == 0)
    sentences = read_sentences(arguments.sentences, 2)
    batches = [
        {name: tensor.to(device) for name, tensor in batch.items()}
        for batch in minilm.batches(sentences, arguments.batch_size, encoder.tokenize)
    ]
    unsplit: Any = encoder.model
    unsplit.to(device)

    with collx.init(device=device) as comm:
        models = {"unsplit": unsplit}
        for name, exchange in exchanges(comm, backend, arguments.sequence_parallel).items():
            models[name] = split_bert(unsplit, world_size, rank, exchange)
        measured = measure(models, batches, arguments.rounds)

    difference = largest(measured.difference, device)
    seconds = {name: largest(value, device) for name, value in measured.seconds.items()}
    passed = difference <= TOLERANCE
    if rank == 0:
        show_neighbors(sentences, measured.embeddings.cpu())
        form = ", tokens divided" if arguments.sequence_parallel else ""
        print(f"\n{len(sentences)} sentences, {world_size} ranks on {device.type}{form}")
        print(f"time per batch of {arguments.batch_size}, median, slowest rank:")
        for name, value in seconds.items():
            note = " (every rank on its own)" if name == "unsplit" else ""
            print(f"  {name:8} {value * 1e3:8.2f} ms{note}")
        verdict = "within" if passed else "NOT WITHIN"
        print(f"largest difference from the unsplit model: {difference:.2e}, {verdict} {TOLERANCE}")
    dist.destroy_process_group()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
