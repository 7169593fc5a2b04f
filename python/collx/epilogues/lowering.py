"""Translates the graph of an elementwise function to the text of an expression.

A text is a list of statements, separated by semicolons. The last statement is the result:

    value.bfloat16;cast.float32 0;extra.bfloat16 0;cast.float32 2;add.float32 1 3;cast.bfloat16 4

Each statement has a name, a type, and operands: the numbers of other statements, or for a leaf its
own number. All statements are different, so functions with the same ops have the same text.
csrc/protocol/expression.h parses the text and defines the meaning of each name.

A function is traced in the wide type of the value, float32 for float16 and bfloat16, and rounded
once at the end. Casts of the function to a narrow type round as in PyTorch. The ops of a model's
graph have narrow types, so each of them is rounded.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

__all__ = [
    "MOST_EXTRAS",
    "MOST_STATEMENTS",
    "Lowering",
    "Refusal",
    "accepts",
    "lower",
    "wide",
]

aten = torch.ops.aten

_NAMES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.uint8: "uint8",
    torch.bool: "bool",
}
_NARROW = (torch.float16, torch.bfloat16)

# As in csrc/protocol/expression.h.
MOST_STATEMENTS = 256
MOST_EXTRAS = 8
_FORMATS = {"float32": "f", "float64": "d"}
# PyTorch's arithmetic of bools is logic.
_OF_BOOLS = {"add": "or", "mul": "and", "minimum": "and", "maximum": "or"}
_OF_NUMBERS = {"sub", "neg", "abs", "relu", "clamp_min", "clamp_max", "floor_divide", "remainder"}


class Refusal(Exception):
    """A part of a function cannot be an epilogue."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the type in which arithmetic of a dtype is computed."""
    return torch.float32 if dtype in _NARROW else dtype


