"""Tests of programs in processes that are forked from a process that has loaded PyTorch."""

from __future__ import annotations

from tests.common import interpreters

PROGRAM = """
import atexit, os, signal, sys, time
atexit.register(print, "finalized")
print(*sys.argv[1:], os.environ["SETTING"], "collx" in sys.modules, flush=True)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "hangs":
    time.sleep(60)
if sys.argv[1] == "raises":
    raise ValueError("wrong")
sys.exit(int(sys.argv[2]))
"""


def test_programs_end_as_interpreters_do() -> None:
    given = [("ends", "0"), ("exits", "3"), ("killed", ""), ("raises", "")]
    for _ in range(2):  # the second time, they are forked from the same process
        ended, exits, killed, raised = interpreters.run(PROGRAM, given, {"SETTING": "x"}, 60.0)
        assert ended == (0, "ends 0 x True\nfinalized\n")
        assert exits == (3, "exits 3 x True\nfinalized\n")
        assert killed == (-9, "killed  x True\n")
        assert raised[0] == 1
        assert "ValueError: wrong" in raised[1]
        assert raised[1].endswith("finalized\n")


def test_a_program_whose_time_is_up_is_killed() -> None:
    [(code, output)] = interpreters.run(PROGRAM, [("hangs", "")], {"SETTING": "x"}, 0.5)
    assert code is None
    assert "finalized" not in output
