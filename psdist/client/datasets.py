"""Data sets whose ranges are leased: each worker that asks gets the next range, until none is left.

    data = client.dataset("train", size=len(images), range_size=256, data_epochs=3)
    for indices in data:
        values = weights.push_pull(gradients(values, images[indices]))

Asking for the next range reports that the samples of the previous one are in the weights. If a push was dropped since
that range was leased, it is returned instead. After a rollback the next push is dropped if the script still holds a
range from before, because that range will be leased again. The ranges of a worker that dies are given to others.
``repeated`` counts them: their samples may have been used twice. ``failed`` counts ranges that were abandoned because
their workers died too often. No other sample is used twice or left out, as long as some worker still asks. A range
whose worker dies after all others have ended their loops waits for a worker that joins later, such as the one that a
launcher restarts. Until then the position lists it as not done.

The loop ends when no range is left, even if other workers still hold some. It does not wait for them: in BSP they may
be waiting for this worker's gradient. A worker that has ended its loop in BSP or SSP must close its client, so that the
others' steps do not wait for it. For the same reason there is no pause between data epochs.

Leaving the loop early, by ``break`` or an error, returns the last range, unless ``done()`` was called. If a push was
made since it was leased, ``repeated`` counts it.

Not here: the samples of a range (``psdist.data.RangeOrder``), the choice of a worker for a range (the scheduler).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from psdist.client.session.loop import ProcessBound
from psdist.client.session.membership import Registration
from psdist.client.session.worker_session import WorkerSession
from psdist.client.session.worker_state import LocalProgress
from psdist.data import RangeOrder
from psdist.errors import PsdistError, SettingsMismatchError
from psdist.types import DataPosition, DatasetSpec
from psdist.v1 import scheduler_pb2 as pb
from psdist.wire import convert

#: Longest wait for the scheduler when leaving a loop or closing.
_LEAVE_SECONDS: Final = 1.0
#: Larger data sets are shuffled in a thread, so that heartbeats continue.
_SHUFFLE_HERE_MAX: Final = 1 << 16


@dataclass(frozen=True)
class Range:
    """A range that this client holds."""

    lease_id: int
    data_epoch: int
    number: int
    attempt: int
    indices: NDArray[np.int64]


class AsyncDataset(ProcessBound):
    """A data set that workers share. Made by ``AsyncClient.dataset``; iterate over it with ``async for``.

    repeated, failed: ranges leased again because their worker was gone, had returned them used in part, or held them
        when the snapshot was cut from which the run resumed; and abandoned ranges. Both are of all workers, by the
        scheduler's last answer.
    data_epoch: data epoch of the newest range.
    """

    def __init__(self, session: WorkerSession, spec: DatasetSpec) -> None:
        self.spec = spec
        self.repeated = 0
        self.failed = 0
        self.data_epoch = 0
        self._calls = session.calls
        self._membership = session.membership
        self._waits = session.waits
        #: Clock of the script's calls.
        self.phases = session.waits.phases
        self._snapshots = session.snapshots
        self._order = RangeOrder(spec)
        #: Leases whose samples the script may be using, void ones included. Of all data sets of this client.
        self._in_use = session.alignment.order.ranges
        self._asking = asyncio.Lock()
        #: The incarnation of this client that the leases belong to.
        self._incarnation = 0
        #: Held leases, each with the number of pushes that were dropped before it, and this worker's next ones.
        self._held: dict[int, tuple[int, dict[str, int]]] = {}
        #: Ended leases that the scheduler may not know of: finished ones, with this worker's next pushes at that time,
        #: and returned ones, with True if some of its samples may be in the weights.
        self._done: dict[int, pb.NextPushes] = {}
        self._returned: dict[int, bool] = {}
        #: Finished leases whose samples are in local steps that the servers do not have yet: the models that trained on
        #: them, and the steps that they had made.
        self._uncontributed: dict[int, list[tuple[LocalProgress, int]]] = {}

    @property
    def name(self) -> str:
        """Name of the data set."""
        return self.spec.name

    async def open(self) -> None:
        """Create the data set, or check that all workers agree on it. Raises SettingsMismatchError,
        LimitExceededError."""
        async with self._asking:
            await self._membership.retry_across_incarnations(self._open)

    def check_same(self, spec: DatasetSpec) -> None:
        """Raise SettingsMismatchError if ``spec`` differs."""
        if difference := self.spec.difference(spec):
            raise SettingsMismatchError(f"this client has data set {self.name!r} with other settings: {difference}")

    async def __aiter__(self) -> AsyncGenerator[NDArray[np.int64], None]:
        held: Range | None = None
        try:
            while (held := await self.next(held)) is not None:
                yield held.indices
        finally:
            if held is not None:
                await self.leave(held)

    async def next(self, before: Range | None = None) -> Range | None:
        """Return the next range, or None at the end of the data. ``before`` is reported as done. ``async for`` calls
        this in a loop."""
        async with self._asking:
            if before is not None:
                self.finish(before.lease_id)
            answer = await self._membership.retry_across_incarnations(self._lease)
            return None if answer.finished else await self._given(answer)

    def done(self) -> None:
        """Mark the samples of the last range as used, before another range is asked for."""
        if self._held:
            self.finish(next(reversed(self._held)))

    def holds(self, lease_id: int) -> bool:
        """True if the range is still leased to this worker. False after a rollback, and if the worker was expelled: the
        scheduler leases it again."""
        return lease_id in self._held and self._incarnation == self._membership.registration.incarnation

    def finish(self, lease_id: int) -> None:
        """Mark the samples of a held range as used. The next call reports it to the scheduler; in a script that makes
        local steps, the next call after the contribution that includes them."""
        self._uncontributed.setdefault(lease_id, [(one, one.made) for one in self._snapshots.local])
        self._finish_contributed()

    def _finish_contributed(self) -> None:
        for lease_id, needed in tuple(self._uncontributed.items()):
            if all(made <= progress.contributed for progress, made in needed):
                del self._uncontributed[lease_id]
                self._finish(lease_id)

    def _finish(self, lease_id: int) -> None:
        self._in_use.pop((self.name, lease_id), None)
        if lease_id not in self._held:
            return
        if self._held[lease_id][0] < self._snapshots.marks.dropped:
            self._give_back(lease_id)  # The push of its samples may have been dropped.
        else:
            del self._held[lease_id]
            self._done[lease_id] = self._now()

    async def leave(self, held: Range, is_used: bool | None = None) -> None:
        """Return a range, unless it is done. A scheduler that is unreachable learns of it later.

        is_used: True if some of its samples are in the weights; None if pushes that were made since may have them.
        """
        self._in_use.pop((self.name, held.lease_id), None)
        if held.lease_id in self._held:
            self._give_back(held.lease_id, is_used)
        await self._report_soon()

    async def report(self) -> None:
        """Report the finished and returned ranges to the scheduler."""
        async with self._asking:
            await self._membership.retry_across_incarnations(self._report)

    async def position(self) -> DataPosition:
        """Return the position of the data set: everything that all workers have done. Ranges that they hold now are not
        in it. ``DataPosition.to_json`` and ``from_json`` convert it for a file.
        """
        await self.report()
        request = pb.GetDataPositionRequest(run_id=self._membership.registration.run_id, dataset=self.name)
        answer = await self._ask(self._calls.stub.GetDataPosition, request)
        self._on_position(answer.position)
        return convert.position_from_proto(answer.position)

    async def set_position(self, position: DataPosition) -> None:
        """Continue from ``position``, for all workers of the run. Ranges that are held now become void and do not count
        as done.

        One worker sets it before the others begin, for example in front of a barrier. Raises InvalidArgumentError.
        """
        async with self._asking:
            self._discard_leases()
            await self._membership.retry_across_incarnations(lambda mine: self._set_position(mine, position))

    async def close(self) -> None:
        """Return the ranges that are held and not done."""
        for key in [key for key in self._in_use if key[0] == self.name]:
            del self._in_use[key]
        self._finish_contributed()
        for lease_id in tuple(self._held):
            self._give_back(lease_id)
        await self._report_soon()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}: {self.spec.size} samples in {self.spec.ranges} ranges>"

    # --- inner --------------------------------------------------------------------------------------------------------

    async def _open(self, mine: Registration) -> None:
        request = pb.OpenDatasetRequest(**mine.caller(), spec=convert.dataset_to_proto(self.spec))
        answer = await self._ask(self._calls.stub.OpenDataset, request)
        self._on_position(answer.position)

    async def _lease(self, mine: Registration) -> Any:
        self._start_incarnation(mine)
        self._finish_contributed()
        if self._returned:
            await self._report(mine)
        done = tuple(self._done)
        request = pb.LeaseRangeRequest(
            **mine.caller(), dataset=self.name, done=done, held=self._held, done_at=self._done.values(), now=self._now()
        )

        async def first(answer: Any) -> Any:
            return None if answer.waiting_for else answer

        with self._waits.open(f"for {self._calls.peer} to give a range of data set {self.name!r}") as wait:
            answer = await self._calls.read_until_result(self._calls.stub.LeaseRange, request, wait, first)
        _remove(self._done, done)
        self.repeated, self.failed = answer.repeated_ranges, answer.failed_ranges
        return answer

    async def _given(self, answer: Any) -> Range:
        self._held[answer.lease_id] = self._snapshots.marks.dropped, self._snapshots.marks.next()
        self._in_use[self.name, answer.lease_id] = self._incarnation
        self.data_epoch, number = answer.data_epoch, answer.range
        if self._order.knows(self.data_epoch) or self.spec.size <= _SHUFFLE_HERE_MAX:
            indices = self._order.indices(self.data_epoch, number)
        else:
            indices = await asyncio.to_thread(self._order.indices, self.data_epoch, number)
        return Range(answer.lease_id, self.data_epoch, number, answer.attempt, indices)

    def _give_back(self, lease_id: int, is_used: bool | None = None) -> None:
        """End a held lease that is not done. is_used: as for ``leave``."""
        self._uncontributed.pop(lease_id, None)
        dropped, given = self._held.pop(lease_id)
        marks = self._snapshots.marks
        made = sum(max(0, number - given.get(name, 0)) for name, number in marks.next().items())
        self._returned[lease_id] = made > marks.dropped - dropped if is_used is None else is_used

    async def _report(self, mine: Registration) -> None:
        """Report the ranges that have ended."""
        self._start_incarnation(mine)
        self._finish_contributed()
        done, returned = tuple(self._done), tuple(self._returned)
        if not done and not returned:
            return
        request = pb.EndRangesRequest(
            **mine.caller(), dataset=self.name, done=done, done_at=self._done.values(), returned=returned,
            now=self._now(), used=[lease_id for lease_id in returned if self._returned[lease_id]],
        )  # fmt: skip
        await self._ask(self._calls.stub.EndRanges, request)
        _remove(self._done, done)
        _remove(self._returned, returned)

    async def _report_soon(self) -> None:
        with suppress(TimeoutError, PsdistError):
            async with asyncio.timeout(_LEAVE_SECONDS), self._asking:
                await self._report(self._membership.registration)

    async def _set_position(self, mine: Registration, position: DataPosition) -> None:
        where = convert.position_to_proto(position)
        request = pb.SetDataPositionRequest(**mine.caller(), dataset=self.name, position=where)
        await self._ask(self._calls.stub.SetDataPosition, request)
        self._on_position(where)

    async def _ask(self, method: Any, request: Any) -> Any:
        reason = f"for {self._calls.peer} to answer about data set {self.name!r}"
        return await self._calls.call_until_answered(method, lambda: request, reason)

    def _start_incarnation(self, mine: Registration) -> None:
        """Discard the leases of an earlier incarnation of this client: its ranges were given to others."""
        if mine.incarnation != self._incarnation:
            self._incarnation = mine.incarnation
            self._discard_leases()

    def _discard_leases(self) -> None:
        for leases in (self._held, self._done, self._returned, self._uncontributed):
            leases.clear()

    def _now(self) -> pb.NextPushes:
        return pb.NextPushes(next=self._snapshots.marks.next())

    def _on_position(self, position: pb.DataPosition) -> None:
        self.repeated, self.failed = position.repeated_ranges, position.failed_ranges


def _remove(leases: dict[int, Any], reported: tuple[int, ...]) -> None:
    for lease_id in reported:
        leases.pop(lease_id, None)
