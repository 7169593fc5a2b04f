"""Tests the output of python -m collx doctor, and its findings for made-up facts."""

from __future__ import annotations

import copy
import json
import os
import re
import runpy
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import setuptools

from collx import __main__, _launch
from collx._doctor import gpus, judge, machine, ranks, report
from collx._doctor.facts import Device, Facts, Gpu, Gpus, Machine, Rank, Run, Timing, Versions
from tests.common.commands import ROOT, python, run

MIB = 1 << 20


def doctor(*arguments: str, code: int = 0, **environment: Any) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "collx", "doctor", *arguments)
    return run(*command, code=code, stderr=subprocess.PIPE, CUDA_VISIBLE_DEVICES="", **environment)


def test_it_runs_collx_and_finds_nothing_wrong() -> None:
    done = doctor("--ranks", "2", "--device", "cpu")
    assert "Run: 2 ranks, cpu" in done.stdout
    assert "rank 1        cpu, done" in done.stdout
    assert "self-test passed" in done.stdout
    lines = [line.split() for line in done.stdout.splitlines()]
    for size in ("8 KiB", "256 KiB", "4 MiB"):
        [line] = [line for line in lines if line[:2] == size.split()]
        assert float(line[2]) > 0
        assert all(float(value) >= 0 for value in line[3:5])  # GB/s, which may be rounded to 0
    unavailable = done.stdout[done.stdout.index("unavailable") :]
    assert "multimem_twoshot" in unavailable
    assert "it uses CPU memory" in " ".join(unavailable.split())


def test_json_has_the_facts_of_a_failure_and_its_remedy() -> None:
    done = doctor("--json", "--ranks=2", "--device=cpu", code=1, GLOO_SOCKET_IFNAME="no_such_link")
    found = json.loads(done.stdout)
    assert list(found) == ["format", "healthy", "findings", "facts"]
    assert found["format"] == 1
    assert found["healthy"] is False
    [failed] = [one for one in found["findings"] if one["level"] == "error"]
    assert failed["id"] == "run-failed"
    assert "ranks 0, 1 failed in stage 'process group'" in failed["what"]
    assert "no_such_link" in failed["what"]
    assert "GLOO_SOCKET_IFNAME" in failed["fix"]
    assert list(found["facts"]) == ["versions", "machine", "gpus", "environment", "run"]
    assert found["facts"]["environment"]["GLOO_SOCKET_IFNAME"] == "no_such_link"
    assert [one["stage"] for one in found["facts"]["run"]["ranks"]] == ["process group"] * 2


def test_memory_that_cannot_be_created_is_found_before_and_in_init() -> None:
    """A limit on the size of files prevents the creation."""
    command = f"ulimit -f 2; exec {sys.executable} -m collx doctor --ranks 2 --device cpu --json"
    done = run("bash", "-c", command, code=1, stderr=subprocess.PIPE, CUDA_VISIBLE_DEVICES="")
    found = {one["id"]: one for one in json.loads(done.stdout)["findings"]}
    assert "File too large" in found["memfd"]["what"]
    assert "step 'allocate' failed" in found["init-failed"]["what"]


def test_ranks_that_do_not_finish_are_ended_in_time() -> None:
    start = time.monotonic()
    done = doctor("--timeout", "0.01", "--ranks", "2", "--device", "cpu", code=1)
    assert time.monotonic() - start < 120
    said = " ".join(done.stdout.split())
    assert re.search(r"error \[timeout\]: .*did not finish stage '.*' within 0.01 s", said), said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--ranks", "17"), "--ranks: got 17; accepted: 1 to 16 on cpu"),
        (("--ranks", "0"), "--ranks: got 0; accepted: 1 to 16 on cpu"),
        (("--timeout", "-1"), "--timeout: got -1.0; accepted: more than 0"),
        (("--timeout", "1e10"), "--timeout: got 10000000000.0; accepted: more than 0 and at most"),
        (("--device", "tpu"), "argument --device: invalid choice: 'tpu'"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        __main__.main(["doctor", "--device", "cpu", *arguments])
    assert left.value.code == 2
    assert said in capsys.readouterr().err


def _dies(device: str, timeout: float) -> int:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), 9)
    return ranks.rank(device, timeout)


def test_ranks_that_cannot_be_started_are_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError("no processes left")

    monkeypatch.setattr(_launch, "start", refuse)
    run = ranks.run("cpu", 2, 10.0)
    found = judge.judge(facts(run=run))
    assert [one.what for one in found] == [
        f"rank {r} ended in stage 'start': it was not started: no processes left" for r in (0, 1)
    ]


