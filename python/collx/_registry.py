"""The live communicators of this process, by name. A communicator stays until it is destroyed:
operators find it by name, whether or not the program keeps the object."""

from __future__ import annotations

import atexit
import os
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collx.communicator import Communicator

__all__ = ["add", "default_name", "find", "forked", "remove", "sharing"]

_live: dict[str, Communicator] = {}
_initialised_in: set[int] = set()  # ids of the processes, this one or ancestors


def add(communicator: Communicator) -> None:
    _live[communicator.name] = communicator
    _initialised_in.add(os.getpid())


def remove(communicator: Communicator) -> None:
    if _live.get(communicator.name) is communicator:
        del _live[communicator.name]


def find(name: str) -> Communicator | None:
    return _live.get(name)


def sharing(device: torch.device) -> list[Communicator]:
    """The communicators on a device."""
    return [communicator for communicator in _live.values() if communicator.device == device]


def forked() -> bool:
    """Whether this process was forked from one that had initialised collx."""
    return bool(_initialised_in - {os.getpid()})


def default_name() -> str:
    """The name that the default group's communicator has. ValueError without such a group."""
    if not dist.is_initialized():
        raise ValueError("torch.distributed has no default process group, so name a communicator")
    assert dist.group.WORLD is not None
    return str(dist.group.WORLD.group_name)


@atexit.register
def _at_exit() -> None:
    # Peers may have gone long ago. Nothing is waited for, and the memory goes with the process.
    for communicator in list(_live.values()):
        communicator._abandon()
