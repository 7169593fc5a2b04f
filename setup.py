"""Builds collx._C, the extension module. What the package is stands in pyproject.toml.

COLLX_CUDA=0|1 leaves out or demands the CUDA kernels; otherwise they are built when nvcc is found.
TORCH_CUDA_ARCH_LIST picks the architectures. MAX_JOBS bounds the parallel compilations.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from setuptools import Extension, setup
from setuptools.command.build_py import build_py
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parent
CHECKOUT_ARCHITECTURES = "9.0"
WHEEL_ARCHITECTURES = "8.0;9.0;10.0+PTX"


def with_cuda() -> bool:
    home = cpp_extension.CUDA_HOME
    found = home is not None and Path(home, "bin", "nvcc").exists()
    wanted = os.environ.get("COLLX_CUDA", "")
    if wanted not in ("", "0", "1"):
        raise SystemExit(f"COLLX_CUDA is {wanted!r}; it can be 0, 1 or unset")
    if wanted == "1" and not found:
        have = f"torch {torch.__version__}, CUDA_HOME {home}"
        raise SystemExit(f"COLLX_CUDA=1 needs nvcc and a torch built for CUDA; found {have}")
    return found if wanted == "" else wanted == "1"


def sources(cuda: bool) -> list[str]:
    found = [p.relative_to(ROOT) for p in (ROOT / "csrc").rglob("*") if p.suffix in (".cpp", ".cu")]
    if not cuda:
        found = [p for p in found if p.parts[1] != "cuda"]
    objects = [p.with_suffix("") for p in found]
    twice = {str(o) for o in objects if objects.count(o) > 1}
    if twice:
        raise SystemExit(f"sources would share an object file: {', '.join(sorted(twice))}")
    return sorted(map(str, found))


def extension() -> Extension:
    cuda = with_cuda()
    device = "cuda" if cuda else "cpu"
    # As system headers, so that only our own files have to be free of warnings.
    foreign = [f for path in cpp_extension.include_paths(device) for f in ("-isystem", path)]
    defines = [f"-DCOLLX_CUDA={int(cuda)}"]
    # No contraction to fma: results are the same bits on every device.
    host = ["-ffp-contract=off", "-fvisibility=hidden", f"-ffile-prefix-map={ROOT}/="]
    warnings = ["-Wall", "-Wextra", "-Werror"]
    flags = {
        "cxx": ["-std=c++20", "-O3", "-g0", *host, *warnings, *defines, *foreign],
        "nvcc": [
            "-std=c++20",
            "-O3",
            "--fmad=false",
            "-Werror=all-warnings",
            # Kernels of one template are much alike: a quarter of the size.
            "-Xfatbin=-compress-all",
            "-Xcompiler=" + ",".join([*host, *warnings]),
            *defines,
        ],
    }
    libraries = ["c10", "torch", "torch_cpu", "torch_python"]
    if cuda:
        libraries += ["c10_cuda", "torch_cuda", "cudart"]
    # Torch has loaded all of them when the module is imported: it needs no path of its own.
    return Extension(
        "collx._C",
        sources(cuda),
        libraries=libraries,
        library_dirs=cpp_extension.library_paths(device),
        extra_compile_args=flags,
        extra_link_args=["-Wl,--as-needed", "-Wl,-s"],
        language="c++",
    )


class BuildExtension(cpp_extension.BuildExtension):
    def run(self) -> None:
        in_checkout = self.inplace or self.editable_mode
        if in_checkout:  # pip would take a fresh folder, and compile everything each time
            self.build_temp = str(ROOT / "build" / "checkout")
        architectures = CHECKOUT_ARCHITECTURES if in_checkout else WHEEL_ARCHITECTURES
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", architectures)
        os.environ.setdefault("MAX_JOBS", "2")
        super().run()

    def build_extensions(self) -> None:
        for name in ("linker_so", "linker_so_cxx"):
            command: list[str] | None = getattr(self.compiler, name, None)
            if command is not None:  # an interpreter may have been built with its own rpath
                setattr(self.compiler, name, [f for f in command if "-rpath" not in f])
        super().build_extensions()


class BuildPy(build_py):
    """Adds the headers, which epilogues compiled at run time include."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for header in self.headers():
            target = self.installed(header)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(header, target)

    def headers(self) -> list[Path]:
        folders = (ROOT / "csrc" / "protocol", ROOT / "csrc" / "cuda")
        found = (p for folder in folders for p in folder.rglob("*") if p.suffix in (".h", ".cuh"))
        return sorted(found)

    def installed(self, header: Path) -> Path:
        return Path(self.build_lib, "collx", "include") / header.relative_to(ROOT / "csrc")

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        outputs: list[str] = super().get_outputs(include_bytecode)
        return outputs + [str(self.installed(h)) for h in self.headers()]


commands: dict[str, Any] = {"build_ext": BuildExtension, "build_py": BuildPy}
setup(ext_modules=[extension()], cmdclass=commands)
