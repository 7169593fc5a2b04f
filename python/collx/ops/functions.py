"""Creates the built-in functions from their declarations and the table of operators.

A declaration has parameters and a docstring, but no body. Its parameters name the arguments of the
operators, which csrc/ops/operator_table.cpp lists. `csrc/bindings/function_table.cpp` defines which
operator a call selects. The built-in function parses the arguments of eager calls and calls the
operator. Its twin does the same in Python. Dynamo traces the twin. The built-in function calls the
twin for arguments that it does not convert itself, such as tensor subclasses and wrong types.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from functools import partial
from numbers import Real
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch.utils._pytree import tree_map_only

from collx._extension import extension
from collx._imports import after_import
from collx.epilogues import expression_of
from collx.ops import arguments

__all__ = ["Handle", "built_in", "post", "register", "twins"]

F = TypeVar("F", bound=Callable[..., Any])

Handle = extension.Handle

twins: dict[str, Callable[..., Any]] = {}
"""The Python twin of each function, by name."""
_made: list[Callable[..., Any]] = []
# For calls that Dynamo must not trace: it breaks the graph, or raises with fullgraph=True.
_out_of_graphs: dict[str, Callable[..., Any]] = {}


def built_in(declaration: F) -> F:
    """Creates the built-in function of a declaration. Raises ValueError if an operator needs an
    argument that the declaration has no parameter for."""
    name, module = declaration.__name__, declaration.__module__
    signature = inspect.signature(declaration)
    parameters = signature.parameters.values()
    made: F = extension.built_in(
        name=name,
        module=module,
        doc=_documentation(name, declaration, signature),
        names=tuple(p.name for p in parameters),
        defaults=tuple(... if p.default is p.empty else p.default for p in parameters),
        positional=sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters),
        declaration=declaration,
        twin=_twin(declaration, signature),
        conversions=arguments,
    )
    _made.append(made)
    return made


def _documentation(name: str, declaration: Callable[..., Any], signature: inspect.Signature) -> str:
    """Returns the docstring of a built-in function, which begins with its signature."""
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return f"{name}{inspect.Signature(bare)}\n--\n\n{inspect.getdoc(declaration)}"


def register() -> None:
    """Makes Dynamo trace the twins when it is imported."""
    after_import("torch._dynamo", _substitute)


def _substitute() -> None:
    from torch._dynamo.eval_frame import set_code_exec_strategy
    from torch._dynamo.types import FrameAction, FrameExecStrategy

    from collx.epilogues.guards import guarded_expression_of

    torch.compiler.substitute_in_graph(expression_of)(guarded_expression_of)
    # Otherwise, Dynamo would compile the conversion in eager calls that follow a graph break.
    skip = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
    set_code_exec_strategy(arguments.epilogue_arguments.__code__, skip)
    torch.compiler.substitute_in_graph(post, skip_signature_check=True)(_post)
    for function in _made:
        name = function.__name__
        torch.compiler.substitute_in_graph(function, skip_signature_check=True)(twins[name])
        _out_of_graphs[name] = torch.compiler.disable(
            partial(function),
            reason=f"collx.{name}: async_op=True: not supported in a compiled graph",
        )


def _post(function: Callable[..., Any], /, *args: Any, **named: Any) -> Handle:
    """Posts a call: starts it and returns a handle, while the program continues.

    Args:
        function: a collective or a fused normalization of collx.
        args, named: its arguments.

    Returns:
        A `Handle`. Its `wait` returns what the function returns. Invalid arguments raise an error
        here.

    Raises:
        TypeError: `function` is not a function that can be posted.
        NotImplementedError: an argument is a tensor subclass.

    Compiled graphs do not contain posted calls: torch.compile breaks the graph at the call, and
    raises an error with fullgraph=True.
    """
    if function not in _made:
        name = getattr(function, "__name__", repr(function))
        accepted = ", ".join(f"collx.{known}" for known in twins)
        raise TypeError(f"collx.post: function: got {name}; accepted: {accepted}")
    handle: Handle = function(*args, **named, async_op=True)
    return handle


_post.__qualname__ = "post"  # in the errors of Python
post: Callable[..., Handle] = extension.built_in_post(
    module=__name__, doc=_documentation("post", _post, inspect.signature(_post)), twin=_post
)


class _Variant(NamedTuple):
    """An overload that a call can select."""

    overload: Any
    arguments: tuple[str, ...]
    defaults: tuple[Any, ...]
    """The default values of the last arguments."""
    outputs: tuple[str, ...]
    is_norm: bool

    @staticmethod
    def of(packet: str, overload: str, is_norm: bool) -> _Variant:
        found = getattr(getattr(torch.ops.collx, packet), overload)
        schema = found._schema.arguments
        return _Variant(
            found,
            tuple(a.name for a in schema if not a.is_out),
            tuple(a.default_value for a in schema if a.has_default_value()),
            tuple(a.name for a in schema if a.is_out),
            is_norm,
        )


def _twin(declaration: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
    name, names = declaration.__name__, tuple(signature.parameters)
    defaults = {
        p.name: p.default for p in signature.parameters.values() if p.default is not p.empty
    }
    variants = {
        features: _Variant.of(packet, overload, is_norm)
        for features, packet, overload, is_norm in extension.variants(name)
    }
    # The epilogue of a normalization is an option of its operator.
    has_map = any("epilogue" in features for features in variants)

    def twin(*args: Any, **named: Any) -> Any:
        declaration(*args, **named)  # raises TypeError for unexpected arguments
        given = {**defaults, **dict(zip(names, args, strict=False)), **named}
        posts = given.get("async_op")
        if posts and torch.compiler.is_dynamo_compiling():
            return _out_of_graphs[name](*args, **named)
        features, values = _resolved(name, given, has_map)
        variant = variants.get(features)
        if variant is None:
            _refuse(name, features)
        if posts:
            return _post_converted(name, variant, given, values)
        return _call(name, variant, given, values)

    twins[name] = twin
    return twin


def _resolved(
    name: str, given: dict[str, Any], has_map: bool
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Returns the features that select the operator in the order of csrc/bindings/function_table.h,
    and the arguments of the operator that are computed from several parameters, or from a parameter
    with another name. `has_map`: whether an epilogue selects the operator."""
    features: list[str] = []
    values: dict[str, Any] = {}
    if given.get("epilogue") is not None:
        values["expression"], values["extras"], values["numbers"] = arguments.epilogue_arguments(
            name, given["epilogue"], given["input"], given["extras"], given["index"]
        )
        if has_map:
            features.append("epilogue")
    elif given.get("extras") or given.get("index"):
        arguments.refuse_without_epilogue(name, given["extras"])
    if name == "alltoallv":
        _check_splits(given)
        if given["device_splits"] is not None:
            features.append("device_splits")
            values["input_splits"] = given["device_splits"]
    if given.get("residual") is not None:
        features.append("residual")
    quantization = arguments.quantization_of(given.get("quantization"))
    if quantization is not None:
        features.append(quantization.kind)
        values.update(quantization.arguments())
    elif given.get("keep_norm") or given.get("scale") is not None:
        which = "keep_norm" if given["keep_norm"] else "scale"
        raise ValueError(
            f"collx.{name}: {which}: got a value without quantization=; accepted: with it"
        )
    if given.get("keep_norm"):
        features.append("keep_norm")
    if given.get("out") is not None:
        features.append("out")
    return tuple(features), values


