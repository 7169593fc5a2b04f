"""NVLink multicast where there is none: refused by name, and never taken."""

from __future__ import annotations

import pytest

from ..attempt import Attempt, allreduce, attempt, ones, works
from ..multicast import ALGORITHMS, NORM_WAYS, WAYS
from ..norm_cases import OPS as NORMS
from ..pool import Pool
from ..rank import Rank


def _refused(rank: Rank) -> tuple[list[Attempt], str | None, str, bool]:
    communicator = rank.communicator()
    found = []
    for algorithm in ALGORITHMS:
        found += [
            attempt(lambda: allreduce(communicator, ones(rank), algorithm)),  # noqa: B023
            attempt(lambda: allreduce(communicator, ones(rank, 0), algorithm)),  # noqa: B023
            attempt(lambda: communicator.explain("allreduce", 1000, algorithm=algorithm)),  # noqa: B023
        ]
    taken = communicator.explain("allreduce", 1000).algorithm
    return found, communicator.no_multicast, taken, works(rank, communicator)


@pytest.mark.worlds(1, 2)
def test_refused_with_what_is_missing_and_what_auto_takes(pool: Pool) -> None:
    """The tests switch multicast off on GPUs; memory of a CPU has none."""
    for attempts, why, taken, well in pool.run(_refused):
        assert well
        assert why
        names = [name for name in ALGORITHMS for _ in range(3)]
        for name, found in zip(names, attempts, strict=True):
            assert found.error == "NotImplementedError", found
            for word in ("algorithm", name, "NVLink multicast", why, f'"auto" takes {taken}'):
                assert word in found.message, (word, found)
        if pool.world.device == "cpu":
            assert "CPU" in why


def test_there_are_such_algorithms() -> None:
    assert ALGORITHMS == ("multimem_oneshot", "multimem_twoshot", "multimem_gather")
    assert [op for op, name in WAYS if name == "multimem"] == [
        "reducescatter",
        "allgather",
        "broadcast",
        "reduce",
    ]
    assert [op for op, _ in NORM_WAYS] == [op for op in NORMS if not op.startswith("reducescatter")]
