"""`python -m collx tune`: runs as one of the ranks under torchrun, otherwise starts the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from collx import _launch
from collx._tune import rank
from collx._tune.options import Options, parse


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
        rank.run(options)
    finally:
        dist.destroy_process_group()
    return 0