def _check_splits(given: dict[str, Any]) -> None:
    output_splits, input_splits = given["output_splits"], given["input_splits"]
    if given["device_splits"] is None:
        if output_splits is None or input_splits is None or given["capacity"] is not None:
            raise ValueError(
                "collx.alltoallv: output_splits, input_splits: pass both without capacity, or pass "
                "device_splits and capacity"
            )
        return
    if input_splits is not None or given["capacity"] is None:
        raise ValueError(
            "collx.alltoallv: device_splits: requires capacity, and excludes input_splits"
        )
    out = given["out"]
    if (out is None) != (output_splits is None) or (
        out is not None and not isinstance(output_splits, torch.Tensor)
    ):
        missing = "out" if out is None else "output_splits"
        raise ValueError(
            f"collx.alltoallv: {missing}: got no tensor; with device_splits, pass both out and "
            "output_splits as tensors, or neither"
        )


def _post_converted(
    name: str, variant: _Variant, given: dict[str, Any], values: dict[str, Any]
) -> Any:
    """Posts a call that the built-in function did not accept with the types of its arguments."""
    converted = {parameter: _converted(value) for parameter, value in given.items()}
    converted["async_op"] = True  # also for other true values
    if any(converted[parameter] is not value for parameter, value in given.items()):
        return next(made for made in _made if made.__name__ == name)(**converted)
    # An invalid argument raises the error of the synchronous call. On the meta device, it does not
    # communicate.
    on_meta = tree_map_only(
        torch.Tensor, lambda t: torch.empty_like(t, device="meta"), [given, values]
    )
    _call(name, variant, *on_meta)
    raise NotImplementedError(
        f"collx.{name}: async_op: got True with a tensor subclass or another type that cannot be "
        "posted; accepted: plain tensors, and values of the documented types"
    )


