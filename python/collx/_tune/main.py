"""`python -m collx tune`: runs as one of the ranks under torchrun, otherwise starts the ranks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime, timezone

import torch
import torch.distributed as dist

import collx
from collx import _launch, _tuning
from collx._tune import report
from collx._tune.cases import Case, cases
from collx._tune.options import Options, parse
from collx._tune.search import entries, search

# As in the benchmarks: collx's multicast algorithms have not run on a switch yet.
_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


def main(argv: Sequence[str]) -> int:
    """Runs the command. Raises SystemExit with status 2 if the arguments are invalid."""
    options = parse(argv)
    if _launch.started_ranks() is not None:
        return run(options)
    return _launch.run(run, options.ranks, options)


def run(options: Options) -> int:
    """Measures as one of the ranks. Returns 0."""
    dist.init_process_group("gloo")
    try:
        _measure(options)
    finally:
        dist.destroy_process_group()
    return 0


def _measure(options: Options) -> None:
    """Measures, and writes the table on rank 0. Collective over the default process group."""
    os.environ[_NO_MULTICAST] = "1"
    os.environ.pop(_tuning.VARIABLE, None)  # the built-in choices are measured
    device = torch.device("cpu")
    if options.device == "cuda":
        local = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    with collx.init(name="collx tune", device=device) as communicator, _stream(device):
        if communicator.fallback_reason is not None:
            raise SystemExit(
                f"collx tune: there is nothing to choose: {communicator.fallback_reason}"
            )
        found = [
            search(case, communicator, options.seconds) for case in _with_progress(cases(options))
        ]
        if communicator.rank == 0:
            date = datetime.now(timezone.utc).isoformat(timespec="seconds")
            table = _tuning.new(
                device,
                communicator.world_size,
                communicator._given.payload_bytes,
                communicator.max_blocks,
                date,
            )
            table = replace(table, entries=tuple(entries(found)))
            options.output.write_text(table.to_json(), encoding="utf-8")
            print(report.text(found))
            print(f"entries in {options.output}: {len(table.entries)}")
            if options.plot is not None:
                report.draw(options.plot, found, f"{table.device}, {table.world_size} ranks")
                print(f"picture in {options.plot}")


def _stream(device: torch.device) -> torch.cuda.StreamContext | nullcontext[None]:
    """Returns a context with a new stream: graphs cannot be captured on the default stream."""
    return nullcontext() if device.type == "cpu" else torch.cuda.stream(torch.cuda.Stream(device))


def _with_progress(given: Iterable[Case]) -> Iterator[Case]:
    """Yields the cases. Shows a progress bar on rank 0 if tqdm is installed and stderr is a
    terminal."""
    listed = list(given)
    try:
        from tqdm import tqdm
    except ImportError:
        yield from listed
        return
    with tqdm(listed, unit="case", disable=dist.get_rank() != 0 or None) as bar:
        for case in bar:
            bar.set_postfix_str(f"{case.op}, {case.nbytes} bytes")
            yield case
