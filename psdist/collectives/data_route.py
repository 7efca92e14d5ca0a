"""Route of a group for the data of large calls: memory that the ranks of one host share, or a chain of hosts.

Which one follows from the members' addresses, so all ranks choose the same one. It is arranged when the group makes its
first large call, and given up when the group ends.

A chain is made of several hosts with equal numbers of ranks, in the order of the hosts. Rank i of each host has the
i-th share of the array. Within a host each rank gives its peers their shares, through memory. Between hosts the partial
result of a share goes from the first host to the last, and each host adds its ranks' contributions in rank order, and
the result goes back the same way. So the bytes are those of a group on one host, and a host's link carries the array
twice in each direction, for any number of ranks. The array is cut into blocks, which follow one another along the
chain.

Invariants: The calls of a part of the group are made in the same order at all of its members. An error of a part ends
the group, and the end of the group ends its parts, without a word to their other members, who learn of it by the group.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Final, Protocol

import numpy as np

from psdist import addresses
from psdist.collectives.core import host_memory, plans
from psdist.collectives.core.host_memory import HostMemory, HostMoves, RegisteredBuffers
from psdist.collectives.core.machine import COLLECTIVES, CallLane, GroupMachine, MoveData
from psdist.collectives.core.plans import BFLOAT16, Array, Bytes, Plan, combine, cut_segment
from psdist.collectives.host_sharing import MAP_SECONDS, BufferAllocator, BufferType, HostSharing, are_on_one_host
from psdist.collectives.mesh import Mesh
from psdist.errors import ClosedError, InternalError, PsdistError, WorkerLostError
from psdist.link import processes
from psdist.types import WorkerEntry
from psdist.v1 import worker_pb2 as pb
from psdist.wire import limits
from psdist.wire.limits import CHAIN_BYTES_MIN, PART_BYTES

_PAUSE_MILLISECONDS: Final = 5
#: Looks at a counter before it sleeps. Other processes run in between, and an idle processor needs longer to wake.
_LOOKS: Final = 20
_LOW_BITS: Final = 2**32 - 1
#: Reductions of 16-bit floats that have no partial result of the array's dtype.
_ROUNDED_ONCE: Final = ("sum", "avg", "product")
#: Messages of a direction that are under way at a time.
_AHEAD: Final = 3

#: Called on the loop, with an error or None, unless the movement was stopped.
Done = Callable[[Exception | None], None]
#: Part of an all-reduce: this rank's array, and the memory for the result.
Block = tuple[Array, Array]


class Mover:
    """Thread that moves the calls of one group, one after another, through memory of the host. Used on the loop.

    It waits for other ranks without the event loop, because a message costs two loops more than a piece costs the
    processor. It never waits long for one change, so that ``stop`` is quick.
    """

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._loop = asyncio.get_running_loop()
        self._moves: queue.SimpleQueue[tuple[HostMoves, Done] | None] = queue.SimpleQueue()
        self._is_stopped = False
        self._is_idle = threading.Event()
        self._is_idle.set()
        # A daemon, because it may wait for a frozen rank when the interpreter exits.
        threading.Thread(target=self._run, name="psdist host memory", daemon=True).start()

    def start(self, moves: HostMoves, done: Done) -> None:
        """Take all steps of ``moves``, and call ``done``."""
        self._is_idle.clear()
        self._moves.put((moves, done))

    def stop(self) -> None:
        """Stop to use the memory of calls, now and for good."""
        if not self._is_stopped:
            self._is_stopped = True
            self._moves.put(None)
            self._is_idle.wait()

    def _run(self) -> None:
        while (given := self._moves.get()) is not None:
            moves, done = given
            error: Exception | None = None
            try:
                self._move(moves)
            except Exception as failure:  # The call ends with it.
                error = failure
            self._is_idle.set()
            if not self._is_stopped:
                with suppress(RuntimeError):  # The loop is closed.
                    self._loop.call_soon_threadsafe(done, error)
            del given, moves, done, error  # They refer to the script's arrays.

    def _move(self, moves: HostMoves) -> None:
        for step in range(moves.first, moves.last):
            for peer in moves.peers:
                self._wait(peer, step)
            if self._is_stopped:
                return
            moves.advance(step)
            processes.wake(self._memory.addresses[self._memory.rank])

    def _wait(self, peer: int, step: int) -> None:
        """Wait until a rank has completed ``step`` steps, or ``stop``."""
        looks = 0
        while (completed := self._memory.completed(peer)) < step and not self._is_stopped:
            looks += 1
            if looks < _LOOKS:
                os.sched_yield()
            else:
                processes.wait(self._memory.addresses[peer], completed & _LOW_BITS, _PAUSE_MILLISECONDS)


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
        return False

    def slowest(self) -> list[int]:
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
        if plan.whole is None or plan.whole[0].nbytes < CHAIN_BYTES_MIN:
            return False
        is_rounded_once = plan.whole[0].dtype in (np.float16, BFLOAT16) and plan.call.op in _ROUNDED_ONCE
        return not is_rounded_once

    def moves(self, plan: Plan) -> ChainMoves:
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
            await self._forth.call(plans.all_to_all(self._index, given, taken))
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
            await self._back.call(plans.gather_segments(self._index, self._share, out))

    def _own(self, array: Array) -> Array:
        """Return this rank's share of a block."""
        return cut_segment(array, self._index, self._share)

    async def _send(self, share: Array, host: int) -> None:
        await self._chain.call(plans.send(share, host), CallLane(self._host, host))

    async def _receive(self, share: Array, host: int) -> None:
        await self._chain.call(plans.receive(share, host), CallLane(host, self._host))


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


