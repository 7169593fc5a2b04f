"""Gathers facts about the GPUs: from nvidia-smi in this process, and from PyTorch in a rank.

This process does not initialize CUDA, because a driver that hangs must not block the doctor.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import torch
from torch._C._autograd import DeviceType
from torch.distributed._symmetric_memory import _SymmetricMemory

from collx._doctor.facts import Device, Gpu, Gpus

_QUERY = ("index", "name", "uuid", "mig.mode.current", "compute_mode", "driver_version")
_SECONDS = 20  # nvidia-smi is slow if the driver is not loaded permanently
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_CUDA = re.compile(r"CUDA[\w ]* Version\s*:\s*([\d.]+)")


def gpus() -> tuple[Gpus, str | None, str | None]:
    """Returns the GPUs, the version of their driver, and the newest CUDA that it supports."""
    found = Gpus(usable=torch.cuda.device_count(), mps=_has_mps())
    try:
        found.seen, driver = parse_query(_smi(f"--query-gpu={','.join(_QUERY)}", "--format=csv"))
        newest = _CUDA.search(_smi())
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        found.smi_error = f"{type(error).__name__}: {error}"
        return found, None, None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        found.links = parse_links(_smi("topo", "-m"))
    return found, driver, newest[1] if newest else None


def _smi(*arguments: str) -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        raise FileNotFoundError("nvidia-smi is not on the path")
    done = subprocess.run(
        [program, *arguments], capture_output=True, text=True, timeout=_SECONDS, check=True
    )
    return done.stdout


def parse_query(text: str) -> tuple[list[Gpu], str | None]:
    """Parses the CSV output with a header: returns the GPUs and the version of the driver."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()[1:]]
    rows = [row for row in rows if len(row) == len(_QUERY)]
    return [Gpu(*row[:-1]) for row in rows], rows[0][-1] if rows else None


def parse_links(text: str) -> dict[str, dict[str, str]]:
    """Parses the links between GPUs in `nvidia-smi topo -m`. "NV18" means 18 NVLinks; all other
    values are PCIe."""
    lines = [_ESCAPES.sub("", line).split() for line in text.splitlines()]
    head = next((line for line in lines if "GPU0" in line), [])
    names = [name for name in head if name.startswith("GPU") and name[3:].isdigit()]
    return {
        line[0]: dict(zip(names, line[1:], strict=False))
        for line in lines
        if line and line != head and line[0] in names
    }


def _has_mps() -> bool:
    """Whether the pipe of an MPS control daemon exists where CUDA expects it."""
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    return Path(folder, "control").exists()


def devices() -> list[Device]:
    """Returns the GPUs of this process. Initializes CUDA."""
    return [_device(index) for index in range(torch.cuda.device_count())]


def _device(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    multicast: bool | None = None
    with contextlib.suppress(Exception):  # queries the driver, and creates nothing
        multicast = bool(_SymmetricMemory.has_multicast_support(DeviceType.CUDA, index))
    return Device(
        index=index,
        name=properties.name,
        uuid=str(properties.uuid),
        capability=f"{properties.major}.{properties.minor}",
        memory=properties.total_memory,
        multicast=multicast,
    )


def peers() -> list[list[bool]]:
    """Returns the matrix of peer access between the devices, with True on the diagonal."""
    indices = range(torch.cuda.device_count())
    return [[i == j or torch.cuda.can_device_access_peer(i, j) for j in indices] for i in indices]