class Writer:
    """Collects statements without duplicates."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self.types: list[torch.dtype] = []

    def add(self, name: str, dtype: torch.dtype, *operands: int | str) -> int:
        """Returns the number of a statement. Adds the statement if it is new."""
        if dtype not in _NAMES:
            raise Refusal(f"dtype {dtype}; accepted: {', '.join(_NAMES.values())}")
        if dtype == torch.bool:
            name = _OF_BOOLS.get(name, name)
            if name in _OF_NUMBERS:
                raise Refusal(f"{name} of bools; accepted: of numbers")
        text = " ".join([f"{name}.{_NAMES[dtype]}", *map(str, operands)])
        if text not in self._numbers:
            self._numbers[text] = len(self.types)
            self.types.append(dtype)
        return self._numbers[text]

    def constant(self, value: float | bool, dtype: torch.dtype) -> int:
        name = _NAMES[dtype]
        if dtype.is_floating_point:
            # Rounded to the type as PyTorch rounds a Python number. Hexadecimal preserves all bits.
            rounded = torch.tensor(float(value), dtype=dtype, device="cpu").item()
            bits = struct.pack(">" + _FORMATS[name], rounded).hex()
        else:
            whole = int(bool(value) if dtype == torch.bool else value)
            bits = format(whole & (1 << 8 * dtype.itemsize) - 1, f"0{2 * dtype.itemsize}x")
        return self.add("constant", dtype, bits)

    def cast(self, number: int, dtype: torch.dtype) -> int:
        return number if self.types[number] == dtype else self.add("cast", dtype, number)

    def text(self, last: int) -> str:
        """Returns the text of the statements that `last` needs, with `last` as the last one."""
        texts = list(self._numbers)
        operands = {n: self._operands(texts[n]) for n in range(len(texts))}
        needed, pending = set(), [last]
        while pending:
            number = pending.pop()
            if number not in needed:
                needed.add(number)
                pending += operands[number]
        order = [*sorted(needed - {last}), last]
        place = {number: at for at, number in enumerate(order)}
        kept = []
        for number in order:
            name, *rest = texts[number].split(" ")
            kept.append(
                " ".join([name, *(str(place[n]) for n in operands[number])])
                if operands[number]
                else " ".join([name, *rest])
            )
        return ";".join(kept)

    @staticmethod
    def _operands(text: str) -> list[int]:
        name, *rest = text.split(" ")
        leaf = name.partition(".")[0] in ("value", "extra", "index", "constant", "number")
        return [] if leaf else [int(number) for number in rest]


class Lowering:
    """Translates the nodes of a graph, one after the other.

    Args:
        unrounded: a narrow type to which only the result is rounded.
    """

    def __init__(self, unrounded: torch.dtype | None = None) -> None:
        self.writer = Writer()
        self.numbers: dict[fx.Node, int] = {}
        self._unrounded = unrounded
        # Numbers of a call, and values that are only computed from them, are float64 and int64 as
        # in Python. In an op with a tensor, they have the type of the tensor, like Python numbers.
        self._scalars: set[fx.Node] = set()
        self._given: dict[fx.Node, str] = {}  # the scalars that are numbers of the call
        self._rounded: dict[int, int] = {}  # statement in the wide type -> in the narrow type

    def leaf(self, node: fx.Node, dtype: torch.dtype, name: str, *which: str) -> None:
        """Adds a node that represents the value, an extra, a coordinate or a number."""
        if name == "number":
            self._scalars.add(node)
            self._given[node] = which[0]
            dtype = self.type_of(node)
        number = self.writer.add(name, dtype, *which)
        self.numbers[node] = self.writer.cast(number, wide(dtype))

    def constant(self, node: fx.Node, value: float | bool) -> None:
        """Adds a node that represents a constant."""
        dtype = node.meta["val"].dtype
        self.numbers[node] = self.writer.constant(self._number(value, dtype), wide(dtype))

    def node(self, node: fx.Node) -> None:
        """Adds a call whose operands have been added. Raises Refusal if it is not elementwise."""
        lower = _OPS.get(node.target)
        if lower is None:
            raise Refusal(f"{_name_of(node)}; accepted: {', '.join(_accepted())}")
        if node.all_input_nodes and self._scalars.issuperset(node.all_input_nodes):
            self._scalars.add(node)
        number = lower(self, node, *node.args, **node.kwargs)
        dtype = node.meta["val"].dtype
        if self._rounds(dtype):
            narrow = self.writer.cast(number, dtype)
            number = self.writer.cast(narrow, wide(dtype))
            self._rounded[number] = narrow
        self.numbers[node] = number

    def text(self, result: fx.Node, dtype: torch.dtype) -> str:
        """Returns the text of an expression with that result, rounded to that type."""
        number = self.numbers[result]
        narrow = self._rounded.get(number)
        if narrow is not None and self.writer.types[narrow] == dtype:
            return self.writer.text(narrow)
        return self.writer.text(self.writer.cast(number, dtype))

    def operand(self, value: Any, dtype: torch.dtype) -> int:
        """Returns the statement of a node or a Python number in that type."""
        if isinstance(value, fx.Node):
            if value not in self.numbers:
                raise Refusal(f"an operand {value}")
            if value in self._given:
                return self.writer.add("number", dtype, self._given[value])
            return self.writer.cast(self.numbers[value], dtype)
        if isinstance(value, (bool, int, float)):
            return self.writer.constant(value, dtype)
        raise Refusal(f"an operand {value!r}")

    def type_of(self, node: fx.Node) -> torch.dtype:
        """Returns the type in which a node is computed."""
        dtype: torch.dtype = node.meta["val"].dtype
        if node not in self._scalars or dtype == torch.bool:
            return wide(dtype)
        return torch.float64 if dtype.is_floating_point else torch.int64

    def arithmetic(self, node: fx.Node, name: str, *operands: Any) -> int:
        dtype = self.type_of(node)
        return self.writer.add(name, dtype, *(self.operand(o, dtype) for o in operands))

    def compared(self, node: fx.Node, name: str, *operands: Any) -> int:
        """Adds a comparison in the type to which PyTorch promotes the operands, including
        numbers."""
        values = [o.meta["val"] if isinstance(o, fx.Node) else o for o in operands]
        dtype = torch.result_type(*values)
        if node in self._scalars:
            dtype = torch.float64 if dtype.is_floating_point else torch.int64
        return self.writer.add(name, torch.bool, *(self._compared(o, dtype) for o in operands))

    def _compared(self, operand: Any, dtype: torch.dtype) -> int:
        """Returns the statement of an operand of a comparison. Rounds numbers to the type."""
        if not isinstance(operand, fx.Node):
            return self.operand(self._number(operand, dtype), wide(dtype))
        number = self.operand(operand, wide(dtype))
        if operand in self._scalars and self._rounds(dtype):
            number = self.writer.cast(self.writer.cast(number, dtype), wide(dtype))
        return number

    def _rounds(self, dtype: torch.dtype) -> bool:
        return dtype in _NARROW and dtype != self._unrounded

    def _number(self, value: Any, dtype: torch.dtype) -> Any:
        """Rounds a Python number as a tensor of that type does."""
        if not self._rounds(dtype) or not isinstance(value, (bool, int, float)):
            return value
        return torch.tensor(value, dtype=dtype, device="cpu").item()


Lower = Callable[..., int]


def _same(name: str) -> Lower:
    """Returns the lowering of an op whose operands have the type of its result."""
    return lambda low, node, *operands: low.arithmetic(node, name, *operands)


def _compare(name: str) -> Lower:
    return lambda low, node, *operands: low.compared(node, name, *operands)


def _scaled(name: str) -> Lower:
    def lower(low: Lowering, node: fx.Node, a: Any, b: Any, *, alpha: float = 1) -> int:
        if alpha not in (1, -1):
            raise Refusal(
                f"{_name_of(node)} with alpha={alpha!r}; accepted: 1 and -1, or a product"
            )
        sign = name if alpha == 1 else {"add": "sub", "sub": "add"}[name]
        return low.arithmetic(node, sign, a, b)

    return lower


def _reversed_sub(low: Lowering, node: fx.Node, a: Any, b: Any, alpha: float = 1) -> int:
    return _scaled("sub")(low, node, b, a, alpha=alpha)


def _divide(low: Lowering, node: fx.Node, a: Any, b: Any, rounding_mode: str | None = None) -> int:
    if rounding_mode == "floor":
        return _floor_divide("floor_divide")(low, node, a, b)
    if rounding_mode is not None:
        raise Refusal(f"div with rounding_mode={rounding_mode!r}; accepted: None, 'floor'")
    return low.arithmetic(node, "div", a, b)


def _floor_divide(name: str) -> Lower:
    def lower(low: Lowering, node: fx.Node, a: Any, b: Any) -> int:
        if node.meta["val"].dtype.is_floating_point or not isinstance(b, int) or b <= 0:
            raise Refusal(f"{_name_of(node)}; accepted: of integers, by a positive Python integer")
        return low.arithmetic(node, name, a, b)

    return lower


def _check_fits(bound: int, dtype: torch.dtype) -> None:
    """Raises Refusal for a bound at which PyTorch raises an error; other operands wrap."""
    try:
        torch.scalar_tensor(bound, dtype=dtype, device="cpu")
    except RuntimeError as error:
        raise Refusal(f"clamp to {bound}: {error}") from None


def _clamp(low: Lowering, node: fx.Node, x: Any, least: Any = None, most: Any = None) -> int:
    dtype = low.type_of(node)
    number = low.operand(x, dtype)
    for bound in (least, most):
        if isinstance(bound, int):
            _check_fits(bound, dtype)
    if least is not None:
        number = low.writer.add("clamp_min", dtype, number, low.operand(least, dtype))
    if most is not None:
        number = low.writer.add("clamp_max", dtype, number, low.operand(most, dtype))
    return number


def _gelu(low: Lowering, node: fx.Node, x: Any, *, approximate: str = "none") -> int:
    return low.arithmetic(node, "gelu" if approximate == "none" else "gelu_tanh", x)


def _add_product(low: Lowering, node: fx.Node, a: Any, b: Any, c: Any, *, value: float = 1) -> int:
    dtype = low.type_of(node)
    add, factor = low.writer.add, low.operand(b, dtype)
    if value != 1:
        factor = add("mul", dtype, low.operand(value, dtype), factor)
    product = add("mul", dtype, factor, low.operand(c, dtype))
    return add("add", dtype, low.operand(a, dtype), product)


def _reciprocal(low: Lowering, node: fx.Node, x: Any) -> int:
    return low.arithmetic(node, "div", 1, x)


def _power(low: Lowering, node: fx.Node, x: Any, exponent: Any) -> int:
    dtype = low.type_of(node)
    add, number = low.writer.add, low.operand(x, dtype)
    if exponent in (1, 2, 3) and not isinstance(exponent, fx.Node):
        power = number
        for _ in range(int(exponent) - 1):
            power = add("mul", dtype, power, number)
        return power
    if exponent == 0.5:
        return add("sqrt", dtype, number)
    if exponent == -1 and dtype.is_floating_point:
        return add("div", dtype, low.operand(1, dtype), number)
    raise Refusal(f"pow with exponent {exponent!r}; accepted: 1, 2, 3, 0.5, -1")


def _where(low: Lowering, node: fx.Node, condition: Any, a: Any, b: Any) -> int:
    dtype = low.type_of(node)
    which = low.operand(condition, torch.bool)
    return low.writer.add("where", dtype, which, low.operand(a, dtype), low.operand(b, dtype))


def _cast(
    low: Lowering, node: fx.Node, x: Any, *, dtype: torch.dtype | None = None, **options: Any
) -> int:
    number = low.numbers[x]
    return number if dtype is None else low.writer.cast(number, wide(dtype))


def _converted(low: Lowering, node: fx.Node, x: Any, dtype: torch.dtype) -> int:
    return _cast(low, node, x, dtype=dtype)


def _number(low: Lowering, node: fx.Node, value: Any, **options: Any) -> int:
    return low.writer.constant(value, wide(node.meta["val"].dtype))


def _filled(low: Lowering, node: fx.Node, like: Any, value: Any = 0, **options: Any) -> int:
    return _number(low, node, value)


def _logical(name: str) -> Lower:
    return lambda low, node, *operands: low.writer.add(
        name, torch.bool, *(low.operand(o, torch.bool) for o in operands)
    )


def _bitwise(name: str) -> Lower:
    def lower(low: Lowering, node: fx.Node, *operands: Any) -> int:
        if node.meta["val"].dtype != torch.bool:
            raise Refusal(f"{_name_of(node)} of integers; accepted: of bools")
        return _logical(name)(low, node, *operands)

    return lower


def _kept(low: Lowering, node: fx.Node, x: Any, *rest: Any, **options: Any) -> int:
    return low.numbers[x]


_OPS: dict[Any, Lower] = {
    aten.add.Tensor: _scaled("add"),
    aten.sub.Tensor: _scaled("sub"),
    aten.rsub.Scalar: _reversed_sub,
    aten.rsub.Tensor: _reversed_sub,
    aten.mul.Tensor: _same("mul"),
    aten.addcmul.default: _add_product,
    aten.div.Tensor: _divide,
    aten.div.Tensor_mode: _divide,
    aten.floor_divide.default: _floor_divide("floor_divide"),
    aten.remainder.Scalar: _floor_divide("remainder"),
    aten.remainder.Tensor: _floor_divide("remainder"),
    aten.neg.default: _same("neg"),
    aten.abs.default: _same("abs"),
    aten.minimum.default: _same("minimum"),
    aten.maximum.default: _same("maximum"),
    aten.clamp.default: _clamp,
    aten.clamp.Tensor: _clamp,
    aten.clamp_min.default: _clamp,
    aten.clamp_min.Tensor: _clamp,
    aten.clamp_max.default: lambda low, node, x, most: _clamp(low, node, x, None, most),
    aten.clamp_max.Tensor: lambda low, node, x, most: _clamp(low, node, x, None, most),
    aten.relu.default: _same("relu"),
    aten.pow.Tensor_Scalar: _power,
    aten.reciprocal.default: _reciprocal,
    aten.sqrt.default: _same("sqrt"),
    aten.rsqrt.default: _same("rsqrt"),
    aten.exp.default: _same("exp"),
    aten.log.default: _same("log"),
    aten.tanh.default: _same("tanh"),
    aten.sigmoid.default: _same("sigmoid"),
    aten.silu.default: _same("silu"),
    aten.erf.default: _same("erf"),
    aten.gelu.default: _gelu,
    aten.where.self: _where,
    aten.logical_and.default: _logical("and"),
    aten.logical_or.default: _logical("or"),
    aten.logical_xor.default: _logical("xor"),
    aten.logical_not.default: _logical("not"),
    aten.bitwise_and.Tensor: _bitwise("and"),
    aten.bitwise_or.Tensor: _bitwise("or"),
    aten.bitwise_xor.Tensor: _bitwise("xor"),
    aten.bitwise_not.default: _bitwise("not"),
    aten._to_copy.default: _cast,
    torch.ops.prims.convert_element_type.default: _converted,
    aten.scalar_tensor.default: _number,
    aten.full_like.default: _filled,
    aten.zeros_like.default: _filled,
    aten.ones_like.default: lambda low, node, like, **options: _number(low, node, 1),
    aten.alias.default: _kept,
    aten.clone.default: _kept,
    aten.lift_fresh_copy.default: _kept,
    aten.detach.default: _kept,
    **{
        getattr(getattr(aten, name), overload): _compare(name)
        for name in ("lt", "le", "gt", "ge", "eq", "ne")
        for overload in ("Tensor", "Scalar")
    },
}


_NOT_WRITTEN = {
    "_to_copy",
    "alias",
    "clone",
    "convert_element_type",
    "detach",
    "lift_fresh_copy",
    "scalar_tensor",
}


def accepts(target: Any) -> bool:
    """Whether an expression may contain an op. Does not check its operands."""
    return target in _OPS


def _accepted() -> list[str]:
    """Returns the names of the accepted ops, for error messages."""
    return [*sorted({op.overloadpacket.__name__ for op in _OPS} - _NOT_WRITTEN), "casts"]


def _name_of(node: fx.Node) -> str:
    target: Any = node.target
    packet = getattr(target, "overloadpacket", None)
    return packet.__name__ if packet is not None else str(target)


def _constant_of(module: fx.GraphModule, node: fx.Node) -> int | float | bool:
    tensor = operator.attrgetter(str(node.target))(module)
    if not isinstance(tensor, torch.Tensor) or tensor.numel() != 1:
        raise Refusal("a tensor that is neither the value nor an extra; accepted: numbers, extras=")
    value: int | float | bool = tensor.item()
    return value


def lower(module: fx.GraphModule, leaves: Sequence[tuple[str, ...]], dtype: torch.dtype) -> str:
    """Returns the text of a traced function with the inputs `leaves`: ("value",), ("extra", "0"),
    ("number", "0"), ("index", "1"). The result has `dtype`, or the dtype of the last cast."""
    low = Lowering()
    names = iter(leaves)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            name, *which = next(names)
            low.leaf(node, torch.int64 if name == "index" else dtype, name, *which)
        elif node.op == "get_attr":
            node.meta["val"] = operator.attrgetter(str(node.target))(module)
            low.constant(node, _constant_of(module, node))
        elif node.op == "call_function":
            low.node(node)
        else:
            (result,) = node.args
    if not isinstance(result, fx.Node):
        raise Refusal(f"a result {result!r}; accepted: one tensor")
    is_cast = result.target is aten._to_copy.default
    return low.text(result, result.meta["val"].dtype if is_cast else dtype)
