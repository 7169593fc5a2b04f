"""The part of PyTorch's compile cache keys that depends on collx.

The shapes in a graph can depend on the rank: `reducescatter` divides a size that is not divisible
by the number of ranks into unequal parts. The graph itself only contains the name of the
communicator, and ranks often share a cache. So every key contains the rank.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from torch.fx import GraphModule

from collx._version import VERSION
from collx.communicator import live
from collx.compile.operators import making, writing

__all__ = ["register", "state"]


def state(*options: object) -> bytes:
    """A hash of everything outside of a graph that affects its code: the version of collx, its
    operators, the live communicators with this process's rank in each, and `options`."""
    communicators = sorted(
        (
            one.name,
            one.rank,
            one.world_size,
            one.group_name,
            str(one.device),
            str(one.fallback_reason),
        )
        for one in live()
    )
    return hashlib.sha256(repr((_package(), communicators, options)).encode()).digest()


@cache
def _package() -> str:
    hasher = hashlib.sha256(VERSION.encode())
    for op in (*making(), *(form.op for form in writing())):
        hasher.update(str(op._schema).encode())
    here = Path(__file__).parent
    for folder in (here, here.with_name("epilogues")):
        for path in sorted(folder.glob("*.py")):
            hasher.update(path.read_bytes())
    return hasher.hexdigest()


def register() -> None:
    """Adds `state` to every key of Inductor and AOTAutograd, whichever backend uses them."""
    from torch._inductor.codegen.common import custom_backend_passes
    from torch._inductor.custom_graph_pass import CustomGraphModulePass

    class Key(CustomGraphModulePass):
        """Every key contains the uuid of each pass that is registered for a device type. Inductor
        runs the pass on graphs that use this type, and no device has it."""

        def __call__(self, gm: GraphModule) -> None:
            raise AssertionError("a graph has tensors on a device named collx")

        def uuid(self) -> bytes:
            return state()

    custom_backend_passes["collx"] = Key()
