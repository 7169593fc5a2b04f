"""Tests that each call ends in time, with the error class that the README documents, if the store
of the process group dies or is stopped. The test uses one rank. Its store is another process."""

from __future__ import annotations

import json

import pytest

from tests.common import interpreters

TIMEOUT = 1.0
MARGIN = 6.0  # for a busy machine; far below the default limit of 30 s

PROGRAM = """
import json, os, signal, sys, time
import torch, torch.distributed as dist, collx

call, fate, timeout = sys.argv[1], getattr(signal, sys.argv[2]), float(sys.argv[3])
here, there = os.pipe()
parent, server = os.getpid(), os.fork()
if server == 0:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(there, str(store.port).encode())
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(0)
store = dist.TCPStore("127.0.0.1", int(os.read(here, 16)), is_master=False)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
options = {"device": "cpu", "payload_bytes": 4 << 20, "timeout": timeout}
comm = None if call == "init" else collx.init(**options)
os.kill(server, fate)
# Until it is dead, or all of its threads stand still: one of them could still answer.
os.waitid(os.P_PID, server, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
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
os.kill(server, signal.SIGKILL)
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
    given, settings = (call, fate, str(TIMEOUT)), {"GLOO_SOCKET_IFNAME": "lo"}
    [(code, output)] = interpreters.run(PROGRAM, [given], settings, 120)
    assert code == 0, output
    error, message, seconds, afterwards = json.loads(output.splitlines()[-1])
    assert error == kind, (error, message)
    assert "store" in message, message
    assert seconds < TIMEOUT + MARGIN, (seconds, message)
    assert afterwards < MARGIN, "destroy of a poisoned communicator is local"
