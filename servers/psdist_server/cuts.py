"""Cuts: what a snapshot that is being taken means for the slices of one holding.

Between the shard machines, which hold marked pushes back and say when a slice was updated, and the copies that are made
before it changes further (``asides``). Runs on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from psdist_server.applier import Applier
from psdist_server.asides import HoldingCut
from psdist_server.events import CutArmed, CutEnded, Effect, SliceCut
from psdist_server.records import Life, SliceRecord
from psdist_server.roles import RoleChanges
from psdist_server.shard import AsyncShard, BspShard
from psdist_server.snapshots import Room


class Cuts:
    """The cut through one holding, at most one at a time.

    shards: the machines of the shards that are served here, by number. shard: that of a slice. carry_out: carries their
    effects out.
    """

    def __init__(
        self,
        shards: Mapping[int, BspShard | AsyncShard],
        shard: Callable[[int], BspShard | AsyncShard],
        applier: Applier,
        carry_out: Callable[[Sequence[Effect]], None],
    ) -> None:
        self._shards = shards
        self._shard = shard
        self._applier = applier
        self._carry_out = carry_out
        self.current: HoldingCut | None = None

    def arm(
        self, attempt: int, step: int | None, array_elements: Mapping[int, int], room: Room, fail: Callable[[str], None]
    ) -> HoldingCut:
        """Begins to watch for the cut. step: BSP: that of the cut, which no slice has passed; else None. The rest as
        in HoldingCut."""
        cut = HoldingCut(step, array_elements, room, self._applier, self._record, fail)
        self.current = self._applier.guard = cut
        for shard in self._shards.values():
            self._carry_out(shard.on(CutArmed(attempt)))
        self._look(cut)
        return cut

    def agree(self, cut: HoldingCut, following: Mapping[Life, int]) -> None:
        """SSP and ASP: the first push of each life that is not in the snapshot."""
        cut.agree(following)
        self._look(cut)

    def disarm(self, cut: HoldingCut) -> None:
        """The snapshot is written, or given up: nothing waits for it any more."""
        cut.end()
        if self.current is cut:
            self.current = self._applier.guard = None
            for shard in self._shards.values():
                self._carry_out(shard.on(CutEnded()))
            self._applier.resume()

    def applied(self, index: int) -> list[Effect]:
        """What follows for slice ``index`` from an update that is done."""
        if self.current is None:
            return []
        return [effect for ripe in self.current.look([index]) for effect in self._shard(ripe).on(SliceCut(ripe))]

    def follow(self, changes: RoleChanges, members_changed: bool) -> None:
        """A new map: a cut goes through the shards, and in SSP and ASP the lives of workers, that were there when it
        began."""
        if self.current is None:
            return
        if changes.demoted or changes.promoted or changes.created:
            self.current.fail("a shard went to another server")
        elif members_changed and self.current.machine.step is None:
            self.current.fail("a worker came or went")

    def _look(self, cut: HoldingCut) -> None:
        idle = [index for shard in self._shards.values() for index, state in shard.slices.items() if not state.busy]
        for index in cut.look(idle):
            self._carry_out(self._shard(index).on(SliceCut(index)))

    def _record(self, index: int) -> SliceRecord:
        return self._shard(index).record(index)
