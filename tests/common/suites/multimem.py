"""NVLink multicast where it is unavailable: refused by name, and never selected."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ..attempt import allreduce, attempt, ones, works
from ..calls import run_call
from ..collectives import Call
from ..multicast import ALGORITHMS, NORM_WAYS, WAYS
from ..norms import NAMES as NORMS
from ..norms import Call as Norm
from ..pool import on_ranks
from ..rank import Rank


@pytest.mark.worlds(1, 2)
@on_ranks
def test_refused_with_what_is_missing_and_what_auto_takes(rank: Rank) -> None:
    """The tests disable multicast on GPUs, and CPU memory does not support it."""
    communicator = rank.communicator()
    found = []
    for algorithm in ALGORITHMS:
        found += [
            attempt(lambda: allreduce(communicator, ones(rank), algorithm)),  # noqa: B023
            attempt(lambda: allreduce(communicator, ones(rank, 0), algorithm)),  # noqa: B023
            attempt(lambda: communicator.explain("allreduce", 1000, algorithm=algorithm)),  # noqa: B023
        ]
    taken = communicator.explain("allreduce", 1000).algorithm
    why = communicator.multicast_unavailable_reason
    assert works(rank, communicator)
    assert why
    names = [name for name in ALGORITHMS for _ in range(3)]
    for name, result in zip(names, found, strict=True):
        assert result.error == "NotImplementedError", result
        for word in ("algorithm", name, "NVLink multicast", why, f'"auto" selects {taken}'):
            assert word in result.message, (word, result)
    if rank.device.type == "cpu":
        assert "CPU" in why


@pytest.mark.worlds(1, 2)
@on_ranks
def test_every_operator_refuses_it(rank: Rank) -> None:
    """Of every operator, a call with data, one without, and explain()."""
    communicator = rank.communicator()
    found = {}
    for op, algorithm in (*WAYS, *NORM_WAYS):
        norm = (op, algorithm) in NORM_WAYS
        for size in (2, 0) if norm else (40, 0):
            call = Norm(op, "float32", size) if norm else Call(op, "float32", (size,))
            call = replace(call, algorithm=algorithm)
            found[op, f"{algorithm} of {size}"] = attempt(
                lambda: run_call(rank, communicator, call)  # noqa: B023
            )
        found[op, f"{algorithm} explained"] = attempt(
            lambda: communicator.explain(op, (2, 64), algorithm=algorithm)  # noqa: B023
        )
    assert works(rank, communicator)
    assert len(found) == 3 * len(WAYS + NORM_WAYS)
    for (op, which), refused in found.items():
        assert refused.error == "NotImplementedError", (op, which, refused)
        for word in (f'"{which.split()[0]}"', "NVLink multicast", "has none", '"auto" selects '):
            assert word in refused.message, (op, which, word, refused)
        if "explained" not in which:
            assert f"collx.{op}: algorithm" in refused.message, (op, refused)


def test_there_are_such_algorithms() -> None:
    assert ALGORITHMS == ("multimem_oneshot", "multimem_twoshot", "multimem_gather")
    assert [op for op, name in WAYS if name == "multimem"] == [
        "reducescatter",
        "allgather",
        "broadcast",
        "reduce",
    ]
    assert [op for op, _ in NORM_WAYS] == [op for op in NORMS if not op.startswith("reducescatter")]
