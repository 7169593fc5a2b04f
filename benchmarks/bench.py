"""Times collx beside its peers, every result checked first.

    torchrun --nproc-per-node 4 benchmarks/bench.py allreduce -b 1K -e 256M -f 4 \\
        --dtype bfloat16 --device cuda --peers all --json out.json

README.md in this folder says what the flags do and how time is taken.
"""

import argparse
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import collx
from collxbench import cpu_peers, cuda_peers, ours, plot, records, report
from collxbench.implementation import Implementation
from collxbench.job import GlooRanks, Job
from collxbench.options import parse, sizes
from collxbench.runner import Results, Runner

# Read by PyTorch, NCCL and NVSHMEM when they first set up memory.
WITHOUT_MULTICAST = {
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
}


def choose_device(kind: str) -> tuple[torch.device, bool]:
    """This rank's device, and whether every rank has a GPU of its own, as NCCL needs."""
    if kind == "cpu":
        torch.set_num_threads(1)  # the ranks are the parallelism
        return torch.device("cpu"), False
    local_rank, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    device = torch.device("cuda", local_rank % gpus)
    torch.cuda.set_device(device)
    return device, int(os.environ["LOCAL_WORLD_SIZE"]) <= gpus


def chosen_peers(options: argparse.Namespace) -> list[Implementation]:
    known = cuda_peers.PEERS if options.device == "cuda" else cpu_peers.PEERS
    return [known[name]() for name in options.peers if name in known]


def measure(options: argparse.Namespace) -> Results:
    device, has_nccl = choose_device(options.device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if has_nccl else "gloo",
        device_id=device if has_nccl else None,
        timeout=timedelta(minutes=5 if options.device == "cuda" else 60),
    )
    ranks = GlooRanks()
    comm = collx.init(device=device)
    job = Job(
        op=options.op,
        reduce_op=options.reduce_op,
        dtype=getattr(torch, options.dtype),
        device=device,
        group=dist.distributed_c10d._get_default_group(),
        ranks=ranks,
        comm=comm,
        has_nccl=has_nccl,
        max_bytes=max(sizes(options)),
    )
    results = Runner(job, options).run(sizes(options), ours.chosen(options) + chosen_peers(options))
    comm.destroy()
    return results


def show(options: argparse.Namespace, results: Results) -> None:
    world = dist.get_world_size()
    print(f"\n{options.op} {options.reduce_op}, {options.dtype}, {world} ranks, {options.device}")
    print("us per call: median, slowest rank; x peer: best peer's time / collx's\n")
    print(report.table(results))
    host = report.host_times(results)
    if host:
        print(f"\nhost time of an eager call\n{host}")
    for note in report.notes(results):
        print(f"\n{note}", end="")
    print()
    if options.json is not None:
        records.write(options.json, [row.record for row in results.rows])
    if options.plot is not None:
        plot.draw(options.plot, results, options.wire_gbs)


def main() -> int:
    options = parse()
    if "LOCAL_RANK" not in os.environ:
        print("start the ranks with torchrun: torchrun --nproc-per-node 2 " + sys.argv[0])
        return 2
    if options.no_multicast:
        os.environ.update(WITHOUT_MULTICAST)
    results = measure(options)
    if dist.get_rank() == 0:
        show(options, results)
    dist.destroy_process_group()
    return 1 if results.ours_failed else 0


if __name__ == "__main__":
    sys.exit(main())
