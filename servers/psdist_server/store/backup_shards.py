"""The shards that this server holds for other primaries, and the handling of the primaries' messages.

Messages for a slice are handled in order: arrays that replace it, updates, and comparisons of its digest. Updates of
different slices run concurrently in the kernel threads. An update is acknowledged when it and all earlier ones are
in the arrays. Only the newest of a server's streams counts: a late message on an earlier one could restart a copy
that is complete, and the primary reads answers on the newest stream only.

``core.replication`` decides which update comes next; ``service`` serves the stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from psdist.consistency import BSP
from psdist.errors import (
    InvalidArgumentError,
    LimitExceededError,
    PsdistError,
    ReplicaMismatchError,
    StaleCopyError,
    StaleTermError,
)
from psdist.types import ITEM_BYTES, ParametersEntry, ParametersSpec, Replica, Shard
from psdist.v1 import server_pb2 as pb
from psdist.wire import convert, status
from psdist.wire.frames import Frame
from psdist_server.core.contributions import SettingsCheck
from psdist_server.core.lags import Lags, checked, ranges_of
from psdist_server.core.replication import BackupReplication, ReplicaUpdate, stale_term
from psdist_server.core.shard import Producer, SliceRecord
from psdist_server.kernels.arrays import Applied, Array, DenseParameters, Gradient, Update, gradient_of
from psdist_server.kernels.pool import KernelLauncher
from psdist_server.store.gradients import NormBoard
from psdist_server.store.statistics import Counters

#: Sends an answer to a primary.
Answer = Callable[[pb.ReplicateResponse], None]


class _QueuedUpdate(NamedTuple):
    """An update of shard ``number``, to be carried out after the slice's earlier ones.

    square: sum of squares of its gradient (clipping).
    """

    number: int
    term: int
    lsn: int
    update: Update
    square: float
    sender: Replica


@dataclass(slots=True)
class _IncomingSlice:
    """A slice of a copy, as far as it has arrived."""

    arrays: list[Array] = field(default_factory=list)
    lags: Lags = ()


class BackupShards:
    """The shards of one parameter set that this server holds for other primaries.

    fail: called with the error if a copy's bytes differ from its primary's.
    """

    def __init__(
        self,
        spec: ParametersSpec,
        dense: DenseParameters,
        kernels: KernelLauncher,
        norms: NormBoard,
        counters: Counters,
        fail: Callable[[PsdistError], None],
    ) -> None:
        self.machines: dict[int, BackupReplication] = {}
        self._dense = dense
        self._kernels = kernels
        self._norms = norms
        self._counters = counters
        self._asynchronous = not isinstance(spec.consistency, BSP)
        self._clipping = spec.optimizer.max_grad_norm > 0 and not self._asynchronous
        self._fail = fail
        self._settings_check = SettingsCheck(spec.optimizer)
        self._incoming: dict[int, _IncomingSlice] = {}
        #: Weights that the next update of a slice begins with, and the lsn of that update.
        self._assigned: dict[int, tuple[int, Array]] = {}
        self._queues: dict[int, deque[_QueuedUpdate | Callable[[], None]]] = {}
        self._busy: set[int] = set()
        #: Shards that this server should copy by the map, but has no memory for.
        self._no_room: dict[int, LimitExceededError] = {}
        #: Answer function of each server's newest stream, by its id.
        self._answers: dict[str, Answer] = {}

    def add(self, number: int, indices: Iterable[int], shard: Shard) -> None:
        """Start holding a shard. If there is no memory for it, its primary is refused until the next map."""
        try:
            self._dense.hold(indices)
        except LimitExceededError as error:
            self._no_room[number] = error
            return
        self.machines[number] = BackupReplication(number, indices, shard)

    def remove(self, number: int) -> BackupReplication:
        """Stop accepting messages for a shard. Wait for ``KernelLauncher.settled`` afterwards: accepted updates are
        still carried out."""
        machine = self.machines.pop(number)
        self._forget_arrays(machine)
        return machine

    def _forget_arrays(self, machine: BackupReplication) -> None:
        """Drop arrays of a shard that wait for the messages behind them."""
        for index in machine.slices:
            self._incoming.pop(index, None)
            self._assigned.pop(index, None)

    def discard(self, indices: Iterable[int]) -> None:
        """Drop all queued work for these slices."""
        for index in indices:
            self._queues.pop(index, None)

    def adopt_map(self, shards: Sequence[Shard]) -> None:
        """Adopt a new map: its primaries. Memory for refused shards is tried again."""
        self._no_room.clear()
        for number, machine in self.machines.items():
            machine.adopt_map(shards[number])

    def retain(self, producers: Collection[Producer]) -> None:
        """Drop the entries of other producers. Entries that a primary with an older map still sends are dropped at the
        next change: no primary has a newer map, as its streams wait for that (``Admission.admit_primary``)."""
        for machine in self.machines.values():
            machine.retain(producers)

    def open_stream(self, sender: Replica, answer: Answer) -> pb.ReplicateResponse:
        """Report this server's copies of the sender's shards. From now on only messages on the stream of ``answer``
        count."""
        self._answers[sender.server_id] = answer
        held = [
            pb.ReplicateResponse.Held(
                shard=number, term=held.term, lsn=held.lsn, complete=held.complete, fill=held.fill
            )
            for number, machine in sorted(self.machines.items())
            if machine.primary == sender and (held := machine.held)
        ]
        return pb.ReplicateResponse(welcome=pb.ReplicateResponse.Welcome(held=held))

    def on_message(
        self, sender: Replica, frame: Frame[pb.ReplicateRequest], entry: ParametersEntry, answer: Answer
    ) -> None:
        """Handle one message. Raises InvalidArgumentError if the stream cannot continue."""
        message = frame.header
        if self._answers.get(sender.server_id) != answer:
            raise InvalidArgumentError(f"{sender} has opened another stream: this one is no longer valid")
        if message.WhichOneof("kind") == "confirm":
            self._confirm(sender, message.confirm, entry, answer)
            return
        try:
            self._check(sender, message.shard, message.term, entry)
            if message.shard in self._no_room:
                raise self._no_room[message.shard]
            machine = self.machines.get(message.shard)
            if machine is not None:  # Otherwise the shard moved away; the primary's next map says so.
                self._on_shard_message(machine, sender, frame, answer)
        except (StaleTermError, StaleCopyError, ReplicaMismatchError, LimitExceededError) as error:
            answer(_refused(message.shard, message.term, error))

    @staticmethod
    def _check(sender: Replica, number: int, term: int, entry: ParametersEntry) -> None:
        if number >= len(entry.shards):
            raise InvalidArgumentError(f"shard {number} of {len(entry.shards)}")
        shard = entry.shards[number]
        if shard.primary != sender or shard.term != term:
            raise stale_term(number, sender, term, shard.primary, shard.term)

    def _confirm(
        self, sender: Replica, confirm: pb.ReplicateRequest.Confirm, entry: ParametersEntry, answer: Answer
    ) -> None:
        for number, term in zip(confirm.shards, confirm.terms, strict=False):
            try:
                self._check(sender, number, term, entry)
            except StaleTermError as error:
                answer(_refused(number, term, error))
                return
        answer(pb.ReplicateResponse(confirmed=pb.ReplicateResponse.Confirmed(number=confirm.number)))

    def _on_shard_message(
        self, machine: BackupReplication, sender: Replica, frame: Frame[pb.ReplicateRequest], answer: Answer
    ) -> None:
        message = frame.header
        match message.WhichOneof("kind"):
            case "begin":
                self._forget_arrays(machine)
                machine.start_copy(message.term, message.begin.lsn, message.begin.fill, message.begin.copy)
            case "state":
                self._on_state(machine, message.state, frame.payload)
            case "end":
                machine.end()
                filled = pb.ReplicateResponse.Filled(shard=message.shard, term=message.term, copy=machine.copy)
                answer(pb.ReplicateResponse(filled=filled))
            case "assign":
                self._check_slice(machine, message.assign.slice)
                values = self._values(message.assign.slice, frame.payload, "float32")
                self._assigned[message.assign.slice] = message.assign.lsn, values  # type: ignore[assignment]  # float32
            case "update":
                self._on_update(machine, sender, message, frame.payload)
            case "digest":
                self._on_digest(machine, message, answer)
            case kind:
                raise InvalidArgumentError(f"unknown message kind {kind}")

    def _on_state(self, machine: BackupReplication, state: pb.ReplicateRequest.SliceState, payload: memoryview) -> None:
        index = state.slice
        self._check_slice(machine, index)
        found = self._incoming.setdefault(index, _IncomingSlice())
        if state.array != len(found.arrays) or state.arrays != self._dense.array_count:
            raise InvalidArgumentError(f"array {state.array} of {state.arrays} of slice {index} is out of order")
        values = self._values(index, payload, "float32")
        if not found.arrays:
            rows, sizes = convert.lags_from_proto(state.lags), {index: self._dense.slicing.size(index)}
            found.lags = checked(rows, sizes, "a copy").get(index, ())
        found.arrays.append(values)  # type: ignore[arg-type]  # float32, as asked for above
        if len(found.arrays) < state.arrays:
            return
        del self._incoming[index]
        record = SliceRecord(
            state.version,
            tuple((life.worker_id, life.incarnation) for life in state.contributors),
            {(p.life.worker_id, p.life.incarnation): p.next for p in state.producers},
        )
        machine.state(index, record)
        version = state.version
        if self._clipping and version:
            self._norms.record(version - 1, index, state.square)

        def install() -> None:
            self._dense.lags.set(index, found.lags)
            for number, array in enumerate(found.arrays):
                self._dense.install_state(index, number, array, version)

        self._enqueue(index, install)

    def _on_digest(self, machine: BackupReplication, message: pb.ReplicateRequest, answer: Answer) -> None:
        index, version, digest = message.digest.slice, message.digest.version, message.digest.digest
        self._check_slice(machine, index)
        number, term = message.shard, message.term

        def compare() -> None:
            if self._dense.digest(index) == digest:
                return
            error = ReplicaMismatchError(
                f"slice {index} of shard {number} differs from its primary's bytes, both at version {version}: "
                "the shard is stopped",
                slice=index,
            )
            self._fail(error)
            answer(_refused(number, term, error))

        if index not in machine.awaited:
            self._enqueue(index, compare)

    def _on_update(
        self, machine: BackupReplication, sender: Replica, message: pb.ReplicateRequest, payload: memoryview
    ) -> None:
        update, assigned = self._update(machine, message.update, payload), self._take_assigned(message.update)
        number, term = message.shard, message.term
        verdict = machine.update(term, update)
        if verdict == "ignore":
            return
        if verdict != "apply":
            self._acknowledge(machine, sender, term, update.lsn)
            return
        parts = [update.gradient] if update.gradient is not None else []
        factor = message.update.factor if message.update.HasField("factor") else None
        dense = Update(
            update.index,
            update.version,
            parts,
            update.lr_scale,
            factor,
            assigned=assigned,
            settings=update.settings,
            absent=update.absent,
        )
        self._enqueue(update.index, _QueuedUpdate(number, term, update.lsn, dense, update.square, sender))

    def _take_assigned(self, update: pb.ReplicateRequest.Update) -> Array | None:
        """Return the weights that ``update`` begins with, or None. Raises InvalidArgumentError if their message did not
        precede it."""
        lsn, values = self._assigned.pop(update.slice, (0, None))
        if not update.assigned:
            return None
        if values is None or lsn != update.lsn:
            raise InvalidArgumentError(
                f"update {update.lsn} of slice {update.slice} comes without its assigned weights"
            )
        return values

    def _acknowledge(self, machine: BackupReplication, sender: Replica, term: int, lsn: int) -> None:
        """Acknowledge an update, unless the term has changed: its number would mean another update."""
        if term == machine.term:
            ack = pb.ReplicateResponse.Ack(shard=machine.number, term=term, lsn=machine.applied(term, lsn))
            self._answers[sender.server_id](pb.ReplicateResponse(ack=ack))

    def _update(
        self, machine: BackupReplication, message: pb.ReplicateRequest.Update, payload: memoryview
    ) -> ReplicaUpdate[Gradient]:
        self._check_slice(machine, message.slice)
        gradient = None
        if message.has_gradient:
            gradient = self._values(message.slice, payload, convert.dtype_from_proto(message.dtype))
        absent, elements = message.absent, self._dense.slicing.size(message.slice)
        return ReplicaUpdate(
            lsn=message.lsn,
            index=message.slice,
            version=message.version,
            contributors=tuple((life.worker_id, life.incarnation) for life in message.contributors),
            sequence=message.sequence if self._asynchronous else None,
            gradient=gradient,
            lr_scale=message.lr_scale,
            square=message.square,
            settings=self._settings_check.check(convert.settings_from_proto(message.settings)),
            absent=ranges_of(absent.starts, absent.sizes, elements, "the elements that an update skips"),
        )

    def _check_slice(self, machine: BackupReplication, index: int) -> None:
        if index not in machine.slices:
            raise InvalidArgumentError(f"slice {index} is not in shard {machine.number}")

    def _values(self, index: int, payload: memoryview, dtype: str) -> Gradient:
        expected = self._dense.slicing.size(index) * ITEM_BYTES[dtype]
        if len(payload) != expected:
            raise InvalidArgumentError(f"slice {index} has {expected} bytes in {dtype}, not {len(payload)}")
        return gradient_of(payload, dtype)

    def _enqueue(self, index: int, work: _QueuedUpdate | Callable[[], None]) -> None:
        self._queues.setdefault(index, deque()).append(work)
        self._next(index)

    def _next(self, index: int) -> None:
        """Carry out the queued work of a slice, up to its next update."""
        queue = self._queues.get(index)
        while queue and index not in self._busy:
            work = queue.popleft()
            if isinstance(work, _QueuedUpdate):
                self._busy.add(index)
                self._kernels.submit(index, self._dense.carry_out, work, self._applied)
            else:
                work()

    def _applied(self, work: _QueuedUpdate, applied: Applied) -> None:
        index, machine = work.update.index, self.machines.get(work.number)
        self._counters.apply_seconds += applied.seconds
        self._busy.discard(index)
        if self._clipping:
            self._norms.record(work.update.step, index, work.square)
        if machine is not None:
            self._acknowledge(machine, work.sender, work.term, work.lsn)
        self._next(index)


def _refused(number: int, term: int, error: PsdistError) -> pb.ReplicateResponse:
    detail = status.to_detail(error)
    return pb.ReplicateResponse(refused=pb.ReplicateResponse.Refused(shard=number, term=term, error=detail))
