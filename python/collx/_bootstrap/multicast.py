"""NVLink multicast: one address for the same memory of all ranks.

PyTorch's rendezvous creates such addresses if it can. If one rank has no address, no rank uses
multicast."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch.distributed._symmetric_memory import _SymmetricMemory

OFF = "TORCH_SYMM_MEM_DISABLE_MULTICAST"  # an environment variable of PyTorch

simulated = False
"""If True, kernels use the address of each rank instead of a switch. Only tests set it."""

_LEAST = (9, 0)  # minimum compute capability


def address_of(handle: _SymmetricMemory) -> int:
    """Returns the multicast address of the memory of a rendezvous; 0 if it has none."""
    if handle.device.type != "cuda":
        return 0
    if simulated:
        return int(handle.buffer_ptrs[handle.rank])
    # If the memory starts inside of a block, it depends on the version of PyTorch whether the
    # address includes the offset.
    inside = handle.offset != 0  # type: ignore[attr-defined]
    return 0 if inside else int(handle.multicast_ptr)


def missing(device: torch.device, address: int) -> str | None:
    """Returns what this rank lacks for multicast, None if nothing. `address`: the multicast address
    of its region."""
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST and not simulated:
        major, minor = capability
        return f"its GPU has compute capability {major}.{minor}; 9.0 or later is required"
    if address == 0:
        why = f" ({OFF} is set)" if os.environ.get(OFF) == "1" else ""
        return f"its memory has no multicast address from PyTorch{why}"
    return None


def agreed(lacking: Sequence[str | None]) -> str | None:
    """Returns why the ranks have no multicast: the first entry of `lacking` that is not None."""
    found = (f"rank {rank}: {what}" for rank, what in enumerate(lacking) if what is not None)
    return next(found, None)
