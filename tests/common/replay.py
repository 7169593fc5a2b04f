"""Repeats the calls of a test. Failing tests of calls print a program that uses this module.

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
    """Makes the calls on new ranks, and prints the failures of each rank."""
    pool = Pool(world)
    try:
        for rank, found in enumerate(pool.run(run_calls, calls, key)):
            print(f"rank {rank}:", "\n".join(found) or "as the reference")
    finally:
        pool.kill()


def program(world: World, calls: Sequence[Call], key: str = "default") -> str:
    """Returns the text of a program that repeats calls. With the key "small", the communicator has
    the smallest payload, and with the key "checked", it checks calls."""
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
    """Makes calls on all ranks, one after the other, with `job`, which gets `arguments` (instead of
    the key) and the calls. Fails with the failures of each rank, and with a program that repeats
    the first wrong call or, with `together`, all calls."""
    given = (calls, key) if arguments is None else (*arguments, calls)
    failures = pool.run(job, *given)
    lines = [f"rank {rank}: {line}" for rank, found in enumerate(failures) for line in found]
    if not lines:
        return
    first = [call for call in calls if repr(call) in lines[0]][:1]
    shown = program(pool.world, calls if together else first, key)
    raise AssertionError("\n".join([*lines, "", "This repeats it:", shown]))
