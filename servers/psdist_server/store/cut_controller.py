"""The cut of a snapshot in one parameter store: detects which slices have reached it, and acts on that.

It connects the shard machines, which hold marked pushes and whose updates move slices towards the cut, with the copies
that are made before a slice changes further (``copy_on_write``). It runs on the event loop, except for prefaulting
memory: touching memory for the first time takes longer than the copy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from psdist_server.core.cut_state import CutState
from psdist_server.core.events import CutArmed, CutEnded, Effect, Producer, SliceCut, StepsEnded
from psdist_server.core.role_changes import RoleChanges
from psdist_server.kernels.arrays import DenseParameters
from psdist_server.kernels.memory import MemoryPool
from psdist_server.kernels.pool import KernelLauncher
from psdist_server.store.copy_on_write import WRITER_COPIES, SliceCopies, UpdateGate
from psdist_server.store.shard_router import ShardRouter

#: Time for which memory of copies is kept for the next snapshot.
KEEP_SECONDS: Final = 30.0
#: Slices are expected to change soon if one changed within this time.
ACTIVE_SECONDS: Final = 2.0
#: Memory for copies is prefaulted this many steps before the cut, if it is at least this large.
_PREFAULT_STEPS: Final = 3
_PREFAULT_BYTES_MIN: Final = 8 << 20


class CutController:
    """The cut in one parameter store, at most one at a time."""

    def __init__(
        self, router: ShardRouter, dense: DenseParameters, kernels: KernelLauncher, gate: UpdateGate[Any]
    ) -> None:
        self._router = router
        self._dense = dense
        self._kernels = kernels
        self._gate = gate
        self.current: SliceCopies | None = None
        #: Called with the reason if the current cut cannot be taken any more.
        self._fail: Callable[[str], None] = lambda reason: None
        self._pool: MemoryPool | None = None
        self._shrinking: asyncio.TimerHandle | None = None
        #: Time of the last update of any slice.
        self._updated_at = float("-inf")
        self._is_prefaulted = False

    def arm(self, attempt: int, state: CutState, fail: Callable[[str], None]) -> SliceCopies:
        """Start watching for the cut of ``state``, in BSP at a step that no slice has passed. ``fail`` is called with
        the reason if the cut cannot be taken any more."""
        copies = SliceCopies(state, self._memory(state), self._dense, self._kernels, self._gate.resume)
        self.current, self._fail = copies, fail
        self._is_prefaulted = sum(state.sizes.values()) < _PREFAULT_BYTES_MIN
        self._gate.arm(copies)
        machines = self._router.machines.values()
        self._router.dispatch_all(CutArmed(attempt))
        self._prefault(copies, max((machine.version_max for machine in machines), default=0))
        self._check_all(copies)
        return copies

    def agree(self, copies: SliceCopies, following: Mapping[Producer, int]) -> None:
        """SSP and ASP: set the first push of each producer that is not in the snapshot."""
        copies.state.agree(following)
        self._check_all(copies)

    def end_steps(self, step: int) -> None:
        """BSP: no worker is left to push the steps below ``step``, the step of the cut."""
        self._router.dispatch_all(StepsEnded(step))

    def disarm(self, copies: SliceCopies) -> None:
        """End the cut, because the snapshot is written or abandoned. Nothing waits for it any more."""
        copies.end()
        if self.current is not copies:
            return
        self.current = None
        self._gate.disarm()
        self._router.dispatch_all(CutEnded())
        self._gate.resume()
        if self._shrinking is not None:
            self._shrinking.cancel()
        self._shrinking = asyncio.get_running_loop().call_later(KEEP_SECONDS, self._shrink)

    @property
    def delays_training(self) -> bool:
        """True if an update waits for the snapshot to be written."""
        return bool(self._gate.deferred)

    def _memory(self, state: CutState) -> MemoryPool:
        largest = max(state.sizes.values(), default=4) // 4
        most = min(len(state.sizes), state.budget.limit // (4 * largest) + 1) + WRITER_COPIES
        pool = self._pool
        # A kernel may still be copying for an earlier attempt.
        if pool is None or pool.shape != (largest, most) or pool.is_used:
            pool = self._pool = MemoryPool(largest, most)
        return pool

    def _prefault(self, copies: SliceCopies, version: int) -> None:
        """Touch memory for copies if the cut is near and slices (one is at ``version``) are about to change."""
        state = copies.state
        is_near = state.step is None or version + _PREFAULT_STEPS >= state.step
        if not self._is_prefaulted and is_near and self._is_active and self._pool is not None:
            self._is_prefaulted = True
            elements = state.budget.prefault(sum(state.sizes.values())) // 4
            asyncio.get_running_loop().run_in_executor(None, self._pool.prefault, elements)

    @property
    def _is_active(self) -> bool:
        return asyncio.get_running_loop().time() - self._updated_at < ACTIVE_SECONDS

    def _shrink(self) -> None:
        if self.current is None:
            self._pool = None
        elif self._pool is not None:
            self._pool.shrink()

    def applied(self, index: int) -> list[Effect]:
        """Handle the end of an update of slice ``index``. Returns the effects."""
        self._updated_at = asyncio.get_running_loop().time()
        if (copies := self.current) is None:
            return []
        at_cut = self._check(copies, [index])
        if not self._is_prefaulted:
            self._prefault(copies, self._router.machine_of(index).slices[index].version)
        copies.copy_ahead(at_cut)
        return [effect for number in at_cut for effect in self._router.machine_of(number).on(SliceCut(number))]

    def check_changes(self, changes: RoleChanges, members_changed: bool) -> None:
        """Adopt a new map. A cut covers the shards, and in SSP and ASP the workers, that existed when it started: it
        fails if these change."""
        if self.current is None:
            return
        if changes.demoted or changes.promoted or changes.created:
            self._fail("a shard went to another server")
        elif members_changed and self.current.state.step is None:
            self._fail("a worker came or went")

    def _check_all(self, copies: SliceCopies) -> None:
        machines = self._router.machines.values()
        idle = [index for machine in machines for index, state in machine.slices.items() if not state.busy]
        at_cut = sorted(self._check(copies, idle))
        if self._is_active:
            copies.copy_ahead(at_cut)
        for index in at_cut:
            self._router.dispatch(index, SliceCut(index))

    def _check(self, copies: SliceCopies, indices: Iterable[int]) -> list[int]:
        """Return the slices that have just reached the cut. None of ``indices`` has an update in progress."""
        at_cut = []
        try:
            for index in indices:
                if not copies.is_over and copies.state.check(index, self._router.machine_of(index).record(index)):
                    at_cut.append(index)
                    copies.notify_writer(index)
        except ValueError as error:
            self._fail(str(error))
        return at_cut
