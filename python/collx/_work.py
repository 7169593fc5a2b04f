"""The `torch.distributed.Work` that a function of torch.distributed returns under `collx.patch`."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from collx.ops.functions import Handle

__all__ = ["Work"]

_NO_TIMEOUT = timedelta()


class Work(dist.Work):
    """The work of a call with async_op=True."""

    def __init__(self, handle: Handle | None, output: Tensor, flat: bool = False) -> None:
        """
        Args:
            handle: the handle of the posted call; None if the call was not posted, and thus is
                ordered on the current stream.
            output: the tensor that the call writes.
            flat: whether the posted call writes a flat view of `output`.
        """
        super().__init__()
        self._handle = handle
        self._output = output
        self._flat = flat
        # Also prevents the warning for a handle that is deleted without wait(): programs for
        # torch.distributed may drop the work of a call, as DDP.join does.
        self._future: Any = _completed(output) if handle is None else handle.get_future()

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        if self._handle is None:
            self._future.wait()
        else:
            self._handle.wait(None if timeout <= _NO_TIMEOUT else timeout)
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._handle is None or self._handle.is_completed()

    def is_success(self) -> bool:
        try:
            return not self._future.done() or bool(self._future.value())
        except RuntimeError:
            return False

    def result(self) -> list[Tensor]:
        return [self._output]

    def get_future(self) -> Any:
        return self._future.then(self._results) if self._flat else self._future

    def _results(self, done: Any) -> list[Tensor]:
        done.value()  # raises the error of the call
        return [self._output]


def _completed(output: Tensor) -> torch.futures.Future[list[Tensor]]:
    made = torch.futures.Future[list[Tensor]](devices=[output.device] if output.is_cuda else None)
    made.set_result([output])
    return made
