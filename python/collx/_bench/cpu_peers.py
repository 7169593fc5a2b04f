"""Peers on the CPU that run in this process, and a plain copy. For MPI, see mpi_run.py."""

import uuid
from importlib.util import find_spec
from pathlib import Path

import torch

from collx._bench.call import Call, Kind
from collx._bench.implementation import Implementation
from collx._bench.job import Case, Job
from collx._bench.ops import OPS
from collx._bench.torch_dist import TorchDist


class Gloo(TorchDist):
    name = "gloo"


class VllmShm(Implementation):
    """The shared-memory collectives of vLLM's build for the CPU."""

    name = "vllm-shm"
    ops = ("allreduce", "allgather")
    form = "operator, in place (allreduce) or out"
    _handle: int | None = None  # belongs to the process: it cannot be released

    def unfit(self, case: Case) -> str | None:
        if case.op.reduces and case.reduce_op != "sum":
            return "sum only"
        dtypes = (torch.float32, torch.bfloat16, torch.float16)
        return None if case.job.dtype in dtypes else "bfloat16, float16 and float32 only"

    def prepare(self, case: Case) -> Call:
        handle, ops = self._opened(case.job), torch.ops._C
        x = case.empty(case.input_numel)
        if case.op.reduces:
            return Call.of(case, lambda: ops.shm_allreduce(handle, x), x, x)
        y = case.empty(case.output_numel)
        return Call.of(case, lambda: ops.shm_all_gather(handle, x, y), x, y)

    @classmethod
    def _opened(cls, job: Job) -> int:
        if cls._handle is None:
            torch.ops.load_library(library_of_vllm())
            name = job.ranks.from_first(f"collx-bench-{uuid.uuid4().hex}")
            ops, ranks = torch.ops._C, job.ranks
            handle = ops.init_shm_manager(name, ranks.world, ranks.rank, torch.get_num_threads())
            ranks.barrier()
            ops.join_shm_manager(handle, name)
            ranks.barrier()
            cls._handle = handle
        return cls._handle


def library_of_vllm() -> Path:
    """Returns vLLM's library of operators for this processor, without importing vllm."""
    found = find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'vllm'")
    folder = Path(found.submodule_search_locations[0])
    name = "_C_AVX2"
    if torch.cpu._is_avx512_supported():
        name = "_C" if torch.cpu._is_avx512_bf16_supported() else "_C_AVX512"
    library = folder / f"{name}.abi3.so"
    return library if library.exists() else folder / "_C.abi3.so"


class Memcpy(Implementation):
    """Copies the number of bytes that must cross the link of each rank, on all ranks at once."""

    name = "memcpy"
    kind = Kind.FLOOR
    ops = tuple(op.name for op in OPS.values() if op.has_tensor)

    def prepare(self, case: Case) -> Call:
        nbytes = int(case.op.bytes_on_link(case.nbytes, case.world, case.at_root))
        source = torch.zeros(max(1, nbytes), dtype=torch.uint8)
        target = torch.ones_like(source)
        return Call(lambda: target.copy_(source), lambda: None, lambda: target)


PEERS: dict[str, type[Implementation]] = {"gloo": Gloo, "vllm-shm": VllmShm, "memcpy": Memcpy}
