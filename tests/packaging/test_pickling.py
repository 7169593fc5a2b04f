"""Tests that public objects are unpickled unchanged, and that the others raise an error with their
name."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import collx
from collx.nn import TensorParallelRMSNorm
from tests.common.pool import on_ranks
from tests.common.rank import Rank

ERRORS = [
    collx.CollectiveTimeout,
    collx.CollectiveMismatch,
    collx.CollectiveOverlap,
    collx.CommunicatorPoisoned,
    collx.InitError,
]


def again(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_an_error_comes_back_as_itself(kind: type[RuntimeError]) -> None:
    error = again(kind("rank 1 waited"))
    assert type(error) is kind
    assert str(error) == "rank 1 waited"


def test_a_norm_comes_back_with_its_weight() -> None:
    norm = TensorParallelRMSNorm(8, eps=1e-3)
    with torch.no_grad():
        norm.weight.uniform_()
    for other in (again(norm), copy.deepcopy(norm)):
        assert torch.equal(other.weight, norm.weight)
        assert other.extra_repr() == norm.extra_repr()


@pytest.mark.worlds(2)
@on_ranks
def test_a_communicator_is_refused_and_its_explanation_is_not(rank: Rank) -> None:
    with collx.init(device="cpu", name="pickled") as communicator:
        explanation = communicator.explain("allreduce", 1024)
        assert again(explanation) == explanation
        assert str(again(explanation)) == str(explanation)
        for refused in (communicator, communicator._native):
            with pytest.raises(TypeError, match=r"[Cc]ommunicator.*pickle|pickle.*Communicator"):
                pickle.dumps(refused)
