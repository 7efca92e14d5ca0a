"""Stream from a primary to one replica. It is reopened whenever it breaks.

``replicator`` and ``replication`` decide which messages are sent, ``replica_carriers`` transports them, and
``service.StreamFromPrimary`` is the other end.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final, Protocol

import grpc.aio
import structlog

from psdist.errors import (
    PsdistError,
    ServerUnreachableError,
    SharingUnavailableError,
    TcpUnavailableError,
)
from psdist.link.connecting import ending_with
from psdist.security.tls import Credentials
from psdist.types import Replica
from psdist.v1 import common_pb2
from psdist.v1 import server_pb2 as pb
from psdist.wire import convert, status
from psdist_server.core.lags import LagRows
from psdist_server.core.replication import PrimaryReplication, ReplicaState, ReplicaUpdate, not_primary
from psdist_server.core.shard import Producer, SliceRecord
from psdist_server.kernels.arrays import Gradient
from psdist_server.store.replica_carriers import Carrier, Offer, UpdateMemory, negotiate
from psdist_server.store.shard_router import SliceContents

logger = structlog.get_logger("psdist.server")

METHOD: Final = "/psdist.v1.ServerService/Replicate"
_RETRY_MIN_SECONDS: Final = 0.02
_RETRY_MAX_SECONDS: Final = 1.0

Machine = PrimaryReplication[Gradient]


class ReplicaNetwork(Protocol):
    """Access to the other servers."""

    rng: Random
    lease_seconds: float
    #: Transports of updates between servers besides gRPC: "shm", "tcp".
    carriers: Collection[str]
    credentials: Credentials

    def hello(self, parameters: str) -> pb.ReplicateRequest:
        """Return the first message of a stream: the identity of this server, and the epoch of its map."""

    def method(self, replica: Replica, name: str) -> Callable[..., Any]:
        """Return a raw bidirectional method of a server. Raises ServerUnreachableError if it is not in the map."""

    def host(self, replica: Replica) -> str:
        """Return the host of another server. Raises ServerUnreachableError if it is not in the map."""

    def report(self) -> None:
        """Announce that the state of a replica has changed, so that this server reports it to the scheduler."""


class StreamPrimary(Protocol):
    """The primary that a stream belongs to, and whose shards it carries."""

    name: str
    network: ReplicaNetwork
    machines: dict[int, Machine]
    memory: UpdateMemory
    contents: SliceContents

    def opened(self, stream: StreamToReplica, machine: Machine, held: ReplicaState | None) -> None:
        """Handle a newly opened stream, whose replica has ``held`` of the shard."""

    def answered(self, stream: StreamToReplica, response: pb.ReplicateResponse) -> None:
        """Handle an answer of the replica."""

    def copy_slice(self, stream: StreamToReplica, machine: Machine, index: int) -> None:
        """Send a quiescent slice."""

    def lose(self, gradients: Sequence[Gradient]) -> None:
        """Give up gradients that the replica may still read."""

    def ship_waiting(self) -> None:
        """Continue with updates that wait until fewer bytes of unacknowledged ones are kept."""


@dataclass(slots=True)
class _Confirm:
    """Caller that waits until the replica confirms this server as primary of the shards of ``machines``."""

    machines: list[Machine]
    done: asyncio.Future[None]


class StreamToReplica:
    """Stream to ``replica``, for all shards that it copies."""

    def __init__(self, replicator: StreamPrimary, replica: Replica) -> None:
        self.replica = replica
        #: Reason that the stream is not open.
        self.reason = ""
        self._replicator = replicator
        #: Transport of the stream; None while it is not open.
        self._carrier: Carrier | None = None
        #: Reasons why better transports did not work, by name.
        self._refused: dict[str, str] = {}
        #: Name of the transport, and the reasons that no better one is used.
        self.carrier_text = ""
        self._copies: asyncio.Queue[Machine] = asyncio.Queue()
        self._numbers = itertools.count(1)
        self._confirms: dict[int, _Confirm] = {}
        #: Ends the stream, whether open or opening.
        self._end: asyncio.Future[PsdistError] | None = None
        self._closed = False
        self.task = asyncio.get_running_loop().create_task(self._run())

    def send(self, message: pb.ReplicateRequest, payload: Gradient | None = None) -> None:
        """Queue a message, or drop it if there is no stream."""
        if self._carrier is not None:
            self._carrier.send(message, payload)

    def add(self, machine: Machine) -> None:
        """Open one more shard on the stream."""
        if self._carrier is not None:
            self._replicator.opened(self, machine, None)

    def copy(self, machine: Machine) -> None:
        """Queue the copy of a shard."""
        self._copies.put_nowait(machine)

    async def confirm(self, machines: list[Machine]) -> None:
        """Wait until the replica has confirmed these shards. Raises StaleEpochError."""
        # A newer map may have arrived before this call and failed the earlier waits.
        for machine in machines:
            if self._closed or not self._is_current(machine):
                raise not_primary(machine.number)
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
        """Fail confirmations of a shard that has another primary."""
        for waiting in self._confirms.values():
            if any(machine.number == number for machine in waiting.machines) and not waiting.done.done():
                waiting.done.set_exception(not_primary(number))

    def restart(self) -> None:
        """Reopen the stream, to learn the replica's current state."""
        if self._end is not None and not self._end.done():
            self._end.set_result(ServerUnreachableError("the stream was reopened"))

    def close(self) -> None:
        """End the stream: the replica has no role any more. Confirmations fail, and callers ask the replicas that have
        one."""
        self._closed = True
        for waiting in self._confirms.values():
            if not waiting.done.done():
                waiting.done.set_exception(not_primary(waiting.machines[0].number))
        self.task.cancel()

    async def _run(self) -> None:
        delay = _RETRY_MIN_SECONDS
        while not self._closed:
            try:
                await self._session()
            except grpc.aio.AioRpcError as error:
                self.reason = str(status.from_call(error, f"server {self.replica}"))
            except SharingUnavailableError as error:
                self.reason = self._refused["shm"] = error.message
            except TcpUnavailableError as error:
                self.reason = self._refused["tcp"] = error.message
            except PsdistError as error:
                self.reason = str(error)
            except asyncio.CancelledError:
                if self._closed:
                    raise
                self.reason = "the call was cancelled"
            except asyncio.InvalidStateError:
                self.reason = f"server {self.replica} ended the stream while it was written to"
            except Exception as error:  # Log defects, and keep retrying.
                self.reason = f"internal error: {error!r}"
                logger.error("the stream to a replica failed", peer=str(self.replica), exc_info=error)
            finally:
                delay = _RETRY_MIN_SECONDS if self._ended() else min(_RETRY_MAX_SECONDS, 2 * delay)
            await asyncio.sleep(delay * self._replicator.network.rng.uniform(0.5, 1.0))

    def _ended(self) -> bool:
        """Discard messages queued for a stream that ended. Return True if it had been open."""
        carrier, self._carrier, self._end, self.carrier_text = self._carrier, None, None, ""
        self._copies = asyncio.Queue()
        for machine in self._replicator.machines.values():
            machine.closed(self.replica, now())
        if carrier is not None:
            self._refused.clear()  # Conditions have changed since they failed.
            carrier.close()
            self._replicator.lose(carrier.unacknowledged())
        if not self._closed:
            self._replicator.ship_waiting()  # Nothing is retained for an interrupted copy.
        return carrier is not None

    async def _session(self) -> None:
        replicator, network = self._replicator, self._replicator.network
        offer = Offer(
            peer=f"server {self.replica}",
            host=network.host(self.replica),
            tls=network.credentials.tls,
            memory=replicator.memory,
            carriers=network.carriers,
            refused=self._refused,
        )
        call = network.method(self.replica, METHOD)()
        self._end = asyncio.get_running_loop().create_future()
        tasks: list[asyncio.Task[None]] = []
        try:
            with ending_with(self._end):
                # In this task, because a carrier created by another one would be lost if cancelled at that moment.
                carrier, answer = await negotiate(call, network.hello(replicator.name), offer)
                self.carrier_text = _carrier_text(carrier.name, network.carriers, self._refused, answer.welcome.reason)
                self._open(carrier, answer.welcome)
                tasks = [asyncio.create_task(carrier.run(self._answered)), asyncio.create_task(self._copy_all(carrier))]
                ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    task.result()
        finally:
            # gRPC never tells the sender about a call that is cancelled before its first message was sent.
            call.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _open(self, carrier: Carrier, welcome: pb.ReplicateResponse.Welcome) -> None:
        held = {held.shard: ReplicaState(held.term, held.lsn, held.complete, held.fill) for held in welcome.held}
        self._carrier, self.reason = carrier, ""
        self.send(self._replicator.network.hello(self._replicator.name))  # There may be a newer map by now.
        for number, machine in sorted(self._replicator.machines.items()):
            if self.replica in machine.peers:
                self._replicator.opened(self, machine, held.get(number))
        for number, waiting in self._confirms.items():
            self._send_confirm(number, waiting)

    def _answered(self, response: pb.ReplicateResponse) -> None:
        kind = response.WhichOneof("kind")
        if kind == "confirmed":
            waiting = self._confirms.get(response.confirmed.number)
            if waiting is not None and not waiting.done.done():
                waiting.done.set_result(None)
            return
        if kind == "ack" and self._carrier is not None:
            self._carrier.acknowledged(response.ack)
        self._replicator.answered(self, response)

    async def _copy_all(self, carrier: Carrier) -> None:
        """Copy one shard after the other, slice by slice."""
        while True:
            machine = await self._copies.get()
            # A shard that moved to another server sends nothing, so it would always have a next slice.
            while self._is_current(machine) and (index := machine.next_copy(self.replica)) is not None:
                await self._copy_slice(machine, index)
                await carrier.has_room()
            if self._is_current(machine) and machine.peers[self.replica].is_copying:
                self.send(pb.ReplicateRequest(shard=machine.number, term=machine.term, end=pb.ReplicateRequest.End()))
                machine.ended(self.replica, now())

    def _is_current(self, machine: Machine) -> bool:
        return self._replicator.machines.get(machine.number) is machine and self.replica in machine.peers

    async def _copy_slice(self, machine: Machine, index: int) -> None:
        done = asyncio.get_running_loop().create_future()

        def copy() -> None:
            """Run while the slice is quiescent: no update gets between the copy and its place in the queue."""
            if done.done():
                return
            try:
                if self._is_current(machine) and machine.peers[self.replica].is_copying:
                    self._replicator.copy_slice(self, machine, index)
            except Exception as error:  # Raised by the waiting caller.
                done.set_exception(error)
            else:
                done.set_result(None)

        self._replicator.contents.when_quiescent(index, copy)
        await done


