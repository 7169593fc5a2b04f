"""Findings from the run: whether collx worked, and how fast it was."""

from __future__ import annotations

from collections.abc import Iterator

from collx._doctor.facts import Facts, Finding, Rank, error, warning

_SHARE_OF_LINK = 0.5  # a large all-reduce below this share of the rate of a GPU's link is slow
_LARGE = 16 << 20
_STEPS = "docs/guide/troubleshooting.md lists the steps of collx.init with their usual causes"
_FIXES = {  # by a part of the reason
    "different machines": "create groups of ranks of one machine",
    "share a GPU": "call torch.cuda.set_device(local_rank) before collx.init, start at most one "
    "rank for each GPU, or set TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 to share one on purpose",
    "no peer access": "use GPUs that have peer access (nvidia-smi topo -p2p r); in a virtual "
    "machine, enable it on the host (IOMMU, ACS)",
}


def findings(facts: Facts) -> Iterator[Finding]:
    run = facts.run
    yield from _ended(run.ranks)
    yield from _failed(run.ranks)
    if run.timed_out:
        yield from _hung(facts)
    if run.fallback_reason is not None:
        fixes = [fix for words, fix in _FIXES.items() if words in run.fallback_reason]
        yield error(
            "fallback",
            f"collx uses the process group instead of direct access: {run.fallback_reason}",
            fixes[0] if fixes else _STEPS,
        )
    yield from _slow(facts)


def _ended(ranks: list[Rank]) -> Iterator[Finding]:
    for one in ranks:
        if one.ended is not None:
            yield error(
                "rank-died",
                f"rank {one.rank} ended in stage {one.stage!r}: {one.ended}",
                "look at its output above; after SIGKILL, check the memory limit (dmesg); if it "
                "was not started, check ulimit -n and ulimit -u",
            )


def _failed(ranks: list[Rank]) -> Iterator[Finding]:
    """Yields one finding for all ranks that raise the same error."""
    for text in dict.fromkeys(one.error for one in ranks if one.error is not None):
        those = [one for one in ranks if one.error == text]
        stage = those[0].stage
        group = "check that gloo finds a network interface: GLOO_SOCKET_IFNAME, /etc/hosts"
        yield error(
            "init-failed" if stage == "collx.init" else "run-failed",
            f"{_names(those)} failed in stage {stage!r}: {text}",
            group if stage == "process group" else _STEPS,
        )


def _hung(facts: Facts) -> Iterator[Finding]:
    left = [one for one in facts.run.ranks if one.stage != "done" and not (one.error or one.ended)]
    for stage in dict.fromkeys(one.stage for one in left):
        those = [one for one in left if one.stage == stage]
        yield error(
            "timeout",
            f"{_names(those)} did not finish stage {stage!r} within {facts.run.timeout:g} s",
            "pass a larger --timeout if the machine is busy; otherwise look for a GPU or a "
            "driver that hangs (nvidia-smi, dmesg)",
        )


def _names(ranks: list[Rank]) -> str:
    numbers = ", ".join(str(one.rank) for one in ranks)
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"


def _slow(facts: Facts) -> Iterator[Finding]:
    """Yields slow all-reduces on GPUs. On the CPU, a plain copy within a cache is not comparable
    to an all-reduce."""
    run = facts.run
    if run.device != "cuda" or run.fallback_reason is not None:
        return
    for one in run.timings:
        if one.bytes < _LARGE or one.link_gbs is None:
            continue
        if one.busbw_gbs < _SHARE_OF_LINK * one.link_gbs:
            yield warning(
                "slow-allreduce",
                f"the all-reduce of {one.bytes >> 20} MiB reaches {one.busbw_gbs:.1f} GB/s, and "
                f"plain copies between the GPUs {one.link_gbs:.1f} GB/s",
                "check that nothing else uses the GPUs and that their clocks are not limited "
                "(nvidia-smi -q -d CLOCK,PERFORMANCE)",
            )
