"""Starts the MPI peer. PyPI's MPI libraries start their ranks themselves and cannot be initialized
in processes that torchrun started, so they run as a separate job in the same run. The other ranks
sleep while MPI is measured, and the job sleeps while they are measured."""

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SECONDS_A_SIZE = 60
PAUSE = 0.02  # seconds between polls, while other processes are measured
JOB = "collx._bench.mpi_job"
END = "end\n"  # the end of an operator's results
_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")


def launcher() -> str | None:
    """Returns mpiexec of this Python environment, otherwise that of the path, None if there is
    none."""
    scripts = sysconfig.get_path("scripts")
    return shutil.which("mpiexec", path=scripts) or shutil.which("mpiexec")


class Mpi:
    """The MPI processes, which are kept between operators because starting them takes seconds."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._process: subprocess.Popen[bytes] | None = None
        self._pipes: list[int] = []

    def run(self, job: dict[str, Any]) -> tuple[list[dict[str, Any]], str | None]:
        """Returns the measurements for the sizes of `job`, and the reason if some are missing."""
        mpiexec = launcher()
        if find_spec("mpi4py") is None or mpiexec is None:
            return [], "mpi4py or mpiexec is not installed"
        process = self._process or self._start(mpiexec)
        output = self._folder / job["op"]
        output.write_text("")
        line = json.dumps({**job, "output": str(output)}) + "\n"
        for pipe in self._pipes:
            os.write(pipe, line.encode())
        error = self._wait(process, output, 60 + SECONDS_A_SIZE * len(job["sizes"]))
        found = [json.loads(line) for line in output.read_text().removesuffix(END).splitlines()]
        if error is not None:
            self.close(0)
        refused = [line["error"] for line in found if "error" in line]
        results = [line for line in found if "error" not in line]
        return results, refused[0] if refused else error

    def _start(self, mpiexec: str) -> subprocess.Popen[bytes]:
        self._temporary = tempfile.TemporaryDirectory()
        self._folder = Path(self._temporary.name)
        pipes = self._folder / "jobs"
        for rank in range(self._world):
            os.mkfifo(f"{pipes}{rank}")
            # Opening for reading and writing does not wait for the other end. The pipes close when
            # this process exits, and the MPI processes then end.
            self._pipes.append(os.open(f"{pipes}{rank}", os.O_RDWR))
        environment = {k: v for k, v in os.environ.items() if not k.startswith(_OF_TORCHRUN)}
        environment["OMP_NUM_THREADS"] = "1"
        with (self._folder / "complaints").open("wb") as complaints:
            self._process = subprocess.Popen(
                [
                    mpiexec,
                    "-n",
                    str(self._world),
                    sys.executable,
                    "-m",
                    JOB,
                    str(pipes),
                ],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=complaints,
                start_new_session=True,
            )
        return self._process

    def _wait(self, process: subprocess.Popen[bytes], output: Path, seconds: float) -> str | None:
        """Waits for the end of the output. Returns the error, None if there is none."""
        deadline = time.monotonic() + seconds
        while not output.read_text().endswith(END):
            if process.poll() is not None:
                complaints = (self._folder / "complaints").read_text(errors="replace").strip()
                last = (complaints or "no message").splitlines()[-1]
                return f"mpiexec exited with {process.returncode}: {last[:160]}"
            if time.monotonic() > deadline:
                return f"stopped after {seconds:.0f} s"
            time.sleep(PAUSE)
        return None

    def close(self, seconds: float = 30) -> None:
        """Ends the processes, and kills them after `seconds`."""
        while self._pipes:
            os.close(self._pipes.pop())
        if self._process is None:
            return
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process = None
        self._temporary.cleanup()
