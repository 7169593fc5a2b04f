"""Life cycle of communicators: names, groups, several at once, thousands, and how they end."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import collx

from .. import interpreters
from ..attempt import allreduce, assert_raised, attempt, finish, ones, works
from ..check import differences
from ..limits import timeout_now
from ..pool import Pool, on_ranks, some_stand_for_all
from ..rank import PAYLOAD_BYTES, Rank
from ..values import inputs_and_reference
from .voting import instead_of_step

PUSHES_AND_PULLS = ("oneshot_push", "twoshot_push", "oneshot_pull", "twoshot_pull")
CYCLE_PAYLOAD = 512 << 10  # bytes; 100 leaked payloads would be noticeable


@pytest.mark.worlds(1, 2)
@on_ranks
def test_the_default_communicator_bears_the_name_of_its_group(rank: Rank) -> None:
    """Lookup by group name: the operator needs only the name of the group."""
    with collx.init(device=rank.device, payload_bytes=4 << 20) as communicator:
        assert communicator.name == dist.distributed_c10d._get_default_group().group_name
        result = torch.ops.collx.allreduce(ones(rank), "sum", communicator.name)
        again = collx.allreduce(ones(rank))
        assert (result == rank.size).all()
        assert (again == rank.size).all()


@pytest.mark.worlds(1, 2)
@on_ranks
def test_the_default_device_of_new_tensors_does_not_matter(rank: Rank) -> None:
    """Models are often constructed with the default device "meta" or "cuda"."""
    with torch.device("meta"), rank.new_communicator("default-device") as communicator:
        assert works(rank, communicator)


@pytest.mark.worlds(1, 2, 3)
@on_ranks
def test_destroy_twice_is_harmless_and_calls_afterwards_are_refused(rank: Rank) -> None:
    """Hazard 24."""
    communicator = rank.new_communicator("twice")
    assert works(rank, communicator)
    name = communicator.name
    communicator.destroy()
    communicator.destroy()
    call = attempt(lambda: torch.ops.collx.allreduce(ones(rank), "sum", name))
    assert_raised(attempt(communicator.__enter__), "CommunicatorPoisoned")
    assert communicator.destroyed
    with rank.new_communicator("twice") as fresh:
        assert works(rank, fresh)
    assert call.error in ("ValueError", "CommunicatorPoisoned"), call
    assert "test-twice" in call.message


@pytest.mark.worlds(1, 2)
@on_ranks
def test_a_destroyed_communicator_does_not_stand_for_its_namesake(rank: Rank) -> None:
    """The new communicator may have other ranks. Dynamo wraps the error in its own exception. Uses
    a destroyed communicator while another one has its name."""

    def compiled() -> torch.Tensor:
        return torch.compile(call, fullgraph=True, backend="eager")(ones(rank))

    def call(x: torch.Tensor) -> torch.Tensor:
        return collx.allreduce(x, group=old)

    torch._dynamo.reset()
    old = rank.new_communicator("namesake")
    compiled()
    old.destroy()
    words = "communicator 'test-namesake' has been destroyed"
    with rank.new_communicator("namesake") as fresh:
        assert collx.is_initialized(fresh)
        assert not collx.is_initialized(old)
        uses = (lambda: call(ones(rank)), lambda: collx.get(old), lambda: collx.empty(2, group=old))
        for use in uses:
            assert_raised(attempt(use), "CommunicatorPoisoned", words)
        assert words in attempt(compiled).message
        assert works(rank, fresh)


def held() -> dict[str, int]:
    """Returns how much of each resource this process has."""
    status = Path("/proc/self/status").read_text().splitlines()
    resident = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "maps": len(Path("/proc/self/maps").read_text().splitlines()),
        "KiB": resident,
        "python threads": threading.active_count(),
    }


def _cycle(rank: Rank, count: int) -> None:
    payload = max(CYCLE_PAYLOAD, rank.smallest_payload())
    for number in range(count):
        with rank.new_communicator("cycle", payload_bytes=payload) as communicator:
            if number % 50 == 0:
                tensor = communicator.empty((100,)).fill_(1)
                torch.ops.collx.allreduce_(tensor, "sum", communicator.name)
                assert bool((tensor == rank.size).all())
    gc.collect()


@pytest.mark.alone  # it measures the free memory of the GPU
@pytest.mark.worlds(2)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cycles", [100, pytest.param(1000, marks=pytest.mark.full)])
@on_ranks(deadline=850.0)
def test_many_lives_leave_nothing_behind(rank: Rank, cycles: int) -> None:
    """Hazard 24: memory, descriptors, threads and mappings do not grow with many communicators."""
    count = 40 if rank.world.takes_turns else cycles
    # Memory that is loaded or cached once does not count: the first cycles are not measured.
    _cycle(rank, min(count, 30))
    before = held()
    free = torch.cuda.mem_get_info()[0] if rank.device.type == "cuda" else 0
    _cycle(rank, count)
    lost = free - torch.cuda.mem_get_info()[0] if rank.device.type == "cuda" else 0
    after = held()
    assert after["descriptors"] <= before["descriptors"] + 2, (before, after)
    assert after["threads"] <= before["threads"] + 1, (before, after)
    assert after["maps"] <= before["maps"] + 40, (before, after)
    assert after["KiB"] <= before["KiB"] + 16 * 1024, (before, after)
    assert lost < 64 << 20


def _exchange(rank: Rank, communicator: Any, seed: int) -> str:
    inputs, expected = inputs_and_reference(
        communicator.world_size, "random", "float32", "sum", 777, seed
    )
    result = allreduce(communicator, inputs[communicator.rank].to(rank.device))
    return differences(result.cpu(), expected)


@pytest.mark.worlds(4)
@on_ranks
def test_tensor_parallel_and_data_parallel_groups_do_not_mix(rank: Rank) -> None:
    """Hazard 7: TP 2 x DP 2 in one job, together with a communicator of all ranks."""
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    tensor_group, data_group = rows[rank.rank // 2], columns[rank.rank % 2]
    world = rank.communicator()
    row = rank.new_communicator(f"tp{rank.rank // 2}", tensor_group)
    # Deliberately in another order: the data-parallel groups are created while the first are used.
    found = [_exchange(rank, row, 1)]
    column = rank.new_communicator(f"dp{rank.rank % 2}", data_group)
    for number in range(20):
        communicator = (row, column, world)[number % 3]
        found.append(_exchange(rank, communicator, number))
        marked = torch.full((5,), float(rank.rank), device=rank.device)
        total = float(allreduce(communicator, marked)[0])
        members = {
            row: [rank.rank // 2 * 2, rank.rank // 2 * 2 + 1],
            column: [rank.rank % 2, rank.rank % 2 + 2],
            world: [0, 1, 2, 3],
        }
        assert total == sum(members[communicator]), (number, total)
        symmetric = communicator.empty((33,)).fill_(1)
        torch.ops.collx.allreduce_(symmetric, "sum", communicator.name)
        assert bool((symmetric == communicator.world_size).all())
    column.destroy()
    row.destroy()
    for group in (tensor_group, data_group):
        dist.destroy_process_group(group)
    assert found == [""] * len(found)


@pytest.mark.worlds(3)
@on_ranks
def test_ranks_with_different_pasts_meet(rank: Rank) -> str:
    """Hazard 7: some ranks have used a subgroup before; all ranks still find each other."""
    pair = dist.new_group([0, 2])
    found = ""
    if rank.rank in (0, 2):
        with rank.new_communicator("pair", pair) as communicator:
            found = _exchange(rank, communicator, 4)
    with rank.new_communicator("all") as communicator:
        return found or _exchange(rank, communicator, 5)


@pytest.mark.worlds(2, 4)
@on_ranks
def test_several_communicators_on_one_group(rank: Rank) -> None:
    """Each has its own region; one can be destroyed while the other remains."""
    first, second = rank.new_communicator("first"), rank.new_communicator("second")
    found = []
    for number in range(30):
        found.append(_exchange(rank, (first, second)[number % 2 if number % 5 else 0], number))
    second.destroy()
    found.append(_exchange(rank, first, 31))
    first.destroy()
    assert found == [""] * 31


def _error(function: Callable[[int], None], number: int) -> list[str]:
    found = attempt(partial(function, number))
    return [f"{found.error}: {found.message}"] if found.error else []


@pytest.mark.worlds(1, 2)
@on_ranks
def test_threads_make_and_destroy_communicators_at_once(rank: Rank) -> list[str]:
    """Each rank starts its threads in another order. Each thread makes and destroys communicators
    on its own group."""
    if rank.device.type == "cuda" and rank.size > 1:
        pytest.skip("the rendezvous of PyTorch on CUDA holds the interpreter's lock")
    lives = 25 // rank.size**2
    groups = [rank.fresh_group() for _ in range(4)]
    wrong: list[str] = []

    def live(number: int) -> None:
        for _ in range(lives):
            with rank.new_communicator(f"thread{number}", groups[number]) as communicator:
                fine = collx.get(groups[number]) is communicator and works(rank, communicator)
                wrong.extend([] if fine else [f"thread {number}"])

    order = range(4) if rank.rank == 0 else reversed(range(4))
    threads = [threading.Thread(target=lambda n=n: wrong.extend(_error(live, n))) for n in order]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    return wrong


@pytest.mark.worlds(1, 2)
@on_ranks
def test_a_name_that_another_thread_is_making_is_refused(rank: Rank) -> None:
    """The attempt in progress is not disturbed. The second thread starts while the first one is
    inside init, on every rank."""
    found = []

    def run(setup: Any, original: Callable[[Any], Any]) -> Any:
        other = threading.Thread(
            target=lambda: found.append(attempt(lambda: rank.new_communicator("twin")))
        )
        other.start()
        other.join()
        return original(setup)

    with instead_of_step("machine", run), rank.new_communicator("twin") as communicator:
        assert works(rank, communicator)
    (second,) = found
    assert_raised(second, "ValueError", "another thread")


@pytest.mark.worlds(2, 3)
@on_ranks
def test_allocations_in_another_order_are_refused(rank: Rank) -> None:
    """Hazard 16: ranks that would get the wrong buffers all raise, and remain usable."""
    communicator = rank.new_communicator("order", call_timeout=3.0)
    sizes = [(100,), (200,)] if rank.rank == 0 else [(200,), (100,)]
    found = attempt(lambda: [communicator.empty(size) for size in sizes])
    rank.barrier()
    fine = works(rank, communicator)
    communicator.destroy()
    assert_raised(found, "CollectiveMismatch", "100", "200")
    assert fine


@pytest.mark.worlds(2, 4)
@on_ranks
def test_tensors_of_pytorchs_symmetric_memory_can_be_registered(rank: Rank) -> None:
    """After collx.register, peers read and write these tensors in place."""
    from torch.distributed import _symmetric_memory as symmetric_memory

    communicator = rank.communicator()
    tensor = symmetric_memory.empty(1000, dtype=torch.float32, device=rank.device)
    out = symmetric_memory.empty(1000, dtype=torch.float32, device=rank.device)
    for each in (tensor, out):
        assert communicator.register(each) is each
    inputs, expected = inputs_and_reference(rank.size, "random", "float32", "sum", 1000, 3)
    found = []
    for algorithm in ("pull_push", "oneshot_pull", "twoshot_pull"):
        tensor.copy_(inputs[rank.rank])
        out.fill_(float("nan"))
        torch.ops.collx.allreduce.out(tensor, "sum", communicator.name, algorithm, 0, out=out)
        found.append(differences(out.cpu(), expected))
    assert found == ["", "", ""]


@pytest.mark.worlds(2)
@on_ranks
def test_memory_of_a_dead_symmetric_tensor_is_not_taken_for_symmetric(rank: Rank) -> None:
    """The registry holds storages weakly."""
    communicator = rank.communicator()
    inputs, expected = inputs_and_reference(rank.size, "random", "float32", "sum", 500, 3)
    found = []
    for _ in range(10):
        # Memory of a freed symmetric tensor is reused for another tensor that is not symmetric.
        symmetric = communicator.empty((500,)).copy_(inputs[rank.rank])
        found.append(differences(allreduce(communicator, symmetric).cpu(), expected))
        finish(communicator)
        del symmetric
        ordinary = inputs[rank.rank].to(rank.device)
        found.append(differences(allreduce(communicator, ordinary).cpu(), expected))
        refused = attempt(partial(allreduce, communicator, ordinary, "pull_push"))
        assert refused.error, "an ordinary tensor was taken for a symmetric one"
    assert found == [""] * 20


def _share(tensor: torch.Tensor) -> None:
    tensor.share_memory_()


def _set(tensor: torch.Tensor) -> None:
    tensor.set_(torch.empty_like(tensor))  # type: ignore[call-overload]


def _swap(tensor: torch.Tensor) -> None:
    tensor.data = torch.empty_like(tensor)


def _at(address: int, numel: int) -> torch.Tensor:
    """Returns an ordinary float tensor at the given address, which must be unmapped."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    fixed = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100000  # MAP_FIXED_NOREPLACE
    access = mmap.PROT_READ | mmap.PROT_WRITE
    at = library.mmap(address, 4 * numel, access, fixed, -1, 0)
    assert at == address, os.strerror(ctypes.get_errno())
    return torch.frombuffer((ctypes.c_float * numel).from_address(at), dtype=torch.float32)


