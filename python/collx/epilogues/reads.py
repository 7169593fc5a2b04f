"""Computes a key from what a function reads besides its arguments. Functions with equal keys have
the same text.

The names are found in the bytecode, and their values are looked up at each call. A value that can
change without changing the key is refused by name: a tensor, or an object with attributes.
"""

from __future__ import annotations

import builtins
import dis
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from enum import Enum
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch

__all__ = ["Unkeyed", "check_reads", "key_of", "modules_read"]


class Unkeyed(Exception):
    """A function reads a value that cannot be part of a key."""


class _Read(NamedTuple):
    """A name, and the chain of attributes that is read from it."""

    name: str
    attributes: tuple[str, ...]
    cell: int = -1
    """The index of the cell in the closure, or -1 for a name of the module."""

    def __str__(self) -> str:
        return ".".join([self.name, *self.attributes])


class _Reads(NamedTuple):
    """The names that a function's code reads."""

    names: tuple[_Read, ...]
    refused: str


_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_SIMPLE = frozenset([bool, int, str, bytes, complex, type(None), type(...), *_TORCH])
_OPS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
# Modules whose functions only depend on their arguments.
_PURE = ("builtins", "math", "cmath", "_operator", "operator", "_functools", "itertools", "typing")
_READERS = frozenset(
    getattr(builtins, name)
    for name in ("__import__", "eval", "exec", "globals", "input", "locals", "open", "vars")
)
_IMPORTED = ("torch", *_PURE)
_UNSET = "unset"  # the function raises when it reads the name


def key_of(f: Callable[..., Any]) -> Hashable:
    """Returns a key that is equal for functions with equal code that read equal values. Does not
    follow what f reads from PyTorch. Raises Unkeyed if f reads a value that can change without
    changing the key. The message names it."""
    return _key(f, "", ())


def check_reads(f: Callable[..., Any]) -> None:
    """Raises Unkeyed if f reads anything that depends on more than its arguments, including
    functions of PyTorch and Python."""
    _key(f, "", (), check=True)


def modules_read(f: Callable[..., Any]) -> dict[str, ModuleType | None] | None:
    """Returns the modules that a function reads by name, None for the name of a builtin. The key of
    the function is the same as long as these are the same. Returns None if it reads anything except
    functions of PyTorch and Python through their modules."""
    if type(f) is not FunctionType or f.__closure__ or f.__defaults__ or f.__kwdefaults__:
        return None
    values, modules = f.__globals__, dict[str, ModuleType | None]()
    for read in _reads_of(f.__code__).names:
        value = values.get(read.name)
        pure = _is_pure(value) if read.name in values else hasattr(builtins, read.name)
        if not pure:
            return None
        modules[read.name] = value
    return modules


def _is_pure(value: Any) -> bool:
    """Whether a value is a module of PyTorch or Python, whose functions do not change."""
    return isinstance(value, ModuleType) and value.__name__.partition(".")[0] in _IMPORTED


@functools.lru_cache(maxsize=4096)
def _reads_of(code: CodeType) -> _Reads:
    names, refused = set(), ""
    for read, why in _reads_in(code, code.co_freevars):
        if why:
            refused = why
        else:
            names.add(read)
    return _Reads(tuple(sorted(names)), refused)


def _reads_in(code: CodeType, free: Sequence[str]) -> Iterator[tuple[_Read, str]]:
    """Yields the reads of a function, each with the reason if it is refused. free: names in the
    closure of the outermost function."""
    pending: _Read | None = None
    for instruction in dis.get_instructions(code):
        op, name = instruction.opname, instruction.argval
        if pending is not None and op in ("LOAD_ATTR", "LOAD_METHOD"):
            pending = pending._replace(attributes=(*pending.attributes, name))
            continue
        if pending is not None and op != "EXTENDED_ARG":
            yield pending, ""
            pending = None
        inside = name not in free or (code.co_freevars != free and name not in code.co_freevars)
        if op in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
            pending = _Read(name, ())
        elif op in ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"):
            pending = None if inside else _Read(name, (), free.index(name))
        elif op in ("STORE_GLOBAL", "DELETE_GLOBAL") or (
            op in ("STORE_DEREF", "DELETE_DEREF") and not inside
        ):
            yield _Read(name, ()), f"writes {name}, which it does not own"
        elif op == "IMPORT_NAME" and name not in _PURE:  # what it reads from torch is not followed
            yield _Read(name, ()), f"imports {name}; accepted: an import outside of it"
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _reads_in(constant, free)


