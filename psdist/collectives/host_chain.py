"""All-reduces of a group whose ranks are on several hosts, in equal numbers and in the order of the hosts.

Rank i of each host has the i-th share of the array. Within a host each rank gives its peers their shares, through
memory. Between hosts the partial result of a share goes from the first host to the last, and each host adds its ranks'
contributions in rank order, and the result goes back the same way. So the bytes are those of a group on one host, and
a host's link carries the array twice in each direction, for any number of ranks.

The array is cut into blocks, which follow one another along the chain.

Invariants: The calls of a part of the group are made in the same order at all of its members. An error of a part ends
the group, and the end of the group ends its parts, without a word to their other members, who learn of it by the group.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

from psdist import addresses
from psdist.collectives import calls
from psdist.collectives.core.machine import COLLECTIVES, CallLane
from psdist.collectives.core.plan import Array, Plan, cut_segment
from psdist.collectives.core.reductions import BFLOAT16, combine
from psdist.errors import ClosedError, PsdistError, WorkerLostError
from psdist.types import WorkerEntry
from psdist.wire.limits import CHAIN_BYTES_MIN, PART_BYTES

#: Reductions of 16-bit floats that have no partial result of the array's dtype.
_ROUNDED_ONCE: Final = ("sum", "avg", "product")


#: Part of an all-reduce: this rank's array, and the memory for the result.
Block = tuple[Array, Array]
#: Messages of a direction that are under way at a time.
_AHEAD: Final = 3


class PartOfGroup(Protocol):
    """Calls of some ranks of the group."""

    def start(self, lane: CallLane, plan: Plan) -> int:
        """Make a call. Returns its id."""

    async def result(self, call_id: int, call: str, timeout: float | None) -> None:
        """Wait for a call."""

    def abandon(self, error: PsdistError) -> None:
        """End the part, and all of its calls with ``error``, and stop to use their memory. Nobody is informed."""


@dataclass(frozen=True)
class ChainMoves:
    """Movement of one all-reduce along the chain. Its parts notice ranks that are lost."""

    plan: Plan

    def needs(self, peer: int) -> bool:
        """See ``Moves``."""
        return False

    def slowest(self) -> list[int]:
        """See ``Moves``."""
        return list(self.plan.peers)


def hosts_of(members: Sequence[WorkerEntry]) -> list[range]:
    """Return the ranks of each host, or nothing if they do not make a chain."""
    hosts = [addresses.parse_address(member.address)[0] if member.address else "" for member in members]
    count = len(set(hosts))
    share = len(hosts) // count if count else 0
    ranges = (
        [range(start, start + share) for start in range(0, count * share, share)] if share > 1 and count > 1 else []
    )
    is_even = share * count == len(hosts) and all(len({hosts[rank] for rank in ranks}) == 1 for ranks in ranges)
    return ranges if is_even else []


class HostChain:
    """All-reduces of one group at one rank.

    hosts: see ``hosts_of``.
    make: makes a part of the group, of these ranks and with a name.
    failed: ends the group, because a part has failed.
    """

    def __init__(
        self,
        rank: int,
        hosts: Sequence[range],
        make: Callable[[Sequence[int], str], PartOfGroup],
        failed: Callable[[PsdistError], None],
    ) -> None:
        self._size = len(hosts) * len(hosts[0])
        self._share = len(hosts[0])
        self._host, self._index = divmod(rank, self._share)
        self._last = len(hosts) - 1
        local, chain = list(hosts[self._host]), [ranks[self._index] for ranks in hosts]
        parts = {"forth": local, "back": local, "chain": chain}
        made = [_PartCalls(make(ranks, name), ranks, failed) for name, ranks in parts.items()]
        self._forth, self._back, self._chain = made

    def fits(self, plan: Plan) -> bool:
        """See ``GroupRoute``."""
        if plan.whole is None or plan.whole[0].nbytes < CHAIN_BYTES_MIN:
            return False
        is_rounded_once = plan.whole[0].dtype in (np.float16, BFLOAT16) and plan.call.op in _ROUNDED_ONCE
        return not is_rounded_once

    def moves(self, plan: Plan) -> ChainMoves:
        """See ``GroupRoute``."""
        return ChainMoves(plan)

    def abandon(self, error: PsdistError) -> None:
        """End the parts, and stop to use the memory of calls."""
        ended = ClosedError(f"the group has ended: {error.message}")  # Ranks of the parts have other numbers.
        for part in (self._forth, self._back, self._chain):
            part.calls.abandon(ended)

    async def all_reduce(self, plan: Plan) -> None:
        """Reduce the array of a plan. Raises the error of a part."""
        assert plan.whole is not None
        array, out = plan.whole
        step = self._share * PART_BYTES // array.itemsize
        starts = range(0, array.size, step)
        blocks = [(array[start : start + step], out[start : start + step]) for start in starts]
        reduced: asyncio.Queue[Array] = asyncio.Queue()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._reduce(blocks, plan.call.op, reduced, tasks))
                tasks.create_task(self._return([out for _, out in blocks], reduced, tasks))
        except* PsdistError as errors:
            raise errors.exceptions[0] from None

    async def _reduce(
        self, blocks: Sequence[Block], op: str, reduced: asyncio.Queue[Array], tasks: asyncio.TaskGroup
    ) -> None:
        """Add this host's contributions to the partial results of this rank's share, and pass them on."""
        coming, sending = _Messages(tasks), _Messages(tasks)
        partials = [np.empty_like(self._own(blocks[0][1])) for _ in range(_AHEAD)] if self._host else []
        for number, (array, out) in enumerate(blocks):
            share = self._own(out)
            while self._host and coming.started < min(number + _AHEAD, len(blocks)):
                memory = partials[coming.started % _AHEAD][: self._own(blocks[coming.started][1]).size]
                coming.start(self._receive(memory, self._host - 1))
            given = [cut_segment(array, rank, self._share) for rank in range(self._share)]
            taken = [np.empty_like(share) for _ in given]
            await self._forth.call(calls.all_to_all(self._index, given, taken))
            if self._host:
                await coming.ended()
                taken.insert(0, partials[number % _AHEAD][: share.size])
            combine("sum" if op == "avg" else op, taken, share)
            if self._host < self._last:
                await sending.has_room()
                sending.start(self._send(share, self._host + 1))
            elif op == "avg":
                with np.errstate(all="ignore"):
                    np.true_divide(share, self._size, out=share)
            reduced.put_nowait(share)

    async def _return(self, outs: Sequence[Array], reduced: asyncio.Queue[Array], tasks: asyncio.TaskGroup) -> None:
        """Pass the results of this rank's share on, and exchange the shares within the host."""
        coming, sending = _Messages(tasks), _Messages(tasks)
        shares: deque[Array] = deque()
        for number, out in enumerate(outs):
            while coming.started < min(number + _AHEAD, len(outs)):
                shares.append(await reduced.get())
                coming.start(self._receive(shares[-1], self._host + 1) if self._host < self._last else _nothing())
            await coming.ended()
            share = shares.popleft()
            if self._host:
                await sending.has_room()
                sending.start(self._send(share, self._host - 1))
            await self._back.call(calls.gather_segments(self._index, self._share, out))

    def _own(self, array: Array) -> Array:
        """Return this rank's share of a block."""
        return cut_segment(array, self._index, self._share)

    async def _send(self, share: Array, host: int) -> None:
        await self._chain.call(calls.send(share, host), CallLane(self._host, host))

    async def _receive(self, share: Array, host: int) -> None:
        await self._chain.call(calls.receive(share, host), CallLane(host, self._host))


