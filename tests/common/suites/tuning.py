"""Tuning tables: what they change, and which tables init refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import collx
import collx.backend
from collx import _tuning
from collx._extension import extension
from collx._tune.cases import BUILT_IN as AUTO
from collx._tune.cases import Case, call_of, tensors_of

from ..attempt import Attempt, attempt, works
from ..pool import Pool, on_ranks
from ..rank import Rank

BUILT_IN = {"cpu": "oneshot_pull", "cuda": "oneshot_push"}
OTHER = "twoshot_push"  # with the same bits
SIZE = 4096  # bytes


def entry(**changes: Any) -> dict[str, Any]:
    return {
        "op": "allreduce",
        "dtype": "float32",
        "symmetric": False,
        "from_bytes": 1024,
        "to_bytes": 8192,
        "algorithm": OTHER,
        "max_blocks": 0,
        "threads": 0,
        **changes,
    }


def table(rank: Rank, *entries: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Returns a table for the pool's ranks as JSON content."""
    made = _tuning.new(rank.device, rank.size, 1, 1, "2026-01-01")
    content = json.loads(made.to_json())
    return {**content, "entries": list(entries) or [entry()], **changes}


def _values(rank: Rank, numel: int) -> torch.Tensor:
    return torch.randn(numel, device=rank.device) * (rank.rank + 1)


