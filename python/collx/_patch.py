"""`collx.patch`: runs the calls of torch.distributed in eager programs on collx."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType, TracebackType
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.distributed import distributed_c10d
from torch.distributed._functional_collectives import traceable_collective_remaps
from torch.utils._python_dispatch import _disable_current_modes

from collx._extension import extension
from collx._groups import Group, get
from collx.communicator import Communicator, of_group
from collx.compile import functional
from collx.ops import collectives
from collx.ops.arguments import reduce_op_argument

__all__ = ["Patch", "patch"]

_ops = torch.ops.collx

_Function: TypeAlias = Callable[..., Any]

_patches: list[Patch] = []
_library: torch.library.Library | None = None


class Patch:
    """The result of `collx.patch`. It is in effect until `remove` or the end of its `with`
    block."""

    def __init__(self, communicators: dict[str, Communicator]) -> None:
        """For `collx.patch` only. `communicators`: maps the name of a process group to its
        communicator."""
        self.communicators = communicators
        try:
            _install()
        except BaseException:
            if not _patches:
                _uninstall()
            raise
        _patches.append(self)

    def remove(self) -> None:
        """Ends the patch. A second call does nothing."""
        if self in _patches:
            _patches.remove(self)
            if not _patches:
                _uninstall()

    def __enter__(self) -> Patch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()


def patch(target: nn.Module | Group = None) -> Patch:
    """Runs calls of torch.distributed in this process on collx.

    The patch applies to all_reduce, reduce_scatter_tensor, all_gather_into_tensor,
    all_to_all_single and broadcast on the selected groups, and to the corresponding calls of
    DTensor and torch.distributed._functional_collectives. async_op=True posts a call, as
    `collx.post` does. Calls that collx does not support (other dtypes, reductions and devices)
    still use the process group. Either all ranks apply the patch or none.

    The patch has no effect on compiled code; torch.compile(model, backend="collx") rewrites it.

    Args:
        target: the groups: a communicator, its name, a process group, a device mesh of one
            dimension, or None for the default group; or a module whose parameters are DTensors, as
            in tensor-parallel models of transformers, which stands for all groups of their meshes
            that have a communicator.

    Returns:
        A `Patch`, which ends with `remove()` or with its `with` block.

    Raises:
        ValueError: there is no communicator for the target, or it uses the process group itself.
    """
    if isinstance(target, nn.Module):
        found = [c for c in map(of_group, _groups_of(target)) if c is not None]
        if not found:
            raise ValueError(
                "patch: the module has no parameter that is a DTensor on a group with a "
                "communicator; call collx.init for its group, or pass the group"
            )
    else:
        found = [get(target)]
    for communicator in found:
        if communicator.fallback_reason is not None:
            raise ValueError(
                f"patch: communicator {communicator.name!r} itself uses the process group: "
                f"{communicator.fallback_reason}"
            )
    return Patch({c.group_name: c for c in found})


def _groups_of(module: nn.Module) -> Iterator[str]:
    """Yields the names of the process groups that a module's parameters are distributed over."""
    from torch.distributed.tensor import DTensor

    meshes = {p.device_mesh for p in module.parameters() if isinstance(p, DTensor)}
    for mesh in meshes:
        yield from (str(group.group_name) for group in mesh.get_all_groups())


def _serving(group: str, tensor: Tensor) -> Communicator | None:
    """Returns the communicator that runs a call; None if the process group runs it."""
    for each in _patches:
        communicator = each.communicators.get(group)
        # Another group may have the name of one that was destroyed.
        if (
            communicator is not None
            and not communicator.destroyed
            and communicator._stands_for(group)
        ):
            return communicator if communicator.device.type == tensor.device.type else None
    return None


@functools.cache
def _reduces(reduce_op: str, dtype: torch.dtype) -> bool:
    """Whether collx supports a reduction of this dtype. Calls the operator on a meta tensor."""
    try:
        with _disable_current_modes():  # modes of the caller do not see this call
            _ops.allreduce.default(torch.empty(1, dtype=dtype, device="meta"), reduce_op, "")
    except (ValueError, TypeError, NotImplementedError):
        return False
    return True


# The functions of torch.distributed. The decision to use collx only depends on the group, dtype,
# device, reduction and sizes, which are the same on all ranks, so all ranks decide alike. It does
# not depend on strides and async_op, which may differ: in DDP.join, some ranks make a call
# asynchronously and others make it synchronously.


