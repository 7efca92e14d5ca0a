"""The cut of a snapshot in one parameter store: which slices have reached it, and the copies made before they change.

``SliceCopies`` connects the state of the cut (``core.cut_state``), the kernels that copy, and the writer of the files
(``snapshots``), which takes slices in file order. ``UpdateGate`` holds the updates that must wait for copies.
``CutController`` connects these with the shard machines, which hold marked pushes and whose updates move slices towards
the cut. Everything here runs on the event loop, except for prefaulting memory: touching memory for the first time takes
longer than the copy.

During training, every slice changes soon after it has reached the cut. So slices are copied as soon as the kernel
threads are otherwise idle.

Invariants: The memory of a copy is reused only when its slice has been written, or the attempt is over and no kernel
uses it. No update waits for an attempt that is over.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, Generic, NamedTuple, TypeVar

from psdist_server.core.cut_state import CutState
from psdist_server.core.lags import LagTable
from psdist_server.core.role_changes import RoleChanges
from psdist_server.core.shard import CutArmed, CutEnded, Effect, Producer, SliceCut, StepsEnded
from psdist_server.kernels.arrays import Array, DenseParameters
from psdist_server.kernels.memory import MemoryPool
from psdist_server.kernels.pool import KernelLauncher
from psdist_server.store.shard_router import ShardRouter

U = TypeVar("U")

#: Copies in progress for writers, in addition to those for updates.
WRITER_COPIES: Final = 8
#: Longest time that the writers of one attempt yield to other copies.
REST_SECONDS: Final = 0.25
#: Copies ahead of updates in progress at a time.
_AHEAD: Final = 2
#: Time for which memory of copies is kept for the next snapshot.
KEEP_SECONDS: Final = 30.0
#: Slices are expected to change soon if one changed within this time.
ACTIVE_SECONDS: Final = 2.0
#: Memory for copies is prefaulted this many steps before the cut, if it is at least this large.
_PREFAULT_STEPS: Final = 3
_PREFAULT_BYTES_MIN: Final = 8 << 20


class CopyTarget(NamedTuple):
    """Destination of a slice's copy: weights, then state, one after another. ``copied`` is called on the loop when the
    copy is complete, unless the slice was discarded."""

    memory: Array
    copied: Callable[[], None]


class SliceCopies:
    """Copies of slices for one snapshot attempt, held until they are written.

    A slice is copied before an update changes it, ahead of such an update, or when the writer takes it next.

    pool: memory of the copies.
    resume: called when an update of slice ``index`` may continue; -1 for any slice.
    """

    def __init__(
        self,
        state: CutState,
        pool: MemoryPool,
        dense: DenseParameters,
        kernels: KernelLauncher,
        resume: Callable[[int], None],
    ) -> None:
        self.state = state
        self.pool = pool
        self._dense = dense
        self._kernels = kernels
        self._resume = resume
        self._copies: dict[int, Array] = {}
        #: Lags of the copied slices.
        self.lags = LagTable()
        #: Writers waiting for a slice to reach the cut, or to be copied.
        self._awaited: dict[int, asyncio.Future[None]] = {}
        #: Slices at the cut that will change soon, and the number of them being copied.
        self._ahead: deque[int] = deque()
        self._copying_ahead = 0
        self._is_pumping = False
        #: Slices being copied by updates.
        self._by_updates: set[int] = set()
        #: Writers that are yielding to other copies, and the seconds left for that.
        self._resting: list[asyncio.Future[None]] = []
        self._rest_left = REST_SECONDS
        self.is_over = False

    def copy_for_update(self, index: int) -> CopyTarget | None:
        """Return the memory to which a starting update of slice ``index`` must copy it first, or None."""
        if self.state.is_safe(index):
            return None
        self.state.copy_for_update(index)
        self._by_updates.add(index)
        return CopyTarget(self._acquire(index), partial(self._copied, index))

    def _acquire(self, index: int) -> Array:
        self.lags.set(index, self._dense.lags.of(index))  # No kernel writes the slice before it is copied.
        memory = self._copies[index] = self.pool.acquire(index, self.state.sizes[index] // 4)
        return memory

    def _copied(self, index: int) -> None:
        self.state.copy_finished(index)
        if self.is_over:
            self.pool.release(index)
            return
        self.notify_writer(index)
        self._by_updates.discard(index)
        if not self._is_hurried:
            self._end_rest()
        self._resume(index)

    def copy_ahead(self, indices: Iterable[int] = ()) -> None:
        """Copy slices at the cut that will change soon, when the kernel threads are otherwise idle."""
        self._ahead.extend(indices)
        if self._is_pumping:  # A caller up the stack does this: small slices are copied synchronously.
            return
        self._is_pumping = True
        while self._ahead and self._copying_ahead < _AHEAD and not self.state.budget.is_exhausted and not self.is_over:
            index = self._ahead.popleft()
            if self.state.needs_copy(index):
                self._copying_ahead += 1
                self.state.copy_for_update(index)
                self._submit(index, self._copied_ahead, last=True)
        self._is_pumping = False

    def _copied_ahead(self, index: int) -> None:
        self._copying_ahead -= 1
        self.copy_ahead()
        self._copied(index)

    def _submit(self, index: int, copied: Callable[[int], None], *, last: bool = False) -> None:
        """Copy a slice that no update changes meanwhile. last: after all updates."""
        target = CopyTarget(self._acquire(index), partial(copied, index))
        self._kernels.submit(index, self._copy, target, _on_copied, last)

    def _copy(self, works: Sequence[tuple[int, CopyTarget]]) -> list[None]:
        """Copy slices. Runs in a kernel thread, or on the loop."""
        for index, target in works:
            self._dense.copy_slice(index, target.memory)
        return [None] * len(works)

    def end(self) -> None:
        """End the attempt, which is over or fully written. Nothing waits for it any more; memory is released when the
        kernels that write to it have ended."""
        self.is_over = True
        copying = set(self.state.copying)
        self.state.drop(self.state.sizes)
        for index in self._copies.keys() - copying:
            self.pool.release(index)
        self._copies.clear()
        for future in self._awaited.values():
            future.cancel()
        self._awaited.clear()
        self._end_rest()

    async def take(self, index: int) -> Array:
        """Wait for the copy of slice ``index``, and return it: all its arrays one after another."""
        while index not in self.state.copied:
            if self.state.needs_copy(index):
                self._copy_for_writer(index)
            else:
                await self._awaited.setdefault(index, asyncio.get_running_loop().create_future())
        return self._copies[index]

    def prefetch(self, indices: Sequence[int]) -> None:
        """Start copying those of these slices that need a copy."""
        for index in indices:
            if self.state.needs_copy(index):
                self._copy_for_writer(index)

    def _copy_for_writer(self, index: int) -> None:
        self.state.copy_for_writer(index)
        self._submit(index, self._copied)

    def notify_writer(self, index: int) -> None:
        """Wake a writer that waits for slice ``index``, which has reached the cut or is copied."""
        future = self._awaited.pop(index, None)
        if future is not None and not future.done():
            future.set_result(None)

    def written(self, index: int) -> None:
        """Release the copy that ``take`` returned; it is in its file."""
        self.state.written(index)
        del self._copies[index]
        self.pool.release(index)
        self._resume(-1)
        self.copy_ahead()

    @property
    def _is_hurried(self) -> bool:
        """True if slices are being copied for updates, or ahead of them."""
        return bool(self._by_updates or self._copying_ahead)

    async def rest(self) -> None:
        """Pause the writer while slices are copied that training needs next, because writing would compete for the
        processor. Pauses at most REST_SECONDS in one attempt, and never if the budget is exhausted."""
        loop = asyncio.get_running_loop()
        while self._is_hurried and self._rest_left > 0 and not self.state.budget.is_exhausted:
            began, quiet = loop.time(), loop.create_future()
            self._resting.append(quiet)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._rest_left):
                    await quiet
            self._rest_left -= loop.time() - began

    def _end_rest(self) -> None:
        for future in self._resting:
            if not future.done():
                future.set_result(None)
        self._resting.clear()

    def versions(self, indices: Sequence[int]) -> list[int]:
        """Return the versions at the cut of slices that were taken."""
        return [self.state.versions[index] for index in indices]

    def waiting_for(self) -> str:
        """Return the writer's wait as text, or "" if that is nothing or the storage."""
        index = next((index for index in self._awaited if index not in self.state.versions), None)
        if index is None:
            return ""
        return f"for slice {index} to reach the cut" + (f" at step {self.state.step}" if self.state.step else "")