def _replaced(
    rank: Rank,
    change: Callable[[torch.Tensor], None],
    ranks: int,
    algorithm: str,
    timeout: float = 3.0,
) -> dict[str, Any]:
    numel = 3 << 18
    inputs, expected = inputs_and_reference(rank.size, "random", "float32", "sum", numel, 3)
    communicator = rank.new_communicator("replaced", rank.fresh_group(), call_timeout=timeout)
    symmetric = communicator.empty((numel,)).zero_()
    address = symmetric.data_ptr()
    if rank.rank < ranks:
        change(symmetric)
    symmetric = symmetric[:numel].copy_(inputs[rank.rank])
    found: dict[str, Any] = {"same": symmetric.data_ptr() == address}
    others = []
    if rank.device.type == "cpu" and rank.rank < ranks:
        others.append(_at(address, numel).copy_(inputs[rank.rank]))
    rank.barrier()
    if ranks < rank.size:
        found["wrong"] = []

        def call() -> None:
            out = communicator.empty((numel,)) if algorithm == "pull_push" else None
            result = collx.allreduce(symmetric, group=communicator, algorithm=algorithm, out=out)
            finish(communicator)
            found["wrong"].append(differences(result.cpu(), expected))

        found["call"] = attempt(call)
    else:
        found["refused"] = attempt(partial(allreduce, communicator, symmetric, "pull_push"))
        results = [allreduce(communicator, each, algorithm).cpu() for each in [symmetric, *others]]
        found["wrong"] = [differences(result, expected) for result in results]
    rank.barrier()
    communicator.destroy()
    return found