def _chosen(group: dist.ProcessGroup | None, *tensors: Tensor) -> Communicator | None:
    # The patch has no effect on compiled code.
    if torch.compiler.is_compiling():
        return None
    # The coalescing manager waits for the works of the process group only.
    if (group or dist.group.WORLD) in distributed_c10d._world.pg_coalesce_state:
        return None
    if not all(isinstance(each, Tensor) and each.layout is torch.strided for each in tensors):
        return None
    members = dist.group.WORLD if group is None else group
    if not isinstance(members, dist.ProcessGroup):  # this process is not a member
        return None
    return _serving(str(members.group_name), tensors[0])


def _reduction(reduce_op: Any, dtype: torch.dtype) -> str | None:
    """Returns the name of a reduction in collx, None if collx does not support it for the dtype."""
    try:
        word = reduce_op_argument("patch", reduce_op)
    except (ValueError, TypeError):
        return None
    return word if _reduces(word, dtype) else None


def _write(
    output: Tensor, async_op: bool, function: _Function, *args: Any, **kwargs: Any
) -> dist.Work | None:
    """Calls a function of collx that writes a tensor, as torch.distributed does: without gradients,
    and outside of inference mode also if the tensor is an inference tensor. Returns the work if
    `async_op`. A call with a tensor subclass is not posted, and has completed on return."""
    mode = torch.inference_mode() if output.is_inference() else contextlib.nullcontext()
    tensors = [each for each in (output, *args) if isinstance(each, Tensor)]
    posts = async_op and all(type(each) in (Tensor, nn.Parameter) for each in tensors)
    with torch._C._AutoDispatchBelowAutograd(), mode:
        returned = function(*args, **kwargs, async_op=posts)
    return extension.work_of(returned if posts else None, output) if async_op else None


def _write_flat(
    output: Tensor, async_op: bool, function: _Function, input: Tensor, *args: Any
) -> dist.Work | None:
    """Calls a function of collx that writes the elements of `output` in order into a flat tensor.
    If the elements must then be copied, the call is not posted."""
    with torch._C._AutoDispatchBelowAutograd():
        flat = input.reshape(-1)
        if output.is_contiguous():
            return _write(output, async_op, function, flat, *args, out=output.view(-1))
        whole = output.contiguous()
        function(flat, *args, out=whole.view(-1))
        output.copy_(whole)
    return extension.work_of(None, output) if async_op else None


