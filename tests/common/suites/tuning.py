"""Tuning tables: what they change, and which tables init refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import collx
import collx.backend
from collx import _tuning
from collx._extension import extension
from collx._tune.cases import BUILT_IN as AUTO
from collx._tune.cases import Case, call_of, tensors_of

from ..attempt import assert_raised, attempt, works
from ..pool import on_ranks
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
    numel = SIZE // 4
    x = _values(rank, numel)
    plans: dict[Any, dict[str, tuple[str, str, str]]] = {}
    results = []
    for name, tuning in ((None, None), ("a dict", table(rank))):
        with rank.new_communicator(f"tuning {name}", tuning=tuning) as communicator:
            assert communicator.tuning == name
            plans[name] = {}
            for what, options in CALLS.items():
                plan = communicator.explain(
                    **{"op": "allreduce", "dtype": torch.float32, **options}
                )
                plans[name][what] = (plan.algorithm, plan.executed_by, plan.tuning)
            text = str(communicator.explain("allreduce", numel, torch.float32))
            results.append(collx.allreduce(x, group=communicator))
            communicator.synchronize()
    assert torch.equal(*results)
    without, tuned = plans.values()
    chosen = "entry of 1,024 to 8,192 bytes in a dict"
    for what in ("fits", "first", "last"):
        assert tuned[what] == (OTHER, OTHER, chosen)
    assert chosen in text
    for what in ("too small", "too large", "symmetric", "dtype", "op"):
        assert tuned[what] == (*without[what][:2], "built-in table; no entry of a dict fits")
        assert without[what][2] == "built-in table"
    assert tuned["named"] == without["named"]
    assert tuned["named"][2] == "the call names the algorithm"
    assert without["fits"][0] == BUILT_IN[rank.device.type]


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
    assert_raised(other, "CollectiveMismatch", OTHER)


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


@pytest.mark.worlds(2)
@on_ranks
def test_a_damaged_or_foreign_table_is_refused_on_all_ranks(rank: Rank) -> None:
    """The wrong table on all ranks, and on the last rank only."""
    last = rank.size - 1
    for changes, words in DAMAGED.values():
        wrong = table(rank, **changes)
        mine = wrong if rank.rank == last else table(rank)
        alike = attempt(lambda: rank.new_communicator("refused", tuning=wrong))  # noqa: B023
        alone = attempt(lambda: rank.new_communicator("refused", tuning=mine))  # noqa: B023
        assert_raised(alike, "ValueError", "collx.init: tuning: got", words)
        assert_raised(alone, "InitError", "collx.init: tuning: got", words, f"rank {last}")
        assert set(rank.gather(alone.message)) == {alone.message}
    with rank.new_communicator("refused", tuning=table(rank)) as communicator:
        assert works(rank, communicator)


@pytest.mark.worlds(2, 3)
@on_ranks
def test_ranks_with_different_tables_all_raise_alike(rank: Rank, tmp_path: Path) -> None:
    def refused(tuning: Any, *words: str) -> None:
        found = attempt(lambda: rank.new_communicator("differs", tuning=tuning))
        assert_raised(found, "InitError", *words)
        assert set(rank.gather(found.message)) == {found.message}

    broken = tmp_path / f"{rank.rank}.json"
    broken.write_text("{" if rank.rank == 0 else json.dumps(table(rank)))
    differs = ("tuning differs between the ranks", "1 entries, sha256 ")
    refused(table(rank, entry(to_bytes=8000 + rank.rank)), *differs)
    refused(table(rank) if rank.rank == 0 else None, *differs, "rank 1: None")
    for tuning in (str(broken), tmp_path / "missing" if rank.rank == 0 else broken):
        refused(tuning, "which cannot be read", "rank 0")
    number = attempt(lambda: rank.new_communicator("differs", tuning=5))
    assert number.error == "TypeError", number


@pytest.mark.worlds(2)
@on_ranks
def test_the_environment_variable_names_a_table(rank: Rank, tmp_path: Path) -> None:
    """It applies to all communicators of a process, some of which have another world size."""

    def chosen(content: dict[str, Any] | None, **options: Any) -> str:
        file = tmp_path / f"{rank.rank}.json"
        file.write_text(json.dumps(content))
        variable = "" if content is None else str(file)
        with (
            mock.patch.dict(os.environ, COLLX_TUNING=variable),
            rank.new_communicator("environment", **options) as communicator,
        ):
            return str(communicator.explain("allreduce", SIZE // 4, torch.float32).algorithm)

    assert chosen(table(rank)) == OTHER
    argument = table(rank, entry(algorithm="twoshot_pull"))
    assert chosen(table(rank), tuning=argument) == "twoshot_pull"
    built_in = BUILT_IN[rank.device.type]
    assert chosen(None) == chosen(table(rank, world_size=9)) == built_in
    refused = attempt(lambda: chosen(table(rank, device="abacus")))
    assert_raised(refused, "ValueError", "device 'abacus'")


@pytest.mark.worlds(2)
@on_ranks
def test_sums_in_another_order_need_the_consent_of_the_program(rank: Rank) -> None:
    """On the CPU, no table can name a multicast algorithm."""
    given = table(rank, entry(algorithm="multimem_twoshot"))

    def made(deterministic: bool) -> None:
        rank.new_communicator("orders", tuning=given, deterministic=deterministic).destroy()

    on_cpu = rank.device.type == "cpu"
    refused = attempt(lambda: made(True))
    assert_raised(refused, "ValueError", "" if on_cpu else "an order of its own")
    assert_raised(attempt(lambda: made(False)), "ValueError" if on_cpu else "")


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


@pytest.mark.worlds(2)
@on_ranks
def test_groups_of_the_backend_have_an_option_for_a_table(rank: Rank, tmp_path: Path) -> None:
    """A group of the backend uses a table that fits, and ignores one for another world size."""
    for fits, size in ((True, rank.size), (False, 9)):
        file = tmp_path / f"{size} {rank.rank}.json"
        file.write_text(json.dumps(table(rank, world_size=size)))
        options = collx.backend.Options(tuning=file if fits else str(file))
        group = dist.new_group(backend="collx", pg_options=options)
        x = torch.ones(SIZE // 4, device=rank.device)
        dist.all_reduce(x, group=group)
        assert (collx.get(group).tuning == str(file)) == fits
        assert bool((x == rank.size).all())
        dist.destroy_process_group(group)
    number: Any = 3
    assert attempt(lambda: collx.backend.Options(tuning=number)).error == "TypeError"
