"""Tests that the schemas of all operators and the public functions are those in surface.txt.

Programs and compiled graphs depend on them. If you change one, change the package's version and
write the file again:

    PYTHONPATH=python python -m tests.cpu.test_surface > tests/cpu/surface.txt
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

import collx

FROZEN = Path(__file__).with_name("surface.txt")


def schemas() -> Iterator[str]:
    """Yields the schemas of all overloads, each followed by its tags."""
    names = sorted(n for n in torch._C._dispatch_get_all_op_names() if n.startswith("collx::"))
    for full in names:
        packet, _, overload = full.removeprefix("collx::").partition(".")
        found = getattr(getattr(torch.ops.collx, packet), overload or "default")
        tags = " ".join(sorted(str(tag).removeprefix("Tag.") for tag in found.tags))
        yield f"{found._schema}  [{tags}]"


def signatures(module: ModuleType, prefix: str) -> Iterator[str]:
    """Yields the signatures of all public names, including methods, without annotations."""
    for name in sorted(module.__all__):
        value = getattr(module, name)
        if isinstance(value, ModuleType):
            yield f"{prefix}.{name}"
        elif inspect.isclass(value):
            bases = ", ".join(base.__name__ for base in value.__bases__)
            yield f"class {prefix}.{name}({bases})"
            for member, inner in sorted(vars(value).items()):
                if member.startswith("_") and member != "__init__":
                    continue
                yield f"  {prefix}.{name}.{member}{parameters(inner)}"
        else:
            yield f"{prefix}.{name}{parameters(value)}"


def parameters(value: object) -> str:
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if not (inspect.isfunction(value) or inspect.isbuiltin(value)):
        return ""
    signature = inspect.signature(value)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(inspect.Signature(bare))


def surface() -> list[str]:
    modules = (collx, collx.compile, collx.nn)
    return [*schemas(), *(line for m in modules for line in signatures(m, m.__name__))]


def test_the_surface_is_the_frozen_one() -> None:
    frozen = FROZEN.read_text().splitlines()
    changed = [
        line
        for line in difflib.unified_diff(frozen, surface(), "frozen", "found", n=0, lineterm="")
        if not line.startswith("@@")
    ]
    assert not changed, "the public surface has changed:\n" + "\n".join(changed)


def test_what_writes_an_argument_returns_nothing() -> None:
    found = list(schemas())
    assert len(found) > 50
    assert all("pt2_compliant_tag" in line for line in found)
    outs = [line for line in found if ", *, Tensor(a!)" in line]
    assert outs
    assert all("out_variant" in line and "-> ()" in line for line in outs)


if __name__ == "__main__":
    print("\n".join(surface()))
