"""Tests that importing collx in an unsuitable environment raises one error with a remedy."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch

from tests.common.commands import ROOT, python

from .programs import TORCH, compiled

IMPORT = """
import torch
torch.__version__ = {version!r}
try:
    import collx
except ImportError as error:
    print(error)
"""


def test_a_build_for_another_torch_is_refused_before_it_is_loaded() -> None:
    said = python(IMPORT.format(version="2.99.1"))
    built_for = said.partition("collx was built for PyTorch ")[2].partition(", and this")[0]
    assert TORCH in built_for.split(", ")  # a checkout may have builds for several versions
    assert "this is PyTorch 2.99.1" in said
    assert "pip install --no-build-isolation" in said


def test_another_patch_of_the_same_torch_is_not_refused() -> None:
    assert python(IMPORT.format(version=f"{TORCH}.99+cu999")) == ""


def test_sources_that_are_not_installed_know_their_version() -> None:
    said = python(
        "import importlib.metadata as metadata, torch\n"
        "def absent(name): raise metadata.PackageNotFoundError(name)\n"
        "metadata.version = absent\n"
        "import collx; print(collx.__version__)"
    )
    version = re.search(r'^VERSION = "(.*)"$', (ROOT / "setup.py").read_text(), re.MULTILINE)
    assert version is not None
    assert said.strip() == version[1]


def copy_of_sources(folder: Path) -> Path:
    ignored = shutil.ignore_patterns("_torch*", "__pycache__", "*.so", "*.egg-info")
    shutil.copytree(ROOT / "python", folder, ignore=ignored)
    return folder


def test_sources_without_a_build_say_how_to_build(tmp_path: Path) -> None:
    said = python(IMPORT.format(version=torch.__version__), path=copy_of_sources(tmp_path / "here"))
    assert "collx's extension is not built" in said
    assert "pip install --no-build-isolation" in said


def test_a_damaged_build_says_how_to_build(tmp_path: Path) -> None:
    sources = copy_of_sources(tmp_path / "here")
    (sources / "collx" / f"_torch{TORCH.replace('.', '_')}").mkdir()
    said = python(IMPORT.format(version=torch.__version__), path=sources)
    assert "could not be loaded" in said
    assert "pip install --no-build-isolation" in said


@pytest.mark.ahead(work=lambda: compiled("other_allocator.cpp", "-shared", "-fPIC"))
def test_another_allocator_for_the_cpu_fails_init_and_not_the_import(ahead: Path) -> None:
    program = f"""
import torch, torch.distributed as dist
torch.ops.load_library({str(ahead)!r})
import collx
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
try:
    collx.init()
except collx.InitError as error:
    print(error)
"""
    said = python(program)
    assert "step 'backend' failed" in said
    assert "another package has registered a symmetric memory allocator" in said
    assert "'OTHER'" in said
    assert "in a process that does not register that one" in said
