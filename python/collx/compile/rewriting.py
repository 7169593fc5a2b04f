"""Rewrites the graphs of models that do not use collx to operators of collx."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, GraphModule, Node

from collx.compile import functional, keys, overlapping, pointwise
from collx.compile.fusing import REDUCTIONS, fuse, operator_for
from collx.compile.norms import Norm, norm_after
from collx.compile.quantization import Quantized, quantized_after

__all__ = ["Pass", "Report", "backend", "report"]

ROUNDINGS = ("model", "fp32")
OPTIONS = {f"collx.{option}": option for option in ("norms", "rounding", "epilogues", "overlap")}
"""Maps the options of the backend to the arguments of `Pass`."""


@dataclass
class Report:
    """Counts what was rewritten in the compiled graphs, and what was not.

    Attributes:
        graphs: the number of graphs. A model that is trained has two for each set of shapes.
        collectives: collectives that became operators of collx, by the name of the collective.
        norms: reductions that became one operator with the norm that follows, by that operator and
            its rounding.
        epilogues: reductions that became one operator with the pointwise ops that follow, by that
            operator, its rounding and the ops.
        products: collectives that became one operator with the adjacent matrix product, by that
            operator.
        left: what was not rewritten: the reason, and how often it occurred.
    """

    graphs: int = 0
    collectives: dict[str, int] = field(default_factory=dict)
    norms: dict[str, int] = field(default_factory=dict)
    epilogues: dict[str, int] = field(default_factory=dict)
    products: dict[str, int] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"graphs rewritten: {self.graphs}"]
        for title, counts in asdict(self).items():
            if isinstance(counts, dict):
                lines += [f"{title}:", *(f"  {n} x {what}" for what, n in counts.items())]
        return "\n".join(lines)


_report = Report()


def report(*, reset: bool = False) -> Report:
    """Returns what was rewritten in this process, what was not, and why. Graphs from the on-disk
    cache are not counted: the process that stored them rewrote them.

    Args:
        reset: True starts a new report. The returned report does not change any more.
    """
    global _report
    current = _report
    if reset:
        _report = Report()
    return current


class Pass(CustomGraphPass):
    """A pass for torch._inductor.config.post_grad_custom_pre_pass.

    The pass replaces PyTorch's functional collectives by operators of collx, for the groups that
    have a communicator when the graph is compiled. Then it replaces an all-reduce or reduce-scatter
    and the norm that follows, with its quantization, by one operator. Optionally it does the same
    with pointwise ops that follow.

    Args:
        norms: True fuses norms. The residual and the weight are then assumed to be the same on all
            ranks, as in tensor-parallel models.
        rounding: where the fused operators round. "model" rounds where the model rounds. "fp32"
            rounds once, at the end; a quantization may then round once more or once less than the
            model.
        epilogues: True fuses a reduction that is not fused with a norm and the pointwise ops that
            follow, also if the model calls it as an operator of collx.
        overlap: True fuses an all-gather and the matrix product that follows, and a reduce-scatter
            and the product before it, so that they overlap: see `collx.nn.allgather_matmul`.
    """

    def __init__(
        self,
        *,
        norms: bool = True,
        rounding: str = "model",
        epilogues: bool = False,
        overlap: bool = False,
    ) -> None:
        if rounding not in ROUNDINGS:
            raise ValueError(f"rounding: got {rounding!r}; accepted: {', '.join(ROUNDINGS)}")
        self._norms = norms
        self._epilogues = epilogues
        self._overlap = overlap
        self._rounding = rounding

    def __call__(self, graph: Graph) -> None:
        from collx.compile import lowering

        lowering.register()
        functional.mark()
        _report.graphs += 1
        left = dict(functional.separate(graph))
        for found in functional.collectives(graph):
            node = functional.replace(graph, found)
            if isinstance(node, str):
                left[found.started] = node
                continue
            _count(_report.collectives, found.name)
            if self._norms and node.target in REDUCTIONS:
                self._fuse(graph, node)
        for node, why in (dict(functional.others(graph)) | left).items():
            _left(str(node.target), why)
        if self._overlap:
            for node in list(graph.nodes):
                if node.target in overlapping.COLLECTIVES:
                    _put_beside_product(graph, node)
        if self._epilogues:
            for reduced in pointwise.reductions(graph):
                self._extend(graph, reduced)
        graph.lint()

    def _fuse(self, graph: Graph, node: Node) -> None:
        norm = norm_after(node)
        if isinstance(norm, str):
            _left("norm", norm)
            return
        quantized = quantized_after(norm.weighted.result)
        if isinstance(quantized, str):
            _left("quantization", quantized)
            quantized = None
        if quantized is not None:
            unlike = norm.weighted.unlike or quantized.unlike
            why = self._put(graph, node, norm, quantized, unlike)
            if not why:
                return
            _left("quantization", why)
        _left("norm", self._put(graph, node, norm, None, norm.weighted.unlike))

    def _put(
        self, graph: Graph, node: Node, norm: Norm, quantized: Quantized | None, unlike: str
    ) -> str:
        as_model = self._rounding == "model"
        if unlike and as_model:
            return f"{unlike}, which no operator does (rounding='fp32' would fuse it)"
        rounding = norm.weighted.rounding if as_model else self._rounding
        op = operator_for(node, norm, quantized)
        why = fuse(graph, node, norm, quantized, rounding)
        if not why:
            _count(_report.norms, f"{op}, {rounding}")
        return why

    def _extend(self, graph: Graph, reduced: pointwise.Reduced) -> None:
        """Fuses pointwise ops after a reduction."""
        chain, ended = pointwise.chain_after(reduced, self._rounding)
        _left("epilogue", ended)
        if chain is None:
            return
        why = pointwise.put(graph, reduced, chain)
        _left("epilogue", why)
        if not why:
            what = f"{reduced.mapped}, {self._rounding}: {', '.join(chain.names) or 'a cast'}"
            _count(_report.epilogues, what)

    def uuid(self) -> bytes:
        """Returns a hash of everything that the result depends on, including the communicators,
        which are not part of the graph."""
        return keys.state(self._norms, self._rounding, self._epilogues, self._overlap)


def _put_beside_product(graph: Graph, node: Node) -> None:
    try:
        made = overlapping.overlap(graph, node)
    except ValueError as why:
        _left("product", str(why))
        return
    if made:
        _count(_report.products, made)


class _InOrder(CustomGraphPass):
    """Several passes as one."""

    def __init__(self, passes: Sequence[Callable[[Graph], None]]) -> None:
        self._passes = passes

    def __call__(self, graph: Graph) -> None:
        for each in self._passes:
            each(graph)

    def uuid(self) -> tuple[Any, ...] | None:
        """Returns None if one of the passes has no uuid. PyTorch then caches nothing."""
        found = tuple(each.uuid() for each in self._passes if isinstance(each, CustomGraphPass))
        return found if len(found) == len(self._passes) and all(found) else None


def backend(
    model: GraphModule,
    inputs: list[torch.Tensor],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """torch.compile(model, backend="collx"): Inductor, with `Pass`.

    Args:
        mode: a mode of Inductor, such as "reduce-overhead". torch.compile takes it or `options`.
        options: options of Inductor, as torch.compile takes them, and of `Pass`: "collx.norms",
            "collx.rounding", "collx.epilogues" and "collx.overlap". The passes of
            "post_grad_custom_pre_pass", here or in torch._inductor.config, run before collx's own.

    Raises:
        ValueError: an option does not exist, or its value is not accepted.
        RuntimeError: Inductor does not have the mode.
    """
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    given = {**list_mode_options(mode or "default"), **(options or {})}
    _check_names(given)
    own = {option: given.pop(name) for name, option in OPTIONS.items() if name in given}
    last = Pass(**own)
    others = given.pop("post_grad_custom_pre_pass", config.post_grad_custom_pre_pass) or []
    # Another Pass would rewrite the collectives that this one fuses.
    before = [each for each in _listed(others) if not isinstance(each, Pass)]
    cacheable = "unsafe_marked_cacheable_functions"
    patches = {
        **given,
        "post_grad_custom_pre_pass": _InOrder([*before, last]),
        # PyTorch only saves graphs with tokens if it has a key that distinguishes them.
        cacheable: {
            **given.get(cacheable, config.unsafe_marked_cacheable_functions),
            "torch.ops.higher_order.with_effects": last.uuid().hex(),
        },
    }
    compiled: Any = compile_fx(model, inputs, config_patches=patches)
    return compiled  # type: ignore[no-any-return]


def _check_names(options: Mapping[str, Any]) -> None:
    from torch._inductor import list_options

    known = {*OPTIONS, *list_options()}
    for name in options:
        if name not in known:
            raise ValueError(
                f"collx.compile.backend: options: got {name!r}; accepted: {', '.join(OPTIONS)}, "
                "and the options that torch._inductor.list_options() lists"
            )


def _listed(passes: Any) -> list[Callable[[Graph], None]]:
    """Returns a list of passes. PyTorch accepts a single pass and, since 2.15, also a list."""
    return list(passes) if isinstance(passes, (list, tuple)) else [passes]


def _left(what: str, why: str) -> None:
    if why:
        _count(_report.left, f"{what}: {why}")


def _count(counts: dict[str, int], what: str) -> None:
    counts[what] = counts.get(what, 0) + 1