def test_a_machine_without_a_loopback_interface_is_a_finding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The store would try to connect for five minutes."""

    def refuse(*arguments: object, **options: object) -> None:
        raise OSError("Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", refuse)
    run = ranks.run("cpu", 2, 10.0)
    assert [one.ended for one in run.ranks] == ["it was not started: Network is unreachable"] * 2
    gathered = facts(run=run)
    gathered.machine = machine.machine()
    found = {one.id: one for one in judge.judge(gathered)}
    assert "127.0.0.1: OSError: Network is unreachable" in found["loopback"].what


def _hangs(device: str, timeout: float) -> int:
    if os.environ["RANK"] == "1":
        time.sleep(1000)
    return ranks.rank(device, timeout)


def run_of(function: Callable[[str, float], int], timeout: float) -> Run:
    """Returns a run of `function` in a new process, which does not use the tests' fork server."""
    program = f"""
import json
from dataclasses import asdict
from collx._doctor import ranks
from tests.cpu import test_doctor
print(json.dumps(asdict(ranks.run("cpu", 2, {timeout}, test_doctor.{function.__name__}))))
"""
    done = run(sys.executable, "-c", program, stderr=subprocess.PIPE)
    found = json.loads(done.stdout)
    return Run("cpu", timeout, [Rank(**one) for one in found["ranks"]], found["timed_out"])


def test_a_rank_that_dies_is_named() -> None:
    run = run_of(_dies, 200.0)
    assert not run.timed_out
    [found] = [one for one in judge.judge(facts(run=run)) if one.id == "rank-died"]
    assert found.what.startswith("rank 1 ended in stage 'start': ")
    assert "SIGKILL" in found.what


def test_a_rank_that_hangs_is_named() -> None:
    run = run_of(_hangs, 8.0)
    assert run.timed_out
    [found] = [one for one in judge.judge(facts(run=run)) if "rank 1" in one.what]
    assert (found.id, found.level) == ("timeout", "error")
    assert "rank 1 did not finish stage 'start' within 8 s" in found.what


# --- made-up facts --------------------------------------------------------------------------------


def facts(device: str = "cpu", run: Run | None = None) -> Facts:
    """Returns the facts of a healthy machine with two cores or two GPUs."""
    on_cuda = device == "cuda"
    healthy = Run(
        device,
        120.0,
        [Rank(r, "done", f"cuda:{r}" if on_cuda else "cpu") for r in range(2)],
        init_seconds=0.1,
        timings=[Timing(64 * MIB, "twoshot_push", 200.0, 335.0, 360.0)],
    )
    found = Facts(
        Versions(
            *("0.1.0", "2.11.0", "13.0", ["8.0", "9.0", "10.0+PTX"], "3.12.0", "2.11.0+cu130"),
            *("13.0", "580.65", "13.0", "Debian", "Linux", "glibc 2.36"),
        ),
        Machine(cores=2, shm_size=1 << 30, seccomp=0, open_files=1024),
        Gpus(),
        {},
        run or healthy,
    )
    if on_cuda:
        found.gpus.usable = 2
        found.gpus.seen = [Gpu(str(i), "H100", f"GPU-{i}", "Disabled", "Default") for i in (0, 1)]
        found.gpus.links = gpus.parse_links(TOPOLOGY)
        found.run.devices = [Device(i, "H100", f"GPU-{i}", "9.0", 80 << 30, True) for i in (0, 1)]
        found.run.peers = [[True, True], [True, True]]
    return found


TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tSYS\t0-31\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tPIX\t0-31\t0\t\tN/A\n"
    "NIC0\tSYS\tPIX\t X \t\t\t\t\n\n"
    "Legend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe\n"
)
QUERY = (
    "index, name, uuid, mig.mode.current, compute_mode, driver_version\n"
    "0, NVIDIA H100 80GB HBM3, GPU-a, Disabled, Default, 580.65.06\n"
    "1, NVIDIA H100 80GB HBM3, GPU-b, Enabled, Exclusive_Process, 580.65.06\n"
)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_healthy_machine_has_no_findings(kind: str) -> None:
    assert judge.judge(facts(kind)) == []


def _set(path: str, value: Any) -> Callable[[Facts], None]:
    *parents, last = path.split(".")

    def change(found: Facts) -> None:
        target: Any = found
        for parent in parents:
            if isinstance(target, dict):
                target = target[parent]
            else:
                target = target[int(parent)] if parent.isdigit() else getattr(target, parent)
        if isinstance(target, (dict, list)):
            target[int(last) if last.isdigit() else last] = value  # type: ignore[index]
        else:
            setattr(target, last, value)

    return change