def _all_reduce(
    original: _Function,
    tensor: Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    communicator = _chosen(group, tensor)
    word = _reduction(op, tensor.dtype) if communicator else None
    if communicator is None or word is None:
        return original(tensor, op, group, async_op)
    return _write(tensor, async_op, collectives.allreduce_, tensor, word, communicator.name)


def _broadcast(
    original: _Function,
    tensor: Tensor,
    src: int | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Any:
    communicator = _chosen(group, tensor)
    if communicator is None or (src is None) == (group_src is None):
        return original(tensor, src, group, async_op, group_src)
    root = group_src
    if src is not None:
        root = dist.get_group_rank(communicator.group, src)
    return _write(tensor, async_op, collectives.broadcast_, tensor, root, communicator.name)


def _all_gather_into_tensor(
    original: _Function,
    output_tensor: Tensor,
    input_tensor: Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    communicator = _chosen(group, input_tensor, output_tensor)
    if communicator is None:
        return original(output_tensor, input_tensor, group, async_op)
    # The output may be concatenated or stacked; the elements are in the same order.
    return _write_flat(
        output_tensor, async_op, collectives.allgather, input_tensor, communicator.name
    )


def _reduce_scatter_tensor(
    original: _Function,
    output: Tensor,
    input: Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    communicator = _chosen(group, input, output)
    word = _reduction(op, input.dtype) if communicator else None
    # Otherwise the sizes of the parts are wrong on some ranks only, and the others would wait.
    fits = communicator and input.numel() == communicator.world_size * output.numel()
    if communicator is None or word is None or not fits:
        return original(output, input, op, group, async_op)
    return _write_flat(output, async_op, collectives.reducescatter, input, word, communicator.name)


def _all_to_all_single(
    original: _Function,
    output: Tensor,
    input: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    communicator = _chosen(group, input, output)
    if communicator is None or not (input.dim() and output.dim()):
        return original(output, input, output_split_sizes, input_split_sizes, group, async_op)
    size = communicator.world_size
    if input.shape[1:] != output.shape[1:]:
        # Equal parts may have other shapes. With splits, rows of other sizes would be counted.
        splits = output_split_sizes or input_split_sizes
        if splits and not input.shape[0]:  # perhaps on this rank only
            input = input.reshape(output[:0].shape)
        elif splits and not output.shape[0]:
            output = output.reshape(input[:0].shape)
        elif splits or input.numel() != output.numel() or input.shape[0] % size:
            return original(output, input, output_split_sizes, input_split_sizes, group, async_op)
        else:
            input = input.reshape(output.shape)
    return _write(
        output,
        async_op,
        collectives.alltoallv,
        input,
        output_split_sizes or [output.shape[0] // size] * size,
        input_split_sizes or [input.shape[0] // size] * size,
        communicator.name,
        out=output,
    )


_FUNCTIONS: dict[str, _Function] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "all_gather_single": _all_gather_into_tensor,  # the name in later versions
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "reduce_scatter_single": _reduce_scatter_tensor,
    "all_to_all_single": _all_to_all_single,
}
_LATER_NAMES = {
    "all_gather_into_tensor": "all_gather_single",
    "reduce_scatter_tensor": "reduce_scatter_single",
}
_MODULES = (dist, distributed_c10d)


class _Wrapper(NamedTuple):
    """A function of collx that replaces one of torch.distributed."""

    name: str
    replaced: _Function
    """The function that the wrapper replaced, and that is restored when the wrapper is removed."""
    call: _Function


_wrappers: list[_Wrapper] = []
"""All wrappers that were created. They are never deleted, since a module may have imported one.
Another tool may wrap or restore the same functions at any time, so that it may call a wrapper or
reinstall one that was removed. This causes no recursion: a wrapper only calls the function that it
replaced, and only calls that function while nothing is patched."""


def _wrapper(name: str, replaced: _Function, original: _Function) -> _Wrapper:
    """Returns the wrapper of `replaced`. `original` runs the calls that collx does not support."""
    for known in _wrappers:
        if known.name == name and known.replaced is replaced:
            return known
    function = _FUNCTIONS[name]

    @functools.wraps(replaced)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    # Dynamo replaces the functions of torch.distributed with traceable ones.
    if inspect.isfunction(replaced) and replaced in traceable_collective_remaps:
        traceable_collective_remaps[call] = traceable_collective_remaps[replaced]
    _wrappers.append(_Wrapper(name, replaced, call))
    return _wrappers[-1]


def _installed(module: ModuleType, name: str) -> _Wrapper | None:
    """Returns the wrapper that is installed in a module, None if there is none."""
    standing = getattr(module, name)
    return next((each for each in _wrappers if each.call is standing), None)


def _kernel(op: OpOverload) -> Callable[..., Any]:
    """Returns the kernel of a patched functional collective of PyTorch."""

    def run(*given: Any) -> Any:
        communicator = _serving(given[-1], given[0])
        if communicator is not None:
            target, arguments = functional.replacement(op, given[:-1], communicator.name)
            reduce_op = arguments[1]
            if not isinstance(reduce_op, str) or _reduces(reduce_op, given[0].dtype):
                with torch._C._AutoDispatchBelowAutograd():
                    return target(*arguments)  # done when it returns: there is no work to wait for
        return op._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *given)

    return run


def _install() -> None:
    """Installs the kernels and wrappers that are not installed yet."""
    global _library
    if _library is None:
        _library = torch.library.Library("_c10d_functional", "IMPL")
        for op in functional.REPLACED:
            for device in ("CPU", "CUDA"):
                # Explicit, because PyTorch 2.15 by default replaces the kernel of another tool.
                name = op._schema.name.partition("::")[2]
                _library.impl(name, _kernel(op), device, allow_override=False)
    for module in _MODULES:
        standing = {name: getattr(module, name) for name in _FUNCTIONS if hasattr(module, name)}
        for name, replaced in standing.items():
            if _installed(module, name) is None:
                # In versions with both names, the function of the earlier name calls the later.
                later = _LATER_NAMES.get(name, name)
                made = _wrapper(name, replaced, standing.get(later, replaced))
                setattr(module, name, made.call)


def _uninstall() -> None:
    """Removes kernels and wrappers. A wrapper below another tool's wrapper remains and forwards
    calls."""
    global _library
    for module in _MODULES:
        for name in _FUNCTIONS:
            wrapper = _installed(module, name) if hasattr(module, name) else None
            if wrapper is not None:
                setattr(module, name, wrapper.replaced)
    if _library is not None:
        _library._destroy()
        _library = None
