"""The output of the doctor: text for users, or one JSON object for programs."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from collx._bench.units import size_name
from collx._doctor.facts import Facts, Finding

FORMAT = 1  # version of the JSON object; changes if the meaning of a key changes
_WIDTH = 100
_LABEL = 14


def as_json(facts: Facts, findings: Sequence[Finding], healthy: bool) -> str:
    content = {
        "format": FORMAT,
        "healthy": healthy,
        "findings": [asdict(one) for one in findings],
        "facts": asdict(facts),
    }
    return json.dumps(content, indent=2)


def as_text(facts: Facts, findings: Sequence[Finding]) -> str:
    sections = {
        "Versions": _versions(facts),
        "Machine": _machine(facts),
        "GPUs": _gpus(facts),
        "Environment": [f"{name}={value}" for name, value in facts.environment.items()],
        f"Run: {len(facts.run.ranks)} ranks, {facts.run.device}": _run(facts),
        "Findings": _findings(findings),
    }
    return "\n\n".join(
        "\n".join([title, *(f"  {line}".rstrip() for line in lines)])
        for title, lines in sections.items()
    )


def _line(label: str, *values: object) -> str:
    return f"{label:<{_LABEL}}{', '.join(str(value) for value in values if value)}"


def _versions(facts: Facts) -> list[str]:
    v = facts.versions
    kernels = f"kernels for {' '.join(v.architectures)}" if v.built_for_cuda else "no CUDA kernels"
    return [
        _line("collx", v.collx, f"built for PyTorch {v.built_for_torch}", kernels),
        _line("PyTorch", v.torch, f"CUDA {v.cuda_runtime}" if v.cuda_runtime else "no CUDA"),
        _line("GPU driver", v.gpu_driver or "none", v.cuda_driver and f"CUDA {v.cuda_driver}"),
        _line("Python", v.python),
        _line("system", v.system, v.kernel, v.libc),
    ]


def _machine(facts: Facts) -> list[str]:
    m = facts.machine
    seccomp = {0: "off", 1: "strict", 2: "a filter is active", None: "unknown"}[m.seccomp]
    cpu = "no limit" if m.cpu_limit is None else f"limit {m.cpu_limit:g}"
    limit = "no limit" if m.memory_limit is None else f"limit {_mib(m.memory_limit)}"
    shm = None if m.shm_size is None else f"{_mib(m.shm_size)}, {_mib(m.shm_free or 0)} free"
    return [
        _line("cores", m.cores, cpu),
        _line("memory", m.memory and _mib(m.memory), limit),
        _line("/dev/shm", shm or "none"),
        _line("ulimit", f"-l {_limit(m.locked_memory, 1024)}", f"-n {_limit(m.open_files, 1)}"),
        _line("seccomp", seccomp),
        _line("memfd_create", m.memfd_error or "works"),
        _line("SCM_RIGHTS", m.descriptors_error or "works"),
    ]


def _mib(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB"


def _limit(value: int | None, unit: int) -> str:
    return "unlimited" if value is None else str(value // unit)


def _gpus(facts: Facts) -> list[str]:
    gpus, run = facts.gpus, facts.run
    lines = [
        f"{gpu.index}: {gpu.name}, MIG {gpu.mig}, compute mode {gpu.compute_mode}"
        for gpu in gpus.seen
    ]
    lines.append(_line("usable", str(gpus.usable), f"MPS {'runs' if gpus.mps else 'does not run'}"))
    if gpus.smi_error is not None:
        lines.append(_line("nvidia-smi", gpus.smi_error))
    for device in run.devices:
        multicast = {True: "yes", False: "no", None: "unknown"}[device.multicast]
        lines.append(
            f"cuda:{device.index} {device.name}, compute capability {device.capability}, "
            f"{_mib(device.memory)}, multicast {multicast}"
        )
    if run.peers:
        lines += _matrix(
            "peer access",
            [f"cuda:{i}" for i in range(len(run.peers))],
            [["yes" if access else "no" for access in row] for row in run.peers],
        )
    if gpus.links:
        names = list(gpus.links)
        rows = [[gpus.links[a].get(b, "") for b in names] for a in names]
        lines += _matrix("links", names, rows)
    return lines


def _matrix(title: str, names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    wide = max(7, *(len(name) + 2 for name in names))
    head = f"{title:<{_LABEL}}" + "".join(f"{name:>{wide}}" for name in names)
    return [
        head,
        *(
            f"{name:<{_LABEL}}" + "".join(f"{cell:>{wide}}" for cell in row)
            for name, row in zip(names, rows, strict=True)
        ),
    ]


def _run(facts: Facts) -> list[str]:
    run = facts.run
    lines = []
    for one in run.ranks:
        state = one.ended or ("failed" if one.error else "")
        where = "done" if one.stage == "done" else f"stopped in stage {one.stage!r}"
        lines.append(_line(f"rank {one.rank}", one.device, where, state))
    if run.init_seconds is not None:
        lines.append(_line("collx.init", f"{run.init_seconds:.2f} s", "self-test passed"))
        lines.append(_line("fallback", run.fallback_reason or "no"))
        lines += _algorithms(run.algorithms)
    if run.timings:
        lines += ["", *_timings(facts)]
    return lines


def _algorithms(algorithms: dict[str, dict[str, str | None]]) -> list[str]:
    lines = []
    reasons: dict[str, list[str]] = {}
    for op, found in algorithms.items():
        lines.append(_line(op, *(name for name, why in found.items() if why is None)))
        for name, why in found.items():
            if why is not None:
                reasons.setdefault(why, []).append(f"{op} {name}")
    for why, names in reasons.items():
        lines += _wrapped(_line("unavailable", *names) + f": {why}", " " * _LABEL)
    return lines


def _timings(facts: Facts) -> Iterable[str]:
    link = "copies, GB/s" if facts.run.device == "cpu" else "link, GB/s"
    yield f"{'allreduce':<{_LABEL}}{'us':>10}{'GB/s':>10}{link:>14}  algorithm"
    for one in facts.run.timings:
        rate = "-" if one.link_gbs is None else f"{one.link_gbs:.2f}"
        size = f"{size_name(one.bytes)}B"
        yield (f"{size:<{_LABEL}}{one.us:>10.1f}{one.busbw_gbs:>10.2f}{rate:>14}  {one.algorithm}")


def _findings(findings: Sequence[Finding]) -> list[str]:
    if not findings:
        return ["none: collx works"]
    lines = []
    for one in findings:
        lines += _wrapped(f"{one.level} [{one.id}]: {one.what}.", " " * 4)
        lines += _wrapped(f"    Remedy: {one.fix}.", " " * 4)
    return lines


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent=indent, break_long_words=False)
