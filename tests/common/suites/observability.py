"""Information about a communicator's calls: statistics, the flight recorder, profiler ranges,
metrics."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import collx
from collx import flight_recorder

from ..attempt import Attempt, allreduce, attempt, finish, ones
from ..calls import run_calls
from ..commands import run
from ..limits import timeout_now
from ..operators import NAMES, call_of
from ..pool import Pool, on_ranks
from ..rank import Rank

LIVES = {"cpu": 40, "cuda": 20}  # of communicators in a test
KEPT = 1000  # calls that the recorder keeps per communicator


@pytest.mark.worlds(2, 3)
@on_ranks
def test_statistics_count_calls_and_bytes_of_every_function(rank: Rank) -> None:
    communicator = rank.new_communicator("counted")
    before = communicator.stats()
    x = ones(rank, 300)
    for _ in range(3):
        allreduce(communicator, x)
    collx.allgather(x, group=communicator)
    collx.barrier(group=communicator)
    finish(communicator)
    rank.barrier()
    after = communicator.stats()
    rank.barrier()
    communicator.destroy()
    assert attempt(communicator.stats).error == "ValueError"
    for function, calls, nbytes in (("allreduce", 3, 3600), ("allgather", 1, 1200)):
        assert after.calls[function] - before.calls.get(function, 0) == calls
        assert after.bytes[function] - before.bytes.get(function, 0) == nbytes
    assert after.calls["barrier"] - before.calls.get("barrier", 0) == 1
    assert after.completed == (sum(after.calls.values()),) * rank.size
    assert after.waiting == (False,) * rank.size
    assert (after.waited is None) == (rank.device.type == "cuda")


@pytest.mark.worlds(2, 3)
@on_ranks
def test_statistics_tell_who_is_late(rank: Rank) -> None:
    """While a rank is missing, and how much longer its peers waited for it."""
    late = rank.size - 1
    communicator = rank.new_communicator("counted-late", watchdog=True)
    allreduce(communicator, ones(rank, 300))
    finish(communicator)
    rank.barrier()
    before = communicator.stats()
    if rank.rank == late:
        time.sleep(0.3)
        assert communicator.stats().waiting == (True,) * late + (False,)
    allreduce(communicator, ones(rank, 300))
    finish(communicator)
    after = communicator.stats()
    rank.barrier()
    communicator.destroy()
    waited = tuple(b - a for a, b in zip(before.waited, after.waited, strict=True))
    assert rank.rank == late or waited[late] > 0.2, waited
    assert rank.rank == late or waited[rank.rank] == 0, waited


@pytest.mark.worlds(2)
@on_ranks
def test_another_thread_reads_while_communicators_are_destroyed(rank: Rank) -> None:
    lives = LIVES[rank.device.type]
    import collx

    errors = set()
    readers: list[Callable[[], object]] = [collx.flight_recorder.trace]
    if importlib.util.find_spec("prometheus_client"):
        from collx import prometheus

        readers.append(lambda: list(prometheus.Collector().collect()))

    def read(one: Any, begun: threading.Event) -> None:
        while not one.destroyed:
            result = attempt(one.stats)
            if "has been destroyed" not in result.message:
                errors.add(result.message)
            errors.update(attempt(reader).message for reader in readers)
            begun.set()

    interval = sys.getswitchinterval()
    for _ in range(lives):
        one = rank.new_communicator("read")
        allreduce(one, ones(rank, 4))
        begun = threading.Event()
        reader = threading.Thread(target=read, args=(one, begun))
        sys.setswitchinterval(1e-4)  # a thread that reads all the time makes init slow, too
        reader.start()
        begun.wait()
        one._leave()  # destroy() would first vote, while the thread uses a core
        reader.join()
        sys.setswitchinterval(interval)
    assert errors <= {""}


@pytest.mark.worlds(2)
@on_ranks
def test_reads_of_another_thread_do_not_end_a_capture(rank: Rank) -> None:
    if rank.device.type != "cuda":
        pytest.skip("CUDA graphs")
    with rank.new_communicator("read-in-capture") as communicator:
        x = ones(rank)
        allreduce(communicator, x)
        rank.synchronize()
        errors: list[str] = []

        def read() -> None:
            for query in (communicator.stats, communicator.raise_if_failed):
                errors.append(attempt(query).message)

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = allreduce(communicator, x)
            reader = threading.Thread(target=read)
            reader.start()
            reader.join()
        graph.replay()
        rank.synchronize()
        assert bool((y == rank.size).all())
        assert errors == [""] * 2


@pytest.mark.worlds(2)
@on_ranks
def test_the_recorder_keeps_the_last_thousand_calls(rank: Rank) -> None:
    communicator = rank.new_communicator("many")
    for number in range(KEPT + 20):
        allreduce(communicator, ones(rank, 1 + number % 3))
    finish(communicator)
    entries = collx.flight_recorder.trace()["entries"]
    communicator.destroy()
    found = [
        (e["collective_seq_id"], e["collx_function"], e["input_sizes"][0], e["state"])
        for e in entries
        if e["process_group"][0] == communicator.name
    ]
    first = found[0][0]
    sizes = [[1 + (number + 20) % 3] for number in range(KEPT)]
    assert found == [
        (first + place, "allreduce", size, "completed") for place, size in enumerate(sizes)
    ]


@pytest.mark.worlds(2)
@on_ranks
def test_the_recorder_knows_every_operator(rank: Rank) -> None:
    communicator = rank.communicator("operators")
    first = communicator._native.calls
    assert run_calls(rank, [call_of(op, 600, rank.size) for op in NAMES], "operators") == []
    collx.barrier(group=communicator)
    finish(communicator)
    entries = collx.flight_recorder.trace()["entries"]
    rank.drop("operators")
    found = [
        (e["collx_function"], e["profiling_name"])
        for e in entries
        if e["process_group"][0] == communicator.name and e["collective_seq_id"] >= first
    ]
    assert {function.partition("_")[0] for function, _ in found} >= {
        *(op.partition("_")[0] for op in NAMES),
        "barrier",
    }
    for function, name in found:
        assert (name == "nccl:all_reduce") == (function.startswith("allreduce")), found


def _differing(rank: Rank, prefix: str) -> tuple[Attempt, Attempt]:
    """Makes calls that do not match in checked mode; the failure writes the traces."""
    os.environ["COLLX_FLIGHT_RECORDER"] = prefix
    communicator = rank.new_communicator("differing", rank.fresh_group(), check=True)
    allreduce(communicator, ones(rank, 64))
    shape = 300 if rank.rank == 0 else 400

    def call() -> None:
        allreduce(communicator, ones(rank, shape))
        finish(communicator)

    attempts = attempt(call), attempt(call)
    del os.environ["COLLX_FLIGHT_RECORDER"]
    return attempts


def _analysis(folder: Path) -> str:
    """Returns the output of PyTorch's analyzer."""
    command = (sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace")
    return run(*command, folder).stdout


@pytest.mark.worlds(2)
def test_pytorchs_analyzer_finds_the_calls_that_differ(pool: Pool, tmp_path: Path) -> None:
    for first, second in pool.run(_differing, str(tmp_path / "collx_")):
        assert (first.error, second.error) == ("CollectiveMismatch", "CommunicatorPoisoned")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["collx_0", "collx_1"]
    for rank in range(2):
        trace = pickle.loads((tmp_path / f"collx_{rank}").read_bytes())
        last = [e for e in trace["entries"] if e["process_group"][0] == "test-differing"][-1]
        assert last["input_sizes"] == [[(300, 400)[rank]]]
        assert last["state"] == "started"
    said = _analysis(tmp_path)
    assert said.count("has errors") == 1, said
    assert re.search(r"Expected input sizes: '\[\[[34]00\]\]' does not match", said), said


def _missing(rank: Rank, key: str, prefix: str, timeout: float) -> tuple[Attempt | None, list[str]]:
    os.environ["COLLX_FLIGHT_RECORDER"] = prefix
    communicator = rank.new_communicator(key, rank.fresh_group(), call_timeout=timeout)
    allreduce(communicator, ones(rank, 64))
    finish(communicator)
    rank.barrier()
    found = None
    said: list[str] = []
    if rank.rank == 0:

        def call() -> None:
            allreduce(communicator, ones(rank, 300))
            finish(communicator)

        with mock.patch.object(flight_recorder, "_log") as log:
            found = attempt(call)
        said = [message.args[0] % message.args[1:] for message in log.mock_calls]
    rank.barrier()
    del os.environ["COLLX_FLIGHT_RECORDER"]
    return found, said


@pytest.mark.worlds(2)
def test_a_time_out_leaves_a_trace(pool: Pool, tmp_path: Path) -> None:
    prefix = str(tmp_path / "deep" / "collx_")
    (found, [said]), _ = pool.run(_missing, "no-trace", prefix, timeout_now(pool))
    assert found.error == "CollectiveTimeout", found  # a missing folder changes nothing
    assert f"'test-no-trace' could not be written (COLLX_FLIGHT_RECORDER={prefix})" in said
    assert not list(tmp_path.iterdir())
    (found, _), _ = pool.run(_missing, "missing", str(tmp_path / "collx_"), timeout_now(pool))
    assert found.error == "CollectiveTimeout", found
    trace = pickle.loads((tmp_path / "collx_0").read_bytes())
    of_this = [e for e in trace["entries"] if e["process_group"][0] == "test-missing"]
    assert [e["state"] for e in of_this[-2:]] == ["completed", "started"]
    status = trace["pg_status"]["test-missing"]
    assert status["last_completed_collective"] == of_this[-2]["collective_seq_id"]
    assert status["last_started_collective"] == of_this[-1]["collective_seq_id"]


@pytest.mark.worlds(2)
@on_ranks
def test_profilers_see_ranges_with_the_fields_of_collectives(rank: Rank, tmp_path: Path) -> None:
    communicator = rank.communicator()
    x = ones(rank, 300)
    allreduce(communicator, x)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds) as profile:
        allreduce(communicator, x, "twoshot_push")
    finish(communicator)
    trace = tmp_path / f"{rank.rank}.json"
    profile.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    names = [event.get("name") for event in events]
    assert names.count("collx.allreduce twoshot_push, 1200 bytes, 2 ranks") == 1
    (fields,) = [e["args"] for e in events if e.get("name") == "record_param_comms"]
    assert fields["Collective name"] == "allreduce"
    assert fields["In msg nelems"] == fields["Out msg nelems"] == 300
    assert (fields["dtype"], fields["Group size"], fields["Rank"]) == ("Float", 2, rank.rank)
    assert fields["Process Group Ranks"] == "[0, 1]"


@pytest.mark.worlds(2)
@on_ranks
def test_prometheus_reads_the_statistics(rank: Rank) -> None:
    client = pytest.importorskip("prometheus_client")
    from collx import prometheus

    communicator = rank.new_communicator("metrics")
    allreduce(communicator, ones(rank, 300))
    finish(communicator)
    registry = client.CollectorRegistry()
    registry.register(prometheus.Collector())
    text = client.generate_latest(registry).decode()
    rank.barrier()
    communicator.destroy()
    (calls,) = [
        line
        for line in text.splitlines()
        if line.startswith("collx_calls_total{")
        and '"test-metrics"' in line
        and 'function="allreduce"' in line
    ]
    assert f'rank="{rank.rank}"' in calls
    assert float(calls.split()[-1]) >= 1
    assert f'collx_failed{{communicator="test-metrics",rank="{rank.rank}"}} 0.0' in text
    assert 'peer="1"' in text
