"""Matches a quantization after a normalization: y becomes q and, unless it is given, a scale.

    largest  amax(abs(y)) over a row, in y's dtype or float32
    scale    largest / limit, or max(largest, 1e-10) / limit; or a given tensor of one element
    q        convert(clamp(float32(y) * (1 / scale)))      operators with scales of rows
             convert(clamp(float32(y) / scale))            operators with a given scale

limit is the largest value of q's dtype. int8 is rounded before or after the clamp. If a model
divides and the operator multiplies, or vice versa, one of them rounds once more.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple, cast

import torch
from torch.fx import Node

from collx.compile.matching import (
    CONVERTS,
    constant,
    converted,
    equal,
    in_float32,
    is_last,
    only_user,
    other_operand,
    value,
)

__all__ = ["Quantized", "quantized_after"]

_aten = torch.ops.aten
_NAMES = {torch.float8_e4m3fn: "e4m3fn", torch.float8_e5m2: "e5m2", torch.int8: "int8"}
_LARGEST = (_aten.amax.default, _aten.max.dim)
_SAME_VALUES = (operator.getitem, _aten.unsqueeze.default)
_LEAST_OF_GROUP = 1e-10  # the minimum magnitude of a group in the operators
_LONGEST_PATH = 8  # from the magnitudes to the scale


class Quantized(NamedTuple):
    """A quantization of a normalized tensor."""

    q: Node
    kind: str
    """"fp8" or "int8", as in the names of the operators."""
    scale: Node | None
    """The computed scale of shape [..., 1], or None if the scale is given."""
    options: dict[str, Any]
    """Arguments of the operator. A node stands for a tensor."""
    keeps_norm: bool
    """Whether the normalized tensor is also used elsewhere."""
    unlike: str
    """Why no operator rounds the same way, or "" if one does."""


class _Rows(NamedTuple):
    """Scales of rows."""

    scale: Node
    options: dict[str, Any]
    below: list[Node]
    """The nodes that the scale is computed from, starting with y or y in float32."""


def quantized_after(y: Node) -> Quantized | str | None:
    """Returns the quantization of a normalized tensor, or the reason why no operator supports it.
    Returns None if nothing resembles a quantization."""
    for wide in {y: None, **dict.fromkeys(in_float32(y))}:
        for product in wide.users:
            factor = other_operand(product, wide, _aten.mul.Tensor)
            if product.target is _aten.div.Tensor and product.args[0] is wide:
                factor = other_operand(product, wide, _aten.div.Tensor)
            steps = _steps_to_q(product) if factor is not None else []
            if factor is not None and steps:
                return _quantized(y, wide, factor, [product, *steps])
    return None


def _steps_to_q(product: Node) -> list[Node]:
    """Returns the nodes after a product up to a conversion to a one-byte dtype, which is the last.
    Returns an empty list if there is no such conversion."""
    between = (_aten.round.default, _aten.clamp_min.default, _aten.clamp_max.default)
    steps, node = [], product
    while (step := only_user(node, *between, _aten.clamp.default, *CONVERTS)) is not None:
        steps.append(step)
        if value(step).dtype.itemsize == 1:
            return steps
        node = step
    return []


def _quantized(y: Node, wide: Node, factor: Node, chain: list[Node]) -> Quantized | str:
    product, *between, q = chain
    dtype = value(q).dtype
    if dtype not in _NAMES:
        return f"it is quantized to {dtype}"
    if value(product).dtype != torch.float32:
        return f"it is scaled in {value(product).dtype}, not in float32"
    if not equal(value(q).shape, value(y).shape):
        return "the scale changes its shape"
    divides = product.target is _aten.div.Tensor
    scale = factor if divides else _inverted(factor)
    if scale is None:
        return "its multiplier is not the inverse of a scale"
    limit = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    rows = _rows(scale, y, limit)
    if isinstance(rows, str):
        return rows
    reason = _no_conversion(between, limit, dtype, rows is not None)
    if reason:
        return reason
    kind = "int8" if dtype == torch.int8 else "fp8"
    options: dict[str, Any] = {} if kind == "int8" else {"fp8_dtype": _NAMES[dtype]}
    inner, unlike = {y, wide, *chain}, ""
    if rows is not None:
        options |= rows.options
        inner |= {*rows.below, rows.scale}
        if divides:
            unlike = "it is divided by the scales of its rows, not multiplied by their inverse"
        elif value(factor).dtype != torch.float32:
            unlike = f"the inverse of its scales is rounded to {value(factor).dtype}"
    elif equal([value(scale).numel()], [1]) and value(scale).dtype == torch.float32:
        options |= {"scale_mode": "tensor", "scale": scale}
        if not divides:
            unlike = "it is multiplied by the inverse of a given scale, not divided by the scale"
    else:
        shape = tuple(value(scale).shape)
        dtype = value(scale).dtype
        return f"the scale is neither one for each row nor one of float32: {dtype} {shape}"
    made = {q} if rows is None else {q, rows.scale}
    keeps_norm = any(user not in inner for node in inner - made for user in node.users)
    return Quantized(q, kind, rows.scale if rows else None, options, keeps_norm, unlike)


def _no_conversion(between: list[Node], limit: float, dtype: torch.dtype, rows: bool) -> str:
    """Returns why the nodes between the product and q differ from the clamp and the rounding of
    the operators, "" if they do not."""
    lows, highs, rounds = [], [], False
    for node in between:
        if node.target is _aten.clamp.default:
            low, high = (*node.args[1:], None, None)[:2]
            lows.append(low)
            highs.append(high)
        elif node.target is _aten.clamp_min.default:
            lows.append(node.args[1])
        elif node.target is _aten.clamp_max.default:
            highs.append(node.args[1])
        elif node.target in CONVERTS:
            return f"the scaled tensor is converted to {value(node).dtype} first"
        else:
            rounds = True
    # With its own scale, no row reaches -128.
    lowest = [-128.0] if rows and dtype == torch.int8 and lows == [-128] else [-limit]
    if lows != lowest or highs != [limit]:
        return f"it is clamped to {lows} and {highs}, not to {-limit:g} and {limit:g}"
    if rounds != (dtype == torch.int8):
        return (
            "it is truncated, not rounded" if dtype == torch.int8 else "it is rounded to integers"
        )
    return ""


def _inverted(factor: Node) -> Node | None:
    """Returns the scale whose inverse is `factor`, None if it is not an inverse."""
    if constant(factor, _aten.mul.Tensor) == 1:  # of 1 / scale
        factor = cast(Node, factor.args[0])
    return cast(Node, factor.args[0]) if factor.target is _aten.reciprocal.default else None


def _rows(scale: Node, y: Node, limit: float) -> _Rows | str | None:
    """Returns how a scale is computed from the largest magnitudes of y's rows, or the reason why no
    operator computes it that way. Returns None if it does not depend on y's magnitudes alone."""
    path = _path_from_magnitudes(scale, y)
    if not path:
        return None
    magnitudes, largest, *above = path
    over = largest.args[1] if len(largest.args) > 1 else None
    shape = (*value(y).shape[:-1], 1)
    of_rows = is_last(over, y) and equal(value(scale).shape, shape)
    if largest.target not in _LARGEST or not of_rows:
        return "the scales are not those of rows"
    options: dict[str, Any] = {"scale_mode": "row"}
    of = cast(Node, magnitudes.args[0])
    below, quotient = [of, magnitudes, largest], None
    dtype = value(y).dtype  # a dtype that represents all values so far
    for node in (of, *above) if of is not y else above:
        if converted(node) is not None and value(node).dtype not in (dtype, torch.float32):
            return f"the scales or the magnitudes are rounded to {value(node).dtype}"
        least = constant(node, _aten.clamp_min.default)
        if node.target in (_aten.clamp_min.default, _aten.div.Tensor):
            dtype = value(node).dtype
        if least is not None:
            what = "largest magnitude" if quotient is None else "scale"
            of_group = what == "largest magnitude" and value(node).dtype == torch.float32
            if not of_group or least != _LEAST_OF_GROUP:
                return f"the minimum {what} is {least} in {value(node).dtype}"
            options = {"scale_mode": "group", "quant_group_size": value(y).shape[-1]}
        elif constant(node, _aten.div.Tensor) == limit and quotient is None:
            quotient = node
        elif converted(node) is None and node.target not in _SAME_VALUES:
            return f"the scales are not the largest magnitudes divided by {limit:g}: {node.target}"
        if quotient is None:
            below.append(node)
    if quotient is None:
        return f"the scales are not the largest magnitudes divided by {limit:g}"
    if value(quotient).dtype != torch.float32:
        if value(quotient).dtype != value(y).dtype:
            return f"the scales are rounded to {value(quotient).dtype}"
        options["scale_dtype"] = "input"
    return _Rows(quotient, options, below)


def _path_from_magnitudes(scale: Node, y: Node) -> list[Node]:
    """Returns the nodes from abs(y) to a scale. Returns an empty list if the scale also depends on
    other tensors."""
    path = [scale]
    while path[0].target is not _aten.abs.default:
        inputs = path[0].all_input_nodes
        if len(inputs) != 1 or len(path) > _LONGEST_PATH:
            return []
        path.insert(0, inputs[0])
    of = cast(Node, path[0].args[0])
    return path if of is y or converted(of) is y else []
