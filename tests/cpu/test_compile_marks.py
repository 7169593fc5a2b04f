"""What torch.compile is told of the operators: of every one, from its schema."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend
from torch._inductor.lowering import lowerings
from torch._library.effects import EffectType
from torch._library.simple_registry import singleton

import collx
from collx.compile import lowering
from collx.compile.operators import LOCAL, making, out_forms, writing


def lacking() -> list[str]:
    """What the operators lack to be kept in compiled code."""
    lowering.register()
    found = []
    made = list(making())
    for op in made:
        if singleton.find(op._name).effect.effect is not EffectType.ORDERED:
            found.append(f"{op}: a token")
        if op not in lowerings:
            found.append(f"{op}: a lowering")
        if op._schema.returns and op not in out_forms():
            found.append(f"{op}: a form with out=")
    found += [f"{form.op}: a functional form" for form in writing() if form.functional not in made]
    return found


def test_nothing_lacks_what_keeps_it() -> None:
    assert not lacking()
    names = [name.partition("collx::")[2] for name in torch._C._dispatch_get_all_op_names()]
    communicating = [name for name in names if name and name not in LOCAL]
    assert len(list(making())) + len(list(writing())) == len(communicating)


def test_a_new_operator_that_is_forgotten_is_named() -> None:
    """The control."""
    library = torch.library.Library("collx", "FRAGMENT")
    library.define("forgotten(Tensor input, str group_name) -> Tensor")
    try:
        assert lacking() == [
            "collx.forgotten.default: a token",
            "collx.forgotten.default: a lowering",
            "collx.forgotten.default: a form with out=",
        ]
    finally:
        library._destroy()


def test_what_is_written_are_the_results_of_the_functional_form_in_their_order() -> None:
    forms = {str(form.op): form for form in writing()}
    fp8 = forms["collx.allreduce_residual_rmsnorm_fp8.keep_norm_out"]
    assert fp8.written == ("q_out", "scale_out", "residual_out", "norm_out")
    assert fp8.functional is torch.ops.collx.allreduce_residual_rmsnorm_fp8.keep_norm
    inplace = forms["collx.allreduce_.default"]
    assert inplace.in_place
    assert inplace.written == ("input",)
    for form in forms.values():
        assert len(form.written) == len(form.functional._schema.returns)


def test_graphs_of_other_options_are_told_apart() -> None:
    """By the caches of PyTorch."""
    ways: list[dict[str, Any]] = [{}, {"norms": False}, {"rounding": "fp32"}, {"epilogues": True}]
    assert len({collx.compile.Pass(**way).uuid() for way in ways}) == len(ways)
    assert collx.compile.Pass().uuid() == collx.compile.Pass().uuid()


def test_the_backend_is_found_by_its_name() -> None:
    try:
        version("collx")
    except PackageNotFoundError:
        pytest.skip("collx is not installed")
    assert lookup_backend("collx") is collx.compile.backend
