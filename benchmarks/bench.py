"""Times collx beside its peers, every result checked first.

    torchrun --nproc-per-node 4 benchmarks/bench.py allreduce -b 1K -e 256M -f 4 \\
        --dtype bfloat16 --device cuda --peers all --json out.json
    torchrun --nproc-per-node 4 benchmarks/bench.py all

README.md in this folder says what the flags do and how time is taken.
"""

import argparse
import os
import sys
import time
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

import collx
from collxbench import cpu_peers, cuda_peers, norm_peers, ours, plot, records, report
from collxbench.implementation import Implementation
from collxbench.job import GlooRanks, Job
from collxbench.op import Op
from collxbench.ops import OPS
from collxbench.ops_norm import NormOp
from collxbench.options import HOST_BYTES, parse, sizes, whole_parts
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


def chosen_peers(options: argparse.Namespace, op: Op) -> list[Implementation]:
    on_cuda = options.device == "cuda"
    if isinstance(op, NormOp):
        made = norm_peers.CUDA_PEERS if on_cuda else norm_peers.CPU_PEERS
        return [made[name]() for name in options.peers if name in made]
    known = cuda_peers.PEERS if on_cuda else cpu_peers.PEERS
    peers = [known[name] for name in options.peers if name in known]
    return [peer() for peer in peers if peer.ops is None or op.name in peer.ops]


def make_job(options: argparse.Namespace) -> Job:
    device, has_nccl = choose_device(options.device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if has_nccl else "gloo",
        device_id=device if has_nccl else None,
        timeout=timedelta(minutes=5 if options.device == "cuda" else 60),
    )
    ranks = GlooRanks()
    ranks.barrier()
    start = time.perf_counter()
    comm = collx.init(device=device)
    [seconds] = ranks.maximum([time.perf_counter() - start])
    largest = [max(sizes(options, OPS[name], ranks.world)) for name in options.ops]
    return Job(
        reduce_op=options.reduce_op,
        dtype=getattr(torch, options.dtype),
        device=device,
        group=dist.distributed_c10d._get_default_group(),
        ranks=ranks,
        comm=comm,
        init_seconds=seconds,
        has_nccl=has_nccl,
        cols=options.cols,
        rounding=options.rounding[0],
        max_bytes=max(HOST_BYTES, *largest),
    )


def measure(options: argparse.Namespace) -> bool:
    """Whether every result of collx was right. What is finished is shown and written at once."""
    job = make_job(options)
    written = [records.of_init(options.dtype, job.ranks.world, job.device.type, job.init_seconds)]
    good = True
    for op, rounding in chosen_ops(options):
        results = Runner(replace(job, rounding=rounding), op, options).run(
            sizes(options, op, job.ranks.world),
            whole_parts(options, op, job.ranks.world, HOST_BYTES),
            ours.chosen(options, op) + chosen_peers(options, op),
        )
        written += [row.record for row in results.rows]
        good = good and not results.ours_failed
        if job.ranks.rank == 0:
            show(options, op, rounding, results)
            if options.json is not None:
                records.write(options.json, written)
    job.comm.destroy()
    return good


def chosen_ops(options: argparse.Namespace) -> list[tuple[Op, str]]:
    """With the roundings of those that have some."""
    ops = [OPS[name] for name in options.ops]
    return [
        (op, rounding)
        for op in ops
        for rounding in (options.rounding if isinstance(op, NormOp) else [""])
    ]


def show(options: argparse.Namespace, op: Op, rounding: str, results: Results) -> None:
    how = rounding if isinstance(op, NormOp) else options.reduce_op
    name = f"{op.name} {how}" if op.reduces else op.name
    print(f"\n{name}, {options.dtype}, {dist.get_world_size()} ranks, {options.device}")
    print("us per call: median, slowest rank; x peer: best peer's time / collx's\n")
    print(report.table(results))
    host = report.host_times(results)
    if host:
        print(f"\nhost time of an eager call\n{host}")
    for note in report.notes(results):
        print(f"\n{note}", end="")
    print(flush=True)
    if options.plot is not None and op.has_tensor:
        stem = "-".join(part for part in (options.plot.stem, op.name, rounding) if part)
        file = options.plot if len(chosen_ops(options)) == 1 else options.plot.with_stem(stem)
        plot.draw(file, op, results, options.wire_gbs)


def main() -> int:
    options = parse()
    if "LOCAL_RANK" not in os.environ:
        print("start the ranks with torchrun: torchrun --nproc-per-node 2 " + sys.argv[0])
        return 2
    if options.no_multicast:
        os.environ.update(WITHOUT_MULTICAST)
    good = measure(options)
    dist.destroy_process_group()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