FALLBACK = "run.fallback_reason"
CASES: list[tuple[str, str, str, str, dict[str, Any]]] = [
    # device, id of the finding, level, words in its text, differences from a healthy machine
    ("cuda", "fallback", "error", "set_device", {FALLBACK: "ranks 0 and 1 share a GPU, and ..."}),
    ("cuda", "fallback", "error", "topo -p2p", {FALLBACK: "rank 0 has no peer access to rank 1's"}),
    ("cpu", "fallback", "error", "one machine", {FALLBACK: "the ranks are on different machines"}),
    ("cpu", "more-ranks-than-cores", "warning", "2 ranks share 1 cores", {"machine.cores": 1}),
    ("cpu", "cpu-limit", "warning", "allows 1.5 cores", {"machine.cpu_limit": 1.5}),
    ("cpu", "memfd", "error", "memfd_create", {"machine.memfd_error": "PermissionError: no"}),
    ("cpu", "memfd", "error", "seccomp", {"machine.memfd_error": "no", "machine.seccomp": 2}),
    ("cpu", "descriptors", "error", "Unix sockets", {"machine.descriptors_error": "OSError: no"}),
    ("cpu", "boot-id", "error", "mount /proc", {"machine.boot_id": False}),
    ("cpu", "open-files", "warning", "may open 64 files", {"machine.open_files": 64}),
    (
        *("cpu", "memory-limit", "warning", "has 512 MiB of memory left for 2 ranks"),
        {"machine.memory_limit": 1024 * MIB, "machine.memory_used": 512 * MIB},
    ),
    (
        *("cuda", "small-shm", "warning", "/dev/shm has 32 MiB"),
        {"machine.shm_size": 32 * MIB, FALLBACK: "rank 0 has no peer access to rank 1's GPU"},
    ),
    ("cpu", "torch-version", "warning", "2.16.0+cpu is outside", {"versions.torch": "2.16.0+cpu"}),
    ("cpu", "torch-version", "warning", "2.10.1 is outside", {"versions.torch": "2.10.1"}),
    ("cuda", "old-driver", "error", "CUDA up to 12.8", {"versions.cuda_driver": "12.8"}),
    ("cuda", "no-kernels", "error", "COLLX_CUDA=1", {"versions.built_for_cuda": None}),
    (
        *("cpu", "no-kernels", "warning", "no CUDA kernels"),
        {"versions.built_for_cuda": None, "gpus.usable": 1},
    ),
    ("cuda", "architecture", "error", "LIST=7.5", {"run.devices.1.capability": "7.5"}),
    ("cuda", "architecture", "error", "LIST=9.0", {"versions.architectures": ["8.0", "10.0+PTX"]}),
    (
        *("cpu", "no-usable-gpu", "warning", "unset CUDA_VISIBLE_DEVICES"),
        {"gpus.seen": [Gpu("0", "H100", "", "", "")], "environment.CUDA_VISIBLE_DEVICES": ""},
    ),
    ("cuda", "mig", "warning", "GPU 1 is divided by MIG", {"gpus.seen.1.mig": "Enabled"}),
    ("cuda", "compute-mode", "error", "-i 0 -c DEF", {"gpus.seen.0.compute_mode": "Prohibited"}),
    (
        *("cuda", "compute-mode", "warning", "one process may use it"),
        {"gpus.seen.0.compute_mode": "Exclusive_Process"},
    ),
    ("cuda", "no-nvlink", "warning", "GPU0 and GPU1 (PIX)", {"gpus.links.GPU0.GPU1": "PIX"}),
    (
        *("cuda", "shared-gpu", "warning", "without CUDA's multi-process service"),
        {
            "run.devices": [Device(0, "H100", "GPU-0", "9.0", 80 << 30, True)],
            "environment.TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
        },
    ),
    ("cuda", "one-rank", "warning", "--ranks 2", {"run.ranks": [Rank(0, "done")]}),
    ("cuda", "slow-allreduce", "warning", "reaches 90.0", {"run.timings.0.busbw_gbs": 90.0}),
    ("cpu", "environment", "warning", "COLLX_CHECK=1", {"environment.COLLX_CHECK": "1"}),
    ("cpu", "environment", "error", "COLLX_CHECK=yes", {"environment.COLLX_CHECK": "yes"}),
    ("cuda", "environment", "error", "NVSHMEM", {"environment.TORCH_SYMMMEM": "NVSHMEM"}),
    (
        *("cuda", "environment", "warning", "NVLink multicast"),
        {"environment.TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"},
    ),
    ("cuda", "environment", "warning", "clusters", {"environment.COLLX_NO_CLUSTERS": "1"}),
    ("cuda", "environment", "warning", "compile", {"environment.COLLX_CACHE_DIR": ""}),
    ("cuda", "environment", "warning", "launch", {"environment.CUDA_LAUNCH_BLOCKING": "1"}),
    ("cuda", "environment", "warning", "NCCL", {"environment.NCCL_P2P_DISABLE": "1"}),
    ("cuda", "environment", "warning", "NCCL", {"environment.NCCL_SHM_DISABLE": "1"}),
    ("cuda", "environment", "error", "too long", {"environment.TMPDIR": "/x" * 50}),
    (
        *("cuda", "init-failed", "error", "rank 1 failed in stage 'collx.init': InitError: no"),
        {"run.ranks.1.stage": "collx.init", "run.ranks.1.error": "InitError: no"},
    ),
]


