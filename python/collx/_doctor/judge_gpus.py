"""Findings about the GPUs, their driver and their links."""

from __future__ import annotations

from collections.abc import Iterator

from collx._doctor.facts import Facts, Finding, error, warning


def findings(facts: Facts) -> Iterator[Finding]:
    yield from _driver(facts)
    yield from _kernels(facts)
    if facts.run.device == "cuda":
        yield from _sharing(facts)
        yield from _modes(facts)
        yield from _links(facts)


def _driver(facts: Facts) -> Iterator[Finding]:
    versions, gpus = facts.versions, facts.gpus
    runtime, driver = versions.cuda_runtime, versions.cuda_driver
    if runtime and driver and int(runtime.split(".")[0]) > int(driver.split(".")[0]):
        yield error(
            "old-driver",
            f"the GPU driver {versions.gpu_driver} supports CUDA up to {driver}, and PyTorch was "
            f"built for CUDA {runtime}",
            "update the driver, or install a PyTorch for an older CUDA and build collx for it",
        )
    elif gpus.seen and gpus.usable == 0:
        hidden = facts.environment.get("CUDA_VISIBLE_DEVICES") is not None
        yield warning(
            "no-usable-gpu",
            f"nvidia-smi lists {len(gpus.seen)} GPUs, and PyTorch can use none"
            + ("; CUDA_VISIBLE_DEVICES is set" if hidden else ""),
            "unset CUDA_VISIBLE_DEVICES"
            if hidden
            else "install a PyTorch with CUDA, and pass the GPUs to the container (--gpus all)",
        )


def _kernels(facts: Facts) -> Iterator[Finding]:
    versions = facts.versions
    if versions.built_for_cuda is None:
        if facts.gpus.usable > 0:
            found = error if facts.run.device == "cuda" else warning
            yield found(
                "no-kernels",
                "this build of collx has no CUDA kernels, and the machine has GPUs",
                "install collx again where nvcc is found, with COLLX_CUDA=1",
            )
        return
    for capability in dict.fromkeys(device.capability for device in facts.run.devices):
        if not _covered(capability, versions.architectures):
            yield error(
                "architecture",
                f"a GPU has compute capability {capability}, and this build has kernels for "
                f"{', '.join(versions.architectures)}",
                f"build collx with TORCH_CUDA_ARCH_LIST={capability}",
            )


def _covered(capability: str, architectures: list[str]) -> bool:
    """Whether a build supports a compute capability. A binary runs on devices with the same major
    and the same or a newer minor version; PTX runs on all newer devices."""
    wanted = tuple(map(int, capability.split(".")))
    for one in architectures:
        built = tuple(map(int, one.removesuffix("+PTX").rstrip("af").split(".")))
        if built <= wanted and (built[0] == wanted[0] or one.endswith("+PTX")):
            return True
    return False


def _sharing(facts: Facts) -> Iterator[Finding]:
    run = facts.run
    allowed = facts.environment.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1"
    if run.devices and len(run.ranks) > len(run.devices) and allowed:
        mps = "" if facts.gpus.mps else ", without CUDA's multi-process service"
        yield warning(
            "shared-gpu",
            f"{len(run.ranks)} ranks share {len(run.devices)} GPUs{mps}: kernels of ranks that "
            "wait for each other may not run at the same time",
            "start one rank for each GPU, or start nvidia-cuda-mps-control -d",
        )
    if len(run.ranks) == 1:
        yield warning(
            "one-rank",
            "only one rank ran, so no access between GPUs was tested",
            "run the doctor where at least two GPUs are visible, or pass --ranks 2",
        )


def _modes(facts: Facts) -> Iterator[Finding]:
    for gpu in facts.gpus.seen:
        if gpu.mig == "Enabled":
            yield warning(
                "mig",
                f"GPU {gpu.index} is divided by MIG: its parts have no peer access",
                "use whole GPUs for ranks that communicate",
            )
        if gpu.compute_mode == "Prohibited":
            yield error(
                "compute-mode",
                f"GPU {gpu.index} is in compute mode Prohibited: no process may use it",
                f"nvidia-smi -i {gpu.index} -c DEFAULT",
            )
        elif gpu.compute_mode == "Exclusive_Process" and not facts.gpus.mps:
            yield warning(
                "compute-mode",
                f"GPU {gpu.index} is in compute mode Exclusive_Process: one process may use it, "
                "and ranks that copy to it fail",
                f"nvidia-smi -i {gpu.index} -c DEFAULT",
            )


def _links(facts: Facts) -> Iterator[Finding]:
    slow = [
        f"{a} and {b} ({link})"
        for a, row in facts.gpus.links.items()
        for b, link in row.items()
        if a < b and not link.startswith("NV") and link != "X"
    ]
    if slow and facts.run.fallback_reason is None:
        yield warning(
            "no-nvlink",
            f"GPUs without an NVLink between them: {', '.join(slow)}; calls are limited by PCIe",
            "put ranks that communicate on GPUs that NVLink connects (nvidia-smi topo -m)",
        )
