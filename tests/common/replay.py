"""Repeats calls that a test has made: the tests of calls print a program that uses this.

python -c "from tests.common.replay import *; replay(World('cpu', 2), [collectives.Call(...)])"
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from . import collectives, norms
from .calls import Call, run_calls
from .pool import Pool
from .worlds import World

__all__ = ["World", "collectives", "norms", "replay"]


def replay(world: World, calls: Sequence[Call], key: str = "default") -> None:
    """Makes the calls on new ranks, and prints what is wrong on each of them."""
    pool = Pool(world)
    try:
        for rank, found in enumerate(pool.run(run_calls, calls, key)):
            print(f"rank {rank}:", "\n".join(found) or "as the reference")
    finally:
        pool.kill()


def program(world: World, calls: Sequence[Call], key: str = "default") -> str:
    """The text of a program that repeats calls; with the key "small" on a communicator with the
    smallest payload, and with the key "checked" on one that checks calls."""
    listed = "".join(f"    {call!r},\n" for call in calls)
    given = f", key={key!r}" if key in ("small", "checked") else ""
    return (
        "python - <<'EOF'\nfrom tests.common.replay import *\n"
        f"if __name__ == '__main__':\n  replay({world!r}, [\n{listed}  ]{given})\nEOF"
    )


def check_calls(
    pool: Pool,
    calls: Sequence[Call],
    key: str = "default",
    together: bool = False,
    job: Callable[..., list[str]] = run_calls,
    arguments: tuple[Any, ...] | None = None,
) -> None:
    """Makes calls on all ranks, one after the other, by `job`, which gets `arguments` (instead of
    the key) and the calls. Fails with what each rank finds wrong, and with a program that repeats
    the first wrong call, or, if they belong `together`, all of them."""
    given = (calls, key) if arguments is None else (*arguments, calls)
    failures = pool.run(job, *given)
    lines = [f"rank {rank}: {line}" for rank, found in enumerate(failures) for line in found]
    if not lines:
        return
    first = [call for call in calls if repr(call) in lines[0]][:1]
    shown = program(pool.world, calls if together else first, key)
    raise AssertionError("\n".join([*lines, "", "This repeats it:", shown]))
