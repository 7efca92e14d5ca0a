"""The replicator: keeps the copies of a holding's shards at other servers in step with this one, their primary.

There is one stream (``Replicate``) to each server that holds copies; what it carries, and what is still to be told when
it breaks and is opened again, is the machines' decision (``replication``). Messages of a stream are packed when they are
written, so that what waits holds no second copy of a gradient. Not here: what a replica does (``copies``).

Invariants: messages leave in the order of the machines' effects. What is kept for replicas is bounded: while there are
more than KEPT_BYTES_MAX, further updates wait (``has_room``), and slices are copied one at a time.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final, Literal, Protocol

import grpc
import grpc.aio
import structlog

from psdist.errors import PsdistError, ReplicaMismatchError, ServerUnreachableError, StaleEpochError
from psdist.types import ParametersEntry, Replica
from psdist.v1 import common_pb2
from psdist.v1 import server_pb2 as pb
from psdist.wire import frames, status
from psdist_server.dense import Array, Gradient
from psdist_server.records import Life, ReplicaUpdate, SliceRecord
from psdist_server.replication import (
    Held,
    PrimaryReplication,
    Replicated,
    ReplicationEffect,
    SendBegin,
    SendUpdate,
)

_log = structlog.get_logger("psdist.server")

METHOD: Final = "/psdist.v1.ServerService/Replicate"
#: Bytes of gradients of one holding that are kept until replicas acknowledge them.
KEPT_BYTES_MAX: Final = 32 << 20
#: A slice is copied when no more than this waits to be written.
COPY_AHEAD_BYTES: Final = 4 << 20
#: Each so many updates of a shard the bytes of a slice are compared.
DIGEST_EVERY: Final = 64
_RETRY_MIN_SECONDS: Final = 0.02
_RETRY_MAX_SECONDS: Final = 1.0

Machine = PrimaryReplication[Gradient]


@dataclass(frozen=True, slots=True)
class Report:
    """What the scheduler must hear from a primary: ``replica`` is filled, or does not answer."""

    kind: Literal["filled", "unreachable"]
    parameters: str
    shard: int
    term: int
    replica: Replica
    reason: str = ""


class Network(Protocol):
    """What a replicator needs of its server."""

    rng: Random
    lease_seconds: float

    def hello(self, parameters: str) -> pb.ReplicateRequest:
        """Who this server is, and by which map it speaks."""

    def method(self, replica: Replica, name: str) -> Callable[..., Any]:
        """The raw bidirectional method of another server. Raises ServerUnreachableError where it is not in the map."""

    def report(self) -> None:
        """There is something new to report."""


class Source(Protocol):
    """The slices that are copied."""

    def at_rest(self, index: int, callback: Callable[[], None]) -> None:
        """Calls ``callback`` as soon as slice ``index`` has its content and is not being written."""

    def export(self, index: int) -> tuple[SliceRecord, list[Array]]:
        """Record and arrays of a slice at rest; the arrays are views."""

    def digest(self, index: int) -> bytes:
        """The digest of a slice at rest."""

    def replicated(self, index: int, lsn: int) -> None:
        """An update is with everybody who must have it."""

    def level(self, number: int) -> None:
        """All who must have it have what this server began with as the primary of a shard."""

    def has_room_again(self) -> None:
        """Updates that wait may go on."""

    def fenced(self, number: int) -> None:
        """A shard has another primary."""

    def stop(self, error: PsdistError) -> None:
        """Copies differ."""


class Replicator:
    """The primary's side for the shards of one holding."""

    def __init__(self, entry: ParametersEntry, me: Replica, network: Network, source: Source) -> None:
        self.name = entry.spec.name
        self.machines: dict[int, Machine] = {}
        self.network = network
        self.source = source
        self._me = me
        self._shard_count = max(1, len(entry.shards))
        self._links: dict[Replica, Link] = {}
        self._updates: Counter[int] = Counter()

    # --- the map ------------------------------------------------------------------------------------------------------

    def add(self, number: int, term: int, slices: Iterable[int], base: tuple[int, int] = (0, 0)) -> None:
        """This server is the primary of a shard now; ``follow`` comes next."""
        self.machines[number] = PrimaryReplication(number, term, slices, base)

    def remove(self, number: int) -> None:
        """It is the primary of this shard no more: who waits for the word that it is gets none."""
        self.machines.pop(number, None)
        for link in self._links.values():
            link.refuse(number)

    def follow(self, entry: ParametersEntry) -> None:
        """A new map's word on who holds copies."""
        now = _now()
        for number, machine in sorted(self.machines.items()):
            before, was_fenced = set(machine.peers), machine.fenced
            self._carry_out(machine, machine.follow(entry.shards[number], now))
            for replica, peer in machine.peers.items():
                if replica not in self._links:
                    self._links[replica] = Link(self, replica)
                elif was_fenced or (replica not in before and peer.in_sync):
                    self._links[replica].restart()
                elif replica not in before:
                    self._links[replica].add(machine)
        wanted = {replica for machine in self.machines.values() for replica in machine.peers}
        for replica in [replica for replica in self._links if replica not in wanted]:
            self._links.pop(replica).close()
        for link in self._links.values():
            link.send(self.network.hello(self.name))
        self.source.has_room_again()

    async def close(self) -> None:
        """Ends all streams."""
        links, self._links = list(self._links.values()), {}
        for link in links:
            link.close()
        await asyncio.gather(*(link.task for link in links), return_exceptions=True)

    def installed(self, index: int) -> None:
        """Slice ``index`` has (other) initial values: who has it gets it again."""
        machine = self._machine(index)
        for replica, peer in list(machine.peers.items()) if machine is not None else ():
            if machine is not None and peer.is_open and index not in peer.missing:
                self._carry_out(machine, machine.copy_again(replica, index))

    # --- updates ------------------------------------------------------------------------------------------------------

    def _machine(self, index: int) -> Machine | None:
        return self.machines.get(index % self._shard_count)

    def needs_gradient(self, index: int) -> bool:
        """See Replicas."""
        machine = self._machine(index)
        return machine is not None and bool(machine.peers) and machine.needs_gradient(index)

    def next_lsn(self, index: int) -> int | None:
        """See Replicas."""
        machine = self._machine(index)
        return machine.lsn + 1 if machine is not None and machine.peers else None

    def has_room(self) -> bool:
        """See Replicas."""
        return sum(machine.log_bytes for machine in self.machines.values()) < KEPT_BYTES_MAX

    def update(self, update: ReplicaUpdate[Gradient]) -> None:
        """See Replicas."""
        machine = self._machine(update.index)
        assert machine is not None
        self._carry_out(machine, machine.update(update, _now()))

    def is_level(self, number: int) -> bool:
        """Whether workers may hear of what this server began with as the primary of a shard."""
        machine = self.machines.get(number)
        return machine is None or machine.is_level

    def behind(self, index: int) -> str:
        """Names of the replicas that have not acknowledged all updates of the slice's shard."""
        machine = self._machine(index)
        peers = machine.peers.values() if machine is not None else ()
        return ", ".join(sorted(str(p.replica) for p in peers if p.required and p.waiting_since is not None))

    def applied(self, index: int) -> None:
        """The slice's update is done and nothing of it is under way: now and then its bytes are compared."""
        machine = self._machine(index)
        if machine is None or not machine.peers:
            return
        self._updates[machine.number] += 1
        if self._updates[machine.number] % DIGEST_EVERY == 0:
            for replica, peer in machine.peers.items():
                if peer.is_open and index not in peer.missing:
                    self._compare(machine, self._links[replica], index)

    def _compare(self, machine: Machine, link: Link, index: int) -> None:
        record, _ = self.source.export(index)
        digest = pb.ReplicateRequest.Digest(slice=index, version=record.version, digest=self.source.digest(index))
        link.send(pb.ReplicateRequest(shard=machine.number, term=machine.term, digest=digest))
        machine.peers[link.replica].digests += 1

    def _carry_out(self, machine: Machine, effects: Sequence[ReplicationEffect[Gradient]]) -> None:
        for effect in effects:
            match effect:
                case SendUpdate(replica, update, whole):
                    self._links[replica].send(*_update_message(machine, update, whole))
                case SendBegin(replica, lsn):
                    begin = pb.ReplicateRequest.Begin(lsn=lsn)
                    link = self._links[replica]
                    link.send(pb.ReplicateRequest(shard=machine.number, term=machine.term, begin=begin))
                    link.copy(machine)
                case Replicated(index, lsn):
                    self.source.replicated(index, lsn)
        if machine.is_level:
            self.source.level(machine.number)

    # --- what links tell ----------------------------------------------------------------------------------------------

    def opened(self, link: Link, machine: Machine, held: Held | None) -> None:
        """The stream of ``link`` stands."""
        self._carry_out(machine, machine.opened(link.replica, held, _now()))

    def copy_slice(self, link: Link, machine: Machine, index: int) -> None:
        """Sends a slice at rest."""
        record, arrays = self.source.export(index)
        for number, array in enumerate(arrays):
            state = _state_message(record, index, number, len(arrays))
            link.send(pb.ReplicateRequest(shard=machine.number, term=machine.term, state=state), array.copy())
        machine.copied(link.replica, index)
        self._compare(machine, link, index)

    def answered(self, link: Link, response: pb.ReplicateResponse) -> None:
        """Carries out what a replica said."""
        match response.WhichOneof("kind"):
            case "ack":
                if (machine := self._current(response.ack.shard, response.ack.term)) is not None:
                    peer = machine.peers.get(link.replica)
                    waited = peer is not None and not peer.complete
                    self._carry_out(machine, machine.acknowledged(link.replica, response.ack.lsn, _now()))
                    self.source.has_room_again()
                    if waited and peer is not None and peer.complete:
                        self.network.report()
            case "filled":
                if (machine := self._current(response.filled.shard, response.filled.term)) is not None:
                    self._carry_out(machine, machine.filled(link.replica, _now()))
                    self.source.has_room_again()
                    self.network.report()
            case "refused":
                self._refused(link, response.refused)

    def _refused(self, link: Link, refused: pb.ReplicateResponse.Refused) -> None:
        machine = self._current(refused.shard, refused.term)
        if machine is None:
            return
        error = status.from_detail(refused.error)
        if isinstance(error, ReplicaMismatchError):
            self.source.stop(error)
            return
        _log.warning("refused by a replica", parameters=self.name, server=str(link.replica), reason=str(error))
        machine.refused(refused.term)
        for other in self._links.values():
            other.refuse(machine.number)
        self.source.fenced(machine.number)

    def _current(self, number: int, term: int) -> Machine | None:
        machine = self.machines.get(number)
        return machine if machine is not None and machine.term == term else None

    # --- reading ------------------------------------------------------------------------------------------------------

    def needs_confirm(self, indices: Iterable[int]) -> bool:
        """Whether somebody must be asked before these slices are read."""
        return any(
            machine is not None and any(peer.required for peer in machine.peers.values())
            for machine in map(self._machine, indices)
        )

    async def confirm(self, indices: Iterable[int]) -> None:
        """Returns when the backups have said that this server is still the primary of these slices' shards. Raises
        StaleEpochError where it is not."""
        by_link: dict[Replica, list[Machine]] = {}
        for number in sorted({index % self._shard_count for index in indices}):
            machine = self.machines.get(number)
            for replica, peer in machine.peers.items() if machine is not None else ():
                if machine is not None and peer.required:
                    by_link.setdefault(replica, []).append(machine)
        links = [(self._links[replica], machines) for replica, machines in by_link.items()]
        await asyncio.gather(*(link.confirm(machines) for link, machines in links))

    # --- telling ------------------------------------------------------------------------------------------------------

    def reports(self, entry: ParametersEntry) -> list[Report]:
        """What is true now and not yet in the map."""
        now, found = _now(), []
        for number, machine in sorted(self.machines.items()):
            shard = entry.shards[number]
            for replica, peer in machine.peers.items():
                if peer.complete and replica in shard.filling:
                    found.append(Report("filled", self.name, number, machine.term, replica))
            for replica in machine.unreachable(now, self.network.lease_seconds):
                reason = self._links[replica].reason or "it does not answer"
                found.append(Report("unreachable", self.name, number, machine.term, replica, reason))
        return found

    def statistics(self) -> list[pb.ReplicaStatistics]:
        """How far each replica is behind."""
        told, now = [], _now()
        for number, machine in sorted(self.machines.items()):
            unreachable = machine.unreachable(now, self.network.lease_seconds)
            for replica, peer in machine.peers.items():
                updates, size = machine.lag(replica)
                state = "filling" if peer.copying or not peer.required else "in sync"
                told.append(
                    pb.ReplicaStatistics(
                        shard=number,
                        server_id=replica.server_id,
                        state="unreachable" if replica in unreachable else state,
                        lag_updates=updates,
                        lag_bytes=size,
                        slices_filled=len(machine.slices) - len(peer.missing) if peer.copying or peer.required else 0,
                        slices=len(machine.slices),
                        digests=peer.digests,
                    )
                )
        return told


