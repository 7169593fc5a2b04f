"""Every overload of the operators, from the registered schemas, and arguments for it. New operators
are therefore tested automatically."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

import collx
from collx import Quantization
from collx._extension import extension
from collx.ops.functions import twins

from .rank import Rank

COLS = 256

MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "grad": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


def all_overloads() -> list[Any]:
    products = ("allgather_matmul", "matmul_reducescatter")  # defined in Python: products.py
    found = []
    for full in sorted(torch._C._dispatch_get_all_op_names()):
        if not full.startswith("collx::"):
            continue
        name, _, overload = full.removeprefix("collx::").partition(".")
        if name in products:
            continue
        found.append(getattr(getattr(torch.ops.collx, name), overload or "default"))
    return found


def written_by(overload: Any) -> list[str]:
    """Returns the arguments that an overload writes."""
    return [
        argument.name
        for argument in overload._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def results_of(overload: Any, returned: Any, arguments: dict[str, Any]) -> list[torch.Tensor]:
    """Returns the results of a call that returned this."""
    if written_by(overload):
        return [arguments[name] for name in written_by(overload)]
    return list(returned) if isinstance(returned, tuple) else [returned]


def writing_overloads() -> list[Any]:
    return [overload for overload in all_overloads() if written_by(overload)]


def name_in_errors(overload: Any) -> str:
    """Returns the name of an overload in error messages. `overload`: the overload, or its name."""
    return str(overload).removeprefix("collx.").split(".")[0].removesuffix("_")


def as_function_call(
    overload: Any, arguments: dict[str, Any]
) -> tuple[Callable[..., Any] | None, dict[str, Any]]:
    """Returns the Python function that calls the overload, and its arguments for the same call.
    Returns None for the forms with an epilogue, because a function does not accept its text."""
    this = (overload._opname, overload._overloadname)
    for name in twins:
        for features, *called, _ in extension.variants(name):
            if tuple(called) == this and "epilogue" not in features:
                return getattr(collx, name), _parameters(features, overload, arguments)
    return None, {}


def _parameters(
    features: tuple[str, ...], overload: Any, arguments: dict[str, Any]
) -> dict[str, Any]:
    given = dict(arguments)
    outs = [a.name for a in overload._schema.arguments if a.is_out]
    given["group"] = given.pop("group_name")
    given.pop("group_size", None)
    kind = next((kind for kind in ("fp8", "int8") if kind in features), None)
    if kind is not None:
        options = {n: given.pop(n) for n in Quantization(kind).arguments() if n in given}
        given["quantization"] = Quantization(kind, **options)
        given["keep_norm"] = "keep_norm" in features
    if "device_splits" in features:
        given["device_splits"] = given.pop("input_splits")
    elif outs and "eps" in given:
        given["out"] = tuple(given.pop(name) for name in outs)
    return given


def arguments_without_outs(
    rank: Rank, group_name: str, overload: Any, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Returns the arguments without a default, except outputs: inputs and tensors that are written
    in place."""
    name = str(overload)
    rows = 2 * rank.size
    norm = "norm" in name
    own = 2 if "reducescatter" in name else rows

    def tensor(*shape: int, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, dtype=dtype, generator=generator).to(rank.device)

    splits: Any = [2] * rank.size
    values = {
        "input": tensor(rows, COLS, seed=1 + rank.rank),
        "value": tensor(rows, COLS),
        "residual": tensor(own, COLS),
        "weight": tensor(COLS),
        "bias": tensor(COLS),
        "eps": 1e-6,
        "reduce_op": "sum",
        "expression": "value.float32;neg.float32 0",
        "extras": [],
        "root": 0,
        "group_size": rank.size,
        "group_name": group_name,
        "output_splits": splits,
        "input_splits": torch.tensor(splits, device=rank.device) if "device" in name else splits,
        "capacity": rows,
    }
    return {
        argument.name: values[argument.name]
        for argument in overload._schema.arguments
        if not argument.has_default_value() and not (argument.kwarg_only and argument.is_out)
    } | ({"scale_mode": "row"} if norm and "8" in name else {})


def arguments_for(
    rank: Rank, group_name: str, overload: Any, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Returns all arguments. The outputs of out variants are the results of the functional form."""
    given = arguments_without_outs(rank, group_name, overload, dtype)
    outs = [name for name in written_by(overload) if name not in given]
    if outs:
        sibling = overload._overloadname.removesuffix("out").removesuffix("_") or "default"
        results = getattr(overload._overloadpacket, sibling)(**given)
        results = results if isinstance(results, tuple) else (results,)
        given.update(zip(outs, results, strict=True))
    return given