def _on_copied(target: CopyTarget, _: None) -> None:
    target.copied()


class UpdateGate(Generic[U]):
    """Holds updates that would overwrite slices that a snapshot still needs, until these are copied.

    deliver: carries out a deferred update.
    """

    def __init__(self, deliver: Callable[[U], None]) -> None:
        self._deliver = deliver
        #: Copies of the snapshot being cut; None if there is none.
        self.copies: SliceCopies | None = None
        self._deferred: dict[int, U] = {}
        self._order: list[int] = []
        self._is_resuming = False

    def arm(self, copies: SliceCopies) -> None:
        """Start a cut: updates may have to wait for its ``copies``."""
        self.copies = copies

    def disarm(self) -> None:
        """End the cut; ``resume`` delivers all updates."""
        self.copies = None

    def blocks(self, index: int) -> bool:
        """Return True if an update of slice ``index`` must be deferred."""
        return self.copies is not None and self.copies.state.blocks_update(index)

    def defer(self, index: int, update: U) -> None:
        """Hold the update of a slice for which ``blocks`` is True."""
        heapq.heappush(self._order, index)
        self._deferred[index] = update

    def resume(self, index: int = -1) -> None:
        """Deliver the update of slice ``index``, and as many others as may continue, the lowest first."""
        self._resume_one(index)
        if self._is_resuming:  # A caller up the stack does this: small slices are updated synchronously.
            return
        self._is_resuming, order = True, self._order
        try:
            while order and (order[0] not in self._deferred or self._resume_one(order[0])):
                heapq.heappop(order)
        finally:
            self._is_resuming = False

    def _resume_one(self, index: int) -> bool:
        if index not in self._deferred or self.blocks(index):
            return False
        self._deliver(self._deferred.pop(index))
        return True

    @property
    def deferred(self) -> Collection[int]:
        """Slices that have a waiting update."""
        return self._deferred.keys()

    def discard(self, index: int) -> None:
        """Drop the update of slice ``index``."""
        self._deferred.pop(index, None)


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
        #: Time of the last update of any slice, by the loop.
        self.updated_at = float("-inf")
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
        return asyncio.get_running_loop().time() - self.updated_at < ACTIVE_SECONDS

    def _shrink(self) -> None:
        if self.current is None:
            self._pool = None
        elif self._pool is not None:
            self._pool.shrink()

    def applied(self, index: int) -> list[Effect]:
        """Handle the end of an update of slice ``index`` while there is a cut. Returns the effects."""
        copies = self.current
        assert copies is not None
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
