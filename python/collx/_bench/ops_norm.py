"""Descriptions of the reductions that are fused with an RMSNorm of the rows of a matrix."""

from __future__ import annotations

from dataclasses import dataclass

from collx._bench.op import Op, Share

STATIC = "_static"  # suffix of the name of the form with a given scale


@dataclass(frozen=True)
class NormOp(Op):
    """A fused normalization. norm_problem.py and ours.py replace `expect` and `arguments`, because
    the operator has several input tensors."""

    residual: bool = False
    kind: str = ""
    """"fp8" or "int8"; "" without quantization."""
    scale_mode: str = "row"
    """"row", or "tensor" if the scale is given."""
    in_all: bool = False
    """Whether `bench.py all` measures the operator."""

    @property
    def operator(self) -> str:
        return self.name.removesuffix(STATIC)

    @property
    def results(self) -> tuple[str, ...]:
        """The names of the results, as arguments of the out variant."""
        first = ("q_out", "scale_out") if self.kind else ("out",)
        return (*first, "residual_out") if self.residual else first


def _described(residual: bool, kind: str, scale_mode: str = "row") -> NormOp:
    # The sum is scattered, and the results are gathered: 16-bit values or bytes.
    crossing = 1.5 if kind and not residual else 2.0
    return NormOp(
        f"allreduce{'_residual' if residual else ''}_rmsnorm{'_' + kind if kind else ''}"
        + (STATIC if scale_mode == "tensor" else ""),
        Share.WHOLE,
        Share.WHOLE,
        lambda inputs, *_: inputs,
        lambda case: (),
        lambda world, at_root: crossing * (world - 1) / world,
        reduces=True,
        symmetric_above=8 << 20,
        residual=residual,
        kind=kind,
        scale_mode=scale_mode,
        in_all=residual and kind != "int8" and scale_mode == "row",
    )


NORM_OPS = (
    *(_described(residual, kind) for residual in (False, True) for kind in ("", "fp8", "int8")),
    _described(True, "fp8", "tensor"),
)
