"""Names of the devices and the driver of this machine."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import torch

__all__ = ["device_name", "driver"]


def device_name(device: torch.device) -> str:
    """Returns the model name of a GPU, or of the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    found = _search(r"^model name\s*:\s*(.+)$", "/proc/cpuinfo")
    return (found or platform.processor() or platform.machine()).strip()


def driver(device: torch.device) -> str | None:
    """Returns the driver version of a GPU; None on the CPU, or if the version is not available."""
    if device.type != "cuda":
        return None
    return _search(r"\b(\d+\.\d+(?:\.\d+)?)\b", "/proc/driver/nvidia/version")


def _search(pattern: str, file: str) -> str | None:
    try:
        found = re.search(pattern, Path(file).read_text(), re.MULTILINE)
    except OSError:
        return None
    return found[1] if found else None
