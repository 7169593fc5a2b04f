"""python -m collx doctor: reports whether collx works on this machine, and what to do if not."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

import collx
from collx import _launch
from collx._bootstrap.options import MAX_RANKS, MAX_TIMEOUT
from collx._doctor import gpus, machine, ranks, report
from collx._doctor.facts import Facts
from collx._doctor.judge import judge

_EPILOG = "exit status: 0 if collx works; 1 if it does not, or uses the process group instead; "
_EPILOG += "2 for bad arguments"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    seen, gpu_driver, cuda_driver = gpus.gpus()
    facts = Facts(
        versions=machine.versions(gpu_driver, cuda_driver),
        machine=machine.machine(),
        gpus=seen,
        environment=machine.environment(),
        run=ranks.run(options.device, options.ranks, options.timeout),
    )
    findings = judge(facts)
    healthy = all(finding.level != "error" for finding in findings)
    if options.json:
        print(report.as_json(facts, findings, healthy))
    else:
        print(report.as_text(facts, findings))
    return 0 if healthy else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m collx doctor",
        description="Gathers facts about this machine, runs collx on it, and prints findings.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="cuda if there is a GPU and this build has kernels, otherwise cpu (auto)",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        help="one for each GPU; on the CPU one for each core, at least 2 and at most 4",
    )
    parser.add_argument(
        "--timeout", type=float, default=120.0, help="maximum duration of the run in seconds (120)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    count = torch.cuda.device_count()
    if options.device == "auto":
        options.device = "cuda" if count > 0 and collx.cuda_built else "cpu"
    if options.device == "cuda" and count == 0:
        parser.error("--device: got cuda; accepted: cpu, since PyTorch can use no GPU here")
    if options.ranks is None:
        options.ranks = _launch.default_ranks(options.device)
    most = MAX_RANKS[options.device]
    if not 1 <= options.ranks <= most:
        parser.error(f"--ranks: got {options.ranks}; accepted: 1 to {most} on {options.device}")
    if not 0 < options.timeout <= MAX_TIMEOUT:
        parser.error(
            f"--timeout: got {options.timeout}; accepted: more than 0 and at most "
            f"{MAX_TIMEOUT:.0f} seconds"
        )
    return options
