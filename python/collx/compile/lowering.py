"""Lowers the operators to Inductor's own collective nodes.

Each operator becomes its `.out` form on buffers of Inductor's pool, so results are not copied.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import lowerings, register_lowering
from torch._inductor.virtualized import V
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from collx._groups import get
from collx.compile.operators import Writing, making, out_forms

__all__ = ["register"]


@cache
def register() -> None:
    """Registers the lowering of every operator, once per process."""
    forms = out_forms()
    for op in making():
        lowered = _into_new_buffers(forms[op]) if op in forms else _barrier(op)
        register_lowering(op, type_promotion_kind=None)(lowered)


class _Collective(ir._CollectiveKernel):
    """A call of an operator. Inductor keeps nodes of this class in order."""

    @classmethod
    def processed(cls, op: OpOverload, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Returns the results as fake tensors, the tensor arguments, the other arguments, and the
        function that reassembles the arguments."""
        with V.graph.fake_mode:
            found: Any = cls.process_kernel(op, *args, **kwargs)
        if isinstance(found, tuple):  # up to PyTorch 2.14
            return found[:4]
        return (
            found.example_output,
            found.tensor_args,
            found.non_tensor_args,
            found.unflatten_args,
        )

    @classmethod
    def add(cls, op: OpOverload, device: torch.device, *args: Any, **kwargs: Any) -> None:
        """Adds a call that returns nothing."""
        _, tensors, others, unflatten = cls.processed(op, *args, **kwargs)
        for tensor in tensors:
            tensor.realize()
        cls(ir.NoneLayout(device=device), op, tensors, others, unflatten)


def _into_new_buffers(form: Writing) -> Callable[..., Any]:
    any_strides = torch.Tag.flexible_layout in form.functional.tags
    prepare = ir.ExternKernel.realize_input if any_strides else ir.ExternKernel.require_contiguous

    def lowered(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map_only(ir.TensorBox, prepare, (args, kwargs))
        example, *_ = _Collective.processed(form.functional, *args, **kwargs)
        examples = example if isinstance(example, tuple) else (example,)
        results = tuple(_empty_like(tensor) for tensor in examples)
        for result in results:
            V.graph.mark_buffer_mutated(result.get_name())
        outs = dict(zip(form.written, results, strict=True))
        _Collective.add(form.op, examples[0].device, *args, **kwargs, **outs)
        return results if isinstance(example, tuple) else results[0]

    return lowered


def _barrier(op: OpOverload) -> Callable[[str], None]:
    def lowered(group_name: str) -> None:
        # A barrier has no tensor to take the device from. A device other than the communicator's
        # would split CUDA graphs.
        _Collective.add(op, get(group_name).device, group_name)

    return lowered


def _empty_like(example: torch.Tensor) -> ir.TensorBox:
    empty = lowerings[torch.ops.aten.empty_strided.default]
    made: ir.TensorBox = empty(
        ir.convert_shape_to_inductor(example.size()),
        ir.convert_shape_to_inductor(example.stride()),
        dtype=example.dtype,
        device=example.device,
    )
    made.realize()
    return made
