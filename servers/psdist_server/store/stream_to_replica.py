"""The stream from a primary to one replica: opened, and opened again whenever it breaks.

Not here: what is sent (``replicator``, ``replication``), what carries it (``replica_carriers``), and the other end
(``replica_service.StreamFromPrimary``).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import grpc.aio
import structlog

from psdist.ending import ending_with
from psdist.errors import (
    PsdistError,
    ServerUnreachableError,
    SharingUnavailableError,
    StaleEpochError,
    TcpUnavailableError,
)
from psdist.types import Replica
from psdist.v1 import common_pb2
from psdist.v1 import server_pb2 as pb
from psdist.wire import status
from psdist_server.core.records import Producer, ReplicaUpdate, SliceRecord
from psdist_server.core.replication import PrimaryReplication, ReplicaState
from psdist_server.kernels.arrays import Gradient
from psdist_server.store.replica_carriers import Carrier, Offer, negotiate

if TYPE_CHECKING:
    from psdist_server.store.replicator import Replicator

_log = structlog.get_logger("psdist.server")

METHOD: Final = "/psdist.v1.ServerService/Replicate"
_RETRY_MIN_SECONDS: Final = 0.02
_RETRY_MAX_SECONDS: Final = 1.0

Machine = PrimaryReplication[Gradient]


@dataclass(slots=True)
class _Confirm:
    """A caller waits until the replica confirms that this server is the primary of ``machines``' shards."""

    machines: list[Machine]
    done: asyncio.Future[None]


