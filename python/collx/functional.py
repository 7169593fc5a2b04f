"""What a program calls around the operators: communicators, symmetric tensors, sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist

from collx import _arguments, _init, _registry, _tensors
from collx._explain import last_axis
from collx._extension import extension
from collx._init import Setup
from collx._vote import Ballot, next_prefix
from collx.communicator import Communicator

__all__ = [
    "Group",
    "empty",
    "get",
    "init",
    "is_initialized",
    "name_of",
    "register",
    "workspace_bytes",
]

Group: TypeAlias = "Communicator | dist.ProcessGroup | str | None"
"""What stands for a communicator: itself, its name, or the group whose default it is; None for
the default group's."""


def init(
    group: dist.ProcessGroup | None = None,
    *,
    name: str | None = None,
    device: torch.device | str | int | None = None,
    timeout: float = _arguments.DEFAULT_TIMEOUT,
    payload_bytes: int | None = None,
    check: bool | None = None,
    pdl: str = "early",
    blocks: int | None = None,
) -> Communicator:
    """Makes a communicator. Collective over `group`: all ranks return one, or all raise.

    Allocates this rank's region, maps the peers', and passes real data through every path that it
    enables. Where the ranks cannot reach each other's memory, the communicator goes through the
    process group instead, and a warning says why.

    Args:
        group: the ranks; the default group if None. At most 8 ranks on CUDA, 16 on CPU.
        name: of the communicator; by default the group's own. One group may have several
            communicators, each with a name, a region and thread blocks of its own.
        device: by default the current CUDA device for a group that was made for GPUs, else "cpu".
            Where this build has no CUDA kernels (`collx.cuda_built`), a group that takes GPU
            tensors alone is refused, and one that takes both gives "cpu" and a warning.
        timeout: seconds that any wait for a peer takes at most.
        payload_bytes: bytes of the region; 96 MiB by default. A smaller one does more in chunks.
        check: compare every call between the ranks before it starts; by default what
            COLLX_CHECK=1 says.
        pdl: level of dependent launch on CUDA: "off", "end" or "early".
        blocks: thread blocks of 512 that a call may use on CUDA; the smallest offer of the ranks
            counts. By default half of what the device holds.

    Returns:
        The communicator, ready for torch.ops.collx by its name.

    Raises:
        ValueError, TypeError: arguments that every rank refuses; or `group` is none to work with.
        InitError: some rank refused its arguments, or a step failed there; rank and cause are
            named on all of them. What was allocated is freed and the group works on. (After a
            rendezvous that did not end, its thread remains.)
    """
    chosen, store = _arguments.resolve_group(group)
    key = name if isinstance(name, str) and name else str(chosen.group_name)
    limit = _arguments.limit(timeout)
    try:
        # Counted before anything can be refused, so that ranks of which one was refused meet again.
        prefix = next_prefix(store, key, dist.get_rank(chosen), limit)
    except Exception as reason:
        raise _init.failure(key, "arguments", f"the store failed: {reason}") from None
    ballot = Ballot(store, prefix, dist.get_rank(chosen), dist.get_world_size(chosen), limit)
    try:
        arguments = _arguments.check(
            chosen,
            name=name,
            device=device,
            timeout=timeout,
            payload_bytes=payload_bytes,
            check=check,
            pdl=pdl,
            blocks=blocks,
        )
    except Exception as own:
        refused = _init.refusal(ballot, key, own)
        raise refused from (None if refused is own else own)
    setup = Setup(arguments=arguments, group=chosen, store=store, ballot=ballot)
    try:
        _init.run(setup)
        return Communicator(setup)
    except BaseException:
        # What the rendezvous wrote stays in the store: a late rank may yet have to read it.
        setup.ballot.leave()
        setup.release()
        raise


def is_initialized(group: Group = None) -> bool:
    """Whether the communicator exists."""
    if group is None and not dist.is_initialized():
        return False
    return _registry.find(name_of(group)) is not None


def get(group: Group = None) -> Communicator:
    """The communicator of a name or group. ValueError when there is none."""
    name = name_of(group)
    communicator = _registry.find(name)
    if communicator is None:
        raise ValueError(f"there is no communicator {name!r}; call collx.init first")
    return communicator


def empty(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    device: torch.device | str | int | None = None,
    group: Group = None,
) -> torch.Tensor:
    """Allocates a symmetric tensor, registered with a communicator: peers read and write it in
    place. Collective, with the same arguments on every rank.

    Args:
        size: the shape, as integers or one sequence. Without elements it is an ordinary tensor.
        dtype: by default torch's default dtype.
        device: the communicator's; another one is refused.
        group: the communicator.

    Returns:
        A contiguous tensor, not initialised. Every rank must keep its own while any rank uses
        them in a call.

    Raises:
        ValueError, TypeError: arguments that every rank refuses.
        InitError: some rank refused its arguments, or could not allocate or map it; rank and cause
            are named on all of them.
        CollectiveMismatch: the ranks asked for different tensors, or made different calls.
        CollectiveTimeout: some rank did not come. The communicator is poisoned then.
    """
    return _tensors.empty(get(group), size, dtype, device)


def register(tensor: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Registers a tensor that PyTorch's symmetric memory allocated. Collective, with tensors of
    one size and dtype at one offset. All tensors that share its storage count as symmetric then.

    Returns:
        The tensor.

    Raises:
        ValueError, TypeError: no rank has a tensor of the communicator's device.
        InitError: some rank's tensor is not, or was not allocated as symmetric memory, or not
            mapped; rank and cause are named on all of them.
        CollectiveMismatch: the ranks' tensors do not fit together, or they made different calls.
        CollectiveTimeout: some rank did not come. The communicator is poisoned then.
    """
    return get(group).register(tensor)


def workspace_bytes(
    op: str,
    shape: int | Sequence[int],
    dtype: torch.dtype,
    world_size: int,
    algorithm: str = "auto",
    *,
    symmetric: bool = False,
) -> int:
    """Bytes of a rank's region that a call keeps occupied if it is not to be done in chunks.

    Args:
        op: name of the operator.
        shape: of the full tensor.
        dtype: of the tensor.
        world_size: number of ranks.
        algorithm: as given to the operator.
        symmetric: whether input and output are registered symmetric tensors.

    Raises:
        ValueError, TypeError: an op, algorithm or dtype that collx does not know.
    """
    numel = shape if isinstance(shape, int) else math.prod(shape)
    if numel < 0 or (not isinstance(shape, int) and any(n < 0 for n in shape)):
        raise ValueError(f"workspace_bytes: shape {shape} has a negative dimension")
    return extension.workspace_bytes(
        op, numel, last_axis(shape), dtype, world_size, algorithm, symmetric
    )


def name_of(group: Group) -> str:
    """The name under which operators find a communicator. TypeError for what stands for none."""
    if isinstance(group, str):
        return group
    if group is None:
        return _registry.default_name()
    if isinstance(group, Communicator):
        return group.name
    if isinstance(group, dist.ProcessGroup):
        return str(group.group_name)
    raise TypeError(f"group is a {type(group).__name__}, not a Communicator, str or ProcessGroup")
