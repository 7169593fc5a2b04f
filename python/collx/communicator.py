"""The class `Communicator`, and the live communicators of this process."""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from collx import _statistics
from collx._bootstrap.options import (
    PDL_LEVELS,
    Arguments,
    group_named,
    group_of_backend,
    seconds_of,
)
from collx._bootstrap.store import VoteError
from collx._explanation import Explanation, shape_of
from collx._extension import extension
from collx._memory import SymmetricMemory
from collx._statistics import Statistics
from collx.errors import CollectiveMismatch, CollectiveTimeout, CommunicatorPoisoned

__all__ = [
    "Communicator",
    "find",
    "forked",
    "group_size_of",
    "known",
    "live",
    "making",
    "of_calls",
    "of_group",
    "settle_known",
]

T = TypeVar("T")

_log = logging.getLogger("collx")

# Guards changes and multiple reads of the variables below. Reentrant, because a destructor may run
# while it is held.
_lock = threading.RLock()
os.register_at_fork(
    before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
)
# The live communicators, by name. A communicator remains until it is destroyed: operators find it
# by name, whether or not the program keeps the object.
_live: dict[str, Communicator] = {}
_in_making: set[str] = set()  # names
known: dict[object, tuple[str, int]] = {}
"""The names and world sizes of the live communicators. The keys are their names, the communicators
and their process groups. Getting the name from a process group takes longer than a small call."""
_initialized_in: set[int] = set()  # process ids: this process or its ancestors


def find(name: str) -> Communicator | None:
    """Returns the live communicator with a name, None if there is none."""
    return _live.get(name)


def group_size_of(op: str, name: str) -> int:
    """Returns the number of ranks. The schemas include it so that Meta kernels do not need a
    communicator. `op`: the operator, for the error message."""
    communicator = _live.get(name)
    if communicator is None:
        group = group_of_backend(name)
        if group is not None:  # the backend will create the communicator
            return group.size()
        raise ValueError(
            f'collx.{op}: group_name: this process has no communicator "{name}". '
            "collx.init creates communicators, and destroy removes them"
        )
    return communicator.world_size


def live() -> tuple[Communicator, ...]:
    """Returns all live communicators of this process, in the order of their creation."""
    return tuple(_live.values())


def of_group(group: dist.ProcessGroup | str, device_type: str | None = None) -> Communicator | None:
    """Returns the live communicator of a process group, or of the group with a name: the one that
    has the group's own name, otherwise the only one that was made from the group. If there is
    none, returns that of the group's own backend: for `device_type` if it is given, otherwise for
    CUDA if there is one. Raises ValueError if several communicators were made from the group and
    none has its name."""
    made = [one for one in live() if one._stands_for(group)]
    for one in made:
        if one.has_name_of_group:
            return one
    # Communicators of a backend are only used if the program has created none itself.
    made = [one for one in made if one._group is not None] or [
        one for one in made if device_type in (None, one.device.type)
    ]
    if made and made[0]._group is None:
        return max(made, key=lambda one: one.device.type == "cuda")
    if len(made) > 1:
        raise ValueError(
            f"group: process group {made[0].group_name!r} has {len(made)} communicators, "
            f"{', '.join(repr(one.name) for one in made)}; accepted: one of them, or its name"
        )
    return made[0] if made else None


def of_calls(group: dist.ProcessGroup | str) -> Communicator | None:
    """Returns the communicator that calls with this group use, if they all use the same one. For a
    communicator of a backend on the CPU, returns None if there are GPUs: for a tensor on CUDA, the
    backend then uses or creates another one."""
    one = of_group(group)
    if one is None or one._group is not None or one.device.type == "cuda":
        return one
    return None if torch.cuda.is_available() else one


@contextmanager
def making(name: str) -> Iterator[None]:
    """Marks a name as used by a running `collx.init`. Raises ValueError if another thread is
    creating a communicator with this name."""
    with _lock:
        if name in _in_making:
            raise ValueError(
                f"init: another thread is creating a communicator with the name {name!r}; pass "
                "another name"
            )
        _in_making.add(name)
    try:
        yield
    finally:
        with _lock:
            _in_making.discard(name)


def settle_known(group: dist.ProcessGroup | None) -> None:
    """Updates `known`. Must be called after a communicator of the group was created or
    destroyed. `group`: None if PyTorch does not know it yet, or not any more."""
    if group is None:
        return
    with _lock:
        try:
            one = of_calls(group)
        except ValueError:
            one = None
        if one is None:
            known.pop(group, None)
        else:
            known[group] = (one.name, one.world_size)


def forked() -> bool:
    """Whether this process was forked from one that had initialized collx."""
    return bool(_initialized_in - {os.getpid()})


