"""NVLink multicast where it is unavailable: refused by name, and never selected."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ..attempt import allreduce, assert_raised, attempt, ones, works
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
        words = ("algorithm", name, "NVLink multicast", why, f'"auto" selects {taken}')
        assert_raised(result, "NotImplementedError", *words)
    if rank.device.type == "cpu":
        assert "CPU" in why


@pytest.mark.worlds(1, 2)
@on_ranks
def test_every_operator_refuses_it(rank: Rank) -> None:
    """Of every operator, a call with data, one without, and explain()."""
    communicator = rank.communicator()
    for op, algorithm in (*WAYS, *NORM_WAYS):
        words = (f'"{algorithm}"', "NVLink multicast", "has none", '"auto" selects ')
        norm = (op, algorithm) in NORM_WAYS
        for size in (2, 0) if norm else (40, 0):
            call = Norm(op, "float32", size) if norm else Call(op, "float32", (size,))
            call = replace(call, algorithm=algorithm)
            refused = attempt(lambda: run_call(rank, communicator, call))  # noqa: B023
            assert_raised(refused, "NotImplementedError", f"collx.{op}: algorithm", *words)
        explained = attempt(lambda: communicator.explain(op, (2, 64), algorithm=algorithm))  # noqa: B023
        assert_raised(explained, "NotImplementedError", *words)
    assert works(rank, communicator)


def test_there_are_such_algorithms() -> None:
    assert ALGORITHMS == ("multimem_oneshot", "multimem_twoshot", "multimem_gather")
    assert [op for op, name in WAYS if name == "multimem"] == [
        "reducescatter",
        "allgather",
        "broadcast",
        "reduce",
    ]
    assert [op for op, _ in NORM_WAYS] == [op for op in NORMS if not op.startswith("reducescatter")]
