"""Builds the operator library and collx._C for the installed PyTorch.

pyproject.toml describes the package. This file contains what depends on the version of PyTorch.

Environment variables:

- COLLX_CUDA=0|1 omits or requires the CUDA kernels. By default, they are built if nvcc is found and
  the machine has a GPU of compute capability 8.0 or later.
- TORCH_CUDA_ARCH_LIST selects the architectures, from 8.0.
- MAX_JOBS limits the number of parallel compilations.
- COLLX_WERROR=1 turns warnings into errors.
- COLLX_SYMBOLS=1 keeps the names of functions and source files for profilers. The machine code does
  not change.
- COLLX_UNITY=0 compiles each source separately. By default, the sources that include PyTorch's
  headers are compiled as a few files, because these headers take most of the time. A change of one
  source recompiles all sources in its file.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import ninja
import torch
from setuptools import Extension, setup
from setuptools.command.build_py import build_py
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parent
VERSION = "0.1.0"
OLDEST_TORCH, NEWEST_TORCH = 11, 15  # minor versions of 2
LIST = "TORCH_CUDA_ARCH_LIST"
OLDEST_GPU = (8, 0)  # compute capability
WHEEL_ARCHITECTURES = "8.0;9.0;10.0+PTX"
INCLUDE_TORCH = ("csrc/memory/", "csrc/ops/", "csrc/distributed/", "csrc/bindings/")
UNITED = 12  # sources that are compiled as one; more, so that there are no more files than jobs

TORCH = ".".join(torch.__version__.split(".")[:2])
# Each PyTorch version has its own folder, so that the builds of one checkout coexist, and so that
# collx/_extension.py can determine the version of a build before loading it.
PACKAGE = f"collx._torch{TORCH.replace('.', '_')}"


def environment_flag(name: str) -> bool | None:
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise SystemExit(f"{name} is {value!r}; it can be 0, 1 or unset")
    return None if value == "" else value == "1"


def choose_tools() -> None:
    """Selects the ninja of this Python, and ccache if it is installed, regardless of PATH. Another
    version of ninja would not read the existing log and would rebuild everything."""
    folders = [str(ninja.BIN_DIR)]
    if shutil.which("ccache") is not None:
        if os.path.isdir("/usr/lib/ccache"):  # Debian: links with the compilers' names
            folders.append("/usr/lib/ccache")
        if cpp_extension.CUDA_HOME is not None:
            os.environ.setdefault("PYTORCH_NVCC", f"ccache {cpp_extension.CUDA_HOME}/bin/nvcc")
        os.environ.setdefault("CCACHE_BASEDIR", str(ROOT))
        os.environ.setdefault("CCACHE_NOHASHDIR", "1")
    os.environ["PATH"] = os.pathsep.join([*folders, os.environ["PATH"]])


def capabilities_here() -> list[tuple[int, int]]:
    """Returns the compute capabilities of the GPUs of this machine that collx supports."""
    found = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    return sorted(capability for capability in found if capability >= OLDEST_GPU)


def architectures_here() -> str:
    """Returns the architectures of the GPUs of this machine, or Hopper if it has none."""
    return ";".join(f"{major}.{minor}" for major, minor in capabilities_here()) or "9.0"


def listed(architectures: str) -> list[str]:
    """Splits a list of architectures as PyTorch does."""
    return architectures.replace(";", " ").split()


def check_architectures() -> None:
    numbers = [re.match(r"(\d+)\.(\d)", a) for a in listed(os.environ.get(LIST, ""))]
    old = [n[0] for n in numbers if n is not None and (int(n[1]), int(n[2])) < OLDEST_GPU]
    if old:
        raise SystemExit(
            f"{LIST} contains {', '.join(old)}; collx needs compute capability 8.0 or later, for "
            f"example {LIST}='{WHEEL_ARCHITECTURES}'"
        )


def check_torch() -> None:
    if TORCH not in [f"2.{minor}" for minor in range(OLDEST_TORCH, NEWEST_TORCH + 1)]:
        raise SystemExit(
            f"collx needs PyTorch 2.{OLDEST_TORCH} to 2.{NEWEST_TORCH} to build against; found "
            f"{torch.__version__}. Install one of them, then collx with --no-build-isolation"
        )


def with_cuda() -> bool:
    home = cpp_extension.CUDA_HOME
    found = home is not None and Path(home, "bin", "nvcc").exists()
    wanted = environment_flag("COLLX_CUDA")
    if wanted and not found:
        have = f"torch {torch.__version__}, CUDA_HOME {home}"
        raise SystemExit(f"COLLX_CUDA=1 needs nvcc and a torch built for CUDA; found {have}")
    return found and len(capabilities_here()) > 0 if wanted is None else wanted


def version_and_torch(cuda: bool) -> tuple[str, str]:
    """Returns the version and the required PyTorch. A build supports one minor version of PyTorch.
    Its local version contains that version and the device. Sources support all versions. A build
    from an sdist keeps the version of the sdist, because installers expect it."""
    if "sdist" in sys.argv:
        return VERSION, f"torch>=2.{OLDEST_TORCH},<2.{NEWEST_TORCH + 1}"
    device = "cu" + str(torch.version.cuda).replace(".", "") if cuda else "cpu"
    label = "" if (ROOT / "PKG-INFO").exists() else f"+torch{TORCH}.{device}"
    return VERSION + label, f"torch=={TORCH}.*"


def sources(*parts: str) -> list[str]:
    folders = [ROOT / "csrc" / part for part in parts]
    found = [p for f in folders for p in f.rglob("*") if p.suffix in (".cpp", ".cu")]
    objects = [p.with_suffix("") for p in found]
    twice = {str(o) for o in objects if objects.count(o) > 1}
    if twice:
        raise SystemExit(f"sources would share an object file: {', '.join(sorted(twice))}")
    return sorted(str(p.relative_to(ROOT)) for p in found)


def united(sources: list[str], folder: Path) -> list[str]:
    """Replaces the sources that include PyTorch with a few files in `folder` that include these
    sources."""
    parts = [source for source in sources if source.startswith(INCLUDE_TORCH)]
    others = [source for source in sources if source not in parts]
    count = -(-len(parts) // UNITED)
    jobs = os.environ["MAX_JOBS"]
    if jobs.isdigit() and int(jobs) > 0:  # otherwise, the number of jobs is not limited
        count = min(count, int(jobs))
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        file = folder / f"united{number}.cpp"
        text = "".join(f'#include "{part}"\n' for part in parts[number::count])
        if not file.exists() or file.read_text() != text:
            file.write_text(text)
        others.insert(0, str(file))  # first, because they take longest
    return others


def extensions(cuda: bool) -> list[Extension]:
    """Returns the operator library, which loads without Python, and the module that links to it."""
    device = "cuda" if cuda else "cpu"
    # As system headers, so that only warnings in our own files are reported.
    foreign = [f for path in cpp_extension.include_paths(device) for f in ("-isystem", path)]
    defines = [f"-DCOLLX_CUDA={int(cuda)}", f"-DCOLLX_VERSION={VERSION}"]
    # No contraction to fma, so that results have the same bits on every device.
    host = ["-ffp-contract=off", "-fvisibility=hidden", f"-ffile-prefix-map={ROOT}/="]
    strict = bool(environment_flag("COLLX_WERROR"))
    symbols = bool(environment_flag("COLLX_SYMBOLS"))
    debug = "-g1" if symbols else "-g0"
    warnings = ["-Wall", "-Wextra", *(["-Werror"] if strict else [])]
    flags = {
        "cxx": ["-std=c++20", "-O3", debug, *host, *warnings, *defines, *foreign],
        "nvcc": [
            "-std=c++20",
            "-O3",
            "--fmad=false",
            *(["-Werror=all-warnings"] if strict else []),
            # Kernels of one template are similar: compression reduces the size to a quarter.
            "-Xfatbin=-compress-all",
            "-Xcompiler=" + ",".join([*host, *warnings]),
            *defines,
        ],
    }

    def linked(name: str, parts: list[str], libraries: list[str], *options: str) -> Extension:
        return Extension(
            f"{PACKAGE}.{name}",
            sources(*parts),
            libraries=libraries,
            library_dirs=cpp_extension.library_paths(device),
            extra_compile_args={tool: list(given) for tool, given in flags.items()},
            extra_link_args=["-Wl,--as-needed", *([] if symbols else ["-Wl,-s"]), *options],
            language="c++",
        )

    # No path to PyTorch's libraries is needed, because they are loaded before.
    torch_libraries = ["c10", "torch", "torch_cpu"]
    parts = ["cpu", "memory", "ops", "distributed"]
    if cuda:
        torch_libraries += ["c10_cuda", "torch_cuda", "cudart"]
        parts += ["cuda"]
    return [
        linked("libcollx", parts, torch_libraries, "-Wl,-soname,libcollx.so", "-Wl,-z,defs"),
        linked(
            "_C", ["bindings"], ["collx", "c10", "torch_cpu", "torch_python"], "-Wl,-rpath,$ORIGIN"
        ),
    ]


def check_linked(library: Path) -> None:
    """Raises SystemExit if a library contains libstdc++, as some compilers link it. PyTorch loads
    the shared one, and two copies in a process crash when one formats a number."""
    if b"libstdc++.so" not in library.read_bytes():
        raise SystemExit(
            f"{library}: the C++ compiler has not linked the shared libstdc++ that PyTorch uses; "
            "select another compiler with the environment variable CXX"
        )


class BuildExtension(cpp_extension.BuildExtension):
    def run(self) -> None:
        in_checkout = self.inplace or self.editable_mode
        architectures = architectures_here() if in_checkout else WHEEL_ARCHITECTURES
        architectures = os.environ.setdefault(LIST, architectures)
        os.environ.setdefault("MAX_JOBS", "2")
        choose_tools()
        # Equal builds share a persistent folder. pip would use a new folder each time.
        cuda = any(source.endswith(".cu") for e in self.extensions for source in e.sources)
        objects = f"cuda-{'_'.join(listed(architectures))}" if cuda else "cpu"
        self.build_temp = str(ROOT / "build" / TORCH / objects)
        if cuda:  # the module reports the architectures
            named = ",".join(listed(architectures))
            self.extensions[1].extra_compile_args["cxx"].append(f"-DCOLLX_ARCHITECTURES={named}")
        if cuda:  # kernels that simulate an NVLink switch in tests; wheels do not contain them
            self.extensions[0].extra_compile_args["nvcc"].append(
                f"-DCOLLX_SIMULATED={int(in_checkout)}"
            )
        if in_checkout:
            (ROOT / "python" / PACKAGE.replace(".", "/")).mkdir(exist_ok=True)
        super().run()

    def build_extensions(self) -> None:
        for name in ("linker_so", "linker_so_cxx"):
            command: list[str] | None = getattr(self.compiler, name, None)
            if command is not None:  # the interpreter may have been built with an rpath
                setattr(self.compiler, name, [f for f in command if "-rpath" not in f])
        library, module = self.extensions
        module.library_dirs.append(str(Path(self.get_ext_fullpath(library.name)).parent))
        super().build_extensions()

    def build_extension(self, extension: Extension) -> None:
        # Each extension has its own folder: ninja only remembers its last list of objects.
        common = self.build_temp
        self.build_temp = os.path.join(common, extension.name.rpartition(".")[2])
        if unity:
            extension.sources = united(extension.sources, Path(self.build_temp))
            extension.include_dirs.append(str(ROOT))
        super().build_extension(extension)
        check_linked(Path(self.get_ext_fullpath(extension.name)))
        self.build_temp = common

    def get_ext_filename(self, fullname: str) -> str:
        if fullname.endswith("libcollx"):
            return fullname.replace(".", os.sep) + ".so"
        filename: str = super().get_ext_filename(fullname)
        return filename


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


check_torch()
cuda_wanted = with_cuda()
if cuda_wanted:
    check_architectures()
unity = environment_flag("COLLX_UNITY") is not False
version, required_torch = version_and_torch(cuda_wanted)
commands: dict[str, Any] = {"build_ext": BuildExtension, "build_py": BuildPy}
setup(
    version=version,
    install_requires=[required_torch],
    ext_modules=extensions(cuda_wanted),
    cmdclass=commands,
    options={"build": {"build_base": f"build/{TORCH}"}},
)
