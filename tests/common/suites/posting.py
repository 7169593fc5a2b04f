"""Posted calls: bits equal to synchronous calls, any order of waits; lifetimes, failures, graphs.

COLLX_FUZZ_SEED=n repeats the random calls of a run, COLLX_FUZZ_CALLS=n makes more of them.
"""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import collx

from ..attempt import Attempt, assert_raised, attempt, in_a_child, ones, works
from ..calls import Call, Prepared
from ..check import ARENA_BYTES, arenas_of, assert_none
from ..limits import AT_ONCE, assert_in_time, timeout_now
from ..operators import random_call
from ..pool import Pool, on_ranks
from ..rank import Rank
from ..worlds import seed_from_environment

CALLS = {"cpu": 300, "cuda": 300}
CALLS_SHARED = 60
LARGEST = 3000  # elements
IN_FLIGHT = 4
SLICE = ARENA_BYTES // IN_FLIGHT
FUNCTIONS = {"functional": "python", "out": "python_out", "inplace": "python_inplace"}
LARGE = 1 << 18  # elements; such a call takes a while


def _posted_calls(seed: int, count: int, world: int) -> list[Call]:
    """Returns random calls in the forms that the Python functions support."""
    choose = random.Random(seed)
    found: list[Call] = []
    while len(found) < count:
        call = random_call(choose, LARGEST, world)
        call = replace(call, form=FUNCTIONS.get(call.form, call.form))
        if call.op == "barrier" or call.form.startswith("python"):
            found.append(call)
    return found


def _mixed(rank: Rank, seed: int, count: int) -> list[str]:
    """Each rank randomly posts or makes each call, pauses, and waits for handles in its own
    order."""
    communicator = rank.communicator("posting", payload_bytes=1 << 20)
    arenas_of(rank, communicator)
    mine = random.Random(seed * 31 + rank.rank)
    in_flight: dict[int, tuple[Call, Any, Callable[[], Any]]] = {}
    found = []

    def finish(slot: int) -> None:
        call, prepared, wait = in_flight.pop(slot)
        wrong = prepared.wrong(wait())
        if wrong:
            found.append(f"COLLX_FUZZ_SEED={seed}: {call}: {wrong}")

    for number, call in enumerate(_posted_calls(seed, count, rank.size)):
        if mine.random() < 0.05:
            time.sleep(0.003 * mine.random())
        if call.op == "barrier":
            if mine.random() < 0.5:
                collx.post(collx.barrier, communicator).wait()
            else:
                collx.barrier(communicator)
            continue
        # Symmetric tensors have the same position on all ranks.
        slot = number % IN_FLIGHT
        for done in {slot, mine.randrange(2 * IN_FLIGHT)} & set(in_flight):
            finish(done)
        prepared = Prepared(rank, communicator, call, slot * SLICE)
        if mine.random() < 0.7:
            in_flight[slot] = (call, prepared, prepared.post())
        else:
            wrong = prepared.wrong(prepared.make())
            if wrong:
                found.append(f"COLLX_FUZZ_SEED={seed}: {call}, not posted: {wrong}")
    for slot in list(in_flight):
        finish(slot)
    communicator.raise_if_failed()
    return found[:5]


@pytest.mark.worlds(1, 2, 3, 4)
def test_posted_and_synchronous_calls_have_the_same_bits(pool: Pool) -> None:
    usual = CALLS_SHARED if pool.world.shared else CALLS[pool.world.device]
    seed, usual = seed_from_environment(), usual if pool.size <= 2 else usual // 3
    count = int(os.environ.get("COLLX_FUZZ_CALLS", usual))
    print(f"COLLX_FUZZ_SEED={seed} COLLX_FUZZ_CALLS={count}")
    assert_none(pool.run(_mixed, seed, count))


