"""Checks the arguments of init locally. Init reports invalid arguments in a vote."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from collx import _tuning
from collx._bootstrap.symmetric import refuse_in_capture
from collx._extension import build, extension

DEFAULT_TIMEOUT = 30.0
MAX_NAME_BYTES = 1024  # a key of the store has at most 8 KiB, and may contain the name twice
MAX_TIMEOUT = 1e9  # seconds; the clocks of Python and the store count nanoseconds in 64 bits
DEFAULT_PAYLOAD_BYTES = 128 << 20  # maximum size of a rank's region
OVERLAP_BLOCKS = 16  # maximum of a call if a communicator leaves multiprocessors to other work
PDL_LEVELS = ("off", "end", "early")
WITHOUT_KERNELS = (
    "this build of collx has no CUDA kernels (collx.cuda_built is False); install collx from "
    "source with COLLX_CUDA=1, which requires nvcc"
)
MAX_RANKS = {"cuda": 8, "cpu": 16}


def group_named(name: str) -> dist.ProcessGroup | None:
    """Returns the process group of this process with that name, None if there is none."""
    named = tuple(distributed_c10d._world.pg_names.items())  # other threads may create groups
    return next((group for group, its_name in named if its_name == name), None)


def group_of_backend(name: str) -> dist.ProcessGroup | None:
    """Returns the process group with that name if it has the backend "collx", otherwise None."""
    group = group_named(name)
    if group is None:
        return None
    backends = dist.get_backend_config(group).split(",")  # such as "cpu:gloo,cuda:collx"
    return group if any(each.endswith(":collx") for each in backends) else None


@dataclass(frozen=True)
class Members:
    """The ranks of a new communicator."""

    name: str
    """The name of the process group."""
    rank: int
    size: int
    store: dist.Store
    group: dist.ProcessGroup | None
    """The process group, or None if its backend creates the communicator. The group may not exist
    yet in this case."""


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
    clusters: bool
    pdl: str
    max_blocks: int | None
    spare: bool
    """Whether calls use the remaining blocks if max_blocks is None."""
    deterministic: bool
    fallback_group: dist.ProcessGroup | None
    watchdog: bool
    overlap: bool
    tuning: _tuning.Tuning | None


def seconds_of(call: str, timeout: float | timedelta) -> float:
    """Returns a timeout in seconds. Raises TypeError or ValueError if it is invalid. `call` starts
    the message."""
    if isinstance(timeout, timedelta):
        seconds = timeout.total_seconds()
    elif isinstance(timeout, (int, float)) and not isinstance(timeout, bool):
        seconds = float(timeout)
    else:
        raise TypeError(
            f"{call}: timeout: got a {type(timeout).__name__}; accepted: a number of seconds, or a "
            "datetime.timedelta"
        )
    if not 0 < seconds <= MAX_TIMEOUT:
        raise ValueError(
            f"{call}: timeout: got {timeout}; accepted: greater than 0 and at most "
            f"{MAX_TIMEOUT:.0f} seconds"
        )
    return seconds


def is_name(name: object) -> bool:
    """Whether `name` can be the name of a communicator."""
    return isinstance(name, str) and 0 < _bytes_in(name) <= MAX_NAME_BYTES


def _bytes_in(name: str) -> int:
    return len(name.encode(errors="surrogatepass"))


def limit(timeout: float | timedelta) -> float:
    """Returns the time limit, in seconds, in which this rank reports invalid arguments to the
    peers. `timeout` itself may be invalid."""
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
    tuning: _tuning.Given = None,
    exact_tuning: bool = True,
    exists: Callable[[str], bool],
) -> Arguments:
    """Checks the arguments and fills in the defaults.

    `exists` returns whether a communicator with a name exists. `exact_tuning`: whether `tuning` is
    for this communicator alone.

    Raises:
        ValueError, TypeError: an argument is invalid. The message names it.
        NotImplementedError: a CUDA graph is being captured.
    """
    seconds = seconds_of("init", timeout)
    if pdl not in PDL_LEVELS:
        raise ValueError(f"init: pdl: got {pdl!r}; accepted: {', '.join(map(repr, PDL_LEVELS))}")
    if check is not None and not isinstance(check, bool):
        raise TypeError(f"init: check: got a {type(check).__name__}; accepted: a bool, or None")
    switches = {"deterministic": deterministic, "watchdog": watchdog, "overlap": overlap}
    for switch, value in switches.items():
        if not isinstance(value, bool):
            raise TypeError(f"init: {switch}: got a {type(value).__name__}; accepted: a bool")
    chosen = _device(device, members.group)
    refuse_in_capture("init", chosen)
    world_size = members.size
    if world_size > MAX_RANKS[chosen.type]:
        raise ValueError(
            f"init: group: got {world_size} ranks; accepted on {chosen.type}: at most "
            f"{MAX_RANKS[chosen.type]}"
        )
    room = DEFAULT_PAYLOAD_BYTES if payload_bytes is None else payload_bytes
    _integer("payload_bytes", room, 2**63 - 1)
    extension.region_layout(chosen.type, world_size, room)
    if max_blocks is not None:
        _integer("max_blocks", max_blocks, 2**31 - 1)
    group_name = members.name
    if name is not None and (not isinstance(name, str) or not name):
        raise TypeError(f"init: name: got {name!r}; accepted: a string that is not empty, or None")
    if name is not None and not is_name(name):
        raise ValueError(
            f"init: name: got {_bytes_in(name)} bytes in UTF-8; accepted: at most {MAX_NAME_BYTES}"
        )
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
        check=_flag("COLLX_CHECK") if check is None else check,
        clusters=not _flag("COLLX_NO_CLUSTERS"),
        pdl=pdl,
        max_blocks=OVERLAP_BLOCKS if overlap and max_blocks is None else max_blocks,
        spare=spare,
        deterministic=deterministic,
        fallback_group=_fallback(fallback_group, members, chosen),
        watchdog=watchdog,
        overlap=overlap,
        tuning=_tuning.chosen(
            tuning, chosen, world_size, deterministic=deterministic, exact=exact_tuning
        ),
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
    # A group that a backend created for itself has no global ranks.
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


def _integer(argument: str, value: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"init: {argument}: got a {type(value).__name__}; accepted: an int")
    if not 1 <= value <= most:
        raise ValueError(f"init: {argument}: got {value}; accepted: 1 to {most}")


def _flag(variable: str) -> bool:
    value = os.environ.get(variable, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"init: environment variable {variable}: got {value!r}; accepted: 0, 1")
    return value == "1"


def _device(
    device: torch.device | str | int | None, group: dist.ProcessGroup | None
) -> torch.device:
    try:
        chosen = None if device is None else torch.device(device)
    except RuntimeError:  # it lists the devices of PyTorch, not those of collx
        raise ValueError(f"init: device: got {device!r}; accepted: cuda, cpu") from None
    chosen = _default_device(group) if chosen is None else chosen
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
    """Returns the device that the group was created for. Gloo and MPI also accept GPU tensors, but
    a group with no other backend was created for the CPU."""
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    gpus_alone = "cpu" not in backends
    for_gpus = gpus_alone or backends.get("cuda", "gloo") not in ("gloo", "mpi")
    if not for_gpus:
        return torch.device("cpu")
    if gpus_alone or (build.cuda is not None and torch.cuda.is_available()):
        return torch.device("cuda")  # the caller raises an error if it is not available
    if torch.cuda.is_available() and dist.get_rank(group) == 0:
        warnings.warn(
            f"collx.init: the communicator accepts only CPU tensors, since {WITHOUT_KERNELS}, or "
            "pass device='cpu' to silence this warning",
            stacklevel=6,  # _default_device, _device, check, make, init, its caller
        )
    return torch.device("cpu")