def _key(value: Any, name: str, within: tuple[int, ...], check: bool = False) -> Hashable:
    """Returns the key of a value. Includes the type and the sign of zero: 1, 1.0 and True compare
    equal, and so do 0.0 and -0.0, but they differ as operands."""
    kind = type(value)
    if kind is float:
        return kind, repr(value)
    if kind in _SIMPLE:
        return kind, value
    if kind is FunctionType and not _is_of_torch(value):
        return _key_of_function(value, within, check)
    if kind is tuple or kind is list:
        each = enumerate(value)
        return kind, tuple([_key(v, f"{name}[{i}]", within, check) for i, v in each])
    if kind is dict:
        items = value.items()
        return kind, tuple([(k, _key(v, f"{name}[{k!r}]", within, check)) for k, v in items])
    if kind is functools.partial:
        parts = (value.func, value.args, value.keywords)
        return kind, tuple([_key(part, name, within, check) for part in parts])
    if isinstance(value, Enum):
        return kind, value
    if not isinstance(value, torch.Tensor) and _depends_on_arguments_alone(value):
        return id(value)  # stable, because a module keeps a reference to the value
    what = f"reads {name}, {_described(value)}" if name else f"is {_described(value)}"
    raise Unkeyed(f"{what}; accepted: functions, and numbers and tensors in extras=")


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "a tensor that is neither the value nor an extra"
    if isinstance(value, MethodType):
        return f"a method of {type(value.__self__).__name__}, whose attributes can change"
    if isinstance(value, ModuleType):
        return "a module whose name cannot be resolved"
    if callable(value) and getattr(value, "__module__", None) and hasattr(value, "__name__"):
        name = f"{value.__module__}.{value.__name__}"
        return f"which is {name} and may depend on more than its arguments"
    return f"an object of {type(value).__name__}, whose attributes can change"


def _key_of_function(f: FunctionType, within: tuple[int, ...], check: bool) -> Hashable:
    if id(f) in within:  # it calls itself
        return within.index(id(f))
    within = (*within, id(f))
    reads = _reads_of(f.__code__)
    if reads.refused:
        raise Unkeyed(reads.refused)
    values: list[Hashable] = [f.__code__]
    for read in reads.names:
        if read.cell < 0:
            value = f.__globals__.get(read.name, _UNSET)
            if value is _UNSET:
                value = getattr(builtins, read.name, _UNSET)
        else:
            value = _content(f, read.cell)
        values.append(_key_of_read(read, value, within, check))
    for given in (f.__defaults__, f.__kwdefaults__):
        values.append(_key(given, "default values", within, check) if given else None)
    return tuple(values)


def _content(f: FunctionType, cell: int) -> Any:
    try:
        return f.__closure__[cell].cell_contents if f.__closure__ else _UNSET
    except ValueError:
        return _UNSET


def _key_of_read(read: _Read, value: Any, within: tuple[int, ...], check: bool) -> Hashable:
    """Returns the key of a read. Attributes are only followed through modules."""
    kind = type(value)
    if not read.attributes and (kind is float or kind in _SIMPLE):
        return kind, repr(value) if kind is float else value
    if read.attributes and not check and _is_pure(value):
        return value.__name__, read
    for attribute in read.attributes:
        if isinstance(value, torch.Tensor):
            break
        if not _has_fixed_attributes(value):
            raise Unkeyed(
                f"reads {read}, an attribute of {type(value).__name__}, which can change; "
                "accepted: numbers and tensors in extras="
            )
        value = getattr(value, attribute, _UNSET)
    return _key(value, str(read), within, check)


def _has_fixed_attributes(value: Any) -> bool:
    """Whether the attributes of a value are fixed, or are looked up at each call (of a module)."""
    return isinstance(value, (ModuleType, *_OPS)) or value is torch.Tensor or type(value) in _SIMPLE


def _is_of_torch(f: FunctionType) -> bool:
    """Whether the code of a function is PyTorch's. This includes PyTorch's wrappers of other
    functions."""
    return str(f.__globals__.get("__name__", "")).partition(".")[0] == "torch"


@functools.cache
def _functions_of_torch() -> frozenset[Any]:
    """Returns the functions of PyTorch on tensors, and those that create tensors from numbers."""
    found = {f for of in torch.overrides.get_overridable_functions().values() for f in of}
    names = {name for name in dir(torch) if name.endswith("_like")}
    names |= {"arange", "as_tensor", "full", "ones", "rand", "randn", "scalar_tensor", "tensor"}
    names |= {"Size", "Tensor", "finfo", "iinfo", "is_tensor", "promote_types", "zeros"}
    return frozenset(found | {getattr(torch, name) for name in names})


def _depends_on_arguments_alone(value: Any) -> bool:
    if isinstance(value, _OPS):
        return True
    try:
        if value in _functions_of_torch():
            return True
    except TypeError:  # not hashable
        return False
    kind = type(value)
    if kind is type:
        return value.__module__ in _PURE
    if kind is not BuiltinFunctionType or value in _READERS:
        return False
    of = value.__self__
    return isinstance(of, ModuleType) and of.__name__ in _PURE
