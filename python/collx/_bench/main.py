"""Times collx and its peers, after checking every result.

    python -m collx bench allreduce -b 1K -e 256M -f 4 --ngpus 4 --peers all --json out.json
    torchrun --nproc-per-node 4 -m collx bench all

benchmarks/README.md describes the flags and the measurement of time.
"""

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

import collx
from collx import _launch
from collx._bench import cpu_peers, cuda_peers, norm_peers, ours, plot, records, report
from collx._bench.implementation import Implementation
from collx._bench.job import GlooRanks, Job
from collx._bench.mpi_run import Mpi
from collx._bench.op import Op
from collx._bench.ops_norm import NormOp
from collx._bench.options import HOST_BYTES, Variant, parse, sizes, variants, whole_parts
from collx._bench.runner import Results, Runner

# PyTorch, NCCL and NVSHMEM read these when they first set up memory.
WITHOUT_MULTICAST = {
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
}


def choose_device(kind: str) -> tuple[torch.device, bool]:
    """Returns this rank's device, and whether every rank has its own GPU, which NCCL requires."""
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
    first = variants(options)[0]
    largest = [max(sizes(options, variant, ranks.world)) for variant in variants(options)]
    return Job(
        reduce_op=first.reduce_op,
        root=options.root,
        dtype=getattr(torch, first.dtype),
        device=device,
        group=dist.distributed_c10d._get_default_group(),
        ranks=ranks,
        comm=comm,
        init_seconds=seconds,
        has_nccl=has_nccl,
        cols=options.cols,
        rounding=first.rounding,
        max_bytes=max(HOST_BYTES, *largest),
    )


def measure(options: argparse.Namespace) -> bool:
    """Measures all variants. Returns whether every result of collx was correct. Prints and writes
    each table as soon as it is complete."""
    job = make_job(options)
    mpi = Mpi(job.ranks.world)
    dtype = options.dtype[0]
    written = [records.of_init(dtype, job.ranks.world, job.device.type, job.init_seconds)]
    good = True
    for variant in variants(options):
        op = variant.op
        results = Runner(of_variant(job, variant), op, options, mpi).run(
            sizes(options, variant, job.ranks.world),
            whole_parts(options, variant, job.ranks.world, HOST_BYTES),
            ours.chosen(options, op) + chosen_peers(options, op),
        )
        written += [row.record for row in results.rows]
        good = good and not results.ours_failed
        if job.ranks.rank == 0:
            show(options, variant, results)
            if options.json is not None:
                records.write(options.json, written)
    mpi.close()
    job.comm.destroy()
    return good


def of_variant(job: Job, variant: Variant) -> Job:
    dtype = getattr(torch, variant.dtype)
    return replace(job, dtype=dtype, reduce_op=variant.reduce_op, rounding=variant.rounding)


def show(options: argparse.Namespace, variant: Variant, results: Results) -> None:
    op, dtype = variant.op, variant.dtype
    name = f"{op.name} {variant.rounding or variant.reduce_op}" if op.reduces else op.name
    root = f", root {options.root}" if op.rooted and options.root else ""
    print(f"\n{name}{root}, {dtype}, {dist.get_world_size()} ranks, {options.device}")
    if options.format == "nccl":
        print(f"us per call: median, slowest rank\n\n{report.nccl_lines(results)}")
    else:
        print("us per call: median, slowest rank; x peer: best peer's time / collx's\n")
        print(report.table(results))
    host = report.host_times(results)
    if host:
        print(f"\nhost time of an eager call\n{host}")
    for note in report.notes(results):
        print(f"\n{note}", end="")
    print(flush=True)
    if options.plot is not None and op.has_tensor:
        parts = [options.plot.stem, op.name, variant.rounding]
        parts += [dtype] if len(options.dtype) > 1 else []
        parts += [variant.reduce_op] if op.reduces and len(options.reduce_op) > 1 else []
        stem = "-".join(part for part in parts if part)
        file = options.plot if len(variants(options)) == 1 else options.plot.with_stem(stem)
        plot.draw(file, op, results, options.wire_gbs)


def run(options: argparse.Namespace) -> int:
    """Runs a rank of the benchmark."""
    if not options.multicast:
        os.environ.update(WITHOUT_MULTICAST)
    good = measure(options)
    dist.destroy_process_group()
    return 0 if good else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Starts the ranks, unless torchrun has started this process as one of them."""
    options = parse(arguments)
    if _launch.started_ranks() is not None:
        return run(options)
    return _launch.run(run, options.ranks, options)
