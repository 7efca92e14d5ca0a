"""What a snapshot under way means for the slices of one parameter store.

This stands between the shard machines, which hold marked pushes back and report each update, and the copies that are
made before a slice changes further (``copy_on_write``). It runs on the event loop, except for prefaulting memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from psdist_server.core.async_shard import AsyncShard
from psdist_server.core.bsp_shard import BspShard
from psdist_server.core.cut import SnapshotCut
from psdist_server.core.events import CutArmed, CutEnded, Effect, SliceCut, StepsEnded
from psdist_server.core.records import Producer, SliceRecord
from psdist_server.core.role_changes import RoleChanges
from psdist_server.store.applier import Applier
from psdist_server.store.copy_on_write import WRITER_COPIES, CopyPool, CutState

#: Memory of copies is kept so long for the next snapshot.
KEEP_SECONDS: Final = 30.0
#: Slices change soon where one did within this time.
_ACTIVE_SECONDS: Final = 2.0
#: Memory for copies is made ready from so many steps before the cut on, where it is at least so much.
_READY_STEPS: Final = 3
_READY_BYTES_MIN: Final = 8 << 20


class CutController:
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
        self.current: CutState | None = None
        self._pool: CopyPool | None = None
        self._shrinking: asyncio.TimerHandle | None = None
        #: When a slice was updated last.
        self._updated_at = float("-inf")
        #: Memory for the cut is being made ready, or is.
        self._is_ready = False

    # --- an attempt ---------------------------------------------------------------------------------------------------

    def arm(self, attempt: int, machine: SnapshotCut, fail: Callable[[str], None]) -> CutState:
        """Begins to watch for the cut that ``machine`` is to follow, in BSP at a step that no slice has passed.
        ``fail`` is told why it cannot be had any more."""
        pool = self._memory(machine)
        cut = CutState(machine, pool, self._applier, self._record, fail)
        self.current, self._is_ready = cut, sum(machine.sizes.values()) < _READY_BYTES_MIN
        self._applier.guard = cut
        for shard in self._shards.values():
            self._carry_out(shard.on(CutArmed(attempt)))
        self._get_ready(cut, max((shard.version_max for shard in self._shards.values()), default=0))
        self._look(cut)
        return cut

    def agree(self, cut: CutState, following: Mapping[Producer, int]) -> None:
        """SSP and ASP: the first push of each producer that is not in the snapshot."""
        cut.agree(following)
        self._look(cut)

    def end_steps(self, step: int) -> None:
        """BSP: no worker is left, and some slice is at ``step``, that of the cut."""
        for shard in self._shards.values():
            self._carry_out(shard.on(StepsEnded(step)))

    def disarm(self, cut: CutState) -> None:
        """The snapshot is written, or given up: nothing waits for it any more."""
        cut.end()
        if self.current is not cut:
            return
        self.current = self._applier.guard = None
        for shard in self._shards.values():
            self._carry_out(shard.on(CutEnded()))
        self._applier.resume()
        if self._shrinking is not None:
            self._shrinking.cancel()
        self._shrinking = asyncio.get_running_loop().call_later(KEEP_SECONDS, self._shrink)

    # --- memory -------------------------------------------------------------------------------------------------------

    def _memory(self, machine: SnapshotCut) -> CopyPool:
        largest = max(machine.sizes.values(), default=4) // 4
        most = min(len(machine.sizes), machine.room.limit // (4 * largest) + 1) + WRITER_COPIES
        pool = self._pool
        # A kernel may still copy for an attempt before.
        if pool is None or pool.shape != (largest, most) or pool.is_used:
            pool = self._pool = CopyPool(largest, most)
        return pool

    def _get_ready(self, cut: CutState, version: int) -> None:
        """Makes memory ready where slices, of which one is at ``version``, will change and the cut is near."""
        is_near = cut.machine.step is None or version + _READY_STEPS >= cut.machine.step
        if not self._is_ready and is_near and self._is_active and self._pool is not None:
            self._is_ready = True
            elements = cut.machine.room.prepare(sum(cut.machine.sizes.values())) // 4
            asyncio.get_running_loop().run_in_executor(None, self._pool.prefault, elements)

    @property
    def _is_active(self) -> bool:
        return asyncio.get_running_loop().time() - self._updated_at < _ACTIVE_SECONDS

    def _shrink(self) -> None:
        if self.current is None:
            self._pool = None
        elif self._pool is not None:
            self._pool.shrink()

    # --- what the store reports ---------------------------------------------------------------------------------------

    def applied(self, index: int) -> list[Effect]:
        """What follows for slice ``index`` from an update that is done."""
        self._updated_at = asyncio.get_running_loop().time()
        if (cut := self.current) is None:
            return []
        at_cut = cut.look([index])
        if not self._is_ready:
            self._get_ready(cut, self._shard(index).slices[index].version)
        cut.copy_ahead(at_cut)
        return [effect for number in at_cut for effect in self._shard(number).on(SliceCut(number))]

    def follow(self, changes: RoleChanges, members_changed: bool) -> None:
        """A new map: a cut goes through the shards, and in SSP and ASP the workers, that were there when it
        began."""
        if self.current is None:
            return
        if changes.demoted or changes.promoted or changes.created:
            self.current.fail("a shard went to another server")
        elif members_changed and self.current.machine.step is None:
            self.current.fail("a worker came or went")

    def _look(self, cut: CutState) -> None:
        idle = [index for shard in self._shards.values() for index, state in shard.slices.items() if not state.busy]
        at_cut = sorted(cut.look(idle))
        if self._is_active:
            cut.copy_ahead(at_cut)
        for index in at_cut:
            self._carry_out(self._shard(index).on(SliceCut(index)))

    def _record(self, index: int) -> SliceRecord:
        return self._shard(index).record(index)
