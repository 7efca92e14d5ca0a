"""The parameter sets that one client has opened: one handle for each name."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from numpy.typing import ArrayLike

from psdist.client.core import flat_vector
from psdist.client.encoding import choose_codec
from psdist.client.parameters import AsyncParameters
from psdist.client.participation import Options, Participation
from psdist.client.session.membership import OnDrop, Registration
from psdist.client.session.worker_session import WorkerSession
from psdist.client.transport.creation import CreatedParameters, ParametersCreator
from psdist.client.transport.delivery import Delivery, Transports
from psdist.client.transport.grpc import GrpcTransport
from psdist.compression import Auto, Float32
from psdist.errors import InvalidArgumentError, LayoutMismatchError, SettingsMismatchError
from psdist.monitoring.metrics import Measurements
from psdist.monitoring.worker_reports import ReportedNumbers
from psdist.off_loop import in_thread
from psdist.settings.config import MetricsEndpoint
from psdist.types import DType, Layout, ParametersSpec
from psdist.v1 import scheduler_pb2

if TYPE_CHECKING:
    from psdist.client.worker_metrics import WorkerMetrics

_REMEDY: Final = (
    ". Another model, or other parameters, need a name of their own: give them another name=. To start afresh, as in a "
    "notebook, call close() of the context and psdist.init() again"
)
#: The defaults of ``AsyncClient.parameters``. A call with these values may not have named them.
_PULL_DTYPE: Final[DType] = "float32"
_ON_DROP: Final[OnDrop] = "warn"
_OWN_REMEDY: Final = (
    ". Leave it out to keep the handle as it is. For another choice close this client and make a new one, or "
    "give the parameters another name="
)
#: Longest wait for handles to rejoin before another set is created. Until psdist knows the script's iterations, a
#: rejoin needs the other workers to continue, and they may be waiting for the new set.
_FOLLOW_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class OwnChoice:
    """Choices of one call of ``parameters`` for this worker alone.

    names_codec: True if it names a codec. The defaults of ``pull_dtype`` and ``on_drop`` count as left out.
    """

    options: Options
    on_drop: OnDrop
    names_codec: bool


class Handles:
    """Handles of one client, and the gRPC transport that they share."""

    def __init__(self, session: WorkerSession) -> None:
        self._session = session
        self._grpc = GrpcTransport(session.calls.credentials, lambda: session.calls.silence_seconds)
        session.reachability.call = self._grpc.call_server
        self._by_name: dict[str, AsyncParameters] = {}
        #: Choices with which the handles of ``_by_name`` were opened.
        self._choices: dict[str, OwnChoice] = {}
        #: All handles ever opened: one for reading may have been replaced.
        self._opened: list[AsyncParameters] = []
        self._opening: dict[str, asyncio.Lock] = {}
        #: Rejoins of handles that must finish before another set is created.
        self._following: set[asyncio.Future[None]] = set()
        #: The numbers that the script reports.
        self.reported = ReportedNumbers()
        session.activities.totals = self._totals
        #: Metrics of this client for Prometheus, if they are served.
        self.metrics: WorkerMetrics | None = None

    async def open_reader(self, name: str, choice: OwnChoice) -> AsyncParameters:
        """Return a handle that only reads, once the parameter set exists, or the existing handle. Raises
        SettingsMismatchError."""
        options = choice.options
        async with self._opening.setdefault(name, asyncio.Lock()):
            if name not in self._by_name:
                creator = self._creator()
                described = await self._session.membership.retry_across_incarnations(lambda _: creator.describe(name))
                if (codec := described.entry.spec.pull_compression) and options.pull_dtype != "float32":
                    raise InvalidArgumentError(
                        f"pull_dtype={options.pull_dtype!r}: the weights of {name!r} are sent by {codec}. Leave it out"
                    )
                _check_dtypes(described.layout, options)
                part = Participation(self._session, self._grpc, creator, described, options, is_member=False)
                self._open(part, choice)
            existing = self._by_name[name]
            self._check_choice(existing, choice)
            return existing

    async def open_member(
        self, spec: ParametersSpec, init: Mapping[str, ArrayLike], choice: OwnChoice
    ) -> AsyncParameters:
        """Return a handle that takes part in the training. Raises LayoutMismatchError, SettingsMismatchError."""
        # In threads: all of this grows with the number of tensors, or copies the whole model.
        layout, options = await in_thread(partial(flat_vector.layout_of, init, spec.dtype)), choice.options
        _check_dtypes(layout, options)
        async with self._opening.setdefault(spec.name, asyncio.Lock()):
            existing = self._by_name.get(spec.name)
            if existing is not None and existing.is_member:
                await existing.open()
                _check_same(existing, spec, layout)
                self._check_choice(existing, choice)
                return existing
            values, creator = await in_thread(partial(flat_vector.flatten, layout, init)), self._creator()

            async def create(_: Registration) -> CreatedParameters:
                await self._follow_rejoin()
                return await creator.create(spec, layout, values)

            created = await self._session.membership.retry_across_incarnations(create)
            part = Participation(self._session, self._grpc, creator, created, options, is_member=True)
            if isinstance(options.codec, Auto):
                try:
                    codec, reason = await choose_codec(part)
                except BaseException:  # This includes cancellation.
                    await part.close()
                    raise
                part.options = replace(options, codec=codec, reason=reason)
            handle = self._open(part, choice)
            await handle.open()
            created.announce()
            return handle

    async def _follow_rejoin(self) -> None:
        """Wait for all handles to join the newest incarnation before another set is created. Otherwise this worker
        would be a member of the new set alone, and its peers would train the other sets without it."""
        following = [asyncio.ensure_future(handle.participation.follow_rejoin()) for handle in self.members()]
        if not following:
            return
        # A slow rejoin continues in the background: to cancel it would leave it half done.
        self._following.update(following)
        for task in following:
            task.add_done_callback(self._on_followed)
        await asyncio.wait(following, timeout=_FOLLOW_SECONDS)

    def _on_followed(self, task: asyncio.Future[None]) -> None:
        self._following.discard(task)
        if not task.cancelled():
            task.exception()  # The next call of the handle raises it again.

    def _creator(self) -> ParametersCreator:
        return ParametersCreator(self._session, Delivery(self._session, Transports(self._grpc)))

    def _open(self, part: Participation, choice: OwnChoice) -> AsyncParameters:
        handle = AsyncParameters(part, choice.on_drop)
        part.siblings = lambda: [one.participation for one in self.members()]
        self._by_name[handle.name], self._choices[handle.name] = handle, choice
        self._opened.append(handle)
        return handle

    def _check_choice(self, existing: AsyncParameters, asked: OwnChoice) -> None:
        """Raise SettingsMismatchError if ``asked`` names a choice that ``existing`` was not opened with."""
        first, used, found = self._choices[existing.name], existing.participation.options, []
        codec, opened = asked.options.codec, first.options.codec
        # A reader sends no gradients. The codec that "auto" chose may be named as well.
        if existing.is_member and asked.names_codec and codec not in (opened, used.codec):
            chosen = "" if used.codec == opened else f", which chose {used.codec!r:.200}"
            found.append(f"compression={codec!r:.200} is asked for, and it has {opened!r:.200}{chosen}")
        if asked.options.pull_dtype not in (_PULL_DTYPE, used.pull_dtype):
            found.append(f"pull_dtype={asked.options.pull_dtype!r} is asked for, and it has {used.pull_dtype!r}")
        if existing.is_member and asked.on_drop not in (_ON_DROP, first.on_drop):
            found.append(f"on_drop={asked.on_drop!r} is asked for, and it has {first.on_drop!r}")
        if found:
            text = "; ".join(found)
            raise SettingsMismatchError(f"this client has {existing.name!r} open already: {text}{_OWN_REMEDY}")

    def members(self) -> list[AsyncParameters]:
        """Return the handles that take part in the training, sorted by name."""
        return [handle for _, handle in sorted(self._by_name.items()) if handle.is_member]

    def measure(self) -> Measurements:
        """Return the counters of all handles. The step is that of the first handle that takes part."""
        if len(self._opened) == 1 and self._opened[0].is_member:
            return self._opened[0].measure()
        each = [handle.measure() for handle in self._opened]
        training = [counted for counted, handle in zip(each, self._opened, strict=True) if handle.is_member]
        return Measurements(
            training[0].step if training else None,
            sum(counted.staleness_mean for counted in training) / max(1, len(training)),
            max((counted.staleness_max for counted in training), default=0),
            sum(counted.push_bytes for counted in each),
            sum(counted.pull_bytes for counted in each),
        )

    def serve_metrics(self, endpoint: MetricsEndpoint) -> None:
        """Serve metrics for Prometheus. Raises ConfigurationError and InsecureBindError."""
        from psdist.client.worker_metrics import WorkerMetrics  # Few workers serve them.

        registrar = self._session.registrar
        endpoint = replace(endpoint, key=registrar.listener.verifier.key)
        self.metrics = WorkerMetrics(endpoint, self._session, self._opened, self.reported)
        registrar.metrics_address = self.metrics.address

    def connections(self) -> Iterator[scheduler_pb2.Connection]:
        """Return how the handles reach servers, for heartbeats."""
        for handle in self._opened:
            for server_id, transport in handle.participation.transports().items():
                kind, _, reason = transport.partition(": ")
                yield scheduler_pb2.Connection(
                    server_id=server_id,
                    parameters=handle.name,
                    transport=kind,
                    reason=reason,
                    compression=handle.participation.options.reason,
                )

    def _totals(self) -> scheduler_pb2.WorkerTotals:
        """Return the totals so far. Bytes of a handle count for the transport and codecs that it has now."""
        pushes, reported = self._session.activities.pushes, self.reported
        compute, push, wait, pull = self._session.waits.phases.seconds()
        pushed, pulled = Counter[tuple[str, str, str]](), Counter[tuple[str, str, str]]()
        dropped = abstained = 0
        for handle in self._opened:
            key = (handle.participation.transport(), *handle.participation.codecs())
            counted = handle.measure()
            pushed[key] += counted.push_bytes
            pulled[key] += counted.pull_bytes
            dropped += counted.dropped
            abstained += counted.abstained
        return scheduler_pb2.WorkerTotals(
            compute_seconds=compute,
            push_seconds=push,
            wait_seconds=wait,
            pull_seconds=pull,
            pushes=pushes.counts,
            traffic=[
                scheduler_pb2.WorkerTotals.Traffic(
                    transport=key[0], push_codec=key[1], pull_codec=key[2], push_bytes=count, pull_bytes=pulled[key]
                )
                for key, count in sorted(pushed.items())
            ],
            dropped=dropped,
            abstained=abstained,
            staleness=pushes.staleness,
            reported=reported.newest,
            reported_step=reported.step,
            samples_per_second=reported.samples_per_second,
        )

    async def close(self) -> None:
        """Cancel calls under way, and close all connections to servers."""
        if self.metrics is not None:
            self._session.registrar.metrics_address = ""
            self.metrics.close()
        for task in self._following:
            task.cancel()
        last = self._totals()
        self._session.activities.totals = lambda: last
        for handle in self._opened:
            await handle.close()
        self._opened.clear()
        await self._grpc.close()


def _check_dtypes(layout: Layout, options: Options) -> None:
    """Raise InvalidArgumentError for a codec or casts with float64: all of them work on float32."""
    if layout.dtype == "float32":
        return
    for what, value in (("compression", options.codec), ("pull_dtype", options.pull_dtype)):
        if value not in (Float32(), "float32"):
            raise InvalidArgumentError(
                f"{what}={value} with master_dtype={layout.dtype!r}: values are sent whole. Leave {what} out, or use "
                "master_dtype='float32'"
            )


def _check_same(existing: AsyncParameters, spec: ParametersSpec, layout: Layout) -> None:
    if difference := existing.layout.difference(layout):
        raise LayoutMismatchError(f"this client has {spec.name!r} with another layout: {difference}{_REMEDY}")
    if difference := existing.spec.difference(spec):
        raise SettingsMismatchError(f"this client has {spec.name!r} with other settings: {difference}{_REMEDY}")
