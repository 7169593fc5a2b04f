"""Tests that kernel headers also compile at run time (NVRTC), without standard headers."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.common.run_time import SOURCES, compile_at_run_time

nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="PyTorch was built without CUDA")

HEADERS = sorted((SOURCES / "cuda").rglob("*.cuh"))
KERNELS = SOURCES / "cuda" / "collectives"


# A stage that is not in the library, and below the kernels that accept a stage.
OWN = """
namespace collx::cuda {
struct Negated : Reduce<DType::bfloat16> {
  template <bool Simple, typename Call, int Ranks>
  static __device__ Vector reduced(const Call& call, int world, const Vector (&v)[Ranks]) {
    Vector sum = Reduce::reduced<Simple>(call, world, v);
    for (uint32_t& word : sum.word) word ^= 0x80008000u;
    return sum;
  }
};
}
"""
STAGED = {
    "allreduce_oneshot_push": "Negated, 2, true",
    "allreduce_oneshot_pull": "Negated, 4",
    "allreduce_twoshot_push": "Negated, 8, false",
    "allreduce_lanes": "Negated, 2, true",
    "allreduce_twoshot_pull": "Negated, 0",
    "allreduce_multimem_oneshot": "Negated, collx::cuda::Switch",
    "allreduce_multimem_twoshot": "Negated, collx::cuda::Simulated",
    "allreduce_multimem_gather": "Negated, 4, collx::cuda::Switch",
    "reducescatter_multimem": "Negated, collx::cuda::Switch",
    "gather_scatter_staged": "Negated, 2, true",
    "gather_scatter_channels": "Negated, 2, false",
    "exchange_lanes": "Negated, 2, false",
    "reducescatter_direct": "Negated, 4",
    "reduce_twostage": "Negated, 2",
    "reduce_local": "Negated",
}


@pytest.mark.parametrize("header", HEADERS, ids=lambda path: path.stem)
def test_kernel_header_compiles_at_run_time(header: Path) -> None:
    """Each header compiles without the others."""
    said = compile_at_run_time(nvrtc, f'#include "{header.name}"\n', header.parent)
    assert not said, said


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_all_kernel_headers_compile_for_every_generation(architecture: str) -> None:
    includes = (f'#include "{header.relative_to(SOURCES)}"' for header in HEADERS)
    said = compile_at_run_time(nvrtc, "\n".join(includes), SOURCES, architecture=architecture)
    assert not said, said


@pytest.mark.parametrize("name", STAGED)
def test_kernels_are_made_at_run_time_with_a_stage_of_their_own(name: str) -> None:
    source = f'#include "{name}.cuh"\n{OWN}'
    kernel = f"collx::cuda::{name}_kernel<collx::cuda::{STAGED[name]}>"
    said = compile_at_run_time(nvrtc, source, KERNELS, kernel=kernel)
    assert not said, said


def test_a_kernel_that_there_is_not_is_refused() -> None:
    source = f'#include "allreduce_oneshot_push.cuh"\n{OWN}'
    kernel = "collx::cuda::allreduce_oneshot_push_kernel<collx::cuda::Missing, 2, true>"
    said = compile_at_run_time(nvrtc, source, KERNELS, kernel=kernel)
    assert "Missing" in said


def test_a_header_that_needs_the_standard_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.cuh").write_text("#include <vector>\n")
    assert "vector" in compile_at_run_time(nvrtc, '#include "bad.cuh"\n', tmp_path)


def test_there_are_kernel_headers() -> None:
    assert HEADERS