class DataRoute:
    """Route of one group at one rank, in whose machine it is set once this rank can go it.

    make_part: makes a group of some of the ranks, with a name. Raises LimitExceededError.
    end: ends the group at all ranks.
    """

    def __init__(
        self,
        mesh: Mesh,
        machine: GroupMachine,
        make_part: Callable[[Sequence[int], str], PartOfGroup],
        end: Callable[[PsdistError], None],
    ) -> None:
        self._mesh = mesh
        self._machine = machine
        self._make_part, self._end = make_part, end
        self._key = b""
        self._members: list[WorkerEntry] = []
        self._buffers = RegisteredBuffers(machine.rank)
        self._allocator = BufferAllocator(machine.rank, machine.size, self._buffers, self._offer)
        self._sharing: HostSharing | None = None
        #: Set once ``_sharing`` has mapped all memory, or cannot.
        self._arranged = asyncio.Event()
        self._mover: Mover | None = None
        self._chain: HostChain | None = None
        self._task: asyncio.Task[None] | None = None

    def open(self, key: bytes, members: list[WorkerEntry]) -> None:
        """Start to choose a route. members: by rank."""
        self._key, self._members = key, members

    def _offer(self, peer: int, offer: pb.GroupMemory) -> None:
        """Offer memory to a rank."""
        offer.group = self._key
        self._mesh.link(self._members[peer]).send(pb.PeerFrame(memory=offer).SerializeToString())

    @cached_property
    def _is_one_host(self) -> bool:
        return are_on_one_host(self._members)

    @cached_property
    def _hosts(self) -> list[range]:
        return hosts_of(self._members)

    def prepare(self, lane: CallLane, plan: Plan) -> None:
        """Arrange the route for a call that is about to be made, if it is the first one that needs it."""
        needs_route = self._sharing is None and self._chain is None and self._machine.broken is None
        if needs_route and self._members and lane == COLLECTIVES and host_memory.fits(plan):
            self._share()
            if self._sharing is None and self._hosts:
                self._chain = HostChain(self._machine.rank, self._hosts, self._make_part, self._end)
                self._machine.route = self._chain
        if plan.whole is not None:
            plan.position = self._buffers.position_of(plan.whole[0])

    async def allocate(self, wanted: BufferType, call: Callable[[Plan], Awaitable[None]]) -> Array:
        """Return a buffer of zeros, registered if all ranks can map that of each. call: makes a call of the group.

        Raises the error that ends the group.
        """
        rank, size = self._machine.rank, self._machine.size
        self._allocator.expect(wanted.nbytes)
        try:
            await call(plans.allocate_buffer(rank, size, wanted.shape, wanted.dtype.name))
            if self._is_one_host and wanted.nbytes >= limits.BUFFER_BYTES_MIN:
                self._share()
                memories = await self._allocator.map_all(can_share=self._sharing is not None)
                # Results need the memory of calls, too.
                agreed = np.array([memories is not None and await self._is_arranged()])
                await call(plans.all_reduce(rank, size, agreed, agreed, "band"))
                if memories is not None and agreed[0]:
                    return self._allocator.register(wanted, memories)
            return np.zeros(wanted.shape, wanted.dtype)
        except asyncio.CancelledError:
            self._end(ClosedError(f"rank {rank} gave up allocate_buffer, so that the group has ended", rank=rank))
            raise
        finally:
            self._allocator.close()

    def on_offer(self, peer: int, offer: pb.GroupMemory) -> None:
        """Process a rank's offer of memory. Raises InvalidArgumentError."""
        if offer.buffer:
            self._allocator.on_offer(peer, offer)
            return
        self._share()
        if self._sharing is not None:
            self._sharing.on_offer(peer, offer)

    def _share(self) -> None:
        """Start to share memory, if all ranks are on this host. Data moves over the links meanwhile."""
        rank, members = self._machine.rank, self._members
        is_needed = self._sharing is None and self._is_one_host and self._machine.broken is None
        if is_needed and self._mesh.claim_memory(self):
            nbytes = host_memory.memory_bytes(len(members))
            self._sharing = HostSharing(rank, len(members), nbytes, self._offer, self._mapped)
            self._sharing.start()

    async def _is_arranged(self) -> bool:
        """Wait until memory for calls was arranged. Returns False if it cannot be."""
        with suppress(TimeoutError):
            async with asyncio.timeout(MAP_SECONDS):
                await self._arranged.wait()
        return self._mover is not None

    def _mapped(self, memories: list[Bytes] | None) -> None:
        self._arranged.set()
        if memories is not None:
            memory = HostMemory(self._machine.rank, memories, self._buffers)
            self._machine.route, self._mover = memory, Mover(memory)

    def move(self, effect: MoveData, moved: Callable[[int], None]) -> None:
        """Carry out an effect. moved: called with the id of the call, unless the movement fails or is stopped."""
        if isinstance(effect.moves, HostMoves) and self._mover is not None:
            self._mover.start(effect.moves, partial(self._ended, effect.call_id, moved))
        elif isinstance(effect.moves, ChainMoves) and self._chain is not None:
            self._task = asyncio.create_task(self._chain.all_reduce(effect.moves.plan), name="psdist host chain")
            self._task.add_done_callback(partial(self._chain_ended, effect.call_id, moved))

    def _chain_ended(self, call_id: int, moved: Callable[[int], None], task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._ended(call_id, moved, task.exception())

    def _ended(self, call_id: int, moved: Callable[[int], None], error: BaseException | None) -> None:
        if error is None:
            moved(call_id)
        elif not isinstance(error, PsdistError):  # Errors of a chain have ended the group.
            self._end(InternalError(f"rank {self._machine.rank} could not move its data: {error!r}"))

    def on_lost(self) -> None:
        """Stop to wait for the memory of a rank that is gone."""
        self._allocator.close()
        self._arranged.set()

    def stop(self) -> None:
        """Stop to use the memory of calls, because the group has ended."""
        self._machine.route = None
        self._allocator.close()
        self._buffers.clear()
        if self._mover is not None:
            self._mover.stop()
        if self._sharing is not None:
            self._sharing.close()
            self._mesh.return_memory(self)
        if self._chain is not None:
            self._chain.abandon(self._machine.broken or ClosedError("the group has ended"))
        if self._task is not None:
            self._task.cancel()
        self._sharing = self._mover = self._chain = self._task = None
