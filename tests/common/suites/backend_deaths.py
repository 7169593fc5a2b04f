"""Groups on the torch.distributed backend whose ranks die. Each rank runs its own program: the
survivors name the rank that died and then exit normally."""

from __future__ import annotations

import json

import pytest

from ..attempt import Attempt, assert_raised
from ..limits import assert_in_time, timeout_now
from ..pool import Pool, some_stand_for_all
from .lifecycle import exit_codes

pytestmark = pytest.mark.alone  # ranks are killed

DEATHS = {"killed": ("os.kill(os.getpid(), signal.SIGKILL)", -9), "exit": ("os._exit(7)", 7)}

PROGRAM = """
import json, signal, time
from dataclasses import replace
from datetime import timedelta
from collx._bootstrap import steps
x = torch.ones(1000, device=device)
victim = rank == size - 1

def prepared(timeout):
    dist.group.WORLD.set_timeout(timedelta(seconds=timeout))
    store.set("prepared/" + str(rank), "")
    store.wait(["prepared/" + str(each) for each in range(size)])

def survive(call):
    started = time.monotonic()
    try:
        call()
        found = "", ""
    except Exception as error:
        found = type(error).__name__, str(error)
    print("found", json.dumps([*found, time.monotonic() - started, started]), flush=True)
{ending}
dist.destroy_process_group()
print("the end", flush=True)
"""

POSTED = """
def call():
    works = [dist.all_reduce(x, async_op=True) for _ in range(3)]
    for work in works:
        work.wait()
    if device == "cuda":  # a call raises what is known when it is made
        torch.cuda.synchronize()
        dist.all_reduce(x)

dist.all_reduce(x)
prepared({timeout})
if victim:
    work = dist.all_reduce(x, async_op=True)
    store.set("posted", "")
    time.sleep(0.1)
    {death}
store.wait(["posted"])
survive(call)
"""

FIRST = """
prepared({timeout})
if victim and {step!r}:
    index = [step.name for step in steps.STEPS].index({step!r})
    def die(setup):
        {death}
    steps.STEPS[index] = replace(steps.STEPS[index], run=die)
elif victim:
    {death}
survive(lambda: dist.all_reduce(x))
"""


def _assert_survived(pool: Pool, ending: str, code: int, error: str, due: float) -> None:
    *survivors, died = exit_codes(
        pool.world.device, ending, program=PROGRAM, size=pool.size, backend="collx"
    )
    assert died[0] == code, died
    for code, output in survivors:
        assert code == 0, output
        assert "the end" in output
        (line,) = (line for line in output.splitlines() if line.startswith("found "))
        name, message, seconds, started = json.loads(line.removeprefix("found "))
        found = Attempt(name, message, seconds, (), started)
        assert_raised(found, error, f"rank {pool.size - 1}")
        assert_in_time(found, due)


@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize("how", DEATHS)
def test_a_rank_that_dies_in_a_posted_call_is_named_by_all_others(pool: Pool, how: str) -> None:
    some_stand_for_all(pool, pool.size == 2 and how == "killed")
    timeout, (death, code) = timeout_now(pool), DEATHS[how]
    ending = POSTED.format(timeout=timeout, death=death)
    _assert_survived(pool, ending, code, "CollectiveTimeout", timeout)


@pytest.mark.worlds(2, 3)
@pytest.mark.parametrize("step", ["", "rendezvous"], ids=["before", "within"])
def test_a_rank_that_dies_before_the_communicator_is_made_is_named(pool: Pool, step: str) -> None:
    some_stand_for_all(pool, pool.size == 2)
    timeout, (death, code) = timeout_now(pool), DEATHS["killed"]
    ending = FIRST.format(timeout=timeout, death=death, step=step)
    # PyTorch's rendezvous has its own wait, and the vote that follows waits again.
    _assert_survived(pool, ending, code, "InitError", 2 * timeout)
