"""Registers the backend, a part of the cache keys, and the function that keeps effect tokens with
PyTorch's compiler when a program imports it."""

from __future__ import annotations

from importlib.metadata import EntryPoint

from collx._imports import after_import
from collx.compile import keys, marks

__all__ = ["register"]

BACKEND = EntryPoint("collx", "collx.compile.rewriting:backend", "torch_dynamo_backends")
"""Equal to the entry point in pyproject.toml, which only exists in an installed package."""


def register() -> None:
    """Registers the hooks. `import collx` calls this once and must not import the compiler."""
    after_import("torch._dynamo.backends.registry", _add_backend)
    after_import("torch._functorch._aot_autograd.runtime_wrappers", marks.keep_tokens)
    after_import("torch._inductor.codegen.common", keys.register)


def _add_backend() -> None:
    from torch._dynamo.backends import registry

    # Not register_backend(): PyTorch calls it itself for the entry point of an installed package,
    # and refuses a second function of the same name.
    registry._BACKENDS.setdefault(BACKEND.name, BACKEND)
