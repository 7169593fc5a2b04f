"""Kernels of epilogues: when they are compiled, when the disk cache is used, and CUDA graphs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import collx
from collx._extension import extension
from tests.common.attempt import assert_raised, attempt, ones, works
from tests.common.check import differences
from tests.common.pool import Pool, on_ranks
from tests.common.rank import Rank

REMEMBERED = 1024  # expressions that a process caches before it drops all: csrc/ops/epilogue.cpp


def _made() -> tuple[int, int]:
    return extension.made_kernels()


def _since(before: tuple[int, int]) -> tuple[int, int]:
    """Returns how many kernels were compiled and how many were loaded from disk."""
    after = _made()
    return after[0] - before[0], after[1] - before[1]


def _forget() -> None:
    """Fills the cache of the process with other expressions, so that it reads the disk cache."""
    for number in range(REMEMBERED):
        text = f"value.float32;constant.float32 {number:08x};add.float32 0 1"
        extension.epilogue_program(text, torch.float32, "allreduce_oneshot_push", True, 2, True)


def _scaled(rank: Rank, scale: float, **options: Any) -> dict[str, Any]:
    """Returns arguments of a call whose kernel contains `scale`; no other test uses this kernel."""
    bias = ones(rank, 24) * -2

    def f(v: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.relu(v * scale + b)

    x = ones(rank, 96).view(4, 24) * (rank.rank + 1)
    return {"input": x, "epilogue": f, "extras": (bias,), **options}


def _wrong(rank: Rank, scale: float, got: torch.Tensor) -> str:
    total = rank.size * (rank.size + 1) / 2
    return differences(got.cpu(), torch.full((4, 24), max(total * scale - 2, 0.0)))


def _kept(rank: Rank, folder: str) -> list[Any]:
    os.environ["COLLX_CACHE_DIR"] = folder
    communicator = rank.communicator()
    options = _scaled(rank, 1.25, group=communicator)
    found: list[Any] = []

    def call() -> None:
        before = _made()
        found.append(_wrong(rank, 1.25, collx.allreduce(**options)))
        found.append(_since(before))

    call()
    call()  # loaded in the process
    _forget()
    call()  # loaded from disk
    for file in Path(folder).iterdir():
        file.write_bytes(file.read_bytes()[:-1000])
    _forget()
    call()  # the file is damaged
    found.append(len(list(Path(folder).iterdir())))
    del os.environ["COLLX_CACHE_DIR"]
    return found


@pytest.mark.worlds(2)
def test_a_kernel_is_compiled_once_and_kept(pool: Pool, tmp_path: Path) -> None:
    """The kernel is kept in the process and on disk, and is compiled again if the file is damaged.
    Both ranks need it at the same time in one file: either may load what the other has compiled."""
    ranks = pool.run(_kept, str(tmp_path))
    for found in ranks:
        *seen, files = found
        assert seen[::2] == [""] * 4  # the results of the calls
        assert seen[3] == (0, 0)
        assert seen[5] == (0, 1)
        assert files == 1
    for call in (1, 7):
        assert all(sum(found[call]) == 1 for found in ranks)
        assert any(found[call] == (1, 0) for found in ranks)


@pytest.mark.worlds(2)
@on_ranks
def test_without_a_folder_to_keep_it_in(rank: Rank) -> None:
    os.environ["COLLX_CACHE_DIR"] = "/proc/none"
    before = _made()
    options = _scaled(rank, 1.75, group=rank.communicator())
    wrong = _wrong(rank, 1.75, collx.allreduce(**options))
    del os.environ["COLLX_CACHE_DIR"]
    assert (wrong, _since(before)) == ("", (1, 0))


@pytest.mark.worlds(2)
@on_ranks
def test_a_capture_needs_a_kernel_that_is_loaded(rank: Rank) -> None:
    """Without a loaded kernel, the capture is refused by name; after warm_up, replays compute new
    results."""
    os.environ["COLLX_CACHE_DIR"] = ""
    communicator = rank.communicator()
    options = _scaled(rank, 2.5, group=communicator)
    out = torch.empty_like(options["input"])

    def capture() -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            collx.allreduce(**options, out=out)
        return graph

    refused = attempt(capture)
    well = works(rank, communicator)
    before = _made()
    collx.warm_up(collx.allreduce, **options, out=out)
    made = _since(before)
    graph, wrong = capture(), []
    for factor in (1, 3):
        options["input"].fill_(float((rank.rank + 1) * factor))
        graph.replay()
        wrong.append(_wrong(rank, 2.5 * factor, out))
    del os.environ["COLLX_CACHE_DIR"]
    assert_raised(refused, "RuntimeError", "collx.allreduce", "not loaded", "collx.warm_up")
    assert well
    assert wrong == ["", ""]
    assert made == (1, 0)


@pytest.mark.worlds(1, 2)
@pytest.mark.parametrize("algorithm", ["auto", "twoshot_pull"])
@on_ranks
def test_a_norm_is_made_ready_and_captured(rank: Rank, algorithm: str) -> None:
    """One kernel of each kind, and the kernel of a single rank."""
    os.environ["COLLX_CACHE_DIR"] = ""
    communicator = rank.communicator()
    x, weight = ones(rank, 96).view(4, 24), ones(rank, 24) * 3
    shift = float(len(algorithm))  # no other call uses this kernel
    options: dict[str, Any] = {
        "group": communicator,
        "epilogue": lambda v, b: torch.relu(v + b - shift),
        "extras": (torch.arange(24.0, device=rank.device),),
        "algorithm": algorithm,
    }
    out = torch.empty_like(x)
    before = _made()
    collx.warm_up(collx.allreduce_rmsnorm, x, weight, 0.0, **options, out=out)
    made, graph, wrong = _since(before), torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        collx.allreduce_rmsnorm(x, weight, 0.0, **options, out=out)
    for value in (2.0, -1.0):
        x.fill_(value)
        graph.replay()
        norm = torch.full((4, 24), 3.0 if value > 0 else -3.0)
        wrong.append(differences(out.cpu(), torch.relu(norm + torch.arange(24.0) - shift)))
    del os.environ["COLLX_CACHE_DIR"]
    assert made == (1, 0)
    assert wrong == ["", ""]


@pytest.mark.worlds(2)
@on_ranks
def test_warm_up_makes_calls_alike_ready(rank: Rank) -> None:

    def options(rows: int) -> dict[str, Any]:
        given = _scaled(rank, 3.5, group=rank.communicator(), axis=1)
        given["input"] = given["input"][:1].expand(rows, 24).contiguous()
        given["extras"] = (given["extras"][0][: 24 // rank.size],)
        return given

    before = _made()
    collx.warm_up(collx.reducescatter, **options(4))
    made, before = _since(before), _made()
    total = rank.size * (rank.size + 1) / 2
    wrong = []
    for rows in (4, 12):
        want = torch.full((rows, 24 // rank.size), total * 3.5 - 2)
        wrong.append(differences(collx.reducescatter(**options(rows)).cpu(), want))
    later = _since(before)
    assert sum(made) == 1
    assert later == (0, 0)
    assert wrong == ["", ""]


def _scaled_by(v: torch.Tensor, number: float) -> torch.Tensor:
    return v * number + 0.8125


@pytest.mark.worlds(2)
@on_ranks
def test_a_number_that_changes_compiles_nothing(rank: Rank) -> None:
    communicator = rank.communicator()
    x = ones(rank, 1000) * (rank.rank + 1)
    total = rank.size * (rank.size + 1) / 2
    before, wrong, made = _made(), [], []
    for number in (0.5, 0.75, -3, 8.0):
        got = collx.allreduce(x, group=communicator, epilogue=_scaled_by, extras=(number,))
        wrong.append(differences(got.cpu(), torch.full((1000,), total * number + 0.8125)))
        made.append(_since(before))
    communicator.raise_if_failed()
    wrong = [text for text in wrong if text]
    assert wrong == []
    assert sum(made[0]) <= 1  # another rank may have stored the kernel on disk
    assert set(made) == {made[0]}
