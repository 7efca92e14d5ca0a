"""A holding: what one server has of one parameters. It feeds the shard machines and carries out their effects.

Everything here runs on the event loop except the kernels, which run in threads without the GIL (small slices are
updated on the loop: a thread costs more). A slice's weights are copied out only while no kernel writes them.

Contributions come in messages (``push``), or lie in memory that the worker shares (``push_shared``). The first are
checked for NaN and Inf when they come; the second when their kernel reads them, because they could change in between.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import structlog

from psdist.consistency import BSP
from psdist.errors import (
    FencedError,
    InternalError,
    InvalidArgumentError,
    NonFiniteGradientError,
    UnknownParametersError,
)
from psdist.types import ITEM_BYTES, Identity, ParametersEntry, ParametersMember
from psdist.v1 import server_pb2
from psdist.wire import frames
from psdist_server import kernels, memory
from psdist_server.calls import Answer, Call
from psdist_server.dense import Bad, DenseParameters, Gradient, Update, gradient_of
from psdist_server.events import (
    Aggregate,
    Apply,
    Cancelled,
    Effect,
    Event,
    Forget,
    JoinProposed,
    JoinWithdrawn,
    MembersChanged,
    NormKnown,
    PullRequested,
    Refuse,
    Reply,
    SliceAggregated,
    SliceApplied,
    SlicePushed,
)
from psdist_server.norms import NormBoard
from psdist_server.pool import KernelPool
from psdist_server.shard import AsyncShard, BspShard, make_shard
from psdist_server.statistics import Counters

_log = structlog.get_logger("psdist.server")

#: Slices of at most so many elements are updated on the event loop.
INLINE_ELEMENTS: Final = 1 << 15
#: So many encoded answers are kept for the other workers of the step.
ENCODED_MAX: Final = 4


@dataclass(slots=True)
class _Part:
    """A contribution that waits for its update."""

    call: Call
    values: Gradient
    #: It lies in memory of the worker, and holds no slot of its stream.
    shared: bool


class Outcome(NamedTuple):
    """What a kernel tells: how long it took, the sum of squares of an Aggregate, contributions that were left out."""

    seconds: float
    square: float
    bad: tuple[int, ...]


class Holding:
    """The shards of ``entry`` that ``server_id`` is the primary of.

    on_aggregated: called with (parameters, step) when all slices here are aggregated (clipping).
    """

    def __init__(
        self,
        entry: ParametersEntry,
        server_id: str,
        pool: KernelPool[Apply | Aggregate, Outcome],
        on_aggregated: Callable[[Holding, int], None],
    ) -> None:
        self.entry = entry
        self.slicing = entry.slicing  # The same for the parameters' life, as is the number of shards.
        self._shard_count = max(1, len(entry.shards))
        self.dense = DenseParameters(entry, server_id)
        self.counters = Counters()
        self.norms = NormBoard()
        self._norm_by_step: dict[int, float] = {}
        self._pool = pool
        self._on_aggregated = on_aggregated
        self._asynchronous = not isinstance(entry.spec.consistency, BSP)
        self._clipping = entry.spec.optimizer.max_grad_norm > 0
        self.shards = self._make_shards()
        self._parts: dict[int, _Part] = {}
        self._calls: dict[int, Call] = {}
        self._encoded: dict[tuple[Answer, int, str], bytes] = {}
        self._effects: deque[Effect] = deque()
        self._carrying_out = False
        #: An update failed: its slice never goes on, so nobody is to wait for it.
        self._defect: InternalError | None = None
        self._readers: dict[int, list[tuple[asyncio.Future[tuple[int, bytes]], str]]] = {}
        #: Done when the update kernel is compiled.
        self.ready = pool.prepare(self._compile)

    def _compile(self) -> None:
        self.dense.rule.warm_up()
        memory.release_compiler()

    def _make_shards(self) -> dict[int, BspShard | AsyncShard]:
        spec, members = self.entry.spec, self.entry.members
        by_shard: dict[int, list[int]] = {}
        for index in self.dense.indices:
            by_shard.setdefault(index % self._shard_count, []).append(index)
        clipping = self._clipping and not self._asynchronous
        return {
            number: make_shard(indices, members, spec.consistency, clipping) for number, indices in by_shard.items()
        }

    # --- what the service asks --------------------------------------------------------------------------------------

    def check_installed(self) -> None:
        """Raises UnknownParametersError while initial values are missing, InternalError once an update failed."""
        if self._defect is not None:
            raise InternalError(self._defect.message)
        if not self.entry.ready or len(self.dense.installed) < len(self.dense.indices):
            raise UnknownParametersError(
                f"{self.entry.spec.name!r} is not ready: {len(self.dense.installed)} of {len(self.dense.indices)} "
                "slices here have their initial values; wait for CreateParameters to say STATE_READY"
            )

    def check_slice(self, index: int) -> None:
        """Raises InvalidArgumentError where slice ``index`` is not here."""
        shard = self.shards.get(index % self._shard_count)
        if shard is None or index not in shard.slices:
            raise InvalidArgumentError(
                f"slice {index} of {self.entry.spec.name!r} is not on this server (of {self.slicing.count} "
                "slices); "
                "route by the cluster map"
            )

    def check_norm(self, call: Call) -> None:
        """Raises InvalidArgumentError where a push must bring its gradient's global norm and does not."""
        needed = self._clipping and self._asynchronous and not call.abstain
        if needed and not (math.isfinite(call.grad_norm) and call.grad_norm >= 0):
            raise InvalidArgumentError(f"grad_norm={call.grad_norm} must be finite: the optimizer has max_grad_norm")

    def install(self, index: int, payload: memoryview) -> None:
        """Sets the initial weights of a slice. Raises InvalidArgumentError once the parameters are ready."""
        self.check_slice(index)
        expected = self.slicing.size(index) * ITEM_BYTES["float32"]
        if self.entry.ready:
            raise InvalidArgumentError(f"{self.entry.spec.name!r} is ready: its initial values cannot be set again")
        if len(payload) != expected:
            raise InvalidArgumentError(f"slice {index} has {expected} bytes in float32, not {len(payload)}")
        self.dense.install(index, gradient_of(payload, "float32"))

    def push(self, call: Call, index: int, base_version: int, payload: memoryview) -> None:
        """Takes one contribution. Raises InvalidArgumentError and its kinds; then nothing was changed."""
        counters = self.counters.of(call.identity.worker_id)
        self.check_slice(index)
        values = self._gradient(call, index, payload)
        abstain = call.abstain or not self._is_finite(call, index, values)
        self.counters.bytes_held += values.nbytes
        counters.push_bytes += len(payload)
        self._take(call, index, base_version, _Part(call, values, shared=False), abstain)

    def push_shared(self, call: Call, index: int, base_version: int, values: Gradient) -> None:
        """Takes one contribution that lies in shared memory: ``values`` are read when the slice is updated, and may
        hold anything. Raises InvalidArgumentError where the slice is not here; then nothing was changed."""
        self.check_slice(index)
        self._take(call, index, base_version, _Part(call, values, shared=True), call.abstain)

    def _take(self, call: Call, index: int, base_version: int, part: _Part, abstain: bool) -> None:
        token = call.ask(index)
        self.counters.of(call.identity.worker_id).pushes += 1
        self._calls[token] = call
        self._parts[token] = part
        event = SlicePushed(
            token,
            index,
            call.identity.worker_id,
            call.identity.incarnation,
            call.step,
            base_version,
            abstain,
            call.wants_weights,
        )
        self._dispatch(index, event)

    def pull(self, call: Call, index: int, min_version: int) -> None:
        """Asks for one slice at ``min_version`` or later."""
        self.check_slice(index)
        token = call.ask(index)
        self._calls[token] = call
        self.counters.of(call.identity.worker_id).pulls += 1
        self._dispatch(index, PullRequested(token, index, call.identity.worker_id, min_version))

    def cancel(self, call: Call) -> None:
        """The call ended: nobody is to be answered any more."""
        for token, index in list(call.outstanding.items()):
            self._calls.pop(token, None)
            self._dispatch(index, Cancelled(token, index))
        call.outstanding.clear()

    async def read(self, index: int, dtype: str) -> tuple[int, bytes | memoryview]:
        """Version and payload of a slice, never torn. The payload is valid until the next await."""
        state = self._shard(index).slices[index]
        if not state.busy or self._is_frozen(index):
            return state.version, self.dense.read(index, dtype)
        future: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self._readers.setdefault(index, []).append((future, dtype))
        return await future

    def close(self) -> None:
        """The parameters are gone, or the server ends."""
        self.dense.close()

    async def encode(self, answer: Answer, call: Call) -> bytes:
        """The PushPullResponse with the slice's weights; the last few are kept, as in BSP all workers get the same."""
        version, payload = await self.read(answer.index, call.pull_dtype)
        self.counters.of(call.identity.worker_id).pull_bytes += len(payload)
        key = (answer, version, call.pull_dtype)
        if key not in self._encoded:
            header = server_pb2.PushPullResponse(
                slice=answer.index, version=version, ignored=answer.ignored, staleness=answer.staleness
            )
            self._encoded[key] = frames.pack(header, payload)
            if len(self._encoded) > ENCODED_MAX:
                del self._encoded[next(iter(self._encoded))]
        return self._encoded[key]

    def _is_frozen(self, index: int) -> bool:
        """Busy, but nothing is being written: an aggregated gradient waits for the norm."""
        state = self._shard(index).slices[index]
        return getattr(state, "aggregated", False) is True

    def waiting_for(self, call: Call) -> str:
        """Why the call's oldest slice is not answered yet."""
        for token, index in call.outstanding.items():
            return self._shard(index).waiting_for(token, index) or "for this server to apply the update"
        return ""

    def fence(self, live: dict[str, int]) -> None:
        """Ends the calls of workers that are no longer ``live`` (incarnation by worker id)."""
        for call in {id(call): call for call in self._calls.values()}.values():
            if live.get(call.identity.worker_id) != call.identity.incarnation:
                call.fail(fenced(call.identity))

    # --- membership ---------------------------------------------------------------------------------------------------

    def update(self, entry: ParametersEntry) -> None:
        """A new map's entry for the same parameters."""
        changed = entry.members != self.entry.members
        self.entry = entry
        if changed:
            self._dispatch_all(MembersChanged(entry.members))

    def propose(self, member: ParametersMember) -> bool:
        """May ``member`` join at its first step? Then its contributions are waited for from now on."""
        if any(shard.step_next > member.first_step for shard in self.shards.values()):
            return False
        self._dispatch_all(JoinProposed(member))
        return True

    @property
    def proposed(self) -> list[str]:
        """Workers that were let in and are no members yet."""
        return sorted({worker_id for shard in self.shards.values() for worker_id in shard.proposals})

    def withdraw(self, worker_id: str) -> None:
        """Forgets a proposal."""
        self._dispatch_all(JoinWithdrawn(worker_id))

    def norm_known(self, step: int, norm: float) -> None:
        """The global norm of ``step``: what was aggregated is applied."""
        self._norm_by_step = {step: norm}
        self._dispatch_all(NormKnown(step))

    # --- machines and effects -----------------------------------------------------------------------------------------

    def _shard(self, index: int) -> BspShard | AsyncShard:
        return self.shards[index % self._shard_count]

    def _dispatch(self, index: int, event: Event) -> None:
        self._carry_out(self._shard(index).on(event))

    def _dispatch_all(self, event: Event) -> None:
        for shard in self.shards.values():
            self._carry_out(shard.on(event))

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        """Carries effects out in order; those that follow from them are queued, so that no chain of them is too
        deep."""
        self._effects.extend(effects)
        if self._carrying_out:
            return
        self._carrying_out = True
        try:
            while self._effects:
                self._carry_out_one(self._effects.popleft())
        finally:
            self._carrying_out = False

    def _carry_out_one(self, effect: Effect) -> None:
        match effect:
            case Reply():
                self._reply(effect)
            case Apply() | Aggregate():
                self._start_kernel(effect)
            case Forget(token):
                self._drop(token)
            case Refuse(token, error):
                self._drop(token)
                call = self._calls.pop(token)
                self.counters.of(call.identity.worker_id).rejected += 1
                call.fail(error)

    def _reply(self, effect: Reply) -> None:
        call = self._calls.pop(effect.token, None)
        if call is None:
            return
        if call.is_push:
            counters = self.counters.of(call.identity.worker_id)
            counters.answered(effect.ignored, effect.late, effect.staleness)
        call.answer(effect.token, Answer(effect.index, effect.version, effect.ignored, effect.staleness))

    def _drop(self, token: int) -> None:
        part = self._parts.pop(token, None)
        if part is not None and not part.shared:
            self.counters.bytes_held -= part.values.nbytes
            part.call.slots.release()

    def _start_kernel(self, effect: Apply | Aggregate) -> None:
        small = self.slicing.slice_elements <= INLINE_ELEMENTS
        if small and not self._asynchronous:
            try:
                outcome = self._run_kernel(effect)
            except Exception as error:  # Whoever waits for the slice must hear of it, not only who pushed last.
                self.fail(f"the update of slice {effect.index}", error)
            else:
                self._finish_kernel(effect, outcome)
            return
        self._pool.submit(effect.index, self._run_kernels, effect, self._kernel_done)

    def _run_kernels(self, effects: Sequence[Apply | Aggregate]) -> list[Outcome]:
        """Runs in a kernel thread."""
        if self._clipping or len(effects) == 1:
            return [self._run_kernel(effect) for effect in effects]
        started = time.perf_counter()
        left_out = self.dense.apply([self._update(effect) for effect in effects if isinstance(effect, Apply)])
        seconds = (time.perf_counter() - started) / len(effects)
        return [Outcome(seconds, 0.0, bad) for bad in left_out]

    def _run_kernel(self, effect: Apply | Aggregate) -> Outcome:
        """Runs in a kernel thread, or on the loop."""
        started = time.perf_counter()
        square, bad = 0.0, Bad()
        if isinstance(effect, Aggregate):
            square, bad = self.dense.aggregate(effect.index, [self._parts[token].values for token in effect.parts])
        elif self._clipping and not self._asynchronous:
            self.dense.apply_aggregated(effect.index, effect.step, self._norm_by_step[effect.step])
        elif self._clipping and effect.parts:
            part = self._parts[effect.parts[0]]
            norm = part.call.grad_norm
            bad = self.dense.apply_clipped(effect.index, effect.step, part.values, norm, effect.lr_scale)
        else:
            (bad,) = self.dense.apply([self._update(effect)])
        return Outcome(time.perf_counter() - started, square, bad)

    def _update(self, effect: Apply) -> Update:
        return Update(effect.index, effect.step, [self._parts[token].values for token in effect.parts], effect.lr_scale)

    def _kernel_done(self, effect: Apply | Aggregate, outcome: Outcome | None, error: BaseException | None) -> None:
        if outcome is not None:
            self._finish_kernel(effect, outcome)
        elif error is not None:
            self.fail(f"the update of slice {effect.index}", error)

    def fail(self, what: str, error: BaseException) -> None:
        """A defect: everybody who waits for something here is told, or will ask, and the log has the traceback."""
        _log.error("failed", parameters=self.entry.spec.name, what=what, exc_info=error)
        self._defect = InternalError(f"{what} of {self.entry.spec.name!r} failed: {error!r}")
        for call in {id(call): call for call in self._calls.values()}.values():
            call.fail(self._defect)

    def _finish_kernel(self, effect: Apply | Aggregate, outcome: Outcome) -> None:
        for place in outcome.bad:
            self._left_out(effect.index, self._parts[effect.parts[place]].call)
        for token in effect.parts:
            self._drop(token)
        self.counters.apply_seconds += outcome.seconds
        if isinstance(effect, Aggregate):
            self._dispatch(effect.index, SliceAggregated(effect.index))
            self.norms.record(effect.step, effect.index, outcome.square)
            if self.norms.is_complete(effect.step, self.dense.indices):
                self._on_aggregated(self, effect.step)
            return
        self.counters.applied_slices += 1
        effects = self._shard(effect.index).on(SliceApplied(effect.index))
        self._serve_readers(effect.index)  # Before the next update of the slice may begin.
        self._carry_out(effects)

    def _serve_readers(self, index: int) -> None:
        version = self._shard(index).slices[index].version
        for future, dtype in self._readers.pop(index, ()):
            if not future.done():
                future.set_result((version, bytes(self.dense.read(index, dtype))))

    def _gradient(self, call: Call, index: int, payload: memoryview) -> Gradient:
        expected = 0 if call.abstain else self.slicing.size(index) * ITEM_BYTES[call.dtype]
        if len(payload) != expected:
            raise InvalidArgumentError(
                f"slice {index} has {expected} bytes in {call.dtype}, not {len(payload)}", slice=index
            )
        return gradient_of(payload, call.dtype)

    def _is_finite(self, call: Call, index: int, values: Gradient) -> bool:
        """Whether all elements are finite; where not, the policy decides between an error and False."""
        if kernels.all_finite(values):
            return True
        self.counters.of(call.identity.worker_id).non_finite += 1
        if self.entry.spec.non_finite == "skip":
            return False
        raise self._non_finite(index)

    def _left_out(self, index: int, call: Call) -> None:
        """A shared contribution turned out to hold NaN or Inf when the slice was updated, and is not in the update."""
        self.counters.of(call.identity.worker_id).non_finite += 1
        if self.entry.spec.non_finite == "reject":
            call.fail(self._non_finite(index))

    def _non_finite(self, index: int) -> NonFiniteGradientError:
        start, stop = self.slicing.bounds(index)
        return NonFiniteGradientError(
            f"the gradient of {self.entry.spec.name!r} holds NaN or Inf in elements {start} to {stop - 1} (slice "
            f"{index}); find out why, or set non_finite='skip'"
        )

    def statistics(self) -> server_pb2.ParametersStatistics:
        """Counters and waits as a message."""
        calls = {id(call): call for call in self._calls.values()}.values()
        waits = sorted({call.waiting_for for call in calls if call.waiting_for})
        versions = [shard.version_min for shard in self.shards.values()]
        return self.counters.to_proto(
            self.entry.spec.name,
            min(versions, default=0),
            max((shard.version_max for shard in self.shards.values()), default=0),
            waits,
        )


def fenced(identity: Identity) -> FencedError:
    """The error for a worker that the cluster map does not know any more."""
    return FencedError(
        f"{identity.worker_id} (incarnation {identity.incarnation}) is not a live member: its lease ended or it was "
        "replaced; start the worker anew",
        worker_id=identity.worker_id,
    )
