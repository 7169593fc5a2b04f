"""`collx.init`: from a group of ranks to a communicator."""

from __future__ import annotations

import logging
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
    timeout: float = options.DEFAULT_TIMEOUT,
    payload_bytes: int | None = None,
    check: bool | None = None,
    pdl: str = "early",
    max_blocks: int | None = None,
    deterministic: bool = True,
    fallback_group: dist.ProcessGroup | None = None,
    watchdog: bool = False,
    overlap: bool = False,
) -> Communicator:
    """Makes a communicator. Collective over `group`: all ranks return one, or all raise.

    Allocates this rank's region, maps the peers', and passes real data through every path that it
    enables. Where the ranks cannot reach each other's memory, the communicator goes through the
    process group instead, or through `fallback_group`, and a warning says why.

    Args:
        group: the ranks: a process group or its name, a device mesh of one dimension, a
            communicator, whose group is taken; the default group if None. At most 8 ranks on CUDA,
            16 on CPU.
        name: of the communicator; by default the group's own. One group may have several
            communicators, each with a name, a region and thread blocks of its own. The name of
            another process group is refused.
        device: by default the current CUDA device for a group that was made for GPUs, else "cpu".
            Where this build has no CUDA kernels (`collx.cuda_built`), a group that takes GPU
            tensors alone is refused, and one that takes both gives "cpu" and a warning.
        timeout: seconds that any wait for a peer takes at most.
        payload_bytes: bytes of the region; 128 MiB by default. A smaller one does more in chunks.
        check: compare every call between the ranks before it starts; by default what
            COLLX_CHECK=1 says.
        pdl: level of dependent launch on CUDA: "off", "end" or "early".
        max_blocks: thread blocks of 512 that a call may use on CUDA; of what the ranks give, the
            smallest counts. By default half of what the device holds.
        deterministic: reduce in the order of the ranks, so that the inputs alone decide the bits.
            False lets "auto" take NVLink multicast, whose switch adds up in an order of its own,
            where there is any: in sums of large symmetric tensors between more than two ranks.
        fallback_group: the process group that `algorithm="fallback"` uses instead of `group`, with
            the same ranks in the same order. For a group whose own backend cannot gather, or
            itself calls the communicator. The communicator keeps it until it is destroyed; whoever
            made it destroys it after that.
        watchdog: log a call that has not completed after a third of `timeout`, with the ranks that
            are missing: one line to the standard error output for each such call, by PyTorch's C++
            logger at level WARNING. One thread serves all communicators of the process. May differ
            from rank to rank.
        overlap: leave the multiprocessors of CUDA devices to other work, for calls that run beside
            it. "auto" takes "copy_engine" for copies of 1 MiB and more into symmetric outputs, and
            `max_blocks` is 16 by default. The same on every rank. The CPU ignores it.

    Returns:
        The communicator, ready for torch.ops.collx by its name.

    Raises:
        ValueError, TypeError: arguments that every rank refuses; or `group` is none to work with.
        InitError: some rank refused its arguments, or a step failed there; rank and cause are
            named on all of them. What was allocated is freed and the group works on, so all ranks
            may call init again. (After a rendezvous that did not end, its thread remains.)
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
    )


def make(
    members: options.Members,
    *,
    name: str | None,
    timeout: float,
    spare: bool = True,
    **arguments: Any,
) -> Communicator:
    """`init` for ranks that need not be a registered process group. `spare`: whether calls
    use the blocks that are left over while the device has no other communicator."""
    key = name if isinstance(name, str) and name else members.name
    with making(key):
        limit = options.limit(timeout)
        try:
            # Before anything can be refused, so that the peers hear of it.
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
            # What the rendezvous wrote stays in the store: a late rank may yet have to read it.
            ballot.leave()
            setup.release()
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


# Communicators that C++ asks for.
extension.make_by(_make_native)