@dataclass(slots=True)
class _Confirm:
    """Somebody waits for the word that this server is the primary of ``machines``' shards."""

    machines: list[Machine]
    done: asyncio.Future[None]


class Link:
    """The stream to one replica: opened, and opened again whenever it breaks."""

    def __init__(self, replicator: Replicator, replica: Replica) -> None:
        self.replica = replica
        #: Why the stream does not stand.
        self.reason = ""
        self._replicator = replicator
        self._is_open = False
        self._out: deque[tuple[pb.ReplicateRequest, Array | None]] = deque()
        self._bytes_waiting = 0
        self._changed = asyncio.Event()
        self._written = asyncio.Event()
        self._copies: asyncio.Queue[Machine] = asyncio.Queue()
        self._numbers = itertools.count(1)
        self._confirms: dict[int, _Confirm] = {}
        self._call: Any = None
        self._closed = False
        self.task = asyncio.get_running_loop().create_task(self._run())

    # --- what the replicator asks ---------------------------------------------------------------------------------------

    def send(self, message: pb.ReplicateRequest, payload: Gradient | None = None) -> None:
        """Writes a message when its turn comes; nothing while there is no stream."""
        if self._is_open:
            self._out.append((message, payload))  # type: ignore[arg-type]
            self._bytes_waiting += payload.nbytes if payload is not None else 0
            self._changed.set()

    def add(self, machine: Machine) -> None:
        """The replica has a role in one more shard."""
        if self._is_open:
            self._replicator.opened(self, machine, None)

    def copy(self, machine: Machine) -> None:
        """Copies a shard when its turn comes."""
        self._copies.put_nowait(machine)

    async def confirm(self, machines: list[Machine]) -> None:
        """Returns when the replica has confirmed these shards. Raises StaleEpochError."""
        number = next(self._numbers)
        waiting = _Confirm(machines, asyncio.get_running_loop().create_future())
        self._confirms[number] = waiting
        self._send_confirm(number, waiting)
        try:
            await waiting.done
        finally:
            self._confirms.pop(number, None)

    def _send_confirm(self, number: int, waiting: _Confirm) -> None:
        confirm = pb.ReplicateRequest.Confirm(
            number=number,
            shards=[machine.number for machine in waiting.machines],
            terms=[machine.term for machine in waiting.machines],
        )
        self.send(pb.ReplicateRequest(confirm=confirm))

    def refuse(self, number: int) -> None:
        """The shard has another primary: who waits for a confirmation of it gets none."""
        for waiting in self._confirms.values():
            if any(machine.number == number for machine in waiting.machines) and not waiting.done.done():
                waiting.done.set_exception(not_primary(number))

    def restart(self) -> None:
        """Opens the stream again, to hear what the replica has."""
        if self._call is not None:
            self._call.cancel()

    def close(self) -> None:
        """The replica has no role any more."""
        self._closed = True
        for waiting in self._confirms.values():
            if not waiting.done.done():
                waiting.done.set_result(None)
        self.task.cancel()

    # --- the stream -----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        delay = _RETRY_MIN_SECONDS
        while not self._closed:
            try:
                await self._session()
            except grpc.aio.AioRpcError as error:
                self.reason = str(status.from_call(error, f"server {self.replica}"))
            except PsdistError as error:
                self.reason = str(error)
            except asyncio.CancelledError:
                if self._closed:
                    raise
                self.reason = "the stream was opened again"
            except asyncio.InvalidStateError:
                self.reason = f"server {self.replica} ended the stream while it was written to"
            except Exception as error:
                self.reason = f"a defect: {error!r}"
                _log.error("the stream to a replica failed", server=str(self.replica), exc_info=error)
            finally:
                delay = _RETRY_MIN_SECONDS if self._end() else min(_RETRY_MAX_SECONDS, 2 * delay)
            await asyncio.sleep(delay * self._replicator.network.rng.uniform(0.5, 1.0))

    def _end(self) -> bool:
        """The stream ended; whether it had stood."""
        stood, self._is_open, self._call = self._is_open, False, None
        self._out.clear()
        self._bytes_waiting = 0
        self._copies = asyncio.Queue()
        for machine in self._replicator.machines.values():
            machine.closed(self.replica, _now())
        return stood

    async def _session(self) -> None:
        network = self._replicator.network
        call = self._call = network.method(self.replica, METHOD)()
        tasks: list[asyncio.Task[None]] = []
        try:
            await call.write(network.hello(self._replicator.name).SerializeToString())
            self._open(await self._read(call))
            tasks = [asyncio.create_task(work(call)) for work in (self._write_all, self._read_all, self._copy_all)]
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
        finally:
            call.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _open(self, response: pb.ReplicateResponse) -> None:
        if response.WhichOneof("kind") != "welcome":
            raise ServerUnreachableError(f"server {self.replica} did not say welcome")
        held = {held.shard: Held(held.term, held.lsn, held.complete) for held in response.welcome.held}
        self._is_open, self.reason = True, ""
        self.send(self._replicator.network.hello(self._replicator.name))  # There may be a newer map by now.
        for number, machine in sorted(self._replicator.machines.items()):
            if self.replica in machine.peers:
                self._replicator.opened(self, machine, held.get(number))
        for number, waiting in self._confirms.items():
            self._send_confirm(number, waiting)

    async def _read(self, call: Any) -> pb.ReplicateResponse:
        data = await call.read()
        if data is grpc.aio.EOF:
            raise ServerUnreachableError(f"server {self.replica} ended the stream")
        return frames.parse(pb.ReplicateResponse, data)

    async def _read_all(self, call: Any) -> None:
        while True:
            response = await self._read(call)
            if response.WhichOneof("kind") == "confirmed":
                waiting = self._confirms.get(response.confirmed.number)
                if waiting is not None and not waiting.done.done():
                    waiting.done.set_result(None)
            else:
                self._replicator.answered(self, response)

    async def _write_all(self, call: Any) -> None:
        while True:
            while self._out:
                message, payload = self._out.popleft()
                await call.write(frames.pack(message, payload.data.cast("B") if payload is not None else b""))
                self._bytes_waiting -= payload.nbytes if payload is not None else 0
                self._written.set()
            self._changed.clear()
            await self._changed.wait()

    async def _copy_all(self, call: Any) -> None:
        """Copies one shard after the other, slice by slice."""
        del call
        while True:
            machine = await self._copies.get()
            while (index := machine.next_copy(self.replica)) is not None:
                await self._copy_slice(machine, index)
                while self._bytes_waiting > COPY_AHEAD_BYTES:
                    self._written.clear()
                    await self._written.wait()
            if self._is_current(machine) and machine.peers[self.replica].copying:
                self.send(pb.ReplicateRequest(shard=machine.number, term=machine.term, end=pb.ReplicateRequest.End()))
                machine.ended(self.replica, _now())

    def _is_current(self, machine: Machine) -> bool:
        return self._replicator.machines.get(machine.number) is machine and self.replica in machine.peers

    async def _copy_slice(self, machine: Machine, index: int) -> None:
        done = asyncio.get_running_loop().create_future()

        def copy() -> None:
            """Runs while the slice stands still, so that no update comes between the copy and its place in line."""
            if done.done():
                return
            try:
                if self._is_current(machine) and machine.peers[self.replica].copying:
                    self._replicator.copy_slice(self, machine, index)
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        self._replicator.source.at_rest(index, copy)
        await done


