"""Tests of the launchers' tables."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.common.nvcc import KERNELS, compiler

PROGRAM = """
#include "launch.h"

namespace collx::cuda {

Kernel some_kernel(const Instance&) { return nullptr; }
void by_the_host(const Launch<ExchangeCall>&) {}

constexpr KernelFamily kMapping{DTypes::any, some_kernel, {"some"}};
constexpr KernelFamily kPlain{DTypes::any, some_kernel};
constexpr LauncherRow<ExchangeCall> kTaking[] = {
    {Algorithm::direct, kPairs, {}, by_the_host},
    {Algorithm::staged, kPairs, kMapping, by_the_host},
};
constexpr LauncherRow<ExchangeCall> kRefusing[] = {
    {Algorithm::direct, kPairs, {}, by_the_host},
    {Algorithm::staged, kPairs, kPlain, by_the_host},
};
static_assert(take_epilogues(kTaking, kPairs, Algorithm::automatic));
static_assert(!take_epilogues(kRefusing, kPairs, Algorithm::automatic));
static_assert(take_epilogues(kRefusing, kPairs, Algorithm::staged));

constexpr bool every_kernel_is_found() {
  for (const KernelFamily& family : kernels::kAll) {
    if (family.find == nullptr) return false;
  }
  return true;
}
static_assert(every_kernel_is_found());
static_assert(kernels::gather_scatter_staged.with_epilogue.name == "gather_scatter_staged");
static_assert(kernels::gather_scatter_staged_copy.with_epilogue.name.empty());

}  // namespace collx::cuda
"""


def test_rows_and_the_list_of_kernels_hold_what_init_and_selection_read(tmp_path: Path) -> None:
    source = tmp_path / "rows.cu"
    source.write_text(PROGRAM)
    command = [compiler(), "-std=c++20", f"-I{KERNELS.parent}", "-c", "-o", str(tmp_path / "rows")]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