class Communicator:
    """A rank's handle of a communicator. `collx.init` creates it, and operators find it by its
    `name`.

    Use it from one thread at a time. A communicator lives until `destroy` is called, or until the
    end of its `with` block. Deleting the object frees nothing and never waits for a peer.

    Attributes:
        name: the name by which operators find the communicator.
        rank, world_size: the number of this process among the ranks, and the number of ranks.
        group_name: the name of the process group that it was made from.
        device: the device of the tensors in its calls.
        timeout: the maximum duration of each wait for a peer, in seconds.
    """

    def __init__(
        self,
        given: Arguments,
        native: extension.Communicator,
        memory: SymmetricMemory,
        group: dist.ProcessGroup | None,
        region: Mapping[str, int],
        fallback_reason: str | None,
    ) -> None:
        """For `collx.init` only. `group`: None if the group's backend creates the communicator.
        `region`: maps each part of the region to its size in bytes."""
        self._given = given
        self._native = native
        self._memory = memory
        self._region = region
        self._wanted_pdl = given.pdl
        self._process = os.getpid()
        self.name = given.name
        self.group_name = given.group_name
        self.rank = given.rank
        self.world_size = given.world_size
        self.device = given.device
        self.timeout = given.timeout
        self._group = group
        self.fallback_reason = fallback_reason
        """Why the communicator uses the process group; None if it does not."""
        self.has_name_of_group = given.name == given.group_name
        self.failure_is_dumped = False
        # Whether it is in `_live`, on which compiled code cannot have a guard.
        self._listed = True
        with _lock:
            _live[self.name] = self
            known.update(dict.fromkeys((self, self.name), (self.name, self.world_size)))
            settle_known(group or group_named(self.group_name))
            _initialized_in.add(self._process)
            _settle_pdl(self.device)

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group that the communicator was made from. ValueError if the backend of that
        group made the communicator and the group no longer exists."""
        group = group_named(self.group_name) if self._group is None else self._group
        if group is None:
            raise ValueError(
                f"communicator {self.name!r}: process group {self.group_name!r} no longer exists"
            )
        return group

    def _stands_for(self, group: dist.ProcessGroup | str) -> bool:
        names = distributed_c10d._world.pg_names  # of groups that have not been destroyed
        if self._group is None:
            return self.group_name in (group, names.get(group))  # type: ignore[arg-type]
        return self._group is group or names.get(self._group) == group

    @property
    def max_blocks(self) -> int:
        """The maximum number of thread blocks of 512 threads that a call may use; fixed at init."""
        return self._native.blocks

    @property
    def poisoned(self) -> bool:
        """Whether a call has failed. A poisoned communicator does not accept calls."""
        return self._native.poisoned

    @property
    def multicast_unavailable_reason(self) -> str | None:
        """Why the ranks have no NVLink multicast; None if they have it. Fixed at init."""
        return self._native.multicast_unavailable_reason or None

    @property
    def tuning(self) -> str | None:
        """The file of the tuning table that replaces choices of "auto", or "a dict"; None if there
        is only the built-in table. Fixed at init."""
        return None if self._given.tuning is None else self._given.tuning.source

    @property
    def destroyed(self) -> bool:
        """Whether `destroy` has been called."""
        return self._native.destroyed

    def raise_if_failed(self) -> None:
        """Raises the failure of this communicator, if there is one.

        The function waits neither for the device nor for peers. On a GPU, it copies a few words
        from the device on its own stream. After a timeout, it names the missing rank if it is
        known at that moment; `synchronize` gives the peers time to report the rank that they wait
        for.

        Raises:
            CollectiveTimeout, CollectiveMismatch, CollectiveOverlap: the recorded failure.
            CommunicatorPoisoned: the communicator has been destroyed.
        """
        self._native.check(wait=False)

    def synchronize(self) -> None:
        """Waits for all work on the device, then raises the failure of this communicator, if there
        is one. After a timeout, it waits up to half a second for the reports of the peers, so that
        all ranks name the same missing rank."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._native.check()

    def empty(self, *size: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Calls `collx.empty` for this communicator. Collective."""
        return self._memory.empty(size, dtype)

    def empty_like(self, tensor: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Calls `collx.empty_like` for this communicator. Collective."""
        return self._memory.empty_like(tensor, dtype)

    def zeros(self, *size: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Calls `collx.zeros` for this communicator. Collective."""
        return self._memory.empty(size, dtype).zero_()

    def register(self, tensor: torch.Tensor) -> torch.Tensor:
        """Calls `collx.register` for this communicator. Collective."""
        return self._memory.register(tensor)

    def stats(self) -> Statistics:
        """Returns calls and bytes by function, the number of calls that each rank has completed,
        and how long this rank has waited for each. On a GPU, it copies a few words of each rank on
        its own stream, and waits for no call. Any thread may call it. Raises ValueError after
        `destroy`."""
        found = _statistics.of(self._native)
        if self.destroyed:  # possibly meanwhile, by another thread
            raise ValueError(f"stats: communicator {self.name!r} has been destroyed")
        return found

    def explain(
        self,
        op: str,
        shape: int | Sequence[int],
        dtype: torch.dtype | None = None,
        *,
        input_symmetric: bool = False,
        output_symmetric: bool = False,
        algorithm: str = "auto",
        max_blocks: int = 0,
        rounding: str = "fp32",
        scale_mode: str = "row",
        quant_group_size: int = 128,
        keep_norm: bool = False,
    ) -> Explanation:
        """Explains how a call would be carried out, and how the region of this rank is divided.

        Args:
            op: the name of an operator in `torch.ops.collx`, such as "allreduce" or
                "reducescatter_residual_rmsnorm"; not `barrier` or an operator with an epilogue.
            shape: the shape of the full tensor, or its number of elements. The full tensor is the
                output of an allgather or a gather, and the input of other operators. In a
                normalization, the last axis forms the rows.
            dtype: the dtype of the tensor; by default torch's default dtype.
            input_symmetric, output_symmetric: whether input and output are symmetric tensors.
            algorithm, max_blocks: as in the operator.
            rounding, scale_mode, quant_group_size, keep_norm: as in the operator, for
                normalizations only.

        Returns:
            The explanation. Sizes are in bytes.

        Raises:
            ValueError, TypeError: an argument is invalid, as in the call. The message names it.
        """
        dtype = torch.get_default_dtype() if dtype is None else dtype
        numel, cols = shape_of("explain", shape, dtype)
        call = self._native.explain(
            op,
            numel,
            cols,
            dtype,
            input_symmetric,
            output_symmetric,
            algorithm,
            max_blocks,
            rounding,
            scale_mode,
            quant_group_size,
            keep_norm,
        )
        return Explanation(
            communicator=repr(self),
            op=op,
            numel=numel,
            dtype=dtype,
            region=dict(self._region),
            pdl=self._native.pdl,
            fallback_reason=self.fallback_reason,
            multicast_unavailable_reason=self.multicast_unavailable_reason,
            deterministic=self._native.deterministic,
            tuning=self._chosen_by(algorithm, call.pop("tuned")),
            **call,
        )

    def _chosen_by(self, algorithm: str, entry: tuple[int, int] | None) -> str:
        if algorithm != "auto":
            return "the call names the algorithm"
        if entry is not None:
            return f"entry of {entry[0]:,} to {entry[1]:,} bytes in {self.tuning}"
        fits = "" if self.tuning is None else f"; no entry of {self.tuning} fits"
        return f"built-in table{fits}"

    @property
    def pdl(self) -> str:
        """The level of programmatic dependent launch that is in effect: "off", "end" or "early".
        `set_pdl` changes it."""
        return self._native.pdl

    def set_pdl(self, level: str) -> AbstractContextManager[object]:
        """Sets the level of programmatic dependent launch: "off", "end" or "early".

        While the device has a second communicator, "early" acts as "end", and the level is "off" if
        a device of a rank does not support dependent launch.

        Returns:
            A context manager that restores the previous level at the end of a `with` block.
            Without `with`, the level stays.
        """
        if level not in PDL_LEVELS:
            raise ValueError(
                f"set_pdl: level: got {level!r}; accepted: {', '.join(map(repr, PDL_LEVELS))}"
            )
        before = self._wanted_pdl

        def put(level: str) -> None:
            self._wanted_pdl = level
            _settle_pdl(self.device)

        put(level)
        return _restoring(put, before)

    @property
    def deterministic(self) -> bool:
        """Whether "auto" only selects algorithms that reduce in the order of the ranks.
        `set_deterministic` changes it."""
        return self._native.deterministic

    def set_deterministic(self, value: bool) -> AbstractContextManager[object]:
        """Sets the option `deterministic` of `collx.init`. All ranks must set the same value, since
        their calls would not match otherwise.

        Returns:
            A context manager that restores the previous value at the end of a `with` block.
            Without `with`, the value stays.
        """
        if not isinstance(value, bool):
            raise TypeError(
                f"set_deterministic: value: got a {type(value).__name__}; accepted: a bool"
            )
        before = self._native.deterministic

        def put(value: bool) -> None:
            self._native.deterministic = value

        put(value)
        return _restoring(put, before)

    def set_timeout(self, timeout: float | timedelta) -> None:
        """Sets the maximum duration of each wait for a peer, in seconds or as a datetime.timedelta.

        It applies to calls that start afterwards. On the CPU, the method waits for a call of
        another thread that is in progress. CUDA graphs keep the timeout of their capture. The ranks
        may set it at different times; they should set the same value.
        """
        seconds = seconds_of("set_timeout", timeout)
        self._native.set_timeout(math.ceil(seconds * 1000))
        self._memory.set_timeout(seconds)
        self.timeout = seconds

    def destroy(self) -> None:
        """Frees the communicator's memory when no rank uses it any more. A second call does
        nothing.

        Collective. On a poisoned communicator and in a forked child the call is local and returns
        immediately. The memory and the name are free afterwards, also if the call raises.

        Raises:
            CollectiveTimeout: a rank or the store did not respond within the timeout.
            CollectiveMismatch: a rank made another collective call.
        """
        if self.destroyed:
            return
        if os.getpid() != self._process:
            self._abandon()
            return
        if self.device.type == "cuda" and not self.poisoned:
            self._drain()
        if self.poisoned:
            self._leave_alone("it is poisoned")
            return
        try:
            self._memory.ballot.vote("destroy")
        except VoteError as verdict:
            message = f"destroy of {self.name!r}: {verdict}"
            absent = verdict.absent[0] if verdict.absent else None
            record = {"phase": "vote", "rank": self.rank, "peer": absent}
            if verdict.absent or verdict.store_failed:
                raise CollectiveTimeout(message, self.name, record) from None
            if len(verdict.left) < len(verdict.failures):
                self._memory.ballot.cast_left("destroyed")  # peers need not wait
                raise CollectiveMismatch(message, self.name, record) from None
        finally:
            try:
                self._memory.leave()
            finally:  # also if an interrupt ends the wait for the store
                self._release()

    def _leave(self) -> None:
        """Frees this rank's memory when its own work is done, without waiting for peers. Mappings
        of the peers remain valid. Every rank must have made its last call: a call of a peer that
        this rank has not made times out."""
        if os.getpid() != self._process:
            self._abandon()
            return
        if self.device.type == "cuda" and not self.poisoned:
            self._drain()
        self._leave_alone("destroyed")

    def _drain(self) -> None:
        try:
            torch.cuda.synchronize(self.device)
        except Exception as reason:  # the device is lost; report it so that peers need not wait
            self._leave_alone(type(reason).__name__)
            raise

    def _leave_alone(self, why: str) -> None:
        """Frees this rank's memory without waiting for the peers, which may never respond. Their
        mappings remain valid."""
        try:
            self._memory.ballot.cast_left(why)
        finally:  # also if an interrupt ends the wait for the store
            self._release()

    def _release(self) -> None:
        self._forget()
        self._memory.release()
        _settle_pdl(self.device)
        _log.info("%s: rank %d has left", self.name, self.rank)

    def _abandon(self) -> None:
        """Leaves without freeing memory that devices or peers may still use."""
        self._forget()
        self._native.destroy()

    def _forget(self) -> None:
        with _lock:
            if self._listed:
                self._listed = False
                del _live[self.name]
                named = [key for key, (name, _) in known.items() if name == self.name]
                for key in named:
                    del known[key]
                settle_known(self._group or group_named(self.group_name))

    def __enter__(self) -> Communicator:
        if self.destroyed:
            raise CommunicatorPoisoned(f"communicator {self.name!r} has been destroyed", self.name)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None or self.destroyed or os.getpid() != self._process:
            self.destroy()
            return
        # Waiting for the peers or for posted calls would delay the error by up to the timeout.
        self._native.abort_posted()
        self._leave_alone(kind.__name__)

    def __repr__(self) -> str:
        state = "destroyed" if self.destroyed else "poisoned" if self.poisoned else "ready"
        way = "" if self.fallback_reason is None else ", fallback only"
        return (
            f"<collx.Communicator {self.name!r}: rank {self.rank} of {self.world_size} "
            f"on {self.device}, {state}{way}>"
        )

    def __reduce__(self) -> Any:
        raise TypeError("a communicator belongs to its process and cannot be pickled")


def _restoring(put: Callable[[T], None], before: T) -> AbstractContextManager[object]:
    """Returns a context manager that restores a value at the end of a `with` block."""
    stack = ExitStack()
    stack.callback(put, before)
    return stack


def _settle_pdl(device: torch.device) -> None:
    """Reduces "early" to "end" if several communicators use the device. With "early", dependents of
    spinning kernels could occupy the device, and two communicators could block each other across
    ranks."""
    with _lock:
        sharing = [communicator for communicator in live() if communicator.device == device]
        for communicator in sharing:
            wanted = communicator._wanted_pdl
            communicator._native.pdl = "end" if wanted == "early" and len(sharing) > 1 else wanted


@atexit.register
def _at_exit() -> None:
    # Peers may have exited, so this takes no vote. On the CPU, it waits for the posted calls, which
    # their timeouts bound. The memory is freed with the process.
    for communicator in live():
        communicator._abandon()