def not_primary(number: int) -> StaleEpochError:
    """The error for a caller who takes this server for the primary of a shard."""
    return StaleEpochError(
        f"this server is not the primary of shard {number} any more: fetch the map, route anew and send again"
    )


def _now() -> float:
    return asyncio.get_running_loop().time()


def _lives(lives: Iterable[Life]) -> list[pb.Life]:
    return [pb.Life(worker_id=worker_id, incarnation=incarnation) for worker_id, incarnation in lives]


def _update_message(
    machine: Machine, update: ReplicaUpdate[Gradient], whole: bool
) -> tuple[pb.ReplicateRequest, Gradient | None]:
    gradient = update.gradient if whole else None
    message = pb.ReplicateRequest.Update(
        lsn=update.lsn,
        slice=update.index,
        version=update.version,
        dtype=common_pb2.DTYPE_FLOAT32,
        has_gradient=gradient is not None,
        lr_scale=update.lr_scale,
        contributors=_lives(update.contributors),
        sequence=update.sequence or 0,
        square=update.square,
    )
    if update.factor is not None:
        message.factor = update.factor
    return pb.ReplicateRequest(shard=machine.number, term=machine.term, update=message), gradient


def _state_message(record: SliceRecord, index: int, array: int, arrays: int) -> pb.ReplicateRequest.SliceState:
    return pb.ReplicateRequest.SliceState(
        slice=index,
        array=array,
        arrays=arrays,
        version=record.version,
        contributors=_lives(record.contributors),
        producers=[
            pb.ReplicateRequest.Producer(life=pb.Life(worker_id=life[0], incarnation=life[1]), next=following)
            for life, following in record.producers.items()
        ],
    )
