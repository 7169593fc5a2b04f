"""Threads that have never set a device, such as a watchdog. Their current device is the first one,
which most ranks do not use: a context there would take hundreds of megabytes, and a copy would be
of the wrong device."""

from __future__ import annotations

import pytest

from tests.common.pool import Pool
from tests.common.suites.lifecycle import exit_codes

# Each rank runs these in a new process, because other tests may have created contexts in the ranks
# of a pool.
THREADS = """
import threading
own = torch.device("cuda", rank)

def in_a_thread(function):
    found = []
    def run():
        try:
            found.append(function())
        except Exception as error:
            found.append(error)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]

def check_contexts():
    contexts = [torch._C._cuda_hasPrimaryContext(i) for i in range(torch.cuda.device_count())]
    assert contexts == [i == rank for i in range(len(contexts))], contexts
"""

PROGRAMS = {
    "init": """
comm = in_a_thread(lambda: collx.init(device=own, payload_bytes=4 << 20, timeout=30.0))
check_contexts()
comm.destroy()
""",
    "a wait for a posted call": """
comm = collx.init(device=own, payload_bytes=4 << 20, timeout=30.0)
handle = collx.post(collx.allreduce, torch.ones(1000, device=own))
found = in_a_thread(lambda: (handle.is_completed(), handle.wait()))
assert isinstance(found, tuple), found
check_contexts()
comm.destroy()
""",
    "errors": """
comm = collx.init(device=own, payload_bytes=4 << 20, timeout=2.0)
x = torch.ones(1000, device=own)
collx.allreduce(x)
assert in_a_thread(comm.raise_if_failed) is None
check_contexts()
if rank == 1:
    collx.allreduce(x)
    torch.cuda.synchronize()
    found = in_a_thread(comm.raise_if_failed)
    assert isinstance(found, collx.CollectiveTimeout), found
    check_contexts()
dist.barrier()
comm.destroy()
""",
    "destructors": """
comm = collx.init(device=own, payload_bytes=4 << 20, timeout=30.0)
used = [comm, torch.ones(1000, device=own), comm.empty(2000)]
collx.allgather(used[1], out=used[2], algorithm="copy_engine")
with torch.cuda.stream(torch.cuda.Stream()):
    used.append(collx.post(collx.allreduce, used[1]))
torch.cuda.synchronize()
comm.destroy()
del comm
in_a_thread(used.clear)
check_contexts()
""",
}


@pytest.mark.own_gpu
@pytest.mark.worlds(2)
@pytest.mark.parametrize("what", PROGRAMS)
def test_threads_leave_other_devices_alone(pool: Pool, what: str) -> None:
    found = exit_codes(pool.world.device, "", program=THREADS + PROGRAMS[what])
    assert [code for code, _ in found] == [0, 0], "\n".join(output for _, output in found)
