"""Checks the arguments of init, all locally. Init reports invalid arguments in a vote."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from collx._bootstrap.symmetric import refuse_in_capture
from collx._extension import build, extension

__all__ = [
    "DEFAULT_TIMEOUT",
    "MAX_RANKS",
    "PDL_LEVELS",
    "Arguments",
    "Members",
    "check",
    "limit",
    "seconds_of",
]

DEFAULT_TIMEOUT = 30.0
DEFAULT_PAYLOAD_BYTES = 128 << 20  # the most that a rank's region takes
OVERLAP_BLOCKS = 16  # of a call, where a communicator leaves multiprocessors to other work
PDL_LEVELS = ("off", "end", "early")
WITHOUT_KERNELS = (
    "this build of collx has no CUDA kernels (collx.cuda_built is False); install collx from "
    "source with COLLX_CUDA=1, which requires nvcc"
)
MAX_RANKS = {"cuda": 8, "cpu": 16}


@dataclass(frozen=True)
class Members:
    """The ranks that a communicator is to have."""

    name: str
    """Of their process group."""
    rank: int
    size: int
    store: dist.Store
    group: dist.ProcessGroup | None
    """None: the backend of that group makes the communicator, maybe before the group is there."""


@dataclass(frozen=True)
class Arguments:
    """The checked arguments of init, with the defaults filled in."""

    name: str
    group_name: str
    rank: int
    world_size: int
    device: torch.device
    timeout: float
    payload_bytes: int
    check: bool
    pdl: str
    max_blocks: int | None
    spare: bool
    """Whether calls use the blocks that are left over, where max_blocks is None."""
    deterministic: bool
    fallback_group: dist.ProcessGroup | None
    watchdog: bool
    overlap: bool


def seconds_of(call: str, timeout: float | timedelta) -> float:
    """A timeout in seconds. TypeError or ValueError if it is invalid; `call` starts the message."""
    if isinstance(timeout, timedelta):
        seconds = timeout.total_seconds()
    elif isinstance(timeout, (int, float)) and not isinstance(timeout, bool):
        seconds = float(timeout)
    else:
        raise TypeError(
            f"{call}: timeout: got a {type(timeout).__name__}; accepted: a number of seconds, or a "
            "datetime.timedelta"
        )
    if not 0 < seconds < math.inf:
        raise ValueError(f"{call}: timeout: got {timeout}; accepted: finite and greater than 0")
    return seconds


def limit(timeout: float | timedelta) -> float:
    """How long this rank reports its invalid arguments to the peers, in seconds. `timeout` may be
    one of them."""
    try:
        return seconds_of("init", timeout)
    except (TypeError, ValueError, OverflowError):
        return DEFAULT_TIMEOUT


def check(
    members: Members,
    *,
    name: str | None,
    device: torch.device | str | int | None,
    timeout: float | timedelta,
    payload_bytes: int | None,
    check: bool | None,
    pdl: str,
    max_blocks: int | None,
    spare: bool,
    deterministic: bool,
    fallback_group: dist.ProcessGroup | None,
    watchdog: bool,
    overlap: bool = False,
    exists: Callable[[str], bool],
) -> Arguments:
    """Fills in the defaults. ValueError or TypeError names the argument that is refused;
    NotImplementedError during a capture. `exists` says whether a communicator has a name."""
    seconds = seconds_of("init", timeout)
    if pdl not in PDL_LEVELS:
        raise ValueError(f"init: pdl: got {pdl!r}; accepted: {', '.join(map(repr, PDL_LEVELS))}")
    if not isinstance(deterministic, bool):
        raise TypeError(
            f"init: deterministic: got a {type(deterministic).__name__}; accepted: a bool"
        )
    if not isinstance(watchdog, bool):
        raise TypeError(f"init: watchdog: got a {type(watchdog).__name__}; accepted: a bool")
    if not isinstance(overlap, bool):
        raise TypeError(f"init: overlap: got a {type(overlap).__name__}; accepted: a bool")
    chosen = _device(device, members.group)
    refuse_in_capture("init", chosen)
    world_size = members.size
    if world_size > MAX_RANKS[chosen.type]:
        raise ValueError(
            f"init: group: got {world_size} ranks; accepted on {chosen.type}: at most "
            f"{MAX_RANKS[chosen.type]}"
        )
    room = DEFAULT_PAYLOAD_BYTES if payload_bytes is None else payload_bytes
    _integer("payload_bytes", room)
    extension.region_layout(chosen.type, world_size, room)
    if max_blocks is not None:
        _integer("max_blocks", max_blocks)
    group_name = members.name
    if name is not None and (not isinstance(name, str) or not name):
        raise TypeError(f"init: name: got {name!r}; accepted: a string that is not empty, or None")
    if name is not None and any(
        named == name and other is not members.group
        for other, named in distributed_c10d._world.pg_names.items()
    ):
        raise ValueError(
            f"init: name: got {name!r}, which is the name of another process group; accepted: any "
            "other name"
        )
    if exists(name or group_name):
        raise ValueError(
            f"init: communicator {name or group_name!r} exists already; destroy it, or pass "
            "another name"
        )
    return Arguments(
        name=name or group_name,
        group_name=group_name,
        rank=members.rank,
        world_size=world_size,
        device=chosen,
        timeout=seconds,
        payload_bytes=room,
        check=_flag("COLLX_CHECK") if check is None else bool(check),
        pdl=pdl,
        max_blocks=OVERLAP_BLOCKS if overlap and max_blocks is None else max_blocks,
        spare=spare,
        deterministic=deterministic,
        fallback_group=_fallback(fallback_group, members, chosen),
        watchdog=watchdog,
        overlap=overlap,
    )


def _fallback(
    given: dist.ProcessGroup | None, members: Members, device: torch.device
) -> dist.ProcessGroup | None:
    if given is None:
        return None
    if cast(object, given) is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("init: this process is not a member of fallback_group")
    if not isinstance(given, dist.ProcessGroup):
        raise TypeError(
            f"init: fallback_group: got a {type(given).__name__}; accepted: a ProcessGroup, or "
            "None for the group itself"
        )
    ranks: list[int] = []
    its_ranks = ranks
    # A group that a backend made for itself has no global ranks.
    if given in distributed_c10d._world.pg_map and members.group is not None:
        ranks = dist.get_process_group_ranks(members.group)
        its_ranks = dist.get_process_group_ranks(given)
    elif (given.rank(), given.size()) != (members.rank, members.size):
        raise ValueError(
            f"init: fallback_group: this process is rank {given.rank()} of {given.size()}; "
            f"accepted: rank {members.rank} of {members.size}, as in group"
        )
    if its_ranks != ranks:
        raise ValueError(
            f"init: fallback_group: got the global ranks {its_ranks}; accepted: the ranks of "
            f"group in the same order, {ranks}"
        )
    served = sorted({served.type for served in given._device_types})
    if not {device.type, "cpu"} & set(served):
        raise ValueError(
            f"init: fallback_group: got a group for {', '.join(served) or 'no device'}; accepted: "
            f"a group for {' or '.join(sorted({device.type, 'cpu'}))}"
        )
    return given


def _integer(argument: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"init: {argument}: got a {type(value).__name__}; accepted: an int")
    if value < 1:
        raise ValueError(f"init: {argument}: got {value}; accepted: 1 or more")


def _flag(variable: str) -> bool:
    return os.environ.get(variable, "0") == "1"


def _device(
    device: torch.device | str | int | None, group: dist.ProcessGroup | None
) -> torch.device:
    chosen = _default_device(group) if device is None else torch.device(device)
    if chosen.type not in MAX_RANKS:
        raise ValueError(f"init: device: got {chosen}; accepted: cuda, cpu")
    if chosen.type == "cpu":
        return torch.device("cpu")
    if build.cuda is None:
        raise ValueError(f"init: device: got {chosen}, but {WITHOUT_KERNELS}, or pass device='cpu'")
    if not torch.cuda.is_available():
        raise ValueError(f"init: device: got {chosen}, but there is no GPU; pass device='cpu'")
    index = torch.cuda.current_device() if chosen.index is None else chosen.index
    if index >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ValueError(f"init: device: got {chosen}; accepted: cuda:0 to cuda:{count - 1}")
    return torch.device("cuda", index)


def _default_device(group: dist.ProcessGroup | None) -> torch.device:
    """What the group was made for. Gloo and MPI take GPU tensors too, but a group that has nothing
    else was made for the CPU."""
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    gpus_alone = "cpu" not in backends
    for_gpus = gpus_alone or backends.get("cuda", "gloo") not in ("gloo", "mpi")
    if not for_gpus:
        return torch.device("cpu")
    if gpus_alone or (build.cuda is not None and torch.cuda.is_available()):
        return torch.device("cuda")  # refused by the caller where it cannot be had
    if torch.cuda.is_available() and dist.get_rank(group) == 0:
        warnings.warn(
            f"collx.init: the communicator accepts only CPU tensors, since {WITHOUT_KERNELS}, or "
            "pass device='cpu' to silence this warning",
            stacklevel=6,  # _default_device, _device, check, make, init, its caller
        )
    return torch.device("cpu")