@pytest.mark.worlds(1, 2, 3)
@on_ranks
def test_handles_are_what_torch_has(rank: Rank) -> None:
    """wait() twice, from another thread, with a timeout; handles as context managers; futures."""
    communicator = rank.communicator("posting-handles")
    world = rank.size
    x = ones(rank)
    handle = collx.post(collx.allreduce, x, group=communicator)
    assert bool((handle.wait() == world).all())
    assert handle.wait() is handle.wait()  # again
    communicator.synchronize()
    assert handle.is_completed()
    assert "completed" in repr(handle)
    out = torch.empty_like(x)
    asynchronous: Any = collx.allreduce(x, group=communicator, out=out, async_op=True)
    with asynchronous as handle:
        pass
    assert handle.wait() is out
    assert bool((out == world).all())
    (future,) = collx.post(collx.allreduce, x, group=communicator).get_future().wait()
    assert bool((future == world).all())
    assert collx.post(collx.allreduce_, x, group=communicator).wait(timeout=30) is x
    assert bool((x == world).all())
    # One future during the call, and one after its completion.
    for pause in (0.0, 0.05):
        handle = collx.post(collx.allgather, ones(rank), communicator)
        time.sleep(pause)
        then = handle.get_future().then(lambda done: done.value()[0] + 1)
        assert bool((then.wait() == 2).all())
        assert then.wait().shape == (1000 * world,)
    # Waits from other threads.
    handles = [collx.post(collx.allreduce, ones(rank) * i, group=communicator) for i in range(8)]
    waited: list[Any] = [None] * 8

    def wait(i: int) -> None:
        if rank.device.type == "cuda":
            torch.cuda.set_device(rank.device)
        waited[i] = handles[i].wait()
        rank.synchronize()

    threads = [threading.Thread(target=wait, args=(i,)) for i in reversed(range(8))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(bool((result == world * i).all()) for i, result in enumerate(waited))


class _NoOperator(TorchDispatchMode):
    """Refuses every operator of PyTorch."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} during wait")


MODES = (torch.inference_mode, torch.no_grad, torch.enable_grad)


@pytest.mark.worlds(1, 2)
@on_ranks
def test_the_modes_of_post_count_and_not_those_of_wait(rank: Rank) -> list[str]:
    """On the CPU, a thread that waits may run the call. Posts in each mode and waits in each mode,
    immediately or after the call has completed."""
    communicator = rank.communicator("posting-modes")
    found = []
    for posting, waiting in itertools.product(MODES, (*MODES, _NoOperator)):
        for algorithm, pause in itertools.product(("auto", "fallback"), (0.0, 0.02)):
            with posting():
                x = ones(rank).requires_grad_(posting is not torch.inference_mode)
                post = partial(collx.allreduce, x, group=communicator, algorithm=algorithm)
                want = post()
                handle: Any = post(async_op=True)
            time.sleep(pause)
            with waiting():
                got = handle.wait()
            rank.synchronize()
            if (got.is_inference(), got.requires_grad) != (want.is_inference(), want.requires_grad):
                found.append(f"{posting} {waiting} {algorithm} {pause}: {got} instead of {want}")
            if not torch.equal(got.detach(), want.detach()):
                found.append(f"{posting} {waiting} {algorithm} {pause}: other values")
    return found


@contextmanager
def _incomplete(rank: Rank, last: int) -> Iterator[None]:
    """On the CPU, no call that is posted inside completes before the ranks other than `last` leave.
    On CUDA, callbacks run when they are set."""
    on_cpu = rank.device.type == "cpu"
    if on_cpu and rank.rank == last:
        rank.barrier()
    yield
    if on_cpu and rank.rank != last:
        rank.barrier()


@pytest.mark.worlds(2, 3)
@on_ranks
def test_callbacks_of_futures_make_calls_and_wait_for_later_calls(rank: Rank) -> None:
    """The callback of each call waits for the future of the next one, and that of the last makes
    calls."""
    communicator = rank.communicator("posting-callbacks")
    found: list[float] = []

    def wait_for_next(number: int, done: Any) -> None:
        if number + 1 < len(futures):
            results = futures[number + 1].wait()
        else:
            synchronous = collx.allreduce(done.value()[0], group=communicator)
            posted: Any = collx.allreduce(synchronous, group=communicator, async_op=True)
            results = [done.value()[0], synchronous, posted.wait()]
        found.extend(result.unique().item() for result in results)

    world = rank.size
    want = sorted([*(i * world for i in range(1, 6)), 5 * world, 5 * world**2, 5 * world**3])
    for last in range(world):
        found.clear()
        with _incomplete(rank, last):
            inputs = [ones(rank) * i for i in range(6)]
            handles = [collx.post(collx.allreduce, x, group=communicator) for x in inputs]
            futures = [handle.get_future() for handle in handles]
            then = [futures[i].then(partial(wait_for_next, i)) for i in reversed(range(6))]
        for future in then:
            future.wait()
        assert sorted(found) == want


@pytest.mark.worlds(1, 2)
@on_ranks
def test_a_callback_may_destroy_the_communicator(rank: Rank) -> None:
    """On the CPU, the calls that were posted before complete first."""
    error = "" if rank.device.type == "cpu" else "CommunicatorPoisoned"
    for last in range(rank.size):
        communicator = rank.new_communicator("posting-ended-by-callback")
        inputs = [ones(rank) for _ in range(3)]
        with _incomplete(rank, last):
            handles = [collx.post(collx.allreduce, x, group=communicator) for x in inputs]
            then = handles[0].get_future().then(lambda done: communicator.destroy())  # noqa: B023
        then.wait()
        assert "has been destroyed" in attempt(communicator.raise_if_failed).message
        if rank.device.type == "cpu":
            assert all(bool((handle.wait() == rank.size).all()) for handle in handles)
        assert [attempt(handle.wait).error for handle in handles] == [error] * 3


@pytest.mark.worlds(2, 3)
@on_ranks
def test_the_order_of_calls_and_of_streams_holds(rank: Rank) -> None:
    """Writes inputs right after wait, reads results on other streams, makes calls in between."""
    communicator = rank.communicator("posting-ordered")
    x = ones(rank, LARGE)
    handles: deque[tuple[int, Any]] = deque()
    for i in range(1, 30):
        x.fill_(i)
        handle = collx.post(collx.allreduce, x, group=communicator)
        if i % 3 == 0:
            assert bool((collx.allreduce(x, group=communicator) == i * rank.size).all())
        handles.append((i, handle.wait()))
        x.fill_(-1)
    for i, result in handles:
        assert bool((result == i * rank.size).all()), i
    if rank.device.type != "cuda":
        return
    other = torch.cuda.Stream(rank.device)
    for i in range(1, 30):
        x.fill_(i)
        handle = collx.post(collx.allreduce, x, group=communicator)
        with torch.cuda.stream(other):
            result = handle.wait()
            read = result.clone()
            del result, handle
        # Would overwrite the result if its memory were reused before it is read.
        scribbled = torch.full((LARGE,), -1.0, device=rank.device)
        other.synchronize()
        assert bool((read == i * rank.size).all()), i
        del scribbled
        torch.cuda.current_stream().wait_stream(other)


def _one_never_comes(rank: Rank, absent: int, timeout: float) -> dict[str, Any]:
    communicator = rank.new_communicator("posting-late", rank.fresh_group(), call_timeout=timeout)
    assert works(rank, communicator)
    rank.barrier()
    found: dict[str, Any] = {}
    if rank.rank != absent:
        handles = [collx.post(collx.allreduce, ones(rank), group=communicator) for _ in range(3)]
        found["limit"] = attempt(lambda: handles[0].wait(timeout=timedelta(seconds=0.05)))
        found["waits"] = [attempt(partial(_finish, communicator, h)) for h in handles[:1] + handles]
        found["future"] = attempt(lambda: _finish(communicator, handles[0].get_future()))
    rank.barrier()
    found["next"] = attempt(
        lambda: collx.post(collx.allreduce, ones(rank), group=communicator).wait()
    )
    found["destroy"] = attempt(communicator.destroy)
    found["after"] = [attempt(h.wait) for h in handles] if rank.rank != absent else []
    rank.barrier()
    with rank.new_communicator("posting-late", communicator.group) as fresh:
        assert works(rank, fresh)
    return found


def _finish(communicator: Any, handle: Any) -> None:
    handle.wait()
    if communicator.device.type == "cuda":
        communicator.synchronize()


@pytest.mark.alone
@pytest.mark.worlds(2, 3)
def test_a_rank_that_never_comes_is_named_by_every_handle_in_flight(pool: Pool) -> None:
    absent, timeout = pool.size - 1, timeout_now(pool)
    for rank, found in enumerate(pool.run(_one_never_comes, absent, timeout)):
        assert found["next"].error in ("CommunicatorPoisoned", "CollectiveTimeout"), found
        assert found["destroy"].error == ""
        assert_in_time(found["destroy"], slack=AT_ONCE)
        if rank == absent:
            continue
        assert_raised(found["limit"], "CollectiveTimeout", "has not completed within 0.05 s")
        first, *others = found["waits"]
        assert_in_time(first, timeout)
        for result in (first, *others):
            assert result.error in ("CollectiveTimeout", "CommunicatorPoisoned"), result
            assert f"rank {absent}" in result.message
            assert "allreduce" in result.message
        assert found["future"].error in ("CollectiveTimeout", "CommunicatorPoisoned"), found
        assert f"rank {absent}" in found["future"].message, found
        assert all(result.error for result in found["after"]), found


def _limited(rank: Rank, timeout: float) -> list[Attempt]:
    """The last rank makes each call late, but well within the timeout of the communicator. Together
    the calls take longer than it."""
    import collx

    communicator = rank.new_communicator("posting-limited", call_timeout=timeout)
    calls, delay = 5, 0.3 * timeout
    handles: list[Any] = []

    def post_and_wait() -> None:
        handles[:] = [collx.post(collx.allreduce, x, group=communicator) for _ in range(calls)]
        handles[-1].wait(timeout=timeout + 0.01)

    x, found = ones(rank), []
    for _ in range(2):
        rank.barrier()
        if rank.rank == rank.size - 1:
            for _ in range(calls):
                time.sleep(delay)
                collx.allreduce(x, group=communicator)
            continue
        time.sleep(0.1)  # on the CPU, the thread that runs the calls sleeps
        found.append(attempt(post_and_wait))
        assert all(bool((handle.wait() == rank.size).all()) for handle in handles)
    communicator.destroy()
    return found


@pytest.mark.worlds(2)
def test_a_wait_with_a_timeout_is_bounded_by_it(pool: Pool) -> None:
    """Also if it exceeds that of the communicator, and the call waits for earlier calls."""
    timeout = timeout_now(pool, 1.5)
    for result in pool.run(_limited, timeout)[0]:
        assert result.error == "CollectiveTimeout", result
        assert_in_time(result, timeout)


def _destroyed(rank: Rank) -> list[Attempt]:
    """Destroys a communicator with handles in flight, on all ranks."""
    communicator = rank.new_communicator("posting-ended", rank.fresh_group(), timeout=10.0)
    handles = [collx.post(collx.allreduce, ones(rank), group=communicator) for _ in range(10)]
    if rank.device.type == "cuda":
        torch.cuda.synchronize(rank.device)
    rank.barrier()
    found = [attempt(communicator.destroy)]
    found += [attempt(h.wait) for h in handles]
    found.append(attempt(lambda: collx.post(collx.allreduce, ones(rank), group=communicator)))
    return found


@pytest.mark.worlds(1, 2)
def test_destroy_with_handles_in_flight(pool: Pool) -> None:
    for destroyed, *waits, after in pool.run(_destroyed):
        assert destroyed.error == ""
        assert_in_time(destroyed, slack=AT_ONCE)
        for result in waits:
            assert result.error in ("", "CommunicatorPoisoned"), result
            assert not result.error or "has been destroyed" in result.message
        assert after.error == "CommunicatorPoisoned", after


def _left_by_an_exception(rank: Rank) -> list[Attempt]:
    """Rank 0 leaves the block of a communicator while a call is posted that rank 1 never makes.
    Rank 1 then makes it."""
    communicator = rank.new_communicator("posting-left", rank.fresh_group(), timeout=20.0)

    def leave() -> None:
        with communicator:
            collx.post(collx.allreduce, ones(rank), group=communicator)
            raise KeyError("left")

    found = [attempt(leave)] if rank.rank == 0 else []
    rank.barrier()
    if rank.rank != 0:
        found.append(attempt(lambda: collx.allreduce(ones(rank), group=communicator)))
    communicator.destroy()
    return found


@pytest.mark.worlds(2)
def test_an_exception_that_leaves_the_block_ends_posted_calls(pool: Pool) -> None:
    """On a GPU, kernels of calls in flight continue until the timeout, and the host does not wait
    for them."""
    if pool.world.device == "cuda":
        pytest.skip("posted calls on a GPU need no thread of the host")
    [left], [peer] = pool.run(_left_by_an_exception)
    assert left.error == "KeyError"
    assert_raised(peer, "CommunicatorPoisoned", "rank 0 has aborted its calls")
    assert_in_time(left, slack=AT_ONCE)
    assert_in_time(peer, slack=AT_ONCE)


@pytest.mark.worlds(2)
@on_ranks
def test_a_forked_child_does_not_wait_for_a_thread_that_it_lacks(rank: Rank) -> None:
    """The child has the result of a complete call, and an error for a call in flight."""
    if rank.device.type == "cuda":
        pytest.skip("CUDA cannot be used in a forked child")
    communicator = rank.new_communicator("posting-forked")
    x = ones(rank)
    complete = collx.post(collx.allreduce, x, group=communicator)
    complete.wait()
    rank.barrier()
    if rank.rank == 0:
        in_flight = collx.post(collx.allreduce, x, group=communicator)
    found = [in_a_child(lambda: complete.wait().sum())]
    if rank.rank == 0:
        found.append(in_a_child(in_flight.wait))
        found.append(in_a_child(lambda: communicator.set_timeout(1.0)))
        found.append(in_a_child(lambda: communicator._native.tune(1, 64)))
    found.append(in_a_child(lambda: collx.post(collx.allreduce, x, group=communicator)))
    rank.barrier()
    if rank.rank != 0:
        in_flight = collx.post(collx.allreduce, x, group=communicator)
    assert bool((in_flight.wait() == rank.size).all())
    communicator.destroy()
    assert found[0].startswith(":"), found
    assert all("forked" in said for said in found[1:]), found


@pytest.mark.worlds(1, 2)
@on_ranks
def test_what_cannot_be_posted_is_refused_by_name(rank: Rank) -> None:
    communicator = rank.communicator("posting-refusing")
    x = ones(rank)

    class Subclass(torch.Tensor):
        pass

    def doubled(t: torch.Tensor) -> Any:
        return collx.post(collx.allreduce, t, group=communicator).wait() * 2

    def doubled_async(t: torch.Tensor) -> Any:
        handle: Any = collx.allreduce(t, group=communicator, async_op=True)
        return handle.wait() * 2

    def gathered(t: torch.Tensor) -> torch.Tensor:
        return collx.post(collx.allgather, t, communicator).wait()

    imaginary = torch.complex(x, x).conj().imag
    for function in (doubled, doubled_async):
        result = torch.compile(function, backend="eager")(x)
        assert bool((result == 2 * rank.size).all())  # between two graphs
    torch._dynamo.reset()

    post: Any = collx.post
    reduce = collx.allreduce

    def refused(error: str, words: str, *args: Any, **options: Any) -> None:
        assert_raised(attempt(lambda: post(*args, group=communicator, **options)), error, words)

    words = "function: got add; accepted: collx.allreduce"
    assert_raised(attempt(lambda: post(torch.add, x, x)), "TypeError", words)
    refused("TypeError", "function: got 'allreduce'", "allreduce", x)
    words = "post() missing 1 required positional argument: 'function'"
    assert_raised(attempt(post), "TypeError", words)
    tensor, words = x.as_subclass(Subclass), "async_op: got True with a tensor subclass"
    refused("NotImplementedError", f"collx.allreduce: {words}", reduce, tensor)
    words = "multiple values for keyword argument 'async_op'"
    refused("TypeError", words, reduce, x, async_op=True)
    refused("ValueError", "algorithm: got", reduce, x, algorithm="none")
    refused("ValueError", "collx.allreduce: out", reduce, x, out=x[1:])
    words = "collx.allreduce: extras: got 1 without epilogue="
    refused("ValueError", words, reduce, x, extras=(1,))
    refused("RuntimeError", "'max_blocks'", reduce, x, max_blocks="many")
    refused("RuntimeError", "'input'", reduce, "x")
    refused("TypeError", "collx.allreduce: reduce_op: got 5", reduce, x, 5)
    words = "an asynchronous call cannot write a conjugate"
    refused("NotImplementedError", f"allreduce: input: {words}", collx.allreduce_, imaginary)
    refused("NotImplementedError", f"allreduce: out: {words}", reduce, x, out=imaginary)
    waits = attempt(lambda: post(reduce, x, group=communicator).wait(timeout=-1.0))
    assert_raised(waits, "ValueError", "wait: timeout: got -1")
    batch = attempt(lambda: torch.func.vmap(gathered)(x[None]))
    words = "allgather: an asynchronous call cannot take a batch"
    assert_raised(batch, "NotImplementedError", words)
    for function in (doubled, doubled_async):
        compiled = torch.compile(function, fullgraph=True, backend="eager")
        words = "collx.allreduce: async_op=True: not supported in a compiled graph"
        assert_raised(attempt(partial(compiled, x)), "Unsupported", words)
    assert works(rank, communicator)


@pytest.mark.worlds(1, 2)
@on_ranks
def test_numbers_of_numpy_are_posted_as_those_of_python(rank: Rank) -> None:
    class Text(str):
        pass

    communicator: Any = rank.communicator("posting-refusing")
    splits: Any = [*[2] * (rank.size - 1), np.int64(2)]
    x = torch.full((2 * rank.size,), float(rank.rank), device=rank.device)
    post: Any = collx.post
    root, options = np.int64(rank.size - 1), {"algorithm": Text("auto"), "max_blocks": np.int32(0)}
    handles = [
        post(collx.broadcast, x, root, communicator),
        collx.broadcast(x, root, communicator, async_op=True, **options),
        post(collx.allreduce, x, group=communicator, extras=[]),
        post(collx.alltoallv, x, splits, splits, communicator),
        post(collx.allreduce_rmsnorm, x[None], x, np.float32(0.5), communicator),
    ]
    wanted: list[Any] = [
        collx.broadcast(x, rank.size - 1, communicator),
        collx.broadcast(x, rank.size - 1, communicator),
        collx.allreduce(x, group=communicator),
        collx.alltoall(x, communicator),
        collx.allreduce_rmsnorm(x[None], x, 0.5, communicator),
    ]
    assert all(torch.equal(h.wait(), want) for h, want in zip(handles, wanted, strict=True))


@pytest.mark.worlds(1, 2)
@on_ranks
def test_gradients_go_through_posted_calls_and_hooks_post(rank: Rank) -> None:
    communicator = rank.communicator("posting-autograd")
    x = ones(rank).requires_grad_()
    y = collx.post(collx.allreduce, x, group=communicator).wait()
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert bool((gradient == rank.size).all())
    # A hook for saved tensors reads what the call writes.
    gradients: list[Any] = []
    for posts in (False, True):
        x = ones(rank, LARGE).requires_grad_()
        square = partial(collx.allreduce, x, epilogue=torch.square, group=communicator)
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
            result: Any = square(async_op=posts)
        (result.wait() if posts else result).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)
    # As in data-parallel training, the hook of a gradient posts its reduction.
    layers = [torch.nn.Parameter(torch.ones(500, device=rank.device)) for _ in range(4)]
    posted = []

    def reduce(parameter: torch.Tensor) -> None:
        posted.append(collx.post(collx.allreduce_, parameter.grad, "avg", communicator))

    for layer in layers:
        layer.register_post_accumulate_grad_hook(reduce)
    value = torch.full((500,), float(rank.rank + 1), device=rank.device)
    for layer in layers:
        value = value * layer
    value.sum().backward()
    for handle in posted:
        handle.wait()
    mean = sum(range(1, rank.size + 1)) / rank.size
    for layer in layers:
        assert layer.grad is not None
        assert bool(torch.allclose(layer.grad, torch.full_like(layer.grad, mean)))


@pytest.mark.worlds(1, 2)
@on_ranks
def test_posted_calls_are_captured(rank: Rank) -> None:
    """A CUDA graph captures a call that is waited for and a call whose handle is dropped. Handles
    of earlier calls are dropped before and within the capture."""
    if rank.device.type != "cuda":
        pytest.skip("CUDA graphs")
    communicator = rank.communicator("posting-graph")
    x, out = ones(rank, LARGE), torch.empty(LARGE, device=rank.device)
    dropped = torch.empty_like(out)
    collx.allreduce(x, group=communicator, out=out)
    rank.synchronize()
    # The queries of these calls during the capture must not end it.
    torch.cuda._sleep(20_000_000)  # the first call has not completed when its handle is dropped
    collx.post(collx.allreduce, x, group=communicator)
    earlier = collx.post(collx.allreduce, x, group=communicator)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        del earlier
        collx.post(collx.allreduce, x, group=communicator, out=dropped)
        handle = collx.post(collx.allreduce, x * 2, group=communicator, out=out)
        with pytest.raises(collx.CollectiveTimeout, match="has not completed"):
            handle.wait(timeout=0.0)
        handle.wait()
        out += 1
        del handle
    for i in range(1, 20):
        x.fill_(i)
        graph.replay()
        assert bool((out == 2 * i * rank.size + 1).all())
        assert bool((dropped == i * rank.size).all())
    communicator.raise_if_failed()


@pytest.mark.worlds(2)
@on_ranks
def test_a_captured_call_keeps_its_input_if_another_stream_waits_for_it(rank: Rank) -> None:
    if rank.device.type != "cuda":
        pytest.skip("CUDA graphs")
    communicator = rank.communicator("posting-graph")
    x, out = ones(rank, LARGE), torch.empty(LARGE, device=rank.device)
    collx.allreduce(x, group=communicator, out=out)
    rank.synchronize()
    graph, other = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        barrier: Any = collx.barrier(communicator, async_op=True)
        handle = collx.post(collx.allreduce, x * 2, group=communicator, out=out)
        with torch.cuda.stream(other):
            handle.wait()
        del handle
        torch.full((LARGE,), -1.0, device=rank.device)  # as large as the input of the call
        torch.cuda.current_stream().wait_stream(other)
        barrier.wait()
    for i in range(1, 5):
        x.fill_(i)
        rank.synchronize()
        rank.barrier()
        if rank.rank == 0:
            time.sleep(0.1)  # the other rank waits in the barrier, before it reads the input
        graph.replay()
        assert bool((out == 2 * i * rank.size).all())
    communicator.raise_if_failed()
