"""Tests that the benchmark and its tools complete and that their output can be parsed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import collx
from collx import _launch
from collx._bench import checks, functional_peers, options
from collx._bench.ops import OPS
from collx._bench.records import Record
from collx._bench.timing import Timing
from collx._tune import options as tune_options
from tests.common.commands import ROOT, run
from tests.common.programs import run_program

BENCHMARKS = ROOT / "benchmarks"
COLLECTIVES = (
    *("allreduce", "reducescatter", "allgather", "broadcast", "reduce"),
    *("gather", "scatter", "alltoall", "alltoallv", "barrier"),
)
NORM = "allreduce_residual_rmsnorm"
NORMS = (NORM, f"{NORM}_fp8", f"{NORM}_fp8_static")
ROUNDINGS = ("fp32", "parity_weight")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
REDUCES = ("allreduce", "reducescatter", "reduce")
UNDIVIDED = ("allreduce", "broadcast", "reduce")
NUMBERS = ("us", "algbw_gbs", "busbw_gbs")
PLOT = find_spec("matplotlib") is not None
MPI = ("mpi",) if find_spec("mpi4py") is not None else ()
SIZES = (1024, 65536)
ROWS = (1, 3)

needs_models = pytest.mark.skipif(
    find_spec("transformers") is None or find_spec("accelerate") is None,
    reason="transformers or accelerate is not installed",
)
LAUNCHED = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
ENVIRONMENT: dict[str, Any] = {"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}


def python(*arguments: str) -> str:
    command = (sys.executable, *arguments)
    return run(*command, limit=500, stderr=subprocess.PIPE, **ENVIRONMENT).stdout


def run_on_ranks(program: str, *arguments: str) -> str:
    return run_program(Path(program), *arguments, **ENVIRONMENT)


# A rank of the benchmark under torchrun.
PROGRAM = """
import sys
from collx._bench import main
sys.exit(main.main())
"""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Returns the output of a run of all operators, and the file that it writes."""
    folder = tmp_path_factory.mktemp("bench")
    file, program = folder / "out.json", folder / "program.py"
    program.write_text(PROGRAM)
    printed = run_on_ranks(
        str(program),
        *(*COLLECTIVES, *NORMS, "--device=cpu", "--dtype=bfloat16", "--peers=all"),
        *("--sizes=1K,64K", "--rows=1,3", "--cols=64", f"--rounding={','.join(ROUNDINGS)}"),
        *("-n=2", "-w=1", "--host-time", f"--json={file}"),
    )
    return printed, file


def records_of(file: Path) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = json.loads(file.read_text())
    return records


SPOILED = 3  # elements

# The benchmark with a Gloo whose all-gather returns some wrong elements on rank 1.
SPOILS = f"""
import sys
from collx._bench import main, torch_dist

right = torch_dist.CALLS["allgather"]

def spoiled(case, x, y):
    call = right(case, x, y)
    def run():
        call()
        y[: {SPOILED} * case.job.ranks.rank] += 1
    return run

torch_dist.CALLS["allgather"] = spoiled
sys.exit(main.main())
"""