def _converted(value: Any) -> Any:
    """Converts a number or string of another class, such as a number of NumPy, to Python's. Returns
    any other value itself."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, (tuple, list)):
        items = tuple(map(_converted, value))
        return value if items and all(map(operator.is_, items, value)) else items
    if isinstance(value, (bool, torch.Tensor)):
        return value
    if hasattr(value, "__index__"):
        return operator.index(value)
    return float(value) if isinstance(value, Real) else value


def _refuse(name: str, features: tuple[str, ...]) -> NoReturn:
    if "int8" in features:
        raise NotImplementedError(f"collx.{name}: quantization: got int8; accepted: fp8, or None")
    raise TypeError(f"collx.{name}: residual: got None; accepted: a tensor")


def _call(name: str, variant: _Variant, given: dict[str, Any], values: dict[str, Any]) -> Any:
    needs_size = "group_size" in variant.arguments
    values["group_name"], values["group_size"] = arguments.group_arguments(
        name, given["group"], needs_size
    )
    if "reduce_op" in given:
        values["reduce_op"] = arguments.reduce_op_argument(name, given["reduce_op"])
    first_default = len(variant.arguments) - len(variant.defaults)
    chosen = []
    for i, argument in enumerate(variant.arguments):
        if argument in values:
            chosen.append(values[argument])
        elif argument in given and argument != "extras":
            chosen.append(given[argument])
        else:
            chosen.append(variant.defaults[i - first_default])
    while len(chosen) > first_default and _is(
        chosen[-1], variant.defaults[len(chosen) - 1 - first_default]
    ):
        chosen.pop()
    out = given.get("out")
    if out is None:
        made = variant.overload(*chosen)
        return given["input"] if name.endswith("_") else made
    outs = _outputs(variant, given, out)
    variant.overload(*chosen, **dict(zip(variant.outputs, outs, strict=True)))
    return outs if name == "alltoallv" and len(outs) == 2 else out


def _is(value: Any, default: Any) -> bool:
    return value is None if default is None else type(value) is type(default) and value == default


def _outputs(variant: _Variant, given: dict[str, Any], out: Any) -> tuple[torch.Tensor, ...]:
    if "output_splits" in variant.outputs:
        return out, given["output_splits"]
    if not variant.is_norm or isinstance(out, torch.Tensor):
        outs: tuple[torch.Tensor, ...] = (out,)
    else:
        outs = tuple(out)
    if len(outs) != len(variant.outputs):
        raise ValueError(
            f"collx.{variant.overload._opname}: out: {len(outs)} tensors; accepted: "
            f"{len(variant.outputs)}: {', '.join(variant.outputs)}"
        )
    return outs
