"""Resolves the `group` arguments: to a communicator, or to the ranks of a new one."""

from __future__ import annotations

from typing import NoReturn, TypeAlias, cast

import torch
import torch.distributed as dist
from torch.compiler import is_dynamo_compiling
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from collx._bootstrap.options import group_named, group_of_backend
from collx._imports import after_import
from collx.communicator import Communicator, find, forked, known, of_calls, of_group, settle_known
from collx.errors import CommunicatorPoisoned

__all__ = ["Group", "get", "is_initialized", "name_of", "process_group"]

Group: TypeAlias = Communicator | str | dist.ProcessGroup | DeviceMesh | None
"""A communicator; its name; a process group or a device mesh of one dimension; or None for the
default process group. A group stands for the communicator that has the group's own name, otherwise
for the only communicator that was made from it."""

_ACCEPTED = (
    "a Communicator, its name, a ProcessGroup, a DeviceMesh of one dimension, or None for the "
    "default group"
)


def name_of(group: Group) -> str:
    """Returns the name by which operators find the communicator. For a group without a
    communicator, returns the group's own name, because a communicator may be created later.

    Raises:
        TypeError: `group` has another type.
        ValueError: this process is not a member of the group, the group is a mesh of several
            dimensions, or it has several communicators.
        CommunicatorPoisoned: the communicator has been destroyed."""
    if type(group) is str:
        return group
    if not is_dynamo_compiling():
        chosen = distributed_c10d._world.default_pg if group is None else group
        try:
            return known[chosen][0]
        except (KeyError, TypeError):  # TypeError: not hashable
            pass
    if isinstance(group, str):
        return group
    if isinstance(group, Communicator):
        if not group._listed:  # another communicator may have the name by now
            _refuse_destroyed(group.name)
        return group.name
    members = _members(group)
    name: str = _name_for_group(str(members.group_name))
    if not is_dynamo_compiling():
        settle_known(members)  # the backend "collx" may have had a communicator before its group
    # Dynamo cannot guard on the result of an assumed constant. It needs no guard for a new string.
    return "".join((name,))


def _name_for_group(group_name: str) -> str:
    communicator = of_calls(group_name)
    if communicator is not None:
        return communicator.name
    if find(group_name) is not None:
        raise ValueError(
            f"group: process group {group_name!r} has no communicator, and the communicator with "
            "that name was made from another group; call collx.init with this group and a name"
        )
    return group_name


def _refuse_destroyed(name: str) -> NoReturn:
    raise CommunicatorPoisoned(f"communicator {name!r} has been destroyed", name)


# Dynamo calls the functions during tracing and stores the name in the graph as a constant. These
# are not decorators, because assume_constant_result imports Dynamo.
after_import("torch._dynamo", lambda: torch.compiler.assume_constant_result(_name_for_group))
after_import("torch._dynamo", lambda: torch.compiler.assume_constant_result(_refuse_destroyed))


def get(group: Group = None) -> Communicator:
    """Returns the communicator of a group. Raises ValueError if there is none, and
    CommunicatorPoisoned if it has been destroyed."""
    name = name_of(group)
    communicator = find(name) or of_group(name)
    if communicator is not None:
        return communicator
    if group_of_backend(name) is not None:
        raise ValueError(
            f'the backend "collx" has not created a communicator of group {name!r}; it does so in '
            "the first collective of all ranks, or with the group if device_id is given"
        )
    raise ValueError(f"this process has no communicator {name!r}; call collx.init first")


def rank_and_size(group: Group = None) -> tuple[int, int]:
    """Returns this rank and the number of ranks, also if the backend "collx" has not created the
    communicator yet. Raises the errors of `get`."""
    name = name_of(group)
    members = group_of_backend(name) if find(name) is None else None
    if members is not None:
        return members.rank(), members.size()
    communicator = get(group)
    return communicator.rank, communicator.world_size


def is_initialized(group: Group = None) -> bool:
    """Whether there is a communicator for the group."""
    if group is None and not dist.is_initialized():
        return False
    if group is None or isinstance(group, (dist.ProcessGroup, DeviceMesh)):
        return of_group(_members(group)) is not None
    if isinstance(group, Communicator):
        return group._listed
    name = name_of(group)
    return (find(name) or of_group(name)) is not None


def process_group(group: Group) -> tuple[dist.ProcessGroup, dist.Store]:
    """Returns the process group of a new communicator, and its store. Raises ValueError if this
    process is not a member of the group."""
    if forked():  # the store must not be used either: its connection belongs to the parent
        raise ValueError(
            "init: this process was forked from one that had initialized collx; "
            "start it with the spawn method instead"
        )
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("init: torch.distributed.init_process_group has not been called")
    if isinstance(group, str):
        chosen = _named(group)
    elif isinstance(group, Communicator):
        chosen = group.group
    else:
        chosen = _members(group, "init: ")
    if chosen not in distributed_c10d._world.pg_map:
        raise ValueError("init: group was never initialized, or has been destroyed")
    if dist.get_rank(chosen) < 0:
        raise ValueError("init: this process is not a member of group")
    return chosen, distributed_c10d._get_process_group_store(chosen)


def _members(group: dist.ProcessGroup | DeviceMesh | None, where: str = "") -> dist.ProcessGroup:
    if group is None:
        if dist.group.WORLD is None:
            raise ValueError(
                f"{where}group: got None, but torch.distributed has no default process group; call "
                "torch.distributed.init_process_group and collx.init first, or pass a communicator"
            )
        return dist.group.WORLD
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"{where}group: got a DeviceMesh of {group.ndim} dimensions "
                f"{tuple(group.mesh_dim_names or group.shape)}; accepted: one of its dimensions, "
                'as mesh["name"]'
            )
        group = group.get_group()
    if cast(object, group) is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"{where}this process is not a member of group")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"{where}group: got a {type(group).__name__}; accepted: {_ACCEPTED}")
    return group


def _named(name: str) -> dist.ProcessGroup:
    """Returns the process group with a name, or that of the communicator with that name."""
    communicator = find(name)
    if communicator is not None:
        return communicator.group
    group = group_named(name)
    if group is None:
        raise ValueError(f"init: group: this process has no process group named {name!r}")
    return group