@pytest.mark.parametrize(("kind", "id", "level", "words", "changes"), CASES)
def test_a_finding(kind: str, id: str, level: str, words: str, changes: dict[str, Any]) -> None:
    found = facts(kind)
    for path, value in copy.deepcopy(changes).items():
        _set(path, value)(found)
    [finding] = [one for one in judge.judge(found) if one.id == id]
    assert finding.level == level
    assert words in f"{finding.what}; {finding.fix}"
    text = " ".join(report.as_text(found, [finding]).split())
    assert f"{level} [{id}]: {finding.what}. Remedy: {finding.fix}." in text
    assert json.loads(report.as_json(found, [finding], False))["findings"][0]["id"] == id


def test_values_at_the_edge_are_no_findings() -> None:
    found = facts("cuda")
    found.versions.torch, found.versions.cuda_driver = "2.15.3", "13.2"
    found.environment = {"COLLX_CHECK": "0", "TORCH_SYMMMEM": "CUDA", "TMPDIR": "/tmp"}
    found.run.devices[1].capability = "12.0"  # supported by the PTX
    found.run.devices[0].capability = "8.6"  # supported by the binary of 8.0
    found.run.timings[0].busbw_gbs = 180.0
    assert judge.judge(found) == []


def test_errors_come_first() -> None:
    found = facts("cuda")
    found.versions.torch, found.gpus.seen[0].compute_mode = "2.16.0", "Prohibited"
    assert [one.level for one in judge.judge(found)] == ["error", "warning"]


def test_the_range_of_pytorch_is_that_of_setup_py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.setenv("COLLX_CUDA", "0")
    names = runpy.run_path(str(ROOT / "setup.py"))
    assert (
        names["OLDEST_TORCH"],
        names["NEWEST_TORCH"],
    ) == (judge.OLDEST_TORCH, judge.NEWEST_TORCH)


def test_what_nvidia_smi_prints_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\n"
        f"case $1 in --query*) cat <<'E'\n{QUERY}E\n;;\n"
        f"topo) cat <<'E'\n{TOPOLOGY}E\n;;\n"
        "*) echo '| NVIDIA-SMI 580.65.06    Driver Version: 580.65.06    CUDA Version: 13.0  |';;\n"
        "esac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "control").touch()
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    found, driver, cuda = gpus.gpus()
    assert (driver, cuda, found.mps, found.smi_error) == ("580.65.06", "13.0", True, None)
    name = "NVIDIA H100 80GB HBM3"
    assert found.seen == [
        Gpu("0", name, "GPU-a", "Disabled", "Default"),
        Gpu("1", name, "GPU-b", "Enabled", "Exclusive_Process"),
    ]
    assert found.links == {
        "GPU0": {"GPU0": "X", "GPU1": "NV18"},
        "GPU1": {"GPU0": "NV18", "GPU1": "X"},
    }
    program.write_text("#!/bin/sh\necho no driver >&2; exit 9\n")
    found, driver, cuda = gpus.gpus()
    assert (found.seen, driver, cuda) == ([], None, None)
    assert "exit status 9" in str(found.smi_error)


def test_limits_of_a_control_group_are_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine, "_group", lambda controller: tmp_path)
    assert machine.machine().memory_limit is None
    (tmp_path / "memory.max").write_text("1048576\n")
    (tmp_path / "memory.current").write_text("4096\n")
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    found = machine.machine()
    assert (found.memory_limit, found.memory_used, found.cpu_limit) == (1048576, 4096, 1.5)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "cpu.max").write_text("max 100000\n")
    found = machine.machine()
    assert (found.memory_limit, found.cpu_limit) == (None, None)


def test_the_matrices_of_gpus_are_shown() -> None:
    text = report.as_text(facts("cuda"), [])
    lines = [line.split() for line in text.splitlines()]
    assert ["peer", "access", "cuda:0", "cuda:1"] in lines
    assert ["cuda:0", "yes", "yes"] in lines
    assert ["GPU0", "X", "NV18"] in lines
    assert "multicast yes" in text
    assert text.endswith("Findings\n  none: collx works")


def test_the_tools_are_not_imported_with_collx() -> None:
    program = "import sys, collx; print([m for m in sys.modules if m.startswith('collx._d') or "
    program += "m.startswith('collx._bench') or m == 'collx._launch'])"
    assert python(program) == "[]\n"
