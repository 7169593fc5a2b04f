"""Rows of the launchers' tables."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.common.nvcc import KERNELS, compiler

PROGRAM = """
#include "launch.h"

namespace collx::cuda {

Kernel some_kernel(const Instance&) { return nullptr; }
void by_the_host(const Launch<ExchangeCall>&) {}

constexpr LauncherRow<ExchangeCall> kRows[] = {
    {Algorithm::direct, kPairs, {}, by_the_host},
    {Algorithm::staged, kPairs, {DTypes::any, some_kernel, {"some"}}, by_the_host},
};
static_assert(take_epilogues(kRows, kPairs, Algorithm::automatic));

}  // namespace collx::cuda

int main() {
  using namespace collx::cuda;
  const std::vector<KernelFamily> kernels = kernels_of(kRows);
  return kernels.size() == 1 && kernels[0].find == some_kernel ? 0 : 1;
}
"""


def test_a_row_without_kernels_gives_init_none_to_load(tmp_path: Path) -> None:
    source = tmp_path / "rows.cu"
    source.write_text(PROGRAM)
    command = [compiler(), "-std=c++20", f"-I{KERNELS.parent}", "-o", str(tmp_path / "rows")]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert subprocess.run([tmp_path / "rows"], check=False).returncode == 0
