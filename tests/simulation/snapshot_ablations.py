"""Ablations of snapshots: proof that the runs of ``snapshots`` detect faults.

They work like those of ``ablations``; ``hunt`` runs seeds until one catches the ablation.
"""

from __future__ import annotations

from typing import Any

from psdist import ASP, BSP
from psdist.client import participation
from psdist.client.session import worker_state
from psdist.optim import SGD
from psdist.snapshots import reader
from psdist_scheduler import snapshot_io
from psdist_scheduler.decide import leased_datasets, losses, members
from psdist_server.core import cut_state as cuts
from psdist_server.core.async_shard import AsyncShard
from psdist_server.store import snapshot_cut
from tests.simulation import snapshots
from tests.simulation.ablations import Ablation, Put, noted_in, search
from tests.simulation.storage import LIES

#: Number of runs within which an ablation must be caught.
SEEDS = 150

ABLATIONS: dict[str, Ablation] = {}


_ablation = noted_in(ABLATIONS)


def hunt(name: str, seeds: int = SEEDS) -> tuple[int, str]:
    """See ``ablations.search``."""
    return search(ABLATIONS[name], snapshots, seeds)


_BUSY: dict[str, Any] = {"faults": (), "storage_faults": 0.0, "think_seconds": 0.02, "steps": 8, "saves": 0.4}
_ASP: dict[str, Any] = {"consistency": ASP(), "optimizer": SGD(lr=1.0), "save_steps": 0}


# --- the cut ----------------------------------------------------------------------------------------------------------


@_ablation("pushes after the cut are held", **_BUSY, **_ASP, workers=3, lives=16, delay=(0.001, 0.03))
def _held_by_nobody(put: Put) -> None:
    on_cut = AsyncShard._on_cut

    def lenient(self: Any, event: Any) -> Any:
        effects = on_cut(self, event)
        self._uncut = set()
        return effects

    def at_cut(self: Any, index: int, record: Any) -> bool:
        """Original check, except that it ignores pushes past the cut."""
        if self.step is not None or self.following is None:
            return bool(record.version == self.step)
        return all(record.producers.get(life, 0) >= following for life, following in self.following.items())

    put(AsyncShard, "_on_cut", lenient)
    put(cuts.CutState, "_at_cut", at_cut)


@_ablation("a slice is copied before it is overwritten", **_BUSY, storage_seconds=(0.01, 0.1))
def _overwritten(put: Put) -> None:
    put(snapshot_cut.SliceCopies, "copy_for_update", lambda self, index: None)
    put(snapshot_cut.UpdateGate, "blocks", lambda self, index: False)


@_ablation("the state of a script is from the last push of the cut", **_BUSY, keeps=True, data=False)
def _state_of_now(put: Put) -> None:
    def now(self: Any, number: int) -> Any:
        [(save, _)] = self.parts.values()
        return save()

    put(worker_state._Kept, "record_before", now)


# --- the commit -------------------------------------------------------------------------------------------------------


@_ablation(
    "the commit record is created last", consistency=BSP(), save_steps=1, save_seconds=0.0, storage_faults=0.05,
    storage_kinds=("crash before",), steps=8,
)  # fmt: skip
def _record_first(put: Put) -> None:
    create = snapshot_io.SnapshotIo._create

    async def hasty(self: Any, path: str, data: bytes) -> None:
        waiting, self.waiting = getattr(self, "waiting", None), None
        if path.endswith("manifest.json"):
            self.waiting = (path, data)
            return
        await create(self, path, data)
        if waiting is not None:
            await create(self, *waiting)

    put(snapshot_io.SnapshotIo, "_create", hasty)


@_ablation(
    "a loss waits for the commit under way", **{**_BUSY, "faults": ("lose server",)}, fault_count=3, replicas=1,
    consistency=BSP(), save_steps=1, save_seconds=0.0, lives=24, delay=(0.0002, 0.001), storage_seconds=(0.01, 0.1),
)  # fmt: skip
def _lost_at_once(put: Put) -> None:
    put(losses.DeferredLosses, "_must_wait", lambda self, now: False)


# --- the storage ------------------------------------------------------------------------------------------------------


async def _trusted(*_: Any) -> None:
    pass


@_ablation(
    "a new file is read back", faults=(), storage_faults=0.3, storage_kinds=LIES, save_steps=0, save_seconds=0.3,
    steps=8, keep_last=1,
)  # fmt: skip
def _trusting(put: Put) -> None:
    put(reader, "confirm", _trusted)


# --- lives and data ---------------------------------------------------------------------------------------------------

_DATA: dict[str, Any] = {"data": True, "storage_faults": 0.0, "steps": 8}


@_ablation(
    "incarnations continue above a snapshot's", **{**_BUSY, "think_seconds": 0.1}, **_ASP, save_seconds=0.0, ends=2,
    lives=24, storage_seconds=(0.0005, 0.003),
)  # fmt: skip
def _lives_again(put: Put) -> None:
    put(members.Membership, "incarnations_given", property(lambda self: 0, lambda self, value: None))


@_ablation("a range is done where its push is in the cut", **_DATA, faults=(), save_seconds=0.3, save_steps=0)
def _done_at_once(put: Put) -> None:
    put(leased_datasets.UsedRanges, "after", lambda *_: [])


@_ablation(
    "a range whose push was dropped is given back", **_DATA, faults=("lose server",), fault_count=3, replicas=1,
    save_steps=0, save_seconds=0.3, lives=24,
)  # fmt: skip
def _dropped_is_done(put: Put) -> None:
    put(participation.Participation, "on_dropped", lambda self: None)