def _carrier_text(name: str, carriers: Collection[str], refused: Mapping[str, str], reason: str) -> str:
    """Return the name of the transport, and the reasons that no better one of those allowed is used."""
    why = [f"no {better}: {text}" for better, text in refused.items() if better in carriers]
    if reason:
        why.append(reason)
    return f"{name}: {'; '.join(why)}" if why else name


def now() -> float:
    """Return the loop's time."""
    return asyncio.get_running_loop().time()


def _producers(producers: Iterable[Producer]) -> list[pb.Life]:
    return [pb.Life(worker_id=worker_id, incarnation=incarnation) for worker_id, incarnation in producers]


def update_messages(
    machine: Machine, update: ReplicaUpdate[Gradient], whole: bool
) -> Iterator[tuple[pb.ReplicateRequest, Gradient | None]]:
    """Yield the messages for ``update``, each with its payload if it has one."""
    gradient, assigned = (update.gradient, update.assigned) if whole else (None, None)
    if assigned is not None:
        assign = pb.ReplicateRequest.Assign(lsn=update.lsn, slice=update.index)
        yield pb.ReplicateRequest(shard=machine.number, term=machine.term, assign=assign), assigned
    message = pb.ReplicateRequest.Update(
        lsn=update.lsn,
        slice=update.index,
        version=update.version,
        dtype=common_pb2.DTYPE_FLOAT32,
        has_gradient=gradient is not None,
        lr_scale=update.lr_scale,
        contributors=_producers(update.contributors),
        sequence=update.sequence or 0,
        square=update.square,
        assigned=assigned is not None,
        settings=convert.settings_to_proto(update.settings) if whole else (),
    )
    if gradient is not None and update.absent:
        starts, sizes = zip(*((start, stop - start) for start, stop in update.absent), strict=True)
        message.absent.CopyFrom(pb.ElementRanges(starts=starts, sizes=sizes))
    yield pb.ReplicateRequest(shard=machine.number, term=machine.term, update=message), gradient


def state_message(
    record: SliceRecord, square: float, index: int, array: int, arrays: int, lags: LagRows
) -> pb.ReplicateRequest.SliceState:
    """Return the message for one array of a slice. square: sum of squares of the slice's last step."""
    return pb.ReplicateRequest.SliceState(
        slice=index,
        array=array,
        arrays=arrays,
        version=record.version,
        contributors=_producers(record.contributors),
        producers=[
            pb.ReplicateRequest.Producer(life=pb.Life(worker_id=producer[0], incarnation=producer[1]), next=following)
            for producer, following in record.producers.items()
        ],
        square=square,
        lags=convert.lags_to_proto(lags) if lags and array == 0 else None,
    )