class _PartCalls:
    """Calls of a part of the group. ranks: its members, by their ranks in the group."""

    def __init__(self, made: PartOfGroup, ranks: Sequence[int], failed: Callable[[PsdistError], None]) -> None:
        self.calls = made
        self._ranks = ranks
        self._failed = failed

    async def call(self, plan: Plan, lane: CallLane = COLLECTIVES) -> None:
        """Make a call. Its error ends the group."""
        try:
            await self.calls.result(self.calls.start(lane, plan), str(plan.call), None)
        except PsdistError as error:
            self._failed(self._named(error))
            raise

    def _named(self, error: PsdistError) -> PsdistError:
        """Return an error that names ranks of the group."""
        if not isinstance(error, WorkerLostError):
            return error
        rank = self._ranks[int(error.details["rank"])]
        return WorkerLostError(f"rank {rank} is gone{error.message[error.message.index(':') :]}", rank=rank)


class _Messages:
    """Messages in one direction. A few are under way at a time."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self.started = 0
        self._tasks = tasks
        self._moving: deque[asyncio.Task[None]] = deque()

    def start(self, message: Coroutine[Any, Any, None]) -> None:
        """Start to send or receive the next one."""
        self.started += 1
        self._moving.append(self._tasks.create_task(message))

    async def ended(self) -> None:
        """Wait for the first one that is under way."""
        await self._moving.popleft()

    async def has_room(self) -> None:
        """Wait until another one may be started."""
        if len(self._moving) >= _AHEAD:
            await self.ended()


async def _nothing() -> None:
    """Receive nothing."""
