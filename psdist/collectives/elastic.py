"""``ElasticSteps``: steps of data-parallel training whose workers die, leave, and are added.

A step reduces the gradients of all members of a group, and ends with a call that commits it. If a member is lost, the
others reconfigure the group and compare how far they are. A member that has committed the step gives its result to
those that have not; if there is none, all repeat the step with the gradients of the members that are left. So all of
them apply the same mean.

New workers wait. When a step has shown to all members that some do, all members admit them before the next step. If
too few members are left after a loss, they take in new ones before they repeat the step. New workers receive the state
from a member.

Invariants: Two members are at most one step apart, and then the one ahead still holds the result of the other's step. A
state contains the newest step that a member has completed, and nothing of the next one. A worker that was left out
contributes to no step until it has the others' state.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from psdist.collectives.core.plans import Array
from psdist.collectives.group import AsyncWorkerGroup
from psdist.errors import (
    ClosedError,
    CollectiveMismatchError,
    ExcludedError,
    FencedError,
    LateWorkerError,
    LimitExceededError,
    PeerUnreachableError,
    WaitTimeoutError,
    WorkerLostError,
)

#: Errors of calls after which the others continue.
_LOST: Final = (WorkerLostError, WaitTimeoutError, ClosedError, PeerUnreachableError)
#: Errors after which this worker joins the group again.
_LEFT_OUT: Final = (ExcludedError, FencedError)
#: Status of a worker without the state.
_NEW: Final = -1


class ElasticState(Protocol):
    """State that new workers receive."""

    @property
    def bytes_max(self) -> int:
        """The most bytes that another worker's state may have."""

    async def export(self) -> NDArray[np.uint8]:
        """Return the state between two steps as bytes."""

    async def load(self, data: NDArray[np.uint8]) -> None:
        """Replace the state by that of another worker."""


@dataclass(frozen=True)
class StepArrays:
    """Arrays of one step. All members have arrays of the same shapes and dtypes.

    given: contributions to the means, and own buffers.
    out: memory for the results, apart from ``given``.
    means: number of arrays that are averaged. The others are buffers: all members get those of the lowest
        rank whose gradients are not stale.
    """

    given: Sequence[Array]
    out: Sequence[Array]
    means: int