CALLS: dict[str, dict[str, Any]] = {
    "fits": {"shape": SIZE // 4},
    "first": {"shape": 1024 // 4},
    "last": {"shape": 8192 // 4},
    "too small": {"shape": 1020 // 4},
    "too large": {"shape": 8196 // 4},
    "symmetric": {"shape": SIZE // 4, "input_symmetric": True, "output_symmetric": True},
    "dtype": {"shape": SIZE // 2, "dtype": torch.bfloat16},
    "named": {"shape": SIZE // 4, "algorithm": "oneshot_push"},
    "op": {"op": "allgather", "shape": SIZE // 4},
}


@pytest.mark.worlds(2, 3)
@on_ranks
def test_a_table_replaces_the_choice_of_auto_and_keeps_the_bits(rank: Rank) -> None:
    found: dict[str, Any] = {}
    numel = SIZE // 4
    x = _values(rank, numel)
    results = {}
    for name, tuning in (("without", None), ("with", table(rank))):
        with rank.new_communicator(f"tuning {name}", tuning=tuning) as communicator:
            found[f"{name} source"] = communicator.tuning
            for what, options in CALLS.items():
                plan = communicator.explain(
                    **{"op": "allreduce", "dtype": torch.float32, **options}
                )
                found[f"{name} {what}"] = (plan.algorithm, plan.executed_by, plan.tuning)
            found[f"{name} text"] = str(communicator.explain("allreduce", numel, torch.float32))
            results[name] = collx.allreduce(x, group=communicator)
            communicator.synchronize()
    found["equal"] = torch.equal(results["with"], results["without"])
    chosen = "entry of 1,024 to 8,192 bytes in a dict"
    assert found["with source"] == "a dict"
    assert found["without source"] is None
    for what in ("fits", "first", "last"):
        assert found[f"with {what}"] == (OTHER, OTHER, chosen), found
    assert chosen in found["with text"]
    for what in ("too small", "too large", "symmetric", "dtype", "op"):
        assert found[f"with {what}"][:2] == found[f"without {what}"][:2], found
        assert found[f"with {what}"][2] == "built-in table; no entry of a dict fits"
        assert found[f"without {what}"][2] == "built-in table"
    assert found["with named"] == found["without named"]
    assert found["with named"][2] == "the call names the algorithm"
    assert found["without fits"][0] == BUILT_IN[rank.device.type], found
    assert found["equal"]


@pytest.mark.worlds(2)
@on_ranks
def test_a_call_runs_what_explain_states(rank: Rank) -> None:
    """A call that names the entry's algorithm matches a call with "auto" on another rank. Checked
    mode compares the algorithms that the calls use."""
    x = _values(rank, SIZE // 4)
    found = []
    for algorithm in (OTHER, "oneshot_push"):
        group = rank.fresh_group()
        with rank.new_communicator(None, group, tuning=table(rank), check=True) as communicator:
            named = algorithm if rank.rank == 0 else "auto"
            found.append(
                attempt(
                    lambda: (
                        collx.allreduce(x, group=communicator, algorithm=named),  # noqa: B023
                        communicator.synchronize(),
                    )
                )
            )
    same, other = found
    assert same.error == "", same
    assert other.error == "CollectiveMismatch", other
    assert OTHER in other.message, other


DAMAGED: dict[str, tuple[dict[str, Any], str]] = {
    "format": ({"format": 2}, "got format 2 in a dict; accepted: 1"),
    "no entries": ({"entries": None}, "got entries of type NoneType"),
    "unknown key": ({"more": 1}, "got the keys "),
    "type": ({"world_size": "2"}, "got world_size '2' in a dict; accepted: int"),
    "row": ({"entries": [3]}, "got a int as entry 0 of a dict"),
    "row key": ({"entries": [{"op": "allreduce"}]}, "got the keys op in entry 0"),
    "operator": ({"entries": [entry(op="allsum")]}, "got op 'allsum'"),
    "counted": ({"entries": [entry(op="alltoallv", dtype=None)]}, "got op 'alltoallv'"),
    "dtype": ({"entries": [entry(dtype="float8")]}, "got dtype 'float8' for allreduce"),
    "copy": ({"entries": [entry(op="allgather")]}, "got dtype 'float32' for allgather"),
    "range": ({"entries": [entry(from_bytes=9000)]}, "from_bytes 9000 and to_bytes 8192"),
    "negative": ({"entries": [entry(from_bytes=-1)]}, "got from_bytes -1"),
    "true": ({"entries": [entry(from_bytes=True)]}, "got from_bytes True"),
    "blocks": ({"entries": [entry(max_blocks=4096)]}, "got max_blocks 4096"),
    "threads": ({"entries": [entry(threads=100)]}, "got threads 100"),
    "overlap": (
        {"entries": [entry(), entry(from_bytes=8192, to_bytes=9000)]},
        "got two entries for allreduce (float32, not symmetric) of 8192 bytes",
    ),
    "algorithm": ({"entries": [entry(algorithm="ring")]}, "got algorithm 'ring'"),
    "fallback": ({"entries": [entry(algorithm="fallback")]}, "got algorithm 'fallback'"),
    "auto": ({"entries": [entry(algorithm="auto")]}, "got algorithm 'auto'"),
    "not symmetric": ({"entries": [entry(algorithm="pull_push")]}, "that are not symmetric"),
    "multicast": ({"entries": [entry(algorithm="multimem_twoshot")]}, "'multimem_twoshot'"),
    "device": ({"device": "abacus"}, "got a table for device 'abacus' in a dict"),
    "driver": ({"driver": "1.0"}, "got a table for driver '1.0' in a dict"),
    "world size": ({"world_size": 7}, "got a table for world_size 7 in a dict; accepted: 2"),
    "version": ({"collx_version": "0"}, "got a table for collx_version '0' in a dict"),
}


def _refused(rank: Rank) -> dict[str, tuple[Attempt, Attempt]]:
    """The wrong table on all ranks, and on the last rank only."""
    found = {}
    for what, (changes, _) in DAMAGED.items():
        wrong = table(rank, **changes)
        mine = wrong if rank.rank == rank.size - 1 else table(rank)
        found[what] = (
            attempt(lambda: rank.new_communicator("refused", tuning=wrong)),  # noqa: B023
            attempt(lambda: rank.new_communicator("refused", tuning=mine)),  # noqa: B023
        )
    with rank.new_communicator("refused", tuning=table(rank)) as communicator:
        assert works(rank, communicator)
    return found


@pytest.mark.worlds(2)
def test_a_damaged_or_foreign_table_is_refused_on_all_ranks(pool: Pool) -> None:
    results = pool.run(_refused)
    for what, (_, words) in DAMAGED.items():
        alike = [found[what][0] for found in results]
        assert {result.error for result in alike} == {"ValueError"}, (what, alike)
        alone = [found[what][1] for found in results]
        assert {result.error for result in alone} == {"InitError"}, (what, alone)
        assert len({result.message for result in alone}) == 1, (what, alone)
        for result in (*alike, *alone):
            assert "collx.init: tuning: got" in result.message, (what, result)
            assert words in result.message, (what, result)
        assert f"rank {pool.size - 1}" in alone[0].message


def _differs(rank: Rank, folder: str) -> dict[str, Attempt]:
    def made(tuning: Any) -> Attempt:
        return attempt(lambda: rank.new_communicator("differs", tuning=tuning))

    broken = Path(folder, f"{rank.rank}.json")
    broken.write_text("{" if rank.rank == 0 else json.dumps(table(rank)))
    return {
        "entries": made(table(rank, entry(to_bytes=8000 + rank.rank))),
        "none": made(table(rank) if rank.rank == 0 else None),
        "broken": made(str(broken)),
        "missing": made(Path(folder, "missing") if rank.rank == 0 else broken),
        "number": made(5),
    }


@pytest.mark.worlds(2, 3)
def test_ranks_with_different_tables_all_raise_alike(pool: Pool, tmp_path: Path) -> None:
    results = pool.run(_differs, str(tmp_path))
    for what in ("entries", "none", "broken", "missing"):
        assert {found[what].error for found in results} == {"InitError"}, (what, results)
        assert len({found[what].message for found in results}) == 1, (what, results)
    for what in ("entries", "none"):
        assert "tuning differs between the ranks" in results[0][what].message
        assert "1 entries, sha256 " in results[0][what].message
    assert "rank 1: None" in results[0]["none"].message
    for what in ("broken", "missing"):
        assert "which cannot be read" in results[0][what].message
        assert "rank 0" in results[0][what].message
    assert {found["number"].error for found in results} == {"TypeError"}


def _environment(rank: Rank, folder: str) -> dict[str, Any]:
    def chosen(**options: Any) -> str:
        with rank.new_communicator("environment", **options) as communicator:
            return str(communicator.explain("allreduce", SIZE // 4, torch.float32).algorithm)

    found: dict[str, Any] = {}
    for name, content in {
        "fits": table(rank),
        "other world": table(rank, world_size=9),
        "other device": table(rank, device="abacus"),
    }.items():
        file = Path(folder, f"{name} {rank.rank}.json")
        file.write_text(json.dumps(content))
        with mock.patch.dict(os.environ, COLLX_TUNING=str(file)):
            found[name] = attempt(lambda: found.setdefault(f"{name} chose", chosen()))  # noqa: B023
            if name == "fits":
                argument = table(rank, entry(algorithm="twoshot_pull"))
                found["argument"] = chosen(tuning=argument)
    with mock.patch.dict(os.environ, COLLX_TUNING=""):
        found["empty"] = chosen()
    return found


@pytest.mark.worlds(2)
def test_the_environment_variable_names_a_table(pool: Pool, tmp_path: Path) -> None:
    """It applies to all communicators of a process, some of which have another world size."""
    for found in pool.run(_environment, str(tmp_path)):
        assert found["fits chose"] == OTHER, found
        assert found["argument"] == "twoshot_pull"
        assert found["empty"] == found["other world chose"] == BUILT_IN[pool.world.device]
        assert found["other device"].error == "ValueError"
        assert "device 'abacus'" in found["other device"].message


@pytest.mark.worlds(2)
@on_ranks
def test_sums_in_another_order_need_the_consent_of_the_program(rank: Rank) -> None:
    """On the CPU, no table can name a multicast algorithm."""
    given = table(rank, entry(algorithm="multimem_twoshot"))
    found = {
        str(deterministic): attempt(
            lambda: rank.new_communicator(
                "orders",
                tuning=given,
                deterministic=deterministic,  # noqa: B023
            ).destroy()
        )
        for deterministic in (True, False)
    }
    assert found["True"].error == "ValueError", found
    assert found["False"].error == ("ValueError" if rank.device.type == "cpu" else "")
    if rank.device.type == "cuda":
        assert "an order of its own" in found["True"].message


@pytest.mark.worlds(2)
@on_ranks
def test_every_algorithm_that_an_entry_may_name_gives_the_same_bits(rank: Rank) -> None:
    """Tests every algorithm that an entry may name, for the operators that have entries."""
    found = {}
    for op in extension.tunable_operators():
        for symmetric in (False, True):
            case = Case(op, torch.float32, symmetric, 4096 * rank.size)
            with rank.new_communicator("plain") as plain:
                x, y = tensors_of(case, plain)
                call_of(case, AUTO, plain, x, y)()
                plain.synchronize()
                expected = y.clone()
            for name in extension.tunable_algorithms(op, rank.device.type, symmetric, True):
                if name.startswith("multimem"):
                    continue
                row = entry(op=op, symmetric=symmetric, algorithm=name, to_bytes=1 << 20)
                row["dtype"] = case.dtype_name
                with rank.new_communicator("with-table", tuning=table(rank, row)) as communicator:
                    x, y = tensors_of(case, communicator)
                    plan = communicator.explain(
                        op,
                        case.numel,
                        torch.float32,
                        input_symmetric=symmetric,
                        output_symmetric=symmetric,
                    )
                    call_of(case, AUTO, communicator, x, y)()
                    communicator.synchronize()
                    found[f"{op} {name} {symmetric}"] = plan.algorithm == name and torch.equal(
                        y, expected
                    )
    assert len(found) >= 20
    assert all(found.values()), found


def _backend(rank: Rank, folder: str) -> list[Any]:
    """A group of the backend uses a table that fits, and ignores one for another world size."""
    import torch.distributed as dist

    found: list[Any] = []
    for name, size in (("fits", rank.size), ("other", 9)):
        file = Path(folder, f"{name} {rank.rank}.json")
        file.write_text(json.dumps(table(rank, world_size=size)))
        options = collx.backend.Options(tuning=file if name == "fits" else str(file))
        group = dist.new_group(backend="collx", pg_options=options)
        x = torch.ones(SIZE // 4, device=rank.device)
        dist.all_reduce(x, group=group)
        communicator = collx.get(group)
        found.append((communicator.tuning == str(file), bool((x == rank.size).all())))
        dist.destroy_process_group(group)
    number: Any = 3
    found.append(attempt(lambda: collx.backend.Options(tuning=number)).error)
    return found


@pytest.mark.worlds(2)
def test_groups_of_the_backend_have_an_option_for_a_table(pool: Pool, tmp_path: Path) -> None:
    for found in pool.run(_backend, str(tmp_path)):
        assert found == [(True, True), (False, True), "TypeError"]
