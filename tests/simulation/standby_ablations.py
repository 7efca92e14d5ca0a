"""Ablations of runs with two schedulers: proof that ``standby`` detects faults."""

from __future__ import annotations

from typing import Any

from tests.simulation import standby
from tests.simulation.ablations import Ablation, Put, noted_in, search
from tests.simulation.disk import Disk, DiskStore

#: Number of seeds within which an ablation must be caught.
SEEDS = 300

ABLATIONS: dict[str, Ablation] = {}
_ablation = noted_in(ABLATIONS)

_REPLACED: dict[str, Any] = {
    "faults": (standby.REPLACE, "kill worker"), "fault_count": 4, "fault_seconds": 8.0, "steps": 20,
    "think_seconds": 0.4, "disk_seconds": (0.02, 0.15),
}  # fmt: skip


def hunt(name: str, seeds: int = SEEDS) -> tuple[int, str]:
    """See ``ablations.search``."""
    return search(ABLATIONS[name], standby, seeds)


@_ablation("each write compares the leader key", **_REPLACED)
def _anyone_writes(put: Put) -> None:
    put(Disk, "is_led_by", lambda self, number: True)


@_ablation("a scheduler stops when its lease has ended", **_REPLACED)
def _no_check(put: Put) -> None:
    put(DiskStore, "check", lambda self: None)
