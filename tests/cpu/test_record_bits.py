"""tools/record_bits.py records every operator that moves tensors."""

from __future__ import annotations

from pathlib import Path

from tests.common.collectives import NAMES, OPS
from tests.common.programs import RANKS, run_program

TOOL = Path(__file__).resolve().parents[2] / "tools" / "record_bits.py"


def test_every_collective_and_algorithm_is_recorded(tmp_path: Path) -> None:
    """With tensors that do not begin at their allocation."""
    run_program(TOOL, str(tmp_path / "bits"), "--short", "--offset", "1")
    for rank in range(RANKS):
        lines = (tmp_path / f"bits.{rank}").read_text().splitlines()
        recorded = {tuple(line.split()[1:3]) for line in lines}
        # Lines of alltoallv include those with splits on the device.
        for name in set(NAMES) - {"alltoallv_device", "reduce_to_everyone"}:
            assert recorded >= {(name, a) for a in ("auto", *OPS[name].algorithms)}, name
        assert "norm" in {what for what, _ in recorded}
