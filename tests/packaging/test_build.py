"""Tests what setup.py builds, for which versions of PyTorch, and the contents of its archives."""

from __future__ import annotations

import json
import re
import runpy
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import setuptools
import torch
from torch.utils import cpp_extension

from tests.common.commands import ROOT, python, run

from .programs import TORCH

MODULE_FOLDER = f"collx/_torch{TORCH.replace('.', '_')}"
CPU_OBJECTS = ROOT / "build" / TORCH / "cpu" / "libcollx" / "build.ninja"
SWITCHES = ("COLLX_CUDA", "COLLX_WERROR", "COLLX_UNITY")

Plan = Callable[..., dict[str, Any]]


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Returns a function that returns the arguments of setup.py for setuptools. The test chooses
    the environment, the command, the PyTorch version, CUDA_HOME and the compute capabilities of
    the GPUs. The function raises SystemExit if setup.py refuses them."""

    def made(
        command: str = "build",
        version: str = str(torch.__version__),
        home: Path | None = None,
        gpus: Sequence[tuple[int, int]] = ((9, 0),),
        **environment: str,
    ) -> dict[str, Any]:
        given: dict[str, Any] = {}
        with monkeypatch.context() as patch:
            patch.setattr(torch, "__version__", version)
            patch.setattr(cpp_extension, "CUDA_HOME", home and str(home))
            patch.setattr(torch.cuda, "device_count", lambda: len(gpus))
            patch.setattr(torch.cuda, "get_device_capability", lambda index: gpus[index])
            patch.setattr(setuptools, "setup", given.update)
            patch.setattr(sys, "argv", ["setup.py", command])
            for name in (*SWITCHES, "TORCH_CUDA_ARCH_LIST"):
                patch.setenv(name, environment.get(name, ""))
            runpy.run_path(str(ROOT / "setup.py"))
        return given

    return made


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        *(([], "9.0"), ([(8, 0), (8, 0)], "8.0"), ([(9, 0), (8, 6)], "8.6;9.0")),
        *(([(7, 5), (8, 0)], "8.0"), ([(7, 5)], "9.0")),
    ],
)
def test_a_build_in_place_is_for_the_gpus_of_the_machine(
    gpus: list[tuple[int, int]], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: gpus[index])
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.setenv("COLLX_CUDA", "0")
    assert runpy.run_path(str(ROOT / "setup.py"))["architectures_here"]() == expected


@pytest.mark.parametrize("static", [False, True])
def test_a_library_with_its_own_copy_of_libstdcxx_is_refused(
    static: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.setenv("COLLX_CUDA", "0")
    check_linked = runpy.run_path(str(ROOT / "setup.py"))["check_linked"]
    source, library = tmp_path / "one.cpp", tmp_path / "one.so"
    source.write_text("#include <iostream>\nvoid f(double x) { std::cout << x; }\n")
    options = ["-static-libstdc++"] * static
    run("g++", "-shared", "-fPIC", *options, source, "-o", library)
    if static:
        with pytest.raises(SystemExit, match="has not linked the shared libstdc"):
            check_linked(library)
    else:
        check_linked(library)


@pytest.fixture
def nvcc(tmp_path: Path) -> Path:
    """Returns a CUDA_HOME with an nvcc that the tests never run."""
    if torch.version.cuda is None:
        pytest.skip("PyTorch was built without CUDA")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    return tmp_path


def sources(planned: dict[str, Any]) -> list[str]:
    return [source for e in planned["ext_modules"] for source in e.sources]


def flags(planned: dict[str, Any]) -> list[str]:
    tools = [tool for e in planned["ext_modules"] for tool in e.extra_compile_args.values()]
    return [flag for tool in tools for flag in tool]


def test_the_kernels_are_left_out_on_demand_where_nvcc_is(plan: Plan, nvcc: Path) -> None:
    with_kernels = plan(home=nvcc)
    without = plan(home=nvcc, COLLX_CUDA="0")
    assert any(source.endswith(".cu") for source in sources(with_kernels))
    assert not any("cuda/" in source for source in sources(without))
    assert not any("cuda" in name for e in without["ext_modules"] for name in e.libraries)
    assert "-DCOLLX_CUDA=1" in flags(with_kernels)
    assert "-DCOLLX_CUDA=1" not in flags(without)
    assert "-DCOLLX_CUDA=0" in flags(without)


@pytest.mark.parametrize("gpus", [[], [(7, 5)]])
def test_a_machine_without_a_usable_gpu_gets_the_kernels_on_demand(
    gpus: list[tuple[int, int]], plan: Plan, nvcc: Path
) -> None:
    assert "-DCOLLX_CUDA=0" in flags(plan(home=nvcc, gpus=gpus))
    assert "-DCOLLX_CUDA=1" in flags(plan(home=nvcc, gpus=gpus, COLLX_CUDA="1"))


def test_architectures_that_the_kernels_do_not_support_are_refused(plan: Plan, nvcc: Path) -> None:
    plan(home=nvcc, TORCH_CUDA_ARCH_LIST="8.0 9.0a;Hopper;10.0+PTX")
    for named in ("7.5", "6.1;8.0 7.5+PTX"):
        with pytest.raises(SystemExit, match=r"contains .*7\.5; collx needs .* 8\.0 or later"):
            plan(home=nvcc, TORCH_CUDA_ARCH_LIST=named)
        plan(home=nvcc, TORCH_CUDA_ARCH_LIST=named, COLLX_CUDA="0")


@pytest.mark.parametrize("listed", ["8.0;9.0+PTX", "8.0 9.0+PTX", " 8.0; 9.0+PTX "])
def test_make_builds_once_for_several_architectures(listed: str) -> None:
    said = run("make", "-n", "build", f"TORCH={TORCH}", TORCH_CUDA_ARCH_LIST=listed).stdout
    assert said.count("pip install -v") == 1
    assert re.search(
        rf"touch build/{re.escape(TORCH)}/\.built-[01]?-8\.0_9\.0\+PTX-1?$", said, re.M
    )


@pytest.mark.parametrize("has_nvcc", [False, True])
def test_make_wheel_finds_nvcc_as_a_build_does(has_nvcc: bool, nvcc: Path, tmp_path: Path) -> None:
    interpreter = tmp_path / "venv" / "bin" / "python"
    interpreter.parent.mkdir(parents=True)
    interpreter.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    interpreter.chmod(0o755)
    if not has_nvcc:
        (nvcc / "bin" / "nvcc").unlink()
    given = [f"TORCH={TORCH}", f"VENV={tmp_path / 'venv'}", "COLLX_CUDA="]
    said = run("make", "-n", "wheel", *given, CUDA_HOME=str(nvcc)).stdout
    assert f"COLLX_CUDA={int(has_nvcc)} python -m pip wheel" in said


def test_make_help_lists_every_target_with_a_description() -> None:
    described = re.findall(r"^([^\s:]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    listed = re.findall(r"^(?=.{25} \S)  make (\S+) ", run("make", "help").stdout, re.MULTILINE)
    assert listed == described


def test_the_version_says_what_a_build_is_for(plan: Plan, nvcc: Path) -> None:
    cuda = "cu" + str(torch.version.cuda).replace(".", "")
    assert plan(home=nvcc)["version"].endswith(f"+torch{TORCH}.{cuda}")
    assert plan(home=nvcc, COLLX_CUDA="0")["version"].endswith(f"+torch{TORCH}.cpu")


def test_without_nvcc_the_kernels_are_left_out_or_refused(plan: Plan, tmp_path: Path) -> None:
    for home in (None, tmp_path):
        assert plan(home=home)["version"].endswith("cpu")
        with pytest.raises(SystemExit, match="COLLX_CUDA=1 needs nvcc"):
            plan(home=home, COLLX_CUDA="1")


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_that_is_neither_on_nor_off_is_refused(plan: Plan, name: str) -> None:
    with pytest.raises(SystemExit, match=f"{name} is 'yes'; it can be 0, 1 or unset"):
        plan(**{name: "yes"})


def test_warnings_are_errors_on_demand_alone(plan: Plan) -> None:
    assert not [flag for flag in flags(plan()) if "Werror" in flag]
    assert [flag for flag in flags(plan(COLLX_WERROR="1")) if "Werror" in flag]


@pytest.mark.parametrize("version", ["2.10.1", "2.16.0.dev20270101", "3.11.0"])
def test_a_torch_outside_of_the_range_is_refused(plan: Plan, version: str) -> None:
    with pytest.raises(SystemExit, match=r"collx needs PyTorch 2\.11 to 2\.15") as refused:
        plan("build", version)
    assert f"found {version}" in str(refused.value)
    assert "--no-build-isolation" in str(refused.value)


def test_a_build_requires_the_torch_that_it_was_made_with(plan: Plan) -> None:
    assert plan("bdist_wheel", "2.13.1")["install_requires"] == ["torch==2.13.*"]


def test_sources_require_the_range_that_pyproject_builds_with(plan: Plan) -> None:
    build_system = re.search(r'"(torch[<>=][^"]*)"', (ROOT / "pyproject.toml").read_text())
    assert build_system is not None
    made = plan("sdist")
    assert made["install_requires"] == [build_system[1]]
    assert "+" not in made["version"]


def test_sources_hold_all_that_a_build_takes(tmp_path: Path) -> None:
    out = str(tmp_path)
    run(sys.executable, "setup.py", "-q", "egg_info", "-e", out, "sdist", "-d", out, COLLX_CUDA="0")
    (archive,) = tmp_path.glob("collx-*.tar.gz")
    with tarfile.open(archive) as made:
        names = {name.partition("/")[2] for name in made.getnames()}
        metadata = made.extractfile(archive.name.removesuffix(".tar.gz") + "/PKG-INFO")
        assert metadata is not None
        assert "Requires-Dist: torch<2.16,>=2.11\n" in metadata.read().decode()
    tracked = run("git", "ls-files", "csrc", "python").stdout.split()
    missing = {*tracked, "setup.py", "pyproject.toml", "README.md", "LICENSE"} - names
    assert not missing
    assert not [name for name in names if name.endswith(".so")]


def wheel(folder: Path) -> zipfile.ZipFile:
    """Returns a wheel without CUDA kernels that reuses the objects of an earlier build."""
    if not CPU_OBJECTS.exists():
        pytest.skip("there is no build without CUDA here, whose objects could be used again")
    out = str(folder)
    command = ["egg_info", "-e", out, "build", "--build-lib", f"{out}/lib", "bdist_wheel"]
    command += ["--skip-build", "--dist-dir", out, "--bdist-dir", f"{out}/bdist"]
    run(sys.executable, "setup.py", "-q", *command, COLLX_CUDA="0")
    (archive,) = folder.glob("*.whl")
    return zipfile.ZipFile(archive)


@pytest.mark.timeout(1200)
def test_a_wheel_is_complete_and_runs(tmp_path: Path) -> None:
    with wheel(tmp_path) as made:
        names = set(made.namelist())
        made.extractall(tmp_path / "site")
    headers = [p for p in (ROOT / "csrc").rglob("*") if p.suffix in (".h", ".cuh")]
    shipped = {"protocol", "cuda"}
    for header in headers:
        inside = header.relative_to(ROOT / "csrc")
        assert (f"collx/include/{inside}" in names) == (inside.parts[0] in shipped)
    assert {"collx/py.typed", "collx/_C.pyi", f"{MODULE_FOLDER}/libcollx.so"} <= names
    commands = ("__main__", "_bench/main", "_doctor/main")
    assert {f"collx/{command}.py" for command in commands} <= names
    modules = [n for n in names if re.fullmatch(rf"{MODULE_FOLDER}/_C\..*\.so", n)]
    assert len(modules) == 1
    assert len([n for n in names if n.endswith(".so")]) == 2
    (metadata,) = (tmp_path / "site").glob("collx-*.dist-info/METADATA")
    assert f"Requires-Dist: torch=={TORCH}.*\n" in metadata.read_text()
    said = python(
        "import collx, collx._extension as e;"
        "print(collx.__file__, e.library, collx.cuda_built, collx.__version__)",
        path=tmp_path / "site",
    ).split()
    site = tmp_path / "site" / "collx"
    assert said[:3] == [
        str(site / "__init__.py"),
        str(tmp_path / "site" / MODULE_FOLDER / "libcollx.so"),
        "False",
    ]
    assert said[3].endswith(f"+torch{TORCH}.cpu")


def retagged(folder: Path) -> Path:
    """Returns the wheel that `make wheel` creates, for a platform that auditwheel detects."""
    wheel(folder).close()
    (plain,) = folder.glob("*.whl")
    excluded = ["libc10*.so", "libtorch*.so", "libcudart.so.*"]
    options = [part for library in excluded for part in ("--exclude", library)]
    auditwheel = [sys.executable, "-m", "auditwheel"]
    run(*auditwheel, "repair", *options, "-w", str(folder / "repaired"), str(plain))
    (made,) = (folder / "repaired").glob("*.whl")
    return made


@pytest.mark.timeout(1200)
def test_a_wheel_serves_a_clean_environment(tmp_path: Path) -> None:
    """auditwheel detects a platform for the wheel, and the model of `make demo` runs from it."""
    pytest.importorskip("auditwheel")
    pytest.importorskip("transformers")
    made = retagged(tmp_path)
    shown = json.loads(run(sys.executable, "-m", "auditwheel", "show", "--json", str(made)).stdout)
    assert re.fullmatch(r"manylinux_2_\d+_x86_64", shown["sym_tag"])
    assert made.name.endswith(f"-{shown['sym_tag']}.whl")
    # In some versions of PyTorch, libtorch.so has no symbol that the wheel uses.
    of_torch = {"libc10.so", "libtorch_cpu.so", "libtorch_python.so"}
    assert set(shown["external_libs"]) - {"libtorch.so"} == of_torch
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", venv)
    # Uses PyTorch and the model's packages of this environment: downloading them takes minutes.
    site = next(venv.glob("lib/python*/site-packages"))
    (site / "of_this_run.pth").write_text(sysconfig.get_path("purelib") + "\n")
    bin = venv / "bin"
    run(bin / "python", "-m", "pip", "install", "--no-deps", "--no-index", str(made))
    example = ROOT / "examples" / "tensor_parallel_embedding.py"
    torchrun: list[str | Path] = [bin / "python", "-m", "torch.distributed.run", "--standalone"]
    said = run(
        *torchrun, "--nproc-per-node", "2", str(example), "--device", "cpu", where=tmp_path
    ).stdout
    assert re.search(r"largest difference .*, within ", said), said
    where = run(bin / "python", "-c", "import collx; print(collx.__file__)", where=tmp_path).stdout
    assert where.startswith(str(site))
