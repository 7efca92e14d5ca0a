"""Sharing: the Share stream, by which a worker on this host pushes and pulls without sending payloads.

The first request attaches: the worker's gradient arena and this server's weights arena change hands
(``psdist.wire.handover``). After that each request is a call whose payloads lie in the arenas: as soon as it is read
all of its slices are with the shard machines, and it is answered by one message when all of them are answered. Whom it
waits for is told meanwhile.

Invariants: calls are taken in the order in which they came. A call is refused before any of its slices is taken, or
all of them are taken. What one stream can make this server hold is bounded by the slices here. When a stream ends, its
calls are over, but what they contributed is not: the machines hold views of the arena, whose mapping lasts as long.

Not here: what a push does (``holding``), arenas as such (``psdist.wire.shm``).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import grpc.aio

from psdist.errors import (
    InternalError,
    InvalidArgumentError,
    LimitExceededError,
    PsdistError,
    SharingUnavailableError,
    UnknownCodecError,
    UnknownParametersError,
)
from psdist.types import ITEM_BYTES, WIRE_DTYPES, Identity
from psdist.v1 import common_pb2, server_pb2
from psdist.wire import convert, frames, handover, limits, status
from psdist.wire.shm import GradientArena
from psdist_server.calls import Answer, Call
from psdist_server.holding import Holding
from psdist_server.host import Host


class ShareService:
    """Serves the Share streams of ``host``."""

    def __init__(self, host: Host) -> None:
        self._host = host
        handover.sweep()

    async def serve(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        """One stream, to its end."""
        stream: _Stream | None = None
        tasks: list[asyncio.Task[None]] = []
        try:
            async for data in requests:
                stream = _Stream(self._host, await _attach(self._host, data, context), context)
                tasks = [asyncio.create_task(stream.read_from(requests)), asyncio.create_task(stream.write())]
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                break
        except PsdistError as error:
            await status.abort(context, error)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if stream is not None:
                stream.end()


@dataclass(frozen=True, slots=True)
class _Attachment:
    """Who attached, and what it shares."""

    identity: Identity
    holding: Holding
    arena: GradientArena
    #: Of its elements; "" where it has none.
    dtype: str


async def _attach(host: Host, data: bytes, context: grpc.aio.ServicerContext) -> _Attachment:
    """Carries the first request out and answers it."""
    request = frames.parse(server_pb2.ShareRequest, data)
    if request.WhichOneof("kind") != "attach" or request.call_id != 0:
        raise InvalidArgumentError("the first request of a Share stream must be attach, with call_id 0")
    attach = request.attach
    identity = convert.identity_from_proto(attach.identity)
    holding = await host.admit(identity)
    # Who never pushes has an arena without elements.
    reads_only = attach.dtype == common_pb2.DTYPE_UNSPECIFIED
    dtype, elements = ("float32", 0) if reads_only else (_wire_dtype(attach.dtype), holding.entry.total)
    weights = holding.dense.arena
    if weights is None:
        raise SharingUnavailableError(holding.dense.arena_error)
    async with handover.connected(attach.socket) as (fd, connection):
        # In a thread, because mapping a large file takes longer than heartbeats may; once begun it closes ``fd``.
        opening = asyncio.get_running_loop().run_in_executor(None, GradientArena.open, fd, elements, dtype)
        arena = await asyncio.shield(opening)
        handover.give(connection, weights.fd)
    attached = server_pb2.Attached(nonce=arena.nonce, weights_nonce=weights.nonce)
    await context.write(server_pb2.ShareResponse(attached=attached).SerializeToString())
    return _Attachment(identity, holding, arena, "" if reads_only else dtype)


@dataclass
class _SharedCall(Call):
    """A call of a Share stream: it keeps its answers until all are there."""

    call_id: int = 0
    #: How many slices it named.
    named: int = 0
    answers: list[Answer] = field(default_factory=list)
    error: PsdistError | None = None
    stream: _Stream | None = None
    timer: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        self._asked_all = False

    @property
    def ended(self) -> bool:
        """Whether it is to be told its answers, or its error."""
        return self.error is not None or (self._asked_all and not self.outstanding)

    def answer(self, token: int, answer: Answer) -> None:
        del self.outstanding[token]
        self.answers.append(answer)
        self._end_if_done()

    def fail(self, error: PsdistError) -> None:
        if self.error is None:
            self.error = error
            self._end_if_done()

    def _end_if_done(self) -> None:
        if self.ended and self.stream is not None:
            self.stream.tell(self)

    def response(self) -> server_pb2.ShareResponse:
        """What it is told now."""
        if self.error is not None:
            return server_pb2.ShareResponse(call_id=self.call_id, error=status.to_detail(self.error))
        if not self.ended:
            return server_pb2.ShareResponse(call_id=self.call_id, waiting_for=self.waiting_for)
        versions = [answer.version for answer in self.answers]
        staleness = [answer.staleness for answer in self.answers]
        answers = server_pb2.SharedAnswers(
            slices=[answer.index for answer in self.answers],
            versions=versions if min(versions) != max(versions) else versions[:1],
            ignored=[answer.index for answer in self.answers if answer.ignored],
            staleness=staleness if any(staleness) else (),
        )
        return server_pb2.ShareResponse(call_id=self.call_id, answers=answers)


class _Stream:
    """An attached stream: its calls under way, and what is to be written about them."""

    def __init__(self, host: Host, attachment: _Attachment, context: grpc.aio.ServicerContext) -> None:
        self._host = host
        self._context = context
        self._attachment = attachment
        self._calls: dict[int, _SharedCall] = {}
        self._last_id = 0
        self._named = 0
        #: Calls about which something is to be written, once each.
        self._told: dict[int, _SharedCall] = {}
        self._wake = asyncio.Event()
        self._writing = False
        #: Whether the reader is at work, which writes what comes of that itself.
        self._taking = False

    # --- reading ------------------------------------------------------------------------------------------------------

    async def read_from(self, requests: AsyncIterator[bytes]) -> None:
        """Takes requests until there are no more. Raises InvalidArgumentError for what cannot be told to a call."""
        async for data in requests:
            await self._take(frames.parse(server_pb2.ShareRequest, data))
            # A call that could be answered at once is, without a turn of the loop for another task.
            await self._flush()

    async def _take(self, request: server_pb2.ShareRequest) -> None:
        kind = request.WhichOneof("kind")
        if kind == "cancel":
            if (call := self._calls.get(request.call_id)) is not None:
                self._forget(call)
            return
        if kind != "push" and kind != "pull":
            raise InvalidArgumentError("a request of an attached Share stream must be push, pull or cancel")
        if request.call_id <= self._last_id:
            raise InvalidArgumentError(f"call_id {request.call_id} does not come after {self._last_id}")
        self._last_id = request.call_id
        call = _SharedCall(
            self._attachment.identity,
            is_push=kind == "push",
            wants_weights=kind == "pull" or request.push.wants_weights,
            call_id=request.call_id,
            stream=self,
        )
        self._calls[request.call_id] = call
        try:
            identity = request.push.header.identity if kind == "push" else request.pull.identity
            holding = await self._admit(call, identity)
            self._taking = True
            if kind == "push":
                self._push(call, holding, request.push)
            else:
                self._pull(call, holding, request.pull)
            call.asked_all()
        except PsdistError as error:
            call.fail(error)
        except Exception as error:  # Without this the worker would wait for an answer that never comes.
            call.fail(InternalError(f"taking the call failed: {error!r}"))
        finally:
            self._taking = False
        if not call.ended:
            self._report_later(call)

    def _push(self, call: _SharedCall, holding: Holding, push: server_pb2.SharedPush) -> None:
        header = push.header
        if header.codec != common_pb2.CODEC_RAW:
            raise UnknownCodecError(f"codec {header.codec} is unknown to this server: use CODEC_RAW (1)")
        call.step, call.abstain, call.grad_norm = header.step, header.abstain, header.grad_norm
        call.dtype = _wire_dtype(header.dtype)
        if call.dtype != self._attachment.dtype:
            held = self._attachment.dtype or "nothing"
            raise InvalidArgumentError(f"the gradient arena holds {held}, not {call.dtype}")
        call.pull_dtype = _wire_dtype(header.pull_dtype) if call.wants_weights else "float32"
        holding.check_norm(call)
        slices = self._check_slices(call, push.slices)
        bases = _one_for_each(push.base_versions, slices, "base_versions")
        slicing = holding.entry.slicing
        counters = holding.counters.of(call.identity.worker_id)
        for index, base in zip(slices, bases, strict=True):
            values = self._attachment.arena.part(*slicing.bounds(index))
            counters.push_bytes += 0 if call.abstain else values.nbytes
            holding.push_shared(call, index, base, values)

    def _pull(self, call: _SharedCall, holding: Holding, pull: server_pb2.SharedPull) -> None:
        for index in self._check_slices(call, pull.slices):
            holding.pull(call, index, pull.min_version)

    async def _admit(self, call: _SharedCall, message: server_pb2.Identity) -> Holding:
        call.identity = convert.identity_from_proto(message)
        attached = self._attachment.identity
        sender = (call.identity.worker_id, call.identity.incarnation, call.identity.parameters)
        if sender != (attached.worker_id, attached.incarnation, attached.parameters):
            raise InvalidArgumentError("a Share stream is for the worker and the parameters that attached it")
        holding = await self._host.admit(call.identity)
        if holding is not self._attachment.holding:
            raise UnknownParametersError(f"{call.identity.parameters!r} are not those that this stream attached to")
        holding.check_installed()
        return holding

    def _check_slices(self, call: _SharedCall, slices: Sequence[int]) -> Sequence[int]:
        """The slices of a call, of which all or none are taken."""
        holding, last = self._attachment.holding, -1
        if not slices:
            raise InvalidArgumentError("a call must name a slice")
        most = limits.SHARED_ROUNDS_MAX * len(holding.dense.indices)
        if self._named + len(slices) > most:
            raise LimitExceededError(
                f"the calls of one Share stream under way name {self._named + len(slices)} slices, more than {most}: "
                "wait for their answers"
            )
        for index in slices:
            if index <= last:
                raise InvalidArgumentError(f"slice {index} came after slice {last}: name each once, in ascending order")
            holding.check_slice(index)
            last = index
        call.named = len(slices)
        self._named += call.named
        return slices

    # --- writing ------------------------------------------------------------------------------------------------------

    def tell(self, call: _SharedCall) -> None:
        """Something is to be written about ``call``."""
        if call.call_id in self._calls:
            self._told[call.call_id] = call
            if not self._taking:
                self._wake.set()

    async def write(self) -> None:
        """Writes what is to be told, for as long as the stream lasts."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._flush()

    async def _flush(self) -> None:
        """Writes what is to be told, one message at a time."""
        if self._writing:
            return
        self._writing = True
        try:
            while self._told:
                call = self._told.pop(next(iter(self._told)))
                response = call.response()
                if call.ended:
                    self._count_pulled(call)
                    self._forget(call)
                await self._context.write(response.SerializeToString())
        finally:
            self._writing = False

    def _count_pulled(self, call: _SharedCall) -> None:
        if call.wants_weights and call.error is None:
            slicing = self._attachment.holding.entry.slicing
            elements = sum(slicing.size(answer.index) for answer in call.answers)
            counters = self._attachment.holding.counters.of(call.identity.worker_id)
            counters.pull_bytes += elements * ITEM_BYTES[call.pull_dtype]

    def _report_later(self, call: _SharedCall) -> None:
        loop = asyncio.get_running_loop()
        call.timer = loop.call_later(limits.REPORT_WAIT_SECONDS, self._report, call, len(call.answers))

    def _report(self, call: _SharedCall, answered: int) -> None:
        """Says whom ``call`` waits for, unless there was progress."""
        if len(call.answers) == answered:
            call.waiting_for = self._host.waiting_for(call) or "for this server to apply the update"
            self.tell(call)
        else:
            call.waiting_for = ""
        self._report_later(call)

    # --- ending -------------------------------------------------------------------------------------------------------

    def _forget(self, call: _SharedCall) -> None:
        """Nobody is to be told of ``call`` any more."""
        self._calls.pop(call.call_id, None)
        self._told.pop(call.call_id, None)
        self._named -= call.named
        if call.timer is not None:
            call.timer.cancel()
        if call.outstanding:
            self._host.end(call)

    def end(self) -> None:
        """The stream is over, whatever the reason."""
        for call in list(self._calls.values()):
            self._forget(call)


def _one_for_each(values: Sequence[int], slices: Sequence[int], what: str) -> Sequence[int]:
    """``values``, or the only one of them as often as there are slices."""
    if len(values) == 1:
        return [values[0]] * len(slices)
    if len(values) != len(slices):
        raise InvalidArgumentError(f"{len(values)} {what} for {len(slices)} slices: send one for each, or one for all")
    return values


def _wire_dtype(value: int) -> str:
    dtype = convert.dtype_from_proto(value)
    if dtype not in WIRE_DTYPES:
        raise InvalidArgumentError(f"payloads cannot be {dtype}: use one of {', '.join(WIRE_DTYPES)}")
    return dtype
