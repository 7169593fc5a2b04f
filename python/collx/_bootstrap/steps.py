"""The voted init: a list of named steps, each local, each ended by an agreement.

A step runs on every rank by itself; then the ranks exchange what came of it, and all go on or all
raise the same InitError (hazard 6). Whatever the ranks have to agree on follows from the values
that they exchanged, never from what one of them knows alone (hazard 5).
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from collx._bootstrap import multicast, selftest, symmetric
from collx._bootstrap.options import Arguments
from collx._bootstrap.store import Ballot, VoteError, cause_of
from collx._extension import extension
from collx.errors import InitError

__all__ = ["STEPS", "Setup", "Step", "failure", "refusal", "run"]

_log = logging.getLogger("collx")

_NOWHERE = symmetric.Mapped([], 0)

NO_CLUSTERS = "COLLX_NO_CLUSTERS"  # 1: as on GPUs whose blocks form no clusters


@dataclass
class Setup:
    """What the steps have built so far on this rank."""

    arguments: Arguments
    store: dist.Store
    ballot: Ballot
    token: str = ""  # makes names of the attempt unique; agreed by all ranks
    layout: dict[str, int] = field(default_factory=dict)
    rendezvous: symmetric.Rendezvous | None = None
    fallback_reason: str | None = None
    region: torch.Tensor | None = None
    regions: symmetric.Mapped = _NOWHERE
    multicast_unavailable_reason: str | None = None  # why the ranks have none
    multicast_failed: bool = False  # in the self-test
    sample: torch.Tensor | None = None  # symmetric memory for the self-test, and no longer
    samples: symmetric.Mapped = _NOWHERE
    agreed: dict[str, int] = field(default_factory=dict)  # of what each rank's device offers
    spare_blocks: int = 0
    same_index: bool = False  # two ranks give different GPUs one index
    shared_device: bool = False  # two ranks use one GPU
    trial: dict[str, int] = field(default_factory=dict)  # clusters still to be shown at once
    trials: int = 0  # numbers that trials have taken
    communicator: extension.Communicator | None = None

    def release(self) -> None:
        """Frees everything. Local; peers keep what they have mapped."""
        if self.communicator is not None:
            self.communicator.destroy()
        if self.rendezvous is not None:
            self.rendezvous.close()
        self.communicator = self.rendezvous = self.region = self.sample = None
        self.regions = self.samples = _NOWHERE


@dataclass(frozen=True)
class Step:
    """`run` is local and may fail or return a value that JSON holds. `conclude` gets the values of
    all ranks in rank order and only computes with them: nothing in it can fail on one rank alone.
    The step is taken again while `conclude` returns True."""

    name: str
    run: Callable[[Setup], Any]
    conclude: Callable[[Setup, list[Any]], bool | None] | None = None


def run(setup: Setup) -> None:
    """Takes all STEPS. InitError, the same on every rank, when one does not succeed."""
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
    """Tells the peers that this rank refuses its arguments. What to raise: `own` if all ranks
    refuse theirs, else the same InitError on every rank."""
    try:
        ballot.vote(STEPS[0].name, error=cause_of(own))
    except VoteError as verdict:
        return own if verdict.everywhere else failure(name, STEPS[0].name, verdict)
    finally:
        ballot.leave()
    raise AssertionError("a vote that contains a failure must raise")


def failure(name: str, step: str, reason: Exception | str) -> InitError:
    """What every rank raises when a step did not succeed."""
    failures = reason.failures if isinstance(reason, VoteError) else {}
    return InitError(f"collx.init({name!r}): step {step!r} failed: {reason}", name, step, failures)


class _DisagreementError(Exception):
    """Values that had to be equal, or to fit together, and do not."""


# --- arguments -----------------------------------------------------------------------------------


def _state_arguments(setup: Setup) -> dict[str, Any]:
    given = setup.arguments
    try:
        package = version("collx")
    except PackageNotFoundError:  # imported from a tree that was never installed
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
        "fallback_group": _name_of(given.fallback_group),
        "version": package,
        "torch version": str(torch.__version__),
        "token": os.urandom(8).hex(),
    }


def _name_of(group: dist.ProcessGroup | None) -> str | None:
    """A group that a backend made for itself may have no name."""
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
    """The unique id of this rank's device and its index, then the ids of the devices that it cannot
    reach. Its own is among them unless ranks may share it."""
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
    """What a rank does not see, by CUDA_VISIBLE_DEVICES, counts as within reach: the rendezvous
    and the self-test will tell."""
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
    # Before any peer can access the region: zeros that were written after the rendezvous could
    # overwrite a peer's first flag (hazard 10). The vote is the barrier between the two.
    given = setup.arguments
    if setup.region is not None:
        with _current(given.device):
            extension.initialize_region(
                setup.region.data_ptr(), given.device, given.world_size, given.payload_bytes
            )


def _meet(setup: Setup) -> str | None:
    """What this rank lacks of multicast."""
    given = setup.arguments
    if setup.region is None or setup.sample is None:
        return "the ranks have no access to each other's memory"
    # PyTorch keeps what a rendezvous gave under a name for as long as the memory lives, so no
    # name may come twice: rank 0's token makes it new on all ranks alike.
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
    clusters = os.environ.get(NO_CLUSTERS) != "1"
    with _current(given.device):
        offer = extension.load_kernels(
            given.device, given.world_size, clusters, multicast.simulated
        )
    resident = offer["blocks"]
    if given.max_blocks is not None:
        if given.device.type == "cuda" and given.max_blocks > resident:
            raise ValueError(
                f"max_blocks: got {given.max_blocks}; accepted: at most {resident}, which the "
                "device can run at once"
            )
        return {**offer, "blocks": given.max_blocks}
    # Half, so that another communicator may be used at once. What is left over is used for now by
    # the algorithms that push: it is worth a tenth of their time from 8 MiB on.
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
_SHARED_CLUSTERS = 32  # blocks of the first trial where ranks share a GPU
_TRIAL_MS = 50
_TRIAL_NUMBERS = 32


def _try_clusters(setup: Setup) -> dict[str, int]:
    """What of `setup.trial` the devices of all ranks hold at the same time."""
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
    """Offers what was shown, and tries half of the rest again. What the driver says holds only for
    a device that no other process uses: ranks that share one by CUDA's multi-process service take
    each other's places. There the next call's clusters can stand beside those of the one that its
    peers are still in (early dependent launch), so half of what was shown is offered."""
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
        blocks = setup.agreed[f"{_CLUSTERS}1 x {_FULL_BLOCK}"]
        if blocks < setup.agreed["blocks"]:  # never on a device of one's own
            setup.agreed["blocks"], setup.spare_blocks = max(1, blocks), 0
    return again


def _take_whole_sizes(setup: Setup) -> None:
    """A size of clusters that some block size does not allow is not used with any."""
    names = [name for name in setup.agreed if name.startswith(_CLUSTERS)]
    for size in {_cluster_size(name) for name in names}:
        of_size = [name for name in names if _cluster_size(name) == size]
        if size > 1 and any(setup.agreed[name] == 0 for name in of_size):
            setup.agreed.update(dict.fromkeys(of_size, 0))


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
    )


def _test(setup: Setup) -> str | None:
    """The failure of multicast, if there is one. Then no rank uses it."""
    given, communicator = setup.arguments, setup.communicator
    assert communicator is not None
    # The fallback is the group's own path. Where it is not needed it stays untouched: a wait that
    # expires in it would cost the whole group, and NCCL would come up for nothing.
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
    setup.sample, setup.samples = None, _NOWHERE  # all ranks have done with it
    wrong = multicast.agreed(values)
    if wrong is not None:
        setup.multicast_unavailable_reason = f"it failed in the self-test of {wrong}"
        setup.multicast_failed = True
        _log.warning(
            "%s: NVLink multicast: %s", setup.arguments.name, setup.multicast_unavailable_reason
        )


def _create_again(setup: Setup) -> None:
    """Without multicast, on which the communicator may have failed. No rank's region is touched by
    another one between the votes before and after this step."""
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


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Makes a CUDA device the current one, with a stream of its own: another thread may be in calls
    on the default stream, which wait for peers that come to this step first."""
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))


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
"""The steps of init, in order. Tests put faults and delays in their place."""