# PyTorch does not resize storages of symmetric memory.
_REPLACEMENTS = [_share, _set, _swap]


@pytest.mark.worlds(2)
@pytest.mark.parametrize("change", _REPLACEMENTS, ids=lambda f: f.__name__)
def test_a_symmetric_tensor_with_other_memory_is_an_ordinary_one(
    pool: Pool, change: Callable[[torch.Tensor], None]
) -> None:
    """Neither the tensor nor a tensor at its old address is treated as symmetric."""
    if pool.world.device == "cuda" and change is _share:
        pytest.skip("share_memory_ leaves the memory of GPUs where it is")
    for found in pool.run(_replaced, change, pool.size, "auto"):
        assert not found["same"]
        assert found["refused"].error == "ValueError", found
        assert set(found["wrong"]) == {""}


@pytest.mark.worlds(2)
@pytest.mark.parametrize("algorithm", ["auto", "oneshot_pull", "twoshot_pull", "pull_push"])
def test_other_memory_on_one_rank_alone_ends_in_an_error(pool: Pool, algorithm: str) -> None:
    """All ranks must agree on whether a tensor is symmetric."""
    results = pool.run(_replaced, _set, 1, algorithm, timeout_now(pool))
    for found in results:
        # A result that does not depend on the difference is right.
        assert set(found["wrong"]) <= {""}, results
    errors = [found["call"].error for found in results]
    if algorithm == "pull_push":  # rank 0 has refused this call
        assert errors == ["ValueError", "CollectiveTimeout"], results
    else:
        assert set(errors) <= {"", "CollectiveTimeout", "CollectiveMismatch"}, results
        assert len(set(errors)) == 1 or "" not in errors, results


