"""Starts the MPI peer. PyPI's MPI libraries start their ranks themselves and cannot be initialised
in processes that torchrun started, so they get a job of their own, in the same run, while the other
ranks sleep."""

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SECONDS_A_SIZE = 60
_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")


def launcher() -> str | None:
    """mpiexec of this Python's environment, else of the path."""
    scripts = sysconfig.get_path("scripts")
    return shutil.which("mpiexec", path=scripts) or shutil.which("mpiexec")


def run(world: int, job: dict[str, Any]) -> tuple[list[dict[str, Any]], str | None]:
    """The measurements of `job`'s sizes, and why some are missing, if any are."""
    mpiexec = launcher()
    if find_spec("mpi4py") is None or mpiexec is None:
        return [], "mpi4py or mpiexec is not installed"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(_OF_TORCHRUN)}
    environment["OMP_NUM_THREADS"] = "1"
    program = str(Path(__file__).with_name("mpi_job.py"))
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "results"
        output.touch()
        argument = json.dumps({**job, "output": str(output)})
        command = [mpiexec, "-n", str(world), sys.executable, program, argument]
        error = _wait(command, environment, 60 + SECONDS_A_SIZE * len(job["sizes"]))
        found = [json.loads(line) for line in output.read_text().splitlines()]
    refused = [line["error"] for line in found if "error" in line]
    results = [line for line in found if "error" not in line]
    return results, refused[0] if refused else error


def _wait(command: list[str], environment: dict[str, str], seconds: float) -> str | None:
    """Runs the command in a session of its own; what went wrong, if anything did."""
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, complaints = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return f"stopped after {seconds:.0f} s"
    if process.returncode == 0:
        return None
    last = (complaints.strip() or "no message").splitlines()[-1]
    return f"mpiexec exited with {process.returncode}: {last[:160]}"
