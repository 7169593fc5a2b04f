"""`collx.init`: creates a communicator for a group of ranks."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from collx._bootstrap import options, steps
from collx._bootstrap.store import Ballot
from collx._extension import extension
from collx._groups import Group, process_group
from collx._memory import SymmetricMemory
from collx.communicator import Communicator, find, making

__all__ = ["init", "make"]

_log = logging.getLogger("collx")


def init(
    group: Group = None,
    *,
    name: str | None = None,
    device: torch.device | str | int | None = None,
    timeout: float | timedelta = options.DEFAULT_TIMEOUT,
    payload_bytes: int | None = None,
    check: bool | None = None,
    pdl: str = "early",
    max_blocks: int | None = None,
    deterministic: bool = True,
    fallback_group: dist.ProcessGroup | None = None,
    watchdog: bool = False,
    overlap: bool = False,
    tuning: str | os.PathLike[str] | Mapping[str, Any] | None = None,
) -> Communicator:
    """Creates a communicator. Collective over `group`: either all ranks return a communicator, or
    all ranks raise an error.

    The function allocates the region of this rank, maps the regions of the peers, and sends real
    data over every path that it enables. If the ranks cannot access each other's memory, the
    communicator uses the process group instead, or `fallback_group`, and a warning states the
    reason.

    Args:
        group: the ranks: a process group or its name, a device mesh of one dimension, or a
            communicator, which stands for its process group. None stands for the default process
            group. At most 8 ranks on CUDA and 16 on the CPU.
        name: the name of the communicator; by default the name of the group. A group may have
            several communicators, each with its own name, region and thread blocks. The name of
            another process group is an error.
        device: by default the current CUDA device if the group was created for GPUs, else "cpu".
            If this build has no CUDA kernels (`collx.cuda_built`), a group that accepts only CUDA
            tensors is an error, and a group that accepts both kinds uses "cpu", with a warning.
        timeout: the maximum duration of each wait for a peer, in seconds or as a
            datetime.timedelta; 30 seconds by default.
        payload_bytes: the maximum size of the region in bytes; 128 MiB by default. On the CPU, a
            region has only a few MiB. With a smaller region, calls are divided into more chunks.
        check: True compares every call between the ranks before it starts. By default, the
            environment variable COLLX_CHECK=1 enables it.
        pdl: the level of programmatic dependent launch on CUDA: "off", "end" or "early".
        max_blocks: the maximum number of thread blocks of 512 threads that a call may use on
            CUDA. If the ranks pass different numbers, the smallest number applies. By default half
            of the blocks that the device can run at once.
        deterministic: True reduces in the order of the ranks, so that the bits of a result depend
            on the inputs only. False allows `algorithm="auto"` to use NVLink multicast, if it is
            available, for sums of large symmetric tensors between more than two ranks. The switch
            adds in its own order.
        fallback_group: the process group that `algorithm="fallback"` uses instead of `group`, with
            the same ranks in the same order. It serves a group whose backend has no gather, or
            whose backend itself calls the communicator. The communicator holds a reference to
            `fallback_group` until it is destroyed; destroy the group after the communicator.
        watchdog: True logs each call that has not completed after a third of `timeout`, with the
            missing ranks: one line for each such call, to the standard error output, by PyTorch's
            C++ logger at level WARNING. On CUDA, it also estimates how long calls wait for each
            rank, see `Communicator.stats`. One thread serves all communicators of the process. The
            ranks may pass different values.
        overlap: True leaves the multiprocessors of CUDA devices to work that runs at the same time.
            "auto" uses "copy_engine" for copies of 1 MiB and more into symmetric outputs, and
            `max_blocks` is 16 by default. The ranks must pass the same value. The CPU ignores it.
        tuning: a tuning table, as `python -m collx tune` measures it: the path of its JSON file, or
            the content of the file as a dict. Its entries replace the choices of
            `algorithm="auto"`; results keep their bits. The ranks must pass equal tables. A table
            of another machine, driver, world size or version of collx is an error. By default the
            environment variable COLLX_TUNING names the file; communicators with another world size
            or kind of device do not use that table.

    The ranks must pass the same values, except where an argument states otherwise. They may use
    devices with different indices.

    Returns:
        The communicator. torch.ops.collx finds it by its name.

    Raises:
        ValueError, TypeError: all ranks passed invalid arguments, or `group` is not usable.
        NotImplementedError: a CUDA graph is being captured on all ranks.
        InitError: a rank passed invalid arguments, or a step failed on a rank. All ranks raise it,
            with the rank and the cause. All memory is freed and the group remains usable, so all
            ranks may call init again. (After a rendezvous that did not end, its thread remains.)
    """
    chosen, store = process_group(group)
    members = options.Members(
        str(chosen.group_name), dist.get_rank(chosen), dist.get_world_size(chosen), store, chosen
    )
    return make(
        members,
        name=name,
        device=device,
        timeout=timeout,
        payload_bytes=payload_bytes,
        check=check,
        pdl=pdl,
        max_blocks=max_blocks,
        deterministic=deterministic,
        fallback_group=fallback_group,
        watchdog=watchdog,
        overlap=overlap,
        tuning=tuning,
    )


def make(
    members: options.Members,
    *,
    name: str | None,
    timeout: float | timedelta,
    spare: bool = True,
    **arguments: Any,
) -> Communicator:
    """Implements `init`, also for ranks without a registered process group. `spare`: whether calls
    use the remaining blocks while the device has no other communicator."""
    # A name that is refused is not used as a key either.
    key = name if name is not None and options.is_name(name) else members.name
    with making(key):
        limit = options.limit(timeout)
        try:
            # Created before any argument can be rejected, so that the peers get a report.
            ballot = Ballot(members.store, key, members.rank, members.size, limit)
        except Exception as reason:
            raise steps.failure(key, "arguments", f"the store failed: {reason}") from None
        try:
            given = options.check(
                members,
                name=name,
                timeout=timeout,
                spare=spare,
                exists=lambda name: find(name) is not None,
                **arguments,
            )
        except Exception as own:
            refused = steps.refusal(ballot, key, own)
            raise refused from (None if refused is own else own)
        setup = steps.Setup(arguments=given, store=members.store, ballot=ballot)
        try:
            steps.run(setup)
        except BaseException:
            setup.release()  # first: an interrupt may end the wait for the store
            # The keys of the rendezvous remain in the store, because a late rank may still read
            # them.
            ballot.leave()
            raise
        native = setup.communicator
        assert native is not None
        memory = SymmetricMemory(native, given.device, ballot, setup.rendezvous, setup.region)
        made = Communicator(
            given, native, memory, members.group, setup.layout, setup.fallback_reason
        )
    _log.info("%s: %r is ready", given.name, made)
    return made


def _make_native(group_name: str) -> extension.Communicator:
    return init(group_name)._native


# Communicators that C++ code requests.
extension.make_by(_make_native)
