"""The voted init: a list of named local steps, each followed by an agreement.

Every rank runs a step by itself. Then the ranks exchange the results, and all continue or all raise
the same InitError (hazard 6). All common decisions are computed from the exchanged values, never
from values that only one rank has (hazard 5).
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from collx._bootstrap import multicast, selftest, symmetric
from collx._bootstrap.options import Arguments, group_named
from collx._bootstrap.store import Ballot, VoteError, cause_of
from collx._extension import extension
from collx.errors import InitError

_log = logging.getLogger("collx")

_NOWHERE = symmetric.Mapped([], 0)


@dataclass
class Setup:
    """The state of the steps on this rank."""

    arguments: Arguments
    store: dist.Store
    ballot: Ballot
    token: str = ""  # makes the names of the attempt unique; equal on all ranks
    layout: dict[str, int] = field(default_factory=dict)
    rendezvous: symmetric.Rendezvous | None = None
    fallback_reason: str | None = None
    region: torch.Tensor | None = None
    regions: symmetric.Mapped = _NOWHERE
    multicast_unavailable_reason: str | None = None  # why the ranks have no multicast
    multicast_failed: bool = False  # in the self-test
    sample: torch.Tensor | None = None  # symmetric memory for the self-test only
    samples: symmetric.Mapped = _NOWHERE
    agreed: dict[str, int] = field(default_factory=dict)  # what the devices of all ranks support
    spare_blocks: int = 0
    same_index: bool = False  # two ranks use the same index for different GPUs
    shared_device: bool = False  # two ranks use one GPU
    trial: dict[str, int] = field(default_factory=dict)  # clusters to test for co-residency
    trials: int = 0  # numbers that trials have used
    communicator: extension.Communicator | None = None

    def release(self) -> None:
        """Frees everything. Local; mappings of the peers remain valid."""
        if self.communicator is not None:
            self.communicator.destroy()
        if self.rendezvous is not None:
            self.rendezvous.close()
        self.communicator = self.rendezvous = self.region = self.sample = None
        self.regions = self.samples = _NOWHERE


@dataclass(frozen=True)
class Step:
    """A step of init. `run` is local, and may fail or return a JSON-serializable value. `conclude`
    gets the values of all ranks in rank order and only computes with them, so it cannot fail on one
    rank alone. The step is repeated while `conclude` returns True."""

    name: str
    run: Callable[[Setup], Any]
    conclude: Callable[[Setup, list[Any]], bool | None] | None = None


def run(setup: Setup) -> None:
    """Takes all STEPS. Raises the same InitError on every rank if a step fails."""
    for step in tuple(STEPS):
        again: bool | None = True
        try:
            while again:
                values = setup.ballot.take(step.name, partial(step.run, setup))
                again = step.conclude is not None and step.conclude(setup, values)
        except (VoteError, _DisagreementError) as reason:
            raise failure(setup.arguments.name, step.name, reason) from None
        _log.debug("%s: step %r is done on all ranks", setup.arguments.name, step.name)


def refusal(ballot: Ballot, name: str, own: Exception) -> Exception:
    """Reports to the peers that this rank's arguments are invalid. Returns the exception to raise:
    `own` if the arguments of all ranks are invalid, otherwise the same InitError on every rank."""
    try:
        ballot.vote(STEPS[0].name, error=cause_of(own))
    except VoteError as verdict:
        return own if verdict.everywhere else failure(name, STEPS[0].name, verdict)
    finally:
        ballot.leave()
    raise AssertionError("a vote that contains a failure must raise")


def failure(name: str, step: str, reason: Exception | str) -> InitError:
    """Returns the error that every rank raises if a step fails."""
    failures = reason.failures if isinstance(reason, VoteError) else {}
    return InitError(f"collx.init({name!r}): step {step!r} failed: {reason}", name, step, failures)


class _DisagreementError(Exception):
    """The ranks have values that do not match."""


# --- arguments -----------------------------------------------------------------------------------


def _state_arguments(setup: Setup) -> dict[str, Any]:
    given = setup.arguments
    try:
        package = version("collx")
    except PackageNotFoundError:  # imported from a source tree that is not installed
        package = "unknown"
    return {
        "name": given.name,
        "group": given.group_name,
        "world size": given.world_size,
        "device type": given.device.type,
        "timeout": given.timeout,
        "payload_bytes": given.payload_bytes,
        "check": given.check,
        "pdl": given.pdl,
        "deterministic": given.deterministic,
        "overlap": given.overlap,
        "tuning": None if given.tuning is None else str(given.tuning),
        "fallback_group": _name_of(given.fallback_group),
        "version": package,
        "torch version": str(torch.__version__),
        "token": os.urandom(8).hex(),
    }


def _name_of(group: dist.ProcessGroup | None) -> str | None:
    """Returns the name of a group. A group that a backend created for itself may have none."""
    return None if group is None else distributed_c10d._world.pg_names.get(group, "no name")


def _agree_on_arguments(setup: Setup, values: list[Any]) -> None:
    for key in values[0]:
        if key != "token" and any(value[key] != values[0][key] for value in values):
            each = ", ".join(f"rank {r}: {value[key]!r}" for r, value in enumerate(values))
            raise _DisagreementError(f"{key} differs between the ranks ({each})")
    setup.token = values[0]["token"]


# --- machine, peers, backend ---------------------------------------------------------------------


def _state_machine(setup: Setup) -> str:
    return extension.boot_id()


def _agree_on_machine(setup: Setup, values: list[Any]) -> None:
    if len(set(values)) > 1:
        setup.fallback_reason = "the ranks are on different machines"


def _state_device(setup: Setup) -> list[str]:
    """Returns the unique id and the index of this rank's device, followed by the ids of the devices
    that it has no peer access to. These include its own device unless ranks may share a device."""
    device = setup.arguments.device
    if device.type != "cuda":
        return []
    own = _uuid(device.index)
    index = str(device.index)
    unreachable = [
        _uuid(other)
        for other in range(torch.cuda.device_count())
        if other != device.index and not torch.cuda.can_device_access_peer(device.index, other)
    ]
    return [own, index, *unreachable, *([] if os.environ.get(symmetric.SHARING) == "1" else [own])]


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _agree_on_peer_access(setup: Setup, values: list[Any]) -> None:
    """Falls back if a rank has no access to a peer's device. A device that CUDA_VISIBLE_DEVICES
    hides counts as accessible: the rendezvous and the self-test detect if it is not."""
    if setup.arguments.device.type != "cuda" or setup.fallback_reason is not None:
        return
    places = {(own, index) for own, index, *_ in values}
    setup.same_index = len({index for _, index in places}) < len(places)
    setup.shared_device = len({own for own, *_ in values}) < len(values)
    for rank, (own, _index, *unreachable) in enumerate(values):
        for peer, (device, *_) in enumerate(values):
            if peer != rank and device in unreachable:
                setup.fallback_reason = (
                    f"ranks {rank} and {peer} share a GPU, and {symmetric.SHARING}=1 is not set"
                    if device == own
                    else f"rank {rank} has no peer access to rank {peer}'s GPU"
                )
                return


def _state_backend(setup: Setup) -> str | None:
    if setup.fallback_reason is not None:
        return None
    device = setup.arguments.device
    if device.type == "cpu":
        extension.register_cpu_allocator()
        return symmetric.backend(device)
    name = symmetric.backend(device)
    if name != "CUDA":
        raise RuntimeError(
            f"PyTorch's symmetric-memory backend for CUDA is {name!r}; accepted: 'CUDA' (select it "
            "with torch.distributed._symmetric_memory.set_backend, or TORCH_SYMMMEM)"
        )
    return name


# --- memory --------------------------------------------------------------------------------------


def _allocate(setup: Setup) -> int:
    given = setup.arguments
    if setup.fallback_reason is not None:
        return 0
    setup.layout = extension.region_layout(given.device.type, given.world_size, given.payload_bytes)
    size = setup.layout["total"]
    setup.region = symmetric.allocate((size,), torch.uint8, given.device)
    setup.sample = symmetric.allocate((selftest.SAMPLE_BYTES,), torch.uint8, given.device)
    return size


def _agree_on_size(setup: Setup, values: list[Any]) -> None:
    if len(set(values)) > 1:
        each = ", ".join(f"rank {r}: {size}" for r, size in enumerate(values))
        raise _DisagreementError(f"the sizes of the regions differ ({each} bytes)")


def _initialize(setup: Setup) -> None:
    # This precedes any access of a peer: zeros that are written after the rendezvous could
    # overwrite a peer's first flag (hazard 10). The vote is the barrier between both steps.
    given = setup.arguments
    if setup.region is not None:
        with _current(given.device):
            extension.initialize_region(
                setup.region.data_ptr(), given.device, given.world_size, given.payload_bytes
            )


def _meet(setup: Setup) -> str | None:
    """Maps the regions of the peers. Returns what this rank lacks for multicast."""
    given = setup.arguments
    if setup.region is None or setup.sample is None:
        return "the ranks have no access to each other's memory"
    # PyTorch caches the result of a rendezvous by its name for the lifetime of the memory, so names
    # must be unique. The token of rank 0 makes the name new on all ranks.
    setup.rendezvous = symmetric.Rendezvous(
        f"collx/{given.name}/{setup.token}",
        setup.store,
        given.rank,
        given.world_size,
        given.timeout,
    )
    if setup.same_index:
        setup.rendezvous.tell_apart(given.device.index)
    setup.regions = setup.rendezvous.exchange(setup.region)
    setup.samples = setup.rendezvous.exchange(setup.sample)
    if given.device.type != "cuda":
        return "it uses CPU memory"
    return multicast.missing(given.device, min(setup.regions.multicast, setup.samples.multicast))


def _agree_on_multicast(setup: Setup, values: list[Any]) -> None:
    setup.multicast_unavailable_reason = multicast.agreed(values)


# --- the communicator ----------------------------------------------------------------------------


def _offer_blocks(setup: Setup) -> dict[str, int]:
    given = setup.arguments
    with _current(given.device):
        offer = extension.load_kernels(
            given.device, given.world_size, given.clusters, multicast.simulated
        )
    resident = offer["blocks"]
    if given.max_blocks is not None:
        if given.device.type == "cuda" and given.max_blocks > resident:
            raise ValueError(
                f"max_blocks: got {given.max_blocks}; accepted: at most {resident}, which the "
                "device can run at once"
            )
        return {**offer, "blocks": given.max_blocks}
    # Half of the blocks, so that another communicator can run at the same time. Until there is one,
    # the algorithms that push use the other half, which saves 10% of their time from 8 MiB on.
    half = max(1, resident // 2)
    setup.spare_blocks = resident - half if given.spare else 0
    return {**offer, "blocks": half}


def _take_smallest(setup: Setup, values: list[Any]) -> None:
    setup.agreed = {name: min(offer[name] for offer in values) for name in values[0]}
    if setup.multicast_unavailable_reason is None and not (
        setup.agreed["multicast"] or multicast.simulated
    ):
        setup.multicast_unavailable_reason = (
            "a rank has no kernels for compute capability 9.0 or later"
        )


_CLUSTERS = "clusters of "  # the names in an offer: "clusters of 8 x 64" has blocks, threads
_FULL_BLOCK = 512  # threads of the blocks that "blocks" counts
_SHARED_CLUSTERS = 32  # blocks of the first trial if ranks share a GPU
_TRIAL_MS = 50
_TRIAL_NUMBERS = 32


def _try_clusters(setup: Setup) -> dict[str, int]:
    """Returns how many of the clusters in `setup.trial` the devices of all ranks hold at once."""
    given = setup.arguments
    if given.device.type == "cpu" or not setup.regions.pointers:
        return {}
    if not setup.trial:
        setup.trial = {name: n for name, n in setup.agreed.items() if name.startswith(_CLUSTERS)}
        if setup.shared_device:
            for name, n in setup.trial.items():
                if (size := _cluster_size(name)) > 1:
                    setup.trial[name] = min(n, _SHARED_CLUSTERS // size)
    setup.trials += _TRIAL_NUMBERS
    with _current(given.device):
        return extension.held_at_once(
            setup.trial,
            setup.regions.pointers,
            given.device,
            given.rank,
            setup.trials,
            _TRIAL_MS,
            math.ceil(given.timeout * 1000),
        )


def _cluster_size(name: str) -> int:
    return int(name.removeprefix(_CLUSTERS).split(" ")[0])


def _agree_on_clusters(setup: Setup, values: list[dict[str, int]]) -> bool:
    """Accepts the numbers of clusters that all ranks held, and retries half of the others. The
    driver's numbers only hold for a device that no other process uses: ranks that share a device
    by CUDA's Multi-Process Service compete for its multiprocessors. On a shared device, clusters of
    the next call can run beside those of a call that the peers have not completed (early dependent
    launch), so only half of the clusters is used."""
    margin = 2 if setup.shared_device else 1
    again = False
    for name, wanted in setup.trial.items():
        if not values[0] or wanted == 0:
            continue
        needed = margin if _cluster_size(name) > 1 else 1
        if all(held[name] == wanted for held in values):
            setup.agreed[name] = wanted // needed
            setup.trial[name] = 0  # settled
        else:
            setup.trial[name] = wanted // 2 if wanted // 2 >= needed else 0
            setup.agreed[name] = 0
            again |= setup.trial[name] > 0
    if not again and values[0]:
        _take_whole_sizes(setup)
        name = f"{_CLUSTERS}1 x {_FULL_BLOCK}"
        blocks = setup.agreed[name] = max(1, setup.agreed[name])
        if blocks < setup.agreed["blocks"]:  # only on a shared device
            setup.agreed["blocks"], setup.spare_blocks = blocks, 0
    return again


def _take_whole_sizes(setup: Setup) -> None:
    """Disables a cluster size for all block sizes if one block size does not allow it."""
    names = [name for name in setup.agreed if name.startswith(_CLUSTERS)]
    for size in {_cluster_size(name) for name in names}:
        of_size = [name for name in names if _cluster_size(name) == size]
        if size > 1 and any(setup.agreed[name] == 0 for name in of_size):
            setup.agreed.update(dict.fromkeys(of_size, 0))


def _global_ranks(group_name: str) -> list[int]:
    """Returns the ranks of a process group in the default group; an empty list if the group is not
    registered."""
    group = group_named(group_name)
    return [] if group is None else dist.get_process_group_ranks(group)


def _create(setup: Setup) -> None:
    given = setup.arguments
    setup.communicator = extension.Communicator(
        name=given.name,
        group_name=given.group_name,
        device=given.device,
        rank=given.rank,
        world_size=given.world_size,
        regions=setup.regions.pointers,
        payload_bytes=given.payload_bytes,
        timeout_ms=math.ceil(given.timeout * 1000),
        pdl=given.pdl,
        check=given.check,
        agreed=setup.agreed,
        spare_blocks=setup.spare_blocks,
        multicast=setup.regions.multicast,
        multicast_unavailable_reason=setup.multicast_unavailable_reason or "",
        simulated=multicast.simulated,
        deterministic=given.deterministic,
        fallback_group=given.fallback_group,
        watchdog=given.watchdog,
        overlap=given.overlap,
        tuning=[] if given.tuning is None else given.tuning.native(),
        global_ranks=_global_ranks(given.group_name),
    )


def _test(setup: Setup) -> str | None:
    """Runs the self-test. Returns the failure of multicast, None if there is none. After a failure,
    no rank uses multicast."""
    given, communicator = setup.arguments, setup.communicator
    assert communicator is not None
    # The fallback uses the process group, and is only tested if it is needed: a timeout in it would
    # make the whole group unusable, and the test would initialize NCCL unnecessarily.
    on_peers = tuple(name for name in extension.algorithms("allreduce") if name != "fallback")
    algorithms = on_peers if setup.fallback_reason is None else ("fallback",)
    with _current(given.device):
        if setup.sample is not None:
            nbytes = setup.sample.untyped_storage().nbytes()
            pointers, _, at_once = setup.samples
            communicator.register(setup.sample, pointers, nbytes, 0, at_once)
        selftest.run(communicator, given.device, algorithms, setup.sample)
        if setup.multicast_unavailable_reason is not None:
            return None
        assert setup.sample is not None
        try:
            return selftest.run_multicast(communicator, given.device, setup.sample)
        except Exception as reason:
            return cause_of(reason)


def _end_test(setup: Setup, values: list[Any]) -> None:
    setup.sample, setup.samples = None, _NOWHERE  # no rank uses it any more
    wrong = multicast.agreed(values)
    if wrong is not None:
        setup.multicast_unavailable_reason = f"it failed in the self-test of {wrong}"
        setup.multicast_failed = True
        _log.warning(
            "%s: NVLink multicast: %s", setup.arguments.name, setup.multicast_unavailable_reason
        )


def _create_again(setup: Setup) -> None:
    """Creates the communicator again without multicast if multicast failed. No rank accesses the
    region of another rank between the votes before and after this step."""
    if not setup.multicast_failed:
        return
    assert setup.communicator is not None
    setup.communicator.destroy()
    if setup.arguments.device.type == "cuda":
        torch.cuda.synchronize(setup.arguments.device)
    _initialize(setup)
    _create(setup)


def _announce(setup: Setup) -> None:
    if setup.fallback_reason is not None and setup.arguments.rank == 0:
        warnings.warn(
            f"collx communicator {setup.arguments.name!r} uses the process group instead of "
            f"direct access: {setup.fallback_reason}",
            stacklevel=6,  # _announce, Ballot.take, run, make, init, its caller
        )


@contextmanager
def _current(device: torch.device) -> Iterator[None]:
    """Makes a CUDA device current, with a new stream. Calls of another thread on the default
    stream may wait for peers that take this step first."""
    if device.type != "cuda":
        yield
        return
    # At its end, torch.cuda.stream alone would create a context on the previous device.
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield


STEPS: list[Step] = [
    Step("arguments", _state_arguments, _agree_on_arguments),
    Step("machine", _state_machine, _agree_on_machine),
    Step("peer access", _state_device, _agree_on_peer_access),
    Step("backend", _state_backend),
    Step("allocate", _allocate, _agree_on_size),
    Step("initialize", _initialize),
    Step("rendezvous", _meet, _agree_on_multicast),
    Step("blocks", _offer_blocks, _take_smallest),
    Step("clusters", _try_clusters, _agree_on_clusters),
    Step("create", _create),
    Step("self-test", _test, _end_test),
    Step("create again", _create_again),
    Step("ready", _announce),
]
"""The steps of init, in order. Tests replace them to inject faults and delays."""