class StreamToReplica:
    """The stream to ``replica``, for all shards that it holds copies of."""

    def __init__(self, replicator: Replicator, replica: Replica) -> None:
        self.replica = replica
        #: Why the stream is not open.
        self.reason = ""
        self._replicator = replicator
        #: What carries the stream; None while it is not open.
        self._carrier: Carrier | None = None
        #: Why better carriers did not work, by their name.
        self._refused: dict[str, str] = {}
        #: What carries the stream, and why nothing better does.
        self.carrier_text = ""
        self._copies: asyncio.Queue[Machine] = asyncio.Queue()
        self._numbers = itertools.count(1)
        self._confirms: dict[int, _Confirm] = {}
        #: Ends the stream, be it open or about to be.
        self._end: asyncio.Future[PsdistError] | None = None
        self._closed = False
        self.task = asyncio.get_running_loop().create_task(self._run())

    def send(self, message: pb.ReplicateRequest, payload: Gradient | None = None) -> None:
        """Queues a message; drops it while there is no stream."""
        if self._carrier is not None:
            self._carrier.send(message, payload)

    def add(self, machine: Machine) -> None:
        """The replica has a role in one more shard."""
        if self._carrier is not None:
            self._replicator.opened(self, machine, None)

    def copy(self, machine: Machine) -> None:
        """Queues the copy of a shard."""
        self._copies.put_nowait(machine)

    async def confirm(self, machines: list[Machine]) -> None:
        """Returns when the replica has confirmed these shards. Raises StaleEpochError."""
        # A newer map may have come before this call waits, and failed those that waited then.
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
        """The shard has another primary: confirmations of it fail."""
        for waiting in self._confirms.values():
            if any(machine.number == number for machine in waiting.machines) and not waiting.done.done():
                waiting.done.set_exception(not_primary(number))

    def restart(self) -> None:
        """Opens the stream again, to learn what the replica has."""
        if self._end is not None and not self._end.done():
            self._end.set_result(ServerUnreachableError("the stream was opened again"))

    def close(self) -> None:
        """The replica has no role any more: confirmations fail, and are asked of the replicas that have one."""
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
            except Exception as error:  # Without this the copies would fall behind without a reason in the log.
                self.reason = f"a defect: {error!r}"
                _log.error("the stream to a replica failed", server=str(self.replica), exc_info=error)
            finally:
                delay = _RETRY_MIN_SECONDS if self._ended() else min(_RETRY_MAX_SECONDS, 2 * delay)
            await asyncio.sleep(delay * self._replicator.network.rng.uniform(0.5, 1.0))

    def _ended(self) -> bool:
        """Discards what was queued for a stream that ended; whether it had been open."""
        carrier, self._carrier, self._end, self.carrier_text = self._carrier, None, None, ""
        self._copies = asyncio.Queue()
        for machine in self._replicator.machines.values():
            machine.closed(self.replica, now())
        if carrier is not None:
            self._refused.clear()  # Something has changed since they did not work.
            self._lose(carrier.close())
        if not self._closed:
            self._replicator.updates.ship_waiting()  # Nothing is kept for a copy that broke off.
        return carrier is not None

    def _lose(self, gradients: Sequence[Gradient]) -> None:
        """The replica may still read these gradients. Where too many are lost in this way there is another arena from
        now on, which all replicas get by new streams."""
        if self._replicator.memory.lose(gradients):
            self._replicator.memory.renew()
            for stream in self._replicator.streams.values():
                stream.restart()

    async def _session(self) -> None:
        replicator, network = self._replicator, self._replicator.network
        offer = Offer(
            f"server {self.replica}", network.host(self.replica), replicator.memory, network.carriers, self._refused
        )
        call = network.method(self.replica, METHOD)()
        self._end = asyncio.get_running_loop().create_future()
        tasks: list[asyncio.Task[None]] = []
        try:
            with ending_with(self._end):
                # In this task: a carrier that is made in the moment of a cancellation would be lost with another one.
                carrier, answer = await negotiate(call, network.hello(replicator.name), offer)
                self.carrier_text = _carrier_text(carrier.name, network.carriers, self._refused, answer.welcome.reason)
                self._open(carrier, answer.welcome)
                tasks = [asyncio.create_task(carrier.run(self._answered)), asyncio.create_task(self._copy_all(carrier))]
                ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    task.result()
        finally:
            # A call that is cancelled before its first message was sent never says so to whoever sends it.
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
        """Copies one shard after the other, slice by slice."""
        while True:
            machine = await self._copies.get()
            # Nothing is sent of a shard that moved to another server, so there would always be a next slice.
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
            """Runs while the slice is quiescent: no update comes between the copy and its place in the queue."""
            if done.done():
                return
            try:
                if self._is_current(machine) and machine.peers[self.replica].is_copying:
                    self._replicator.copy_slice(self, machine, index)
            except Exception as error:  # Raised by the caller, who waits for the copy.
                done.set_exception(error)
            else:
                done.set_result(None)

        self._replicator.updates.when_quiescent(index, copy)
        await done


def _carrier_text(name: str, carriers: Collection[str], refused: Mapping[str, str], reason: str) -> str:
    """What carries a stream, and why nothing that was allowed and is better does."""
    why = [f"no {better}: {text}" for better, text in refused.items() if better in carriers]
    if reason:
        why.append(reason)
    return f"{name}: {'; '.join(why)}" if why else name


def not_primary(number: int) -> StaleEpochError:
    """The error for a request to this server as the primary of a shard that it is not."""
    return StaleEpochError(
        f"this server is not the primary of shard {number} any more: fetch the map, route anew and send again"
    )


def now() -> float:
    """The loop's time."""
    return asyncio.get_running_loop().time()


def _producers(producers: Iterable[Producer]) -> list[pb.Life]:
    return [pb.Life(worker_id=worker_id, incarnation=incarnation) for worker_id, incarnation in producers]


def update_message(
    machine: Machine, update: ReplicaUpdate[Gradient], whole: bool
) -> tuple[pb.ReplicateRequest, Gradient | None]:
    """The message that carries ``update``, and its payload if it has one."""
    gradient = update.gradient if whole else None
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
    )
    return pb.ReplicateRequest(shard=machine.number, term=machine.term, update=message), gradient


def state_message(
    record: SliceRecord, square: float, index: int, array: int, arrays: int
) -> pb.ReplicateRequest.SliceState:
    """The message that carries one array of a slice, whose last step had the sum of squares ``square``."""
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
    )