class ElasticSteps:
    """Steps of one worker.

    join: joins the group.
    state: what new workers receive.
    """

    def __init__(self, join: Callable[[], Awaitable[AsyncWorkerGroup]], state: ElasticState) -> None:
        self._join = join
        self._state = state
        self._group: AsyncWorkerGroup | None = None
        self._is_new = True
        #: True if the gradients under way belong to a state that was replaced.
        self._is_stale = False
        #: Rank whose buffers all members get: its gradients are not stale.
        self._buffer_source = 0
        #: Sum of the weights and number of waiting workers in the last step, and that step's results.
        self._totals: NDArray[np.float64] = np.zeros(2)
        self._results: Sequence[Array] = ()
        #: Completed steps.
        self.step = 0

    @property
    def group(self) -> AsyncWorkerGroup:
        """The newest group. Raises ClosedError before ``start``, and after ``close``."""
        if self._group is None:
            raise ClosedError("the elastic training is closed")
        return self._group

    async def start(self) -> None:
        """Join the group, and receive its state.

        Raises LimitExceededError if the state has too many bytes, and as ``join_group`` and ``ElasticState.load``.
        """
        await self._regroup(joins=True)

    async def begin_step(self) -> None:
        """Take in new workers, if some waited in the last step."""
        while self._totals[1]:
            await self._regroup(admit=True)

    async def reduce(self, arrays: StepArrays) -> None:
        """Make a step. Its results are not to be written to before the next one.

        Raises CollectiveMismatchError if arrays differ, FencedError if this worker may not rejoin, and ClosedError.
        """
        self._is_stale = False
        while True:
            try:
                await self._reduce_once(arrays)
                return
            except _LEFT_OUT:
                has_result = await self._regroup(arrays.out, joins=True)
            except _LOST:
                has_result = await self._regroup(arrays.out)
            if has_result:
                return

    async def _reduce_once(self, arrays: StepArrays) -> None:
        group = self.group
        for number, (array, result) in enumerate(zip(arrays.given, arrays.out, strict=True)):
            if number < arrays.means:
                sent = np.zeros_like(array) if self._is_stale else array
                await group.all_reduce(sent, out=result)
            else:
                await group.broadcast(array, self._buffer_source, out=result)
        waiting = await group.count_newcomers() if group.rank == 0 else 0
        totals = await group.all_reduce(np.array([not self._is_stale, waiting], np.float64))
        for result in arrays.out[: arrays.means]:
            with np.errstate(all="ignore"):
                result /= result.dtype.type(max(1.0, totals[0]))
        self._commit(totals, arrays.out)

    def _commit(self, totals: NDArray[np.float64], results: Sequence[Array]) -> None:
        self._totals, self._results = totals, results
        self.step += 1
        self._buffer_source = 0

    async def close(self) -> None:
        """Wait until all members have completed their last step, and end the group. Workers that wait learn of it.

        Raises CollectiveMismatchError if others continue.
        """
        while self._group is not None:
            try:
                await self._close_once(self._group)
            except (*_LEFT_OUT, LateWorkerError):  # The others have completed their work.
                self._group = None

    async def _close_once(self, group: AsyncWorkerGroup) -> None:
        try:
            await group.barrier()
            await group.finish()
            self._group = None
        except _LOST:
            await self._regroup()

    # --- changes of the group -----------------------------------------------------------------------------------------

    async def _regroup(self, results: Sequence[Array] = (), *, admit: bool = False, joins: bool = False) -> bool:
        """Form groups until all members of one have compared their steps. Returns True if this worker has received the
        results of its step from another.

        results: memory for them; empty between two steps.
        """
        while True:
            try:
                if joins:
                    self._is_new = True
                self._group = await (self._join() if joins else self.group.reconfigure(admit=admit or self._is_new))
            except _LEFT_OUT:
                joins = True
                continue
            joins = False
            try:
                return await self._compare(self._group, results)
            except _LEFT_OUT:
                joins = True
            except _LOST:
                pass
            except Exception:  # This worker cannot take part, and the others are not to wait for it.
                await self._group.close()
                raise

    async def _compare(self, group: AsyncWorkerGroup, results: Sequence[Array]) -> bool:
        """Bring all members to one step. Returns True if this one has received the results of its step."""
        mine = np.array([_NEW if self._is_new else self.step, self.step, bool(len(results)), self._is_stale])
        steps, known, in_step, is_stale = (await group.all_gather(mine)).T
        newest, is_new = int(steps.max()), steps == _NEW
        # If nobody is left that others continued with, the workers' own states are all there is.
        source = int((known if is_new.all() else steps).argmax())
        behind = np.flatnonzero(~is_new & (steps < newest))
        if any(steps[behind] < newest - 1):
            raise CollectiveMismatchError(
                f"ranks have completed different numbers of steps: {steps[~is_new].tolist()}. All workers make the "
                "same number"
            )
        if group.rank == source:
            await self._help(group, behind, np.flatnonzero(is_new))
        has_result = group.rank in behind
        if has_result:
            await self._receive_results(group, source, results)
        elif is_new[group.rank] and group.rank != source:
            await self._receive_state(group, source)
        self._is_new = False
        received = is_new & (np.arange(group.size) != source)
        self._buffer_source = int(np.argmin(is_stale.astype(bool) | received))
        # All have admitted the workers that waited, or some have begun the next step without them.
        if not len(behind) or in_step[steps == newest].any():
            self._totals = np.zeros(2)
        return has_result

    async def _help(self, group: AsyncWorkerGroup, behind: Any, new: Any) -> None:
        """Give this worker's results to those that lack them, and its state to new ones."""
        for rank in behind:
            for array in (self._totals, *self._results):
                await group.send(array, int(rank))
        others = [int(rank) for rank in new if rank != group.rank]
        if others:
            data = await self._state.export()
            for rank in others:
                await group.send(np.array([self.step, data.nbytes]), rank)
                await group.send(data, rank)

    async def _receive_results(self, group: AsyncWorkerGroup, source: int, results: Sequence[Array]) -> None:
        totals = np.zeros(2)
        for array in (totals, *results):
            await group.recv(array, source)
        self._commit(totals, results)

    async def _receive_state(self, group: AsyncWorkerGroup, source: int) -> None:
        step, size = map(int, await group.recv(np.zeros(2, np.int64), source))
        if not 0 <= size <= self._state.bytes_max:
            raise LimitExceededError(
                f"rank {source} announces a state of {size} bytes, and this worker takes at most "
                f"{self._state.bytes_max}: give all workers the same model, optimizer and other states"
            )
        data = np.empty(size, np.uint8)
        await group.recv(data, source)
        await self._state.load(data)
        self.step, self._is_stale = step, True
