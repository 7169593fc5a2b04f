"""Tests what torch.compile learns about the operators from their schemas."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor.codegen.common import custom_backend_passes
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.lowering import lowerings
from torch._library.effects import EffectType
from torch._library.simple_registry import singleton
from torch.fx import Graph

import collx
from collx.compile import keys, lowering
from collx.compile.operators import LOCAL, making, out_forms, writing
from collx.compile.registration import BACKEND
from tests.common import interpreters


def lacking() -> list[str]:
    """Returns what the operators lack so that compiled code keeps their calls."""
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
    """Negative control of `lacking`."""
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
    """The keys for PyTorch's caches differ if the options differ."""
    ways: list[dict[str, Any]] = [{}, {"norms": False}, {"rounding": "fp32"}, {"epilogues": True}]
    assert len({collx.compile.Pass(**way).uuid() for way in ways}) == len(ways)
    assert collx.compile.Pass().uuid() == collx.compile.Pass().uuid()


class Own(CustomGraphPass):
    """A pass of the program."""

    def __init__(self, uuid: str | None) -> None:
        self._uuid = uuid

    def __call__(self, graph: Graph) -> None:
        pass

    def uuid(self) -> str | None:
        return self._uuid


def uuid_beside(own: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns the uuid of the passes that the backend gives to Inductor."""
    from torch._inductor import compile_fx

    given: dict[str, Any] = {}
    monkeypatch.setattr(compile_fx, "compile_fx", lambda *_, **options: given.update(options))
    collx.compile.backend(None, [], options={"post_grad_custom_pre_pass": own})  # type: ignore
    return given["config_patches"]["post_grad_custom_pre_pass"].uuid()


def test_graphs_of_other_passes_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program's own passes are part of the key. A pass without a uuid disables the cache."""
    passes: list[Any] = [None, Own("1"), Own("2"), [Own("1"), Own("2")], [Own("2"), Own("1")]]
    assert len({uuid_beside(own, monkeypatch) for own in passes}) == len(passes)
    assert uuid_beside(Own("1"), monkeypatch) == uuid_beside(Own("1"), monkeypatch)
    assert uuid_beside(Own(None), monkeypatch) is None
    assert uuid_beside(lambda graph: None, monkeypatch) is None


@pytest.mark.parametrize("what", ["version", "schema", "rank"])
def test_the_keys_of_the_caches_change_with(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(keys, "live", lambda: made)

    def found() -> tuple[bytes, bytes]:
        keys._package.cache_clear()
        return custom_backend_passes["collx"].uuid(), collx.compile.Pass().uuid()  # type: ignore

    member = SimpleNamespace(
        name="a",
        rank=0,
        world_size=2,
        device="cpu",
        fallback_reason=None,
        group_name="0",
    )
    made.append(member)
    before = found()
    assert found() == before
    library = torch.library.Library("collx", "FRAGMENT")
    try:
        if what == "version":
            monkeypatch.setattr(keys, "VERSION", "another")
        elif what == "schema":
            library.define("another(Tensor input, str group_name) -> Tensor")
        else:
            member.rank = 1
        assert not set(found()) & set(before)
    finally:
        library._destroy()
        keys._package.cache_clear()


@pytest.mark.parametrize("name", ["collx.norm", "colx.norms", "max_autotun"])
def test_an_option_that_does_not_exist_is_refused(name: str) -> None:
    with pytest.raises(
        ValueError, match=r"accepted: collx\.norms, collx\.rounding, collx\.epi"
    ) as e:
        collx.compile.backend(None, [], options={name: True})  # type: ignore
    assert f"got {name!r}" in str(e.value)


def test_a_report_begins_anew() -> None:
    collx.compile.report().left["a reason"] = 1
    before = collx.compile.report(reset=True)
    assert before.left["a reason"] == 1
    assert collx.compile.report() == collx.compile.Report()
    assert collx.compile.report() is collx.compile.report()


# The processes have only imported PyTorch.
ORDERS = {
    "collx first": "import collx, torch._dynamo",
    "the compiler first": "import torch._dynamo, collx",
    # An installed package has an entry point, whose backend imports collx.
    "by the entry point": "import torch._dynamo as d; d.backends.registry.lookup_backend('collx')",
    "listed before": "import torch._dynamo as d; d.backends.registry.list_backends()",
}
FOUND = """
import collx
from torch._dynamo.backends import registry
assert registry.lookup_backend("collx") is collx.compile.backend
assert registry.list_backends().count("collx") == 1
assert registry.lookup_backend("collx") is collx.compile.backend
from torch._inductor.codegen.common import custom_backend_passes
assert "collx" in custom_backend_passes
import torch._inductor.codecache
"""


@pytest.mark.parametrize("order", sorted(ORDERS))
@pytest.mark.parametrize("installed", [False, True])
def test_the_backend_is_found_by_its_name(tmp_path: Path, installed: bool, order: str) -> None:
    if not installed and order == "by the entry point":
        pytest.skip("there is none")
    if installed:
        info = tmp_path / "collx-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: collx\nVersion: 1\n")
        line = f"collx = {BACKEND.value}"
        (info / "entry_points.txt").write_text(f"[{BACKEND.group}]\n{line}\n")
    program = f"import sys; sys.path.insert(0, sys.argv[1]); {ORDERS[order]}\n{FOUND}"
    [(code, output)] = interpreters.run(program, [(str(tmp_path),)], {}, 120, ("torch",))
    assert code == 0, output


def test_an_installed_package_has_the_same_entry_point() -> None:
    project = Path(__file__).resolve().parents[2] / "pyproject.toml"
    section = project.read_text().split(f"[project.entry-points.{BACKEND.group}]\n")[1]
    assert section.startswith(f'{BACKEND.name} = "{BACKEND.value}"\n')