@pytest.mark.worlds(2, 4)
@on_ranks
def test_selection_does_not_depend_on_facts_of_one_rank(rank: Rank) -> None:
    """Hazard 5: free memory, addresses and environment differ, but the plan is the same on all
    ranks."""
    # Rank 0 has other addresses, less free memory and another environment.
    ballast, other = [], {}
    if rank.rank == 0:
        ballast = [torch.empty(1 << 20, device=rank.device) for _ in range(37)]
        other = {"COLLX_UNRELATED": "1", "OMP_NUM_THREADS": "3"}
    with mock.patch.dict(os.environ, other), rank.new_communicator("facts") as communicator:
        for numel in (1, 1000, 100_000, 3_000_000):
            for dtype in (torch.float32, torch.int32):
                plan = asdict(communicator.explain("allreduce", numel, dtype))
                plan.pop("communicator")
                assert rank.gather(plan) == [plan] * rank.size
        # Alignment and contiguity of the input differ between ranks.
        base = torch.arange(4000, device=rank.device, dtype=torch.float32)
        each = [base[r : r + 1000] if r % 2 else base[:2000:2] for r in range(rank.size)]
        want = torch.stack(each).sum(0)  # small integers: exact in any order
        assert differences(allreduce(communicator, each[rank.rank]).cpu(), want.cpu()) == ""
    del ballast


