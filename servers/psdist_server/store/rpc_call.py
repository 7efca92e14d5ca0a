"""Server's side of one stream of slices, between the gRPC handler and the parameter store, and the table of a store's
calls.

A call holds at most HELD_SLICES_MAX unused payloads. More stay in the network, which slows the sender down. Answers are
queued without their weights, which are read when the answer is written. A slow reader therefore costs no memory.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from psdist.errors import FencedError, InvalidArgumentError, PsdistError, UnknownCodecError
from psdist.hyperparameters import Settings
from psdist.types import GradientDifference, Identity
from psdist.v1 import common_pb2, server_pb2
from psdist.wire import convert, limits
from psdist_server.core.lags import Ranges, ranges_of

_tokens = itertools.count(1)

_CODECS: Final = (common_pb2.CODEC_RAW, common_pb2.CODEC_SEGMENTS)
_CODEC_NAMES: Final = ", ".join(f"{common_pb2.Codec.Name(codec)} ({codec})" for codec in _CODECS)


@dataclass(frozen=True, slots=True)
class SliceAnswer:
    """Permission to read a slice, or news that a push to it was applied."""

    index: int
    version: int
    ignored: bool = False
    staleness: int = 0


def one_for_each(values: Sequence[int], slices: Sequence[int], what: str) -> Sequence[int]:
    """Expand ``values`` to one per slice: a single value is repeated. Raises InvalidArgumentError for any other number
    of values."""
    if len(values) == 1:
        return [values[0]] * len(slices)
    if len(values) != len(slices):
        raise InvalidArgumentError(f"{len(values)} {what} for {len(slices)} slices: send one for each, or one for all")
    return values


class CallState(Enum):
    """Progress of a call. It changes in ``asked_all``, and with the last answer."""

    ASKING = "more slices may be requested"
    WAITING = "some slices are unanswered"
    ENDED = "all slices are answered, or the call was refused"


@dataclass(frozen=True, slots=True)
class PushedGradient:
    """Properties of a whole pushed gradient.

    norm: its L2 norm, if needed.
    weight: its weight in the mean of its step.
    difference: set if its payloads are differences, None for gradients.
    lr_factor: factor on the learning rate of its update; None if other members decide.
    written: digest of the weights that the script wrote before it; empty if it wrote none.
    settings: hyperparameters of its update, unchecked until the push begins; None if other members decide.
    absent: elements of the vector that it has no gradient for.
    follows_writes, attempt, withdraws: see SlicePushed.
    """

    norm: float = 0.0
    weight: float = 1.0
    difference: GradientDifference | None = None
    lr_factor: float | None = None
    written: bytes = b""
    settings: Settings | None = None
    absent: Ranges = ()
    follows_writes: bool = False
    attempt: int = 0
    withdraws: bool = False

    @classmethod
    def from_header(cls, header: server_pb2.PushHeader) -> PushedGradient:
        """Read a header. Raises InvalidArgumentError for a difference that is not encoded, for a digest of another
        size, and for too many ranges or ranges in disorder; LimitExceededError as ``settings_from_proto``."""
        difference: GradientDifference | None = None
        if header.HasField("difference"):
            if header.codec != common_pb2.CODEC_SEGMENTS:
                raise InvalidArgumentError("a difference to an earlier gradient is in segments: send CODEC_SEGMENTS")
            difference = GradientDifference(header.difference.number, header.difference.from_zeros)
        weight = header.weight if header.HasField("weight") else 1.0
        lr_factor = header.lr_factor if header.HasField("lr_factor") else None
        if len(header.written) not in (0, limits.WRITTEN_DIGEST_BYTES):
            raise InvalidArgumentError(
                f"the digest of the written weights has {len(header.written)} bytes: send {limits.WRITTEN_DIGEST_BYTES}"
            )
        settings: Settings | None = None
        if header.HasField("settings"):
            stated = header.settings.settings
            settings = convert.settings_from_proto(stated) if stated else ()
        absent = _absent(header.absent) if header.HasField("absent") else ()
        return cls(
            header.grad_norm, weight, difference, lr_factor, header.written, settings, absent, header.follows_writes,
            header.attempt, header.withdraws,
        )  # fmt: skip


def _absent(message: server_pb2.ElementRanges) -> Ranges:
    if len(message.starts) > limits.TENSORS_MAX:
        raise InvalidArgumentError(
            f"{len(message.starts)} ranges without a gradient: send at most {limits.TENSORS_MAX}, one for each tensor"
        )
    return ranges_of(message.starts, message.sizes, limits.ELEMENTS_MAX, "the elements without a gradient")


@dataclass
class WantedWeights:
    """Form in which a worker wants weights. held: versions of slices that it holds and that differences may refer
    to."""

    dtype: str = "float32"
    held: dict[int, int] = field(default_factory=dict)

    def read_held(self, held: server_pb2.HeldWeights, generation: int) -> None:
        """Record the weights that the worker holds, if they are of this generation of the parameter set. Raises
        InvalidArgumentError unless each slice has a version."""
        if held.generation == generation:
            self.held = dict(zip(held.slices, one_for_each(held.versions, held.slices, "versions"), strict=True))


class PayloadSlots:
    """Slots of one call. report: sends a ``Reading`` to the worker, if ``is_reported`` says that it asked for that."""

    def __init__(self, report: Callable[[server_pb2.Reading], None]) -> None:
        self.is_reported = False
        #: Bytes of the messages so far.
        self.received_bytes = 0
        self._slots = asyncio.Semaphore(limits.HELD_SLICES_MAX)
        self._report = report

    async def acquire(self) -> None:
        """Wait until one more payload may be held, and report it if that takes long."""
        if not (self.is_reported and self._slots.locked()):
            await self._slots.acquire()
            return
        loop = asyncio.get_running_loop()
        timer = loop.call_later(limits.HELD_REPORT_SECONDS, self._report, server_pb2.READING_HELD)
        try:
            await self._slots.acquire()
        finally:
            timer.cancel()
        if loop.time() >= timer.when():
            self._report(server_pb2.READING_RESUMED)

    def release(self) -> None:
        """Release the slot of a payload."""
        self._slots.release()

    def end(self) -> None:
        """Report that the whole push was read, if it is not small."""
        if self.is_reported and self.received_bytes > limits.DELIVERED_BYTES:
            self._report(server_pb2.READING_COMPLETE)


@dataclass
class Call:
    """One stream: its sender, the slices that it waits for, and its unsent answers."""

    #: The first message names it.
    identity: Identity
    is_push: bool
    wants_weights: bool
    step: int = 0
    dtype: str = "float32"
    #: True if its payloads are segments (``psdist.compression.segments``).
    is_encoded: bool = False
    wanted: WantedWeights = field(default_factory=WantedWeights)
    abstain: bool = False
    gradient: PushedGradient = PushedGradient()
    #: Snapshot attempt that the push comes after; 0 for none.
    mark: int = 0
    #: Requested and unanswered slices, by token.
    outstanding: dict[int, int] = field(default_factory=dict)
    #: Reason that the oldest of them has waited for longer than WAIT_REASON_SECONDS; "" otherwise.
    waiting_for: str = ""
    state: CallState = CallState.ASKING

    def __post_init__(self) -> None:
        self._answers: asyncio.Queue[SliceAnswer | server_pb2.Reading | PsdistError | None] = asyncio.Queue()
        self.slots = PayloadSlots(self._answers.put_nowait)

    def note_wait(self, reason: str) -> str:
        """Record why the oldest slice waits; "" if it has not waited long. Return the reason."""
        self.waiting_for = reason
        return reason

    def read_header(self, header: server_pb2.PushHeader) -> None:
        """Read the header of a push. Raises UnknownCodecError, and InvalidArgumentError for an unknown dtype, a dtype
        that the codec does not use, and as ``PushedGradient.from_header``."""
        if header.codec not in _CODECS:
            raise UnknownCodecError(f"codec {header.codec} is unknown to this server: use {_CODEC_NAMES}")
        self.step, self.abstain = header.step, header.abstain
        self.gradient = PushedGradient.from_header(header)
        self.mark = header.mark
        self.dtype = convert.payload_dtype_from_proto(header.dtype)
        if header.codec == common_pb2.CODEC_SEGMENTS:
            if self.dtype != "float32":
                raise InvalidArgumentError(f"segments decode to float32, not {self.dtype}: send DTYPE_FLOAT32")
            self.is_encoded = True
        if self.wants_weights:
            self.wanted.dtype = convert.payload_dtype_from_proto(header.pull_dtype)

    def ask(self, index: int) -> int:
        """Add a slice. Return its token, a number unique among all calls."""
        token = next(_tokens)
        self.outstanding[token] = index
        return token

    def answer(self, token: int, answer: SliceAnswer) -> None:
        """Queue the answer for ``token``."""
        del self.outstanding[token]
        self._add_answer(answer)
        if self.state is CallState.WAITING and not self.outstanding:
            self._end()

    def asked_all(self) -> None:
        """Record that no more slices will be added."""
        self.state = CallState.WAITING
        if not self.outstanding:
            self._end()

    def fail(self, error: PsdistError) -> None:
        """End the stream with ``error``, after the queued answers."""
        self._answers.put_nowait(error)

    def release_payload(self) -> None:
        """Release the slot of a payload."""
        self.slots.release()

    def _add_answer(self, answer: SliceAnswer) -> None:
        self._answers.put_nowait(answer)

    def _end(self) -> None:
        self.state = CallState.ENDED
        self._answers.put_nowait(None)

    async def next_answer(self) -> SliceAnswer | server_pb2.Reading | None:
        """Return the next answer or report, or None at the end of the stream. Raises the error of a failed call, and
        TimeoutError after WAIT_REASON_SECONDS with neither."""
        if self._answers.empty():
            async with asyncio.timeout(limits.WAIT_REASON_SECONDS):
                answer = await self._answers.get()
        else:
            answer = self._answers.get_nowait()
        self.waiting_for = ""
        if isinstance(answer, PsdistError):
            raise answer
        return answer


class CallTable:
    """Calls that wait for slices of one parameter set, by token.

    Once the parameter set has failed, all calls receive the error, and ``raise_if_failed`` raises it.
    """

    def __init__(self) -> None:
        self._by_token: dict[int, Call] = {}
        self._failure: PsdistError | None = None

    def __iter__(self) -> Iterator[Call]:
        """Iterate over the waiting calls, each once."""
        return iter({id(call): call for call in self._by_token.values()}.values())

    def ask(self, call: Call, index: int) -> int:
        """Return a token under which ``call`` waits for slice ``index``."""
        token = call.ask(index)
        self._by_token[token] = call
        return token

    def pop(self, token: int) -> Call | None:
        """Remove and return the call that waits under ``token``; None if it was cancelled."""
        return self._by_token.pop(token, None)

    def fence(self, live: Mapping[str, int]) -> None:
        """End the calls of workers that are not ``live`` (incarnation by worker id)."""
        for call in self:
            if live.get(call.identity.worker_id) != call.identity.incarnation:
                call.fail(fenced(call.identity))

    def fail_slices(self, indices: Collection[int], error: PsdistError) -> None:
        """End the calls that wait for one of these slices."""
        for call in self:
            if any(index in indices for index in call.outstanding.values()):
                call.fail(error)

    def fail_permanently(self, error: PsdistError) -> None:
        """End all current and future calls: some slices will never be updated again."""
        self._failure = error
        for call in self:
            call.fail(error)

    def raise_if_failed(self) -> None:
        """Raise the error of ``fail_permanently``, if there was one."""
        if self._failure is not None:
            raise type(self._failure)(self._failure.message, **self._failure.details)


def fenced(identity: Identity) -> FencedError:
    """Return the error for a worker that the cluster map does not list any more."""
    return FencedError(
        f"{identity.worker_id} (incarnation {identity.incarnation}) is not a live member: its lease expired or it was "
        "replaced; restart the worker",
        worker_id=identity.worker_id,
    )
