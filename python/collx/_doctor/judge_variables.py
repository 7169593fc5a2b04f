"""Findings about environment variables that disable a feature."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from collx._doctor.facts import Facts, Finding, error, warning

_SOCKET_PATH = 100  # approximate maximum length of the path of a Unix socket
_SOCKET_NAME = 40  # length of the socket's name in PyTorch


class _Rule(NamedTuple):
    name: str
    applies: Callable[[str], bool]
    device: str  # "cpu", "cuda", or empty for both
    what: str
    fix: str = "unset it"
    breaks: bool = False


def _is_one(value: str) -> bool:
    return value == "1"


def _is_no_flag(value: str) -> bool:
    return value not in ("", "0", "1")


_NO_FLAG = (
    "collx.init accepts 0 and 1, and raises ValueError",
    "unset it, or set it to 0 or 1",
    True,
)
_RULES = (
    _Rule("COLLX_CHECK", _is_no_flag, "", *_NO_FLAG),
    _Rule("COLLX_NO_CLUSTERS", _is_no_flag, "", *_NO_FLAG),
    _Rule("COLLX_CHECK", _is_one, "", "every call is compared between the ranks, which takes time"),
    _Rule(
        "COLLX_NO_CLUSTERS",
        _is_one,
        "cuda",
        "collx uses no thread-block clusters, and fused norms of long rows take longer",
    ),
    _Rule(
        "COLLX_CACHE_DIR",
        lambda value: value == "",
        "cuda",
        "kernels of epilogues are not cached, and every process compiles them again",
    ),
    _Rule(
        "TORCH_SYMMMEM",
        lambda value: value not in ("", "CUDA"),
        "cuda",
        "PyTorch takes symmetric memory from another allocator than CUDA, which collx needs",
        "unset it, or set it to CUDA",
        True,
    ),
    _Rule(
        "TORCH_SYMM_MEM_DISABLE_MULTICAST",
        _is_one,
        "cuda",
        "PyTorch creates no multicast addresses, so no algorithm uses NVLink multicast",
    ),
    _Rule("CUDA_LAUNCH_BLOCKING", _is_one, "cuda", "every kernel launch waits for its kernel"),
    _Rule(
        "CUDA_MODULE_LOADING",
        lambda value: value == "EAGER",
        "cuda",
        "CUDA loads all kernels of all libraries at the start, which takes memory and time",
    ),
    _Rule(
        "NCCL_P2P_DISABLE",
        _is_one,
        "cuda",
        "NCCL does not use peer access; collx does, but the process group beside it is slow",
    ),
    _Rule(
        "NCCL_SHM_DISABLE",
        _is_one,
        "cuda",
        "NCCL does not use shared memory; calls that use the process group are slow",
    ),
    _Rule(
        "TMPDIR",
        lambda value: len(value) + _SOCKET_NAME > _SOCKET_PATH,
        "cuda",
        "the path is too long for the sockets by which PyTorch exchanges memory",
        "set it to a short path, such as /tmp",
        True,
    ),
)


def findings(facts: Facts) -> Iterator[Finding]:
    for rule in _RULES:
        value = facts.environment.get(rule.name)
        fits = rule.device in ("", facts.run.device)
        if value is not None and fits and rule.applies(value):
            found = error if rule.breaks else warning
            yield found("environment", f"{rule.name}={value}: {rule.what}", rule.fix)