@pytest.fixture(scope="module")
def nccl_bench(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Returns the same for a run in the style of nccl-tests, with root 1 and the Gloo above."""
    folder = tmp_path_factory.mktemp("nccl")
    file, program = folder / "out.json", folder / "spoiled.py"
    program.write_text(SPOILS)
    printed = run_on_ranks(
        *(str(program), *COLLECTIVES, "--device=cpu", "--peers=gloo,mpi", "--format=nccl"),
        *("-d", "float,int32", "-o", "sum,max", "-r", "1", "-b", "1K", "-e", "1K"),
        *("-n=2", "-w=1", f"--json={file}"),
        *([f"--plot={folder / 'time.png'}"] if PLOT else []),
    )
    return printed, file


def test_every_operator_is_measured_beside_its_peers(bench: tuple[str, Path]) -> None:
    printed, file = bench
    records = [r for r in records_of(file) if not r["op"].endswith("_host_time")]
    assert all(r["correct"] and r["us"] > 0 and r["world"] == 2 for r in records), printed
    found = {(r["op"], r["impl"], r["rows"] or r["bytes"], r["rounding"]) for r in records}
    for impl in ("collx", "gloo"):
        for op in COLLECTIVES:
            for nbytes in SIZES if op != "barrier" else (0,):
                assert (op, impl, nbytes, None) in found, (op, impl, nbytes)
        for op in NORMS:
            for rows in ROWS:
                assert {(op, impl, rows, rounding) for rounding in ROUNDINGS} <= found
    [init] = [r for r in records if r["op"] == "init"]
    assert init["us"] < 60e6


def test_a_peer_that_is_not_installed_is_left_out_by_name(bench: tuple[str, Path]) -> None:
    printed, file = bench
    there = find_spec("vllm") is not None
    assert ("vllm-shm" in {r["impl"] for r in records_of(file)}) == there
    assert ("vllm-shm left out: rank 0: ModuleNotFoundError" in printed) != there


def test_several_dtypes_and_reductions_and_another_root(nccl_bench: tuple[str, Path]) -> None:
    printed, file = nccl_bench
    records = [r for r in records_of(file) if r["op"] != "init"]
    assert all(r["root"] == (1 if r["op"] in ROOTED else None) for r in records)
    found = {(r["op"], r["impl"], r["dtype"], r["reduce_op"]) for r in records}
    for impl in ("collx", "gloo", *MPI):
        for op in set(COLLECTIVES) - {"barrier"}:
            for reduce_op in ("sum", "max") if op in REDUCES else (None,):
                assert {(op, impl, dtype, reduce_op) for dtype in ("float32", "int32")} <= found
    assert "reduce max, root 1, int32, 2 ranks, cpu" in printed


def test_wrong_elements_are_counted_and_not_timed(nccl_bench: tuple[str, Path]) -> None:
    printed, file = nccl_bench
    records = records_of(file)
    spoiled = [r for r in records if (r["op"], r["impl"]) == ("allgather", "gloo")]
    others = [r for r in records if r not in spoiled]
    assert len(spoiled) == 2  # one for each dtype
    assert all(r["wrong"] == 0 and r["correct"] for r in others), printed
    assert not any(r["in_place_wrong"] for r in others), printed
    for r in spoiled:
        assert (r["wrong"], r["in_place_wrong"]) == (SPOILED, SPOILED)
        assert not r["correct"]
        assert r["us"] is r["algbw_gbs"] is r["busbw_gbs"] is r["in_place_us"] is None


def test_lines_as_nccl_tests_prints_them(nccl_bench: tuple[str, Path]) -> None:
    """The lines have the format of nccl-tests, and the file also contains their numbers."""
    printed, file = nccl_bench
    lines = [line.split() for line in printed.splitlines()]
    measured = ["time", "algbw", "busbw", "#wrong"]
    assert ["#", "size", "count", "type", "redop", "root", *measured, *measured] in lines
    names = {"float32": "float"}
    for r in records_of(file):
        if r["op"] in ("barrier", "init"):
            continue
        label = r["impl"].replace("collx-symmetric", "collx(sym)")
        label = label.replace("collx-device-splits", "collx(device splits)")
        count = 1024 // 4 // (1 if r["op"] in UNDIVIDED else 2)
        head = [*label.split(), "1024", str(count), names.get(r["dtype"], r["dtype"])]
        head += [r["reduce_op"] or "none", "-1" if r["root"] is None else "1"]
        apart, inside = (
            [*(_number(r[f"{where}{name}"]) for name in NUMBERS), _wrong(r[f"{where}wrong"])]
            for where in ("", "in_place_")
        )
        assert [*head, *(["-"] * 4 if r["in_place"] else apart), *inside] in lines


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _wrong(value: int | None) -> str:
    return "-" if value is None else str(value)


def test_in_place_where_there_is_such_a_form(nccl_bench: tuple[str, Path]) -> None:
    _, file = nccl_bench
    records = [r for r in records_of(file) if r["wrong"] == 0]
    inside = {(r["op"], r["impl"]) for r in records if r["in_place_us"] is not None}
    assert all((r["in_place_us"] is None) == (r["in_place_wrong"] is None) for r in records)
    both = {"allreduce", "reducescatter", "allgather", "broadcast", "reduce", "alltoall"}
    assert {op for op, impl in inside if impl == "collx"} == both
    assert {op for op, impl in inside if impl == "gloo"} == both - {"allgather", "alltoall"}
    assert {op for op, impl in inside if impl == "mpi"} == (both if MPI else set())
    alone = {(r["op"], r["impl"]) for r in records if r["in_place"]}
    gloo = {(op, "gloo") for op in ("allreduce", "broadcast", "reduce")}
    assert alone == gloo | {("broadcast", impl) for impl in MPI}


def test_a_run_without_it_has_no_numbers_in_place_but_of_what_has_no_others(
    bench: tuple[str, Path],
) -> None:
    _, file = bench
    for r in records_of(file):
        assert (r["in_place_us"] is not None) == r["in_place"]
        assert not r["in_place"] or r["in_place_us"] == r["us"]


# The busbw of 10^6 bytes in 100 us, calculated by hand. The algbw is 10.
BUSBW = {
    "allreduce": {2: 10.0, 4: 15.0, 8: 17.5},
    "reducescatter": {2: 5.0, 4: 7.5, 8: 8.75},
    "allgather": {2: 5.0, 4: 7.5, 8: 8.75},
    "alltoall": {2: 5.0, 4: 7.5, 8: 8.75},
    "broadcast": {2: 10.0, 4: 10.0, 8: 10.0},
    "reduce": {2: 10.0, 4: 10.0, 8: 10.0},
    "gather": {2: 5.0, 4: 7.5, 8: 8.75},
    "scatter": {2: 5.0, 4: 7.5, 8: 8.75},
}


@pytest.mark.parametrize("op", BUSBW)
def test_bandwidths_are_those_of_nccl_tests(op: str) -> None:
    for world, busbw in BUSBW[op].items():
        record = Record(op, "collx", "", 1_000_000, "float32", world, "cpu")
        timed = record.timed(Timing(100.0, 90.0, 110.0))
        assert timed.algbw_gbs == pytest.approx(10.0)
        assert timed.busbw_gbs == pytest.approx(busbw)


def test_what_counts_as_a_wrong_element() -> None:
    sums, copies = OPS["allreduce"], OPS["allgather"]
    expected = torch.arange(1.0, 65.0)
    expected[0], expected[1] = torch.nan, 0.0
    result = expected.clone()
    result[0] = torch.tensor(0x7FC00001, dtype=torch.int32).view(torch.float32)
    assert checks.inexact(sums, result, expected) == 0
    assert (
        checks.inexact(copies, result, expected) == checks.wrong(copies, result, expected, 2) == 1
    )
    result[1] = -0.0
    result[2:4] = torch.nan
    assert checks.inexact(sums, result, expected) == 3
    assert checks.inexact(copies, result, expected) == 4
    whole, off = torch.arange(8), torch.arange(8)
    off[3] = 0
    assert checks.wrong(sums, off, whole, 2) == 1
    near, far = expected[2:] * (1 + 1e-7), expected[2:].clone()
    far[:2] += 1
    assert checks.wrong(sums, near, expected[2:], 2) == 0
    assert checks.wrong(sums, far, expected[2:], 2) == 2


def test_the_root_is_the_one_asked_for() -> None:
    inputs = [torch.tensor([rank, 10 + rank]) for rank in range(2)]
    results = {
        op: [result.tolist() for result in OPS[op].expect(inputs, "sum", 1)] for op in ROOTED
    }
    assert results == {
        "broadcast": [[1, 11], [1, 11]],
        "reduce": [[0, 10], [1, 21]],
        "gather": [[0, 0, 0, 0], [0, 10, 1, 11]],
        "scatter": [[1], [11]],
    }


def test_flags_have_the_names_of_nccl_tests(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)

    def chosen(*arguments: str) -> list[tuple[str, str, str]]:
        given = options.parse([*arguments, "--device=cpu"])
        return [(v.op.name, v.dtype, v.reduce_op) for v in options.variants(given)]

    assert chosen("allreduce", "-d", "half,double", "-o", "avg,max") == [
        ("allreduce", dtype, op) for dtype in ("float16", "float64") for op in ("avg", "max")
    ]
    assert chosen("allreduce", "--dtype=int8", "--reduce-op=prod") == [
        ("allreduce", "int8", "prod")
    ]
    everything = chosen("allreduce", "allgather", NORM, "barrier", "-d", "all", "-o", "all")
    assert len(everything) == (4 * 5 + 4 * 4) + 8 + 3 + 1  # integers have no averages
    assert ("allreduce", "int64", "avg") not in everything
    for wrong, said in (
        (("allreduce", "-r", "2"), "--root 2: there are 2 ranks"),
        (("allreduce", "-d", "int8", "-o", "avg"), "avg of int8"),
        (("allreduce", "-d", "complex64"), "--dtype: 'complex64' is none of all, float32"),
        ((NORM, "-d", "int8"), "it takes float32, float16, bfloat16"),
        (("allreduce", "-g", "3"), "-g: got 3; 2 ranks have been started"),
        (("allreduce", "-g", "0"), "-g: got 0; accepted on cpu: 1 to 16"),
        (("allreduce", "-g", "17"), "-g: got 17; accepted on cpu: 1 to 16"),
        (("allreduce", "-d", ","), "--dtype: got nothing; accepted: all, float32"),
        (("allreduce", "--sizes", ","), "--sizes: got ','; accepted: sizes such as 1K"),
        (("allreduce", "--wire-gbs", "-5"), "--wire-gbs: got -5; accepted: numbers above 0"),
        (("allreduce", "-o", ""), "--reduce-op: got nothing; accepted: all, sum"),
        (("allreduce", "--algorithms", ""), "--algorithms of allreduce: got nothing"),
        (("allreduce", "--json", "/nowhere/x.json"), "--json: there is no folder /nowhere"),
        (("allreduce", "--json", "/tmp"), "--json: got /tmp, which cannot be written"),
        (("allreduce", "-n", "x"), "-n/--iterations/--iters: got 'x'; accepted: numbers from 0"),
        (("allreduce", "-n", "-1"), "-n/--iterations/--iters: got '-1'; accepted: numbers from 0"),
        (("allreduce", "-c", "2"), "argument -c/--check: invalid choice: 2"),
    ):
        with pytest.raises(SystemExit):
            chosen(*wrong)
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("missing", LAUNCHED)
def test_variables_of_a_cluster_do_not_count_as_a_launcher(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    assert _launch.started_ranks() == 2
    monkeypatch.delenv(missing)
    given = ["--device=cpu", "--ranks=3"]
    assert options.parse(["allreduce", *given]).ranks == tune_options.parse(given).ranks == 3


def test_a_build_without_kernels_measures_on_the_cpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(options, "build", collx.build._replace(cuda=None))
    assert options.parse(["allreduce"]).device == "cpu"
    with pytest.raises(SystemExit):
        options.parse(["allreduce", "--device=cuda"])
    assert "this build has no CUDA kernels" in capsys.readouterr().err


def test_peers_of_compiled_models_are_operators() -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    made = functional_peers._operator("all-reduce", twice, torch.empty_like)
    assert torch.equal(made(torch.ones(3)), torch.full((3,), 2.0))
    assert torch.ops.collxbench.all_reduce.default is not None


def test_sizes_grow_by_a_factor_or_by_a_step() -> None:
    def sizes(*arguments: str) -> list[int]:
        given = options.parse(["broadcast", "--device=cpu", "-g=2", *arguments])
        return options.sizes(given, options.variants(given)[0], 2)

    kilo = 1024
    assert sizes("-b=1K", "-e=20K") == [kilo, 4 * kilo, 16 * kilo]
    assert sizes("-b=1K", "-e=4K", "-f=2") == [kilo, 2 * kilo, 4 * kilo]
    assert sizes("-b=1K", "-e=4K", "-i=1K") == [kilo, 2 * kilo, 3 * kilo, 4 * kilo]
    assert sizes("--minbytes=1K", "--maxbytes=4K", "--stepbytes=1K", "--stepfactor=4") == [
        kilo,
        4 * kilo,
    ]


def test_it_starts_its_own_ranks_and_leaves_out_checks_on_demand(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    printed = python(
        *("-m", "collx", "bench", "allreduce", "-b", "1K", "-e", "4K", "-f", "4", "-c", "0"),
        *("-g", "2", "-n", "2", "-w", "1", "--device=cpu", "--peers=none", "--format=nccl"),
        *("--json", str(file)),
    )
    assert "allreduce sum, float32, 2 ranks, cpu" in printed
    lines = [line.split() for line in printed.splitlines() if line.strip().startswith("collx")]
    assert [(line[1], line[9]) for line in lines if line[0] == "collx"] == [
        ("1024", "-"),
        ("4096", "-"),
    ]
    measured = [r for r in records_of(file) if r["impl"] == "collx" and r["op"] != "init"]
    assert [(r["bytes"], r["world"]) for r in measured] == [(1024, 2), (4096, 2)]
    assert all(r["us"] > 0 and r["wrong"] is None and r["correct"] is None for r in measured)


def test_a_rank_that_fails_ends_the_run() -> None:
    command = (sys.executable, "-m", "collx", "bench", "barrier", "-g", "2", "--device", "cpu")
    environment = {**ENVIRONMENT, "GLOO_SOCKET_IFNAME": "no_such_link"}
    done = run(*command, code=1, stderr=subprocess.PIPE, **environment)
    assert "no_such_link" in done.stderr


def test_host_times_name_the_form_of_every_call(bench: tuple[str, Path]) -> None:
    printed, file = bench
    assert "over operator" in printed
    forms: dict[tuple[str, str], set[str]] = {}
    for r in records_of(file):
        if r["op"].endswith("_host_time"):
            assert r["us_min"] <= r["us"] <= r["us_max"]
            forms.setdefault((r["op"], r["impl"]), set()).add(r["form"])
    outs = {
        f"{kind}, {form}" for kind in ("operator", "function") for form in ("out", "functional")
    }
    compiled = {"operator, compiled by tens"}
    places = {"operator, in place", "function, in place"}
    for op in ("allreduce", "broadcast", "reduce"):
        assert forms[f"{op}_host_time", "collx"] == outs | compiled | places
    for op in ("allgather", "alltoallv"):
        assert forms[f"{op}_host_time", "collx"] == outs | compiled
    for op in NORMS:
        assert forms[f"{op}_host_time", "collx"] == outs
    assert forms["allreduce_host_time", "gloo"] == {"function of torch.distributed"}


@needs_models
@pytest.mark.full
def test_a_decoding_step_is_timed_beside_its_peers() -> None:
    """decode.py times uncompiled decoding steps and checks that the logits agree."""
    small = ("--hidden=128", "--layers=1", "--rows=1,3", "--steps=1")
    printed = run_on_ranks(str(BENCHMARKS / "decode.py"), "--device=cpu", "--mode=eager", *small)
    for name in ("collx, fused", "collx, unfused", "gloo"):
        assert len(re.findall(rf"^  {name} +[0-9.]+ us +[0-9.]+x +[0-9.e+-]+$", printed, re.M)) == 2


def test_epilogues_are_timed_beside_calls_without_one() -> None:
    small = ("--device=cpu", "--sizes=4K,64K", "--rows=1,4", "--hidden=512", "-n=2")
    printed = run_on_ranks(str(BENCHMARKS / "epilogues.py"), *small)
    lines = re.findall(r"^(\w+).* +[0-9.]+ us +[0-9.]+ us +[0-9.]+x$", printed, re.M)
    assert lines == ["allreduce", "reducescatter"] * 2 + ["rmsnorm"] * 4


@needs_models
@pytest.mark.full
def test_models_of_other_libraries_are_timed_with_and_without_collx() -> None:
    small = ("--hidden=64", "--rows=1", "--steps=1", "--models", "Llama", "DTensor", "FSDP2")
    printed = run_on_ranks(str(BENCHMARKS / "models.py"), "--device=cpu", "--no-compile", *small)
    for way in ("eager", "eager, collx.patch"):
        assert len(re.findall(rf"^  {way} +[0-9.]+ us +[0-9.]+x$", printed, re.M)) == 3


def test_markdown_fills_the_tables_of_a_document(bench: tuple[str, Path], tmp_path: Path) -> None:
    _, file = bench
    tool = str(BENCHMARKS / "markdown.py")
    titles = [
        line.removeprefix("### ") for line in python(tool, str(file)).splitlines() if "###" in line
    ]
    title = "allreduce, 2 ranks, cpu, bfloat16"
    assert {title, f"{NORM}, 2 ranks, cpu, bfloat16, parity_weight"} <= set(titles)
    document = tmp_path / "document.md"
    other = "<!-- table: allreduce, 9 ranks, cpu, bfloat16 -->\nold\n<!-- end -->\n"
    document.write_text(
        f"before\n<!-- table: {title} -->\nold\n<!-- end -->\n{other}"
        f"<!-- table: allgather, 2 ranks, cpu, bfloat16, brief -->\nold\n<!-- end -->\n"
    )
    printed = python(tool, str(file), "--into", str(document))
    assert f"no place for: {title}" not in printed
    assert "no place for: barrier" in printed
    text = document.read_text()
    assert other in text
    assert text.count("old") == 1
    assert "\n| bytes | collx | gloo | memcpy |" in text
    brief = text[text.index("allgather, 2 ranks") :]
    head, _, *lines = [line for line in brief.splitlines() if line.startswith("|")]
    assert head == (
        "| bytes | collx | collx-symmetric | algorithm | best peer | which | x best peer |"
    )
    assert [line.split(" | ")[0] for line in lines] == ["| 1 Ki", "| 64 Ki"]
    assert "Peers in the same run: gloo" in brief


@pytest.mark.full
def test_turns_compares_two_builds(tmp_path: Path) -> None:
    """The test compares a build with itself."""
    build = str(Path(collx.__file__).parents[1])
    printed = python(
        *(str(BENCHMARKS / "turns.py"), build, build, "--device=cpu", "--turns=1"),
        *("--sizes=1K", "--rows=1"),
    )
    lines = printed.splitlines()
    assert sum("MiB compiled" in line for line in lines) == 2
    cells = {tuple(line.split()[:2]) for line in lines}
    assert {(op, "collx") for op in (*COLLECTIVES, NORM, "init")} <= cells


@pytest.mark.skipif(not PLOT, reason="matplotlib is not installed")
def test_plot_draws_one_picture_a_table(nccl_bench: tuple[str, Path]) -> None:
    _, file = nccl_bench
    pictures = {picture.stem for picture in file.parent.glob("*.png")}
    kinds = {op: ("-sum", "-max") if op in REDUCES else ("",) for op in COLLECTIVES}
    assert pictures == {
        f"time-{op}-{dtype}{kind}"
        for op in set(COLLECTIVES) - {"barrier"}
        for dtype in ("float32", "int32")
        for kind in kinds[op]
    }
    for picture in file.parent.glob("*.png"):
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_products_are_compared(tmp_path: Path) -> None:
    out = tmp_path / "products.json"
    program, given = str(BENCHMARKS / "products.py"), ("--rounds", "1", "--n", "64")
    said = run_on_ranks(program, "--device", "cpu", *given, "--json", str(out))
    figures = json.loads(out.read_text())
    for name in ("allgather_matmul", "matmul_reducescatter"):
        assert name in said
        calls = figures["fused"][name]
        assert {"collx.nn", "collx, two steps", "gloo, two steps", "product alone"} == set(calls)
        assert all(us > 0 for us in calls.values())