@pytest.mark.worlds(1, 2, 4)
@on_ranks
def test_workspace_and_explain_tell_where_bytes_go(rank: Rank) -> None:
    """Hazard 17: explain and workspace_bytes report the same capacity, within the stated bounds."""
    sizes = [
        collx.workspace_bytes("allreduce", (1000,), torch.float32, rank.size, algorithm)
        for algorithm in PUSHES_AND_PULLS
    ]
    communicator = rank.communicator()
    for algorithm, size in zip(PUSHES_AND_PULLS, sizes, strict=True):
        plan = communicator.explain("allreduce", (10, 100), algorithm=algorithm)
        assert (plan.algorithm, plan.bytes, plan.chunks) == (algorithm, 4000, 1)
        assert plan.workspace_bytes == size
        assert f"algorithm  {algorithm}" in str(plan)
        parts = dict(plan.region)
        assert 4000 * rank.size < sum(parts.values()) - parts["total"] <= parts.pop("total")
        larger = communicator.explain("allreduce", 4 * PAYLOAD_BYTES, algorithm=algorithm)
        assert larger.chunks > 1
        assert larger.workspace_bytes > size
    assert communicator.explain("allreduce", 1000).algorithm in PUSHES_AND_PULLS
    oneshot_push, twoshot_push, oneshot_pull, twoshot_pull = sizes
    tile = 1024
    assert oneshot_push <= 2 * rank.size * (4000 + tile)
    assert twoshot_push <= 4 * (4000 + rank.size * tile)
    assert oneshot_pull <= 2 * (4000 + tile)
    assert twoshot_pull <= 2 * (4000 + 4000 // rank.size + (rank.size + 1) * tile)


EXITS = {
    "without destroying anything": "",
    "destroying the process group first": "dist.destroy_process_group(); comm.destroy()",
    "destroying the communicator first": "comm.destroy(); dist.destroy_process_group()",
    "destroying the process group alone": "dist.destroy_process_group()",
    "with the communicator in a cycle": "loop = [comm, x]; loop.append(loop); del comm, x, loop",
    "within a with block": "comm.__enter__(); sys.exit(0)",
    "after dropping every name": "del comm, x, y; import gc; gc.collect()",
    "with a finalizer that uses it": (
        "import atexit; atexit.register(lambda: (comm.raise_if_failed, comm.destroyed, repr(comm)))"
    ),
    "after Ctrl-C in a vote": (
        "import contextlib, signal, threading, time; comm.set_timeout(3.0)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "signals = (threading.get_ident(), signal.SIGINT)\n"
        "if rank == 0: threading.Timer(0.3, signal.pthread_kill, signals).start()\n"
        "else: time.sleep(0.5)\n"
        "with contextlib.suppress(KeyboardInterrupt, collx.CollectiveError): comm.empty(8)\n"
    ),
    "with posted calls in flight": "h = [collx.post(collx.allreduce, x) for _ in range(9)]",
    "with a posted call that the other rank never makes": (
        "comm.set_timeout(3.0); h = collx.post(collx.allreduce, x) if rank == 0 else None"
    ),
}

EXITS_WHERE_SHARED = ("without destroying anything", "destroying the process group first")

JOINED = """
import os, sys
import torch, torch.distributed as dist, {module}
torch.set_num_threads(1)
rank, port, device, size = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
store = dist.TCPStore("127.0.0.1", port, is_master=False)
if device == "cuda":
    torch.cuda.set_device(rank % torch.cuda.device_count())
dist.init_process_group("{backend}", store=store, rank=rank, world_size=size)
"""

PROGRAM = """
comm = collx.init(device=torch.device(device), payload_bytes=4 << 20, timeout=30.0)
x = comm.empty((100,)).fill_(1)
y = torch.ops.collx.allreduce(x, "sum", comm.name)
assert bool((y == 2).all())
dist.barrier()
{ending}
print("the end", flush=True)
"""


def exit_codes(
    device: str,
    ending: str,
    settings: dict[str, str] | list[dict[str, str]] | None = None,
    *,
    program: str = PROGRAM,
    size: int = 2,
    backend: str = "gloo",
) -> list[tuple[int, str]]:
    """Returns the exit code and output of each rank. Each rank runs `program`, after JOINED, in its
    own interpreter. With `settings` of all ranks or of each, which libraries may read when they are
    imported, the interpreter has imported nothing before."""
    from ..worlds import World, gpu_count, rank_environment

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world = World(device, size, min(size, gpu_count()) if device == "cuda" else 0)
    given = settings if isinstance(settings, list) else [settings or {}] * size
    environments = [{**rank_environment(world), **own} for own in given]
    module = "collx.backend" if backend == "collx" else "collx"
    text = JOINED.format(module=module, backend=backend) + program.format(ending=ending)
    arguments = [[str(rank), str(store.port), device, str(size)] for rank in range(size)]
    modules = interpreters.IMPORTED if settings is None else ()
    return [
        (1, f"{output}\ndid not end") if code is None else (code, output)
        for code, output in interpreters.run(text, arguments, environments, 90, modules)
    ]


@pytest.mark.worlds(2)
@pytest.mark.parametrize("how", sorted(EXITS))
def test_the_interpreter_exits_in_any_order(pool: Pool, how: str) -> None:
    """Hazard 24: no crash, no hang, no message, in any order of destruction."""
    some_stand_for_all(pool, how in EXITS_WHERE_SHARED)
    if pool.world.device == "cuda" and "never makes" in how:
        pytest.skip("a process that ends while its kernel spins takes others of the GPU with it")
    for code, output in exit_codes(pool.world.device, EXITS[how]):
        assert code == 0, output
        for word in ("terminate called", "Segmentation", "Traceback", "Fatal", "did not end"):
            assert word not in output, output
