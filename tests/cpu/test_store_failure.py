"""Tests that each call ends in time, with the error class that the README documents, if the store
of the process group dies or is stopped. The test uses one rank. Its store is another process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 1.0
MARGIN = 6.0  # for a busy machine; far below the default limit of 30 s

PROGRAM = """
import json, os, signal, subprocess, sys, time

SERVER = '''
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
'''
call, fate, timeout = sys.argv[1], getattr(signal, sys.argv[2]), float(sys.argv[3])
server = subprocess.Popen(
    [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
)
import torch, torch.distributed as dist, collx  # while the server does

store = dist.TCPStore("127.0.0.1", int(server.stdout.readline()), is_master=False)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
options = {"device": "cpu", "payload_bytes": 4 << 20, "timeout": timeout}
comm = None if call == "init" else collx.init(**options)
server.send_signal(fate)
# Until it is dead, or all of its threads stand still: one of them could still answer.
os.waitid(os.P_PID, server.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
started = time.monotonic()
error, message = "", ""
calls = {"init": lambda: collx.init(**options), "empty": lambda: comm.empty(8)}
try:
    calls.get(call, lambda: comm.destroy())()
except Exception as reason:
    error, message = type(reason).__name__, str(reason)
seconds = time.monotonic() - started
afterwards = time.monotonic()
if comm is not None:
    comm.destroy()
afterwards = time.monotonic() - afterwards
server.kill()
print(json.dumps([error, message, seconds, afterwards]), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("fate", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize(
    ("call", "kind"),
    [("init", "InitError"), ("empty", "CollectiveTimeout"), ("destroy", "CollectiveTimeout")],
)
def test_a_store_that_is_gone_is_named_in_time(call: str, kind: str, fate: str) -> None:
    """Hazard 8: the caller's limit applies, also before the communicator exists."""
    path = os.pathsep.join([str(ROOT / "python"), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, call, fate, str(TIMEOUT)],
        env={**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    error, message, seconds, afterwards = json.loads(done.stdout.splitlines()[-1])
    assert error == kind, (error, message)
    assert "store" in message, message
    assert seconds < TIMEOUT + MARGIN, (seconds, message)
    assert afterwards < MARGIN, "destroy of a poisoned communicator is local"
