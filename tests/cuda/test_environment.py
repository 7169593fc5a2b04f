"""Hazard 21: environment settings that are known to cause problems."""

from __future__ import annotations

import os

import pytest
import torch

from tests.common.pool import Pool
from tests.common.suites.lifecycle import exit_codes

ENVIRONMENTS = {
    "expandable segments": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    "blocking launches": {"CUDA_LAUNCH_BLOCKING": "1"},
    "checked mode": {"COLLX_CHECK": "1"},
    "one connection": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
}


@pytest.mark.worlds(2)
@pytest.mark.parametrize("which", sorted(ENVIRONMENTS))
def test_works_in_this_environment(pool: Pool, which: str) -> None:
    """Hazard 21: a setting does not disable features that it does not affect."""
    for code, output in exit_codes(pool.world.device, "", ENVIRONMENTS[which]):
        assert code == 0, output


@pytest.mark.worlds(2)
def test_works_with_devices_named_by_uuid(pool: Pool) -> None:
    """Hazard 21: CUDA_VISIBLE_DEVICES as UUIDs; each rank sees only its own GPU if possible."""
    gpus = torch.cuda.device_count()
    uuids = [f"GPU-{torch.cuda.get_device_properties(i).uuid}" for i in range(gpus)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    for devices in ([",".join(uuids)] * 2, [uuids[0], uuids[1 % gpus]]):
        each = [{"CUDA_VISIBLE_DEVICES": names} for names in devices]
        for code, output in exit_codes(pool.world.device, "", each):
            assert code == 0, output
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible
