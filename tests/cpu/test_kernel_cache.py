"""Tests of the kernel cache on disk: permissions, concurrent writes, and the size limit."""

from __future__ import annotations

import multiprocessing
import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from collx._extension import extension
from tests.common.commands import run

NAME = "kernel.cubin"
read, keep = extension.read_kernel, extension.keep_kernel


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kernels"


def test_what_is_kept_is_read_and_belongs_to_this_user_alone(folder: Path) -> None:
    umask = os.umask(0)
    try:
        keep(str(folder), NAME, b"code\0code")
    finally:
        os.umask(umask)
    assert read(str(folder), NAME) == b"code\0code"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / NAME).stat().st_mode) == 0o600
    assert [file.name for file in folder.iterdir()] == [NAME]


def test_a_damaged_file_is_not_read(folder: Path) -> None:
    keep(str(folder), NAME, b"code")
    file = folder / NAME
    file.write_bytes(file.read_bytes()[:-1])
    assert read(str(folder), NAME) == b""


_USE = """
import sys
from collx._extension import extension
extension.keep_kernel(sys.argv[1], "kernel.cubin", b"code")
extension.keep_kernel(sys.argv[1], "kernel.cubin", b"code")
print(extension.read_kernel(sys.argv[1], "kernel.cubin"))
"""


def _used(folder: Path) -> tuple[str, str]:
    """Writes twice in another process and then reads. Returns what it reads, and its stderr."""
    done = run(sys.executable, "-c", _USE, folder, stderr=subprocess.PIPE)
    return done.stdout.strip(), done.stderr


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_folder_that_others_can_write_is_refused_with_one_warning(
    folder: Path, mode: int
) -> None:
    keep(str(folder), NAME, b"code")
    folder.chmod(mode)
    (folder / NAME).rename(folder / "other.cubin")
    printed, said = _used(folder)
    assert printed == "b''"
    assert said.count(f"{folder}: compiled kernels are neither stored nor read there") == 1
    assert [file.name for file in folder.iterdir()] == ["other.cubin"]


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
def test_a_folder_of_another_user_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, -1)
    printed, said = _used(folder)
    assert printed == "b''"
    assert "other users can write to it" in said
    assert not list(folder.iterdir())


def test_links_are_not_followed(folder: Path, tmp_path: Path) -> None:
    keep(str(folder), NAME, b"code")
    linked = tmp_path / "linked"
    linked.symlink_to(folder)
    assert read(str(linked), NAME) == b""
    moved = tmp_path / "moved"
    (folder / NAME).rename(moved)
    (folder / NAME).symlink_to(moved)
    before = moved.read_bytes()
    assert read(str(folder), NAME) == b""
    keep(str(folder), NAME, b"other")  # replaces the link
    assert (moved.read_bytes(), read(str(folder), NAME)) == (before, b"other")


def test_a_file_that_others_can_write_is_not_read(folder: Path) -> None:
    keep(str(folder), NAME, b"code")
    (folder / NAME).chmod(0o666)
    assert read(str(folder), NAME) == b""


def _write_and_read(folder: str, fill: int) -> int:
    """Returns the number of reads that returned something that no writer has written."""
    wrong = 0
    for length in range(1, 40):
        keep(folder, NAME, bytes([fill]) * (1000 * length))
        found = read(folder, NAME)
        wrong += found != bytes(found[:1]) * len(found) or len(found) % 1000 != 0 or not found
    return wrong


def test_threads_write_at_once(folder: Path) -> None:
    """Threads of one process do not differ in the process ID."""
    with ThreadPoolExecutor(4) as threads:
        wrong = list(threads.map(_write_and_read, [str(folder)] * 4, range(1, 5)))
    assert wrong == [0] * 4
    assert [file.name for file in folder.iterdir()] == [NAME]


def test_processes_write_at_once(folder: Path) -> None:
    with multiprocessing.get_context("fork").Pool(3) as processes:
        wrong = processes.starmap(_write_and_read, [(str(folder), fill) for fill in range(1, 4)])
    assert wrong == [0] * 3
    assert [file.name for file in folder.iterdir()] == [NAME]


def test_a_file_that_a_process_of_the_same_number_left_is_in_nobodys_way(folder: Path) -> None:
    """Processes in two containers may have the same ID."""
    keep(str(folder), NAME, b"code")
    for left in (f"{NAME}.{os.getpid()}", ".writing-aaaaaa"):
        (folder / left).symlink_to("/nowhere/else")
    keep(str(folder), NAME, b"other")
    assert read(str(folder), NAME) == b"other"


def test_what_was_used_longest_ago_goes(folder: Path) -> None:
    for which in range(4):
        keep(str(folder), f"{which}.cubin", bytes(1000))
        os.utime(folder / f"{which}.cubin", (which, which))
    assert read(str(folder), "0.cubin")  # counts as a use
    keep(str(folder), "new.cubin", bytes(1000), most_bytes=3500)
    assert {file.name for file in folder.iterdir()} == {"0.cubin", "3.cubin", "new.cubin"}


def test_what_a_dead_process_left_goes(folder: Path) -> None:
    keep(str(folder), NAME, b"code")
    for name, age in ((".writing-old", 7200), (".writing-new", 10)):
        (folder / name).write_bytes(b"half")
        now = (folder / name).stat().st_mtime
        os.utime(folder / name, (now - age, now - age))
    keep(str(folder), NAME, b"other")
    assert {file.name for file in folder.iterdir()} == {NAME, ".writing-new"}


def test_without_a_place_to_write_nothing_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    for folder in (file / "below", Path("/proc/none")):
        keep(str(folder), NAME, b"code")
        assert read(str(folder), NAME) == b""
