"""NVLink multicast: an address that stands for the same memory of all ranks.

PyTorch's rendezvous creates such addresses if it can. The ranks agree on their use: if one rank has
none, no rank uses them."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch.distributed._symmetric_memory import _SymmetricMemory

__all__ = ["OFF", "address_of", "agreed", "missing"]

OFF = "TORCH_SYMM_MEM_DISABLE_MULTICAST"  # PyTorch's own switch

simulated = False
"""Only set by tests: kernels use the address of each rank instead of a switch."""

_LEAST = (9, 0)  # compute capability


def address_of(handle: _SymmetricMemory) -> int:
    """The multicast address of the memory of a rendezvous; 0 if it has none."""
    if handle.device.type != "cuda":
        return 0
    if simulated:
        return int(handle.buffer_ptrs[handle.rank])
    # Whether the address of what starts inside of a block has its offset depends on the version.
    inside = handle.offset != 0  # type: ignore[attr-defined]
    return 0 if inside else int(handle.multicast_ptr)


def missing(device: torch.device, address: int) -> str | None:
    """What this rank lacks. `address`: of its region."""
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST and not simulated:
        major, minor = capability
        return f"its GPU has compute capability {major}.{minor}; 9.0 or later is required"
    if address == 0:
        why = f" ({OFF} is set)" if os.environ.get(OFF) == "1" else ""
        return f"its memory has no multicast address from PyTorch{why}"
    return None


def agreed(lacking: Sequence[str | None]) -> str | None:
    """The reason why the ranks have no multicast: the first of what each rank lacks; or None."""
    found = (f"rank {rank}: {what}" for rank, what in enumerate(lacking) if what is not None)
    return next(found, None)
