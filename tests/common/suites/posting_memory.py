"""Memory of posted calls whose handles were dropped: it is reused only after the call."""

from __future__ import annotations

import ctypes
import gc
import warnings
import weakref
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch

import collx

from ..attempt import ones
from ..pool import Pool, on_ranks
from ..rank import Rank

LARGE = 1 << 18  # elements; such a call takes a while
SMALL = 1 << 12  # elements; so little memory is not returned to the system when it is freed


@pytest.mark.worlds(2, 3)
@on_ranks
def test_a_dropped_handle_leaves_the_tensors_to_the_call_and_is_reported(rank: Rank) -> None:
    communicator = rank.communicator("posting-dropped")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", ResourceWarning)
        for i in range(20):
            out = torch.empty(LARGE, device=rank.device)
            collx.post(collx.allreduce, ones(rank, LARGE) * i, group=communicator, out=out)
            gc.collect()
            # Would reuse the memory of the input if the call did not keep it.
            scribbled = [torch.full((LARGE,), -1.0, device=rank.device) for _ in range(4)]
            result = collx.allreduce(ones(rank), group=communicator)  # runs after the posted call
            assert bool((result == rank.size).all())
            assert bool((out == i * rank.size).all()), (i, out)
            del scribbled
    words = [str(warning.message) for warning in seen]
    assert len([w for w in words if "dropped without wait()" in w]) == 20, words


class _Array:
    """The memory of a CUDA tensor through the CUDA array interface."""

    def __init__(self, of: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(of.shape),
            "typestr": "<f4",
            "data": (of.data_ptr(), False),
            "version": 2,
        }


def _borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor on the memory of another tensor, without keeping it alive."""
    if tensor.is_cuda:
        return torch.as_tensor(_Array(tensor), device=tensor.device)
    memory = (ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype)


@pytest.mark.worlds(1, 2)
@on_ranks
def test_wait_releases_the_tensors_of_the_call(rank: Rank) -> None:
    if rank.device.type == "cuda":
        return  # a GPU cannot use memory of NumPy
    for _ in range(20):
        array = np.ones(LARGE, dtype=np.float32)
        alive = weakref.ref(array)
        x = torch.from_numpy(array)
        handle = collx.post(collx.allreduce_, x, group=rank.communicator("posting-released"))
        del array
        handle.wait()
        del x, handle
        assert alive() is None


@pytest.mark.worlds(1, 2)
@on_ranks
def test_a_callback_in_progress_does_not_keep_the_tensors_of_its_call(rank: Rank) -> None:
    if rank.device.type == "cuda":
        return  # a GPU cannot use memory of NumPy
    communicator = rank.communicator("posting-callback")
    array = np.ones(SMALL, dtype=np.float32)
    alive = weakref.ref(array)
    began, end = Event(), Event()

    def callback(_: Any) -> None:
        began.set()
        end.wait(10)

    handle = collx.post(collx.allreduce, torch.from_numpy(array), group=communicator)
    future = handle.get_future().then(callback)
    assert began.wait(10)
    del array
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        del handle
    collx.barrier(communicator)  # a later call releases the tensors of completed calls
    released = alive() is None
    end.set()
    future.wait()
    assert released


def _overlap(place: tuple[int, int], tensors: list[torch.Tensor]) -> bool:
    first, end = place
    return any(t.data_ptr() < end and first < t.data_ptr() + t.nbytes for t in tensors)


def _freed(rank: Rank, kept: bool) -> dict[str, bool]:
    """The last rank is late and makes synchronous calls. By then, the others have dropped the
    handles and tensors of their posted calls and have filled new tensors."""
    communicator = rank.communicator("posting-freed")
    late = rank.rank == rank.size - 1
    x, y = ones(rank, SMALL) * 2, ones(rank, SMALL) * 3
    out = torch.empty_like(x)
    places = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in (x, y)]
    given = x if kept or late else _borrowed(x)
    rank.synchronize()
    if late:
        rank.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        collx.barrier(communicator, async_op=not late)  # no later call starts before the late rank
        collx.allreduce(given, group=communicator, out=out, async_op=not late)
        collx.allreduce_(y, group=communicator, async_op=not late)
    del x, y, given
    # Slightly smaller: the CPU allocator needs room to align them.
    new = [torch.full((SMALL - 64,), -1.0, device=rank.device) for _ in range(64)]
    if rank.device.type == "cuda":
        torch.cuda.current_stream().synchronize()
    found = {
        "input reused": _overlap(places[0], new),
        "inplace reused": _overlap(places[1], new),
    }
    if not late:
        # A call without references must not run: it would crash.
        assert not (kept and any(found.values())), found
        rank.barrier()
    collx.barrier(communicator)
    rank.synchronize()
    found["result is right"] = bool((out == 2 * rank.size).all())
    found["new tensors are intact"] = all(bool((tensor == -1).all()) for tensor in new)
    return found


@pytest.mark.worlds(2, 3)
def test_memory_is_not_reused_before_a_call_whose_handle_was_dropped(pool: Pool) -> None:
    for found in pool.run(_freed, True)[:-1]:
        assert found["result is right"], found
        assert found["new tensors are intact"], found


@pytest.mark.worlds(2)
def test_without_a_reference_the_memory_of_the_input_is_reused_before_the_call(pool: Pool) -> None:
    """The control of the test above: the borrowed input does not keep its memory alive."""
    found = pool.run(_freed, False)[0]
    assert found["input reused"], found
    assert not found["result is right"], found
    assert not found["inplace reused"], found
