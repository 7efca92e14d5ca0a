"""Calls to the scheduler that create, attach to and describe a parameter set, before its first pull.

The scheduler gathers all creators. The one of lowest rank uploads its values to the servers and commits; the others
wait. If a server is lost during the upload, its slices are uploaded to their new primary.

``parameters`` is the handle that uses the result.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from psdist.client.core import flat_vector, routing
from psdist.client.core.flat_vector import Flat
from psdist.client.core.push_sequence import PendingRequest
from psdist.client.core.routing import RoutingPlan
from psdist.client.session.worker_session import WorkerSession
from psdist.client.transport.delivery import Delivery
from psdist.client.transport.transport import InstallRequest, RequestIdentity
from psdist.errors import StaleEpochError, UnknownParametersError
from psdist.off_loop import in_thread
from psdist.types import Layout, ParametersEntry, ParametersSpec, Replica
from psdist.v1 import scheduler_pb2 as pb
from psdist.wire import convert

logger = logging.getLogger("psdist")

#: Pause between calls to servers that did not answer.
_RETRY_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class CreatedParameters:
    """Parameter set that is ready for use.

    resumed: True if the push in the request is to be completed under its number.
    notice: remark for the user on how the parameter set was created; empty for none.
    """

    entry: ParametersEntry
    layout: Layout
    first_step: int
    resumed: bool = False
    notice: str = ""

    def announce(self) -> None:
        """Log the notice as a warning, so that it shows in scripts that do not configure logging."""
        if self.notice:
            logger.warning("%s", self.notice)


class _SupersededError(Exception):
    """The scheduler asked for an upload that another one has completed."""


class ParametersCreator:
    """Creates parameter sets for one client. path: carries initial values."""

    def __init__(self, session: WorkerSession, path: Delivery) -> None:
        self._calls = session.calls
        self._membership = session.membership
        self._waits = session.waits
        self._activities = session.activities
        self._reachability = session.reachability
        self._path = path

    async def create(
        self, spec: ParametersSpec, layout: Layout, values: Flat | None, resume: pb.ResumePush | None = None
    ) -> CreatedParameters:
        """Create the parameter set or attach to it. Returns once it is ready.

        values: initial values; None if the parameter set was ready before and this worker rejoins.
        resume: the push that a rejoining worker would send next.

        Raises LayoutMismatchError, SettingsMismatchError, InvalidArgumentError if ``values`` must be uploaded and are
        not finite, and any refusal of the scheduler or servers.
        """
        mine, view, peer = self._membership.registration, self._membership.view, self._calls.peer
        await self._until_servers_answer(spec.name, mine.incarnation)
        placed: dict[int, Replica] = {}
        tensors = await in_thread(partial(convert.layout_to_proto, layout))
        settings = convert.spec_to_proto(spec)
        request = pb.CreateParametersRequest(**mine.caller(), spec=settings, layout=tensors, resume=resume)

        async def handle(response: Any) -> CreatedParameters | None:
            if response.HasField("map"):
                view.on_map(convert.map_from_proto(response.map))
            if response.state == pb.CreateParametersResponse.STATE_UPLOAD:
                if values is None:
                    raise UnknownParametersError(f"{peer} no longer knows {spec.name!r}: restart the run")
                # In a thread, to keep heartbeats running. Values that are not uploaded need not be finite.
                await in_thread(partial(flat_vector.check_initial, layout, values))
                # If a server with some of the values is gone, the scheduler asks again, and an earlier request may be
                # outdated by then. A server that restarted without its record does not know the parameters; the session
                # then ends the run.
                with suppress(_SupersededError):
                    await self._upload(spec.name, values, placed)
                    with suppress(StaleEpochError, UnknownParametersError):
                        await self._commit(spec.name)
            elif response.state == pb.CreateParametersResponse.STATE_READY:
                # Ignore a late answer to an earlier incarnation of this worker.
                self._membership.raise_if_expelled(mine.incarnation)
                entry = routing.find_entry(view.cluster, spec.name)
                return CreatedParameters(entry, layout, response.first_step, response.resumed, response.notice)
            return None

        activity = self._activities.waits(limited=False, call=True)
        with activity, self._waits.open(f"for {peer} to create {spec.name!r}") as wait:
            request.activity.CopyFrom(activity.activity)
            return await self._calls.read_until_result(self._calls.stub.CreateParameters, request, wait, handle)

    async def _until_servers_answer(self, name: str, incarnation: int) -> None:
        """Wait until this worker reaches every server of a parameter set in training. Otherwise the other workers would
        wait for its pushes as soon as it joins. Raises FencedError."""
        if name not in self._membership.ready_before:
            return
        with self._waits.open(f"for the servers of {name!r} to answer") as wait:
            while reasons := await self._why_unreachable(name):
                wait.update_reason(f"for {reasons[0]}, before joining {name!r}")
                await asyncio.sleep(_RETRY_SECONDS)
                self._membership.raise_if_expelled(incarnation)

    async def _why_unreachable(self, name: str) -> list[str]:
        """Return why servers of a parameter set cannot be reached, each as "server-0 to be reachable: no route"."""
        entry = self._membership.view.cluster.entry(name)
        servers = sorted({shard.primary for shard in entry.shards}, key=str) if entry is not None else []
        reasons = await asyncio.gather(*map(self._reachability.why_unreachable, servers))
        return [f"{server} to be reachable: {why}" for server, why in zip(servers, reasons, strict=True) if why]

    async def describe(self, name: str) -> CreatedParameters:
        """Wait until the parameter set exists and is ready."""
        view = self._membership.view
        request = pb.DescribeParametersRequest(**self._membership.registration.caller(), parameters=name)

        async def handle(response: Any) -> CreatedParameters | None:
            if not response.HasField("spec"):
                return None
            view.on_map(convert.map_from_proto(response.map))
            layout = await in_thread(partial(convert.layout_from_proto, response.layout))
            return CreatedParameters(routing.find_entry(view.cluster, name), layout, first_step=0)

        with self._waits.open(f"for {name!r} to be created") as wait:
            return await self._calls.read_until_result(self._calls.stub.DescribeParameters, request, wait, handle)

    async def _upload(self, name: str, values: Flat, placed: dict[int, Replica]) -> None:
        """Install all slices on their primaries. placed: the server of each installed slice.

        Raises _SupersededError if the set is ready.
        """
        mine, view = self._membership.registration, self._membership.view

        def planner(slices: Sequence[int]) -> RoutingPlan:
            current_entry()
            return routing.plan(view.cluster, name, slices, view.news)

        def current_entry() -> ParametersEntry:
            self._membership.raise_if_expelled(mine.incarnation)
            entry = routing.find_entry(view.cluster, name)
            if entry.ready:
                raise _SupersededError
            return entry

        while True:
            entry = current_entry()
            missing = [index for index in range(entry.slicing.count) if placed.get(index) != _primary(entry, index)]
            if not missing:
                return
            request = InstallRequest(
                sender=RequestIdentity(mine.run_id, mine.worker_id, mine.incarnation, name),
                progress=PendingRequest(0, set(missing)),
                slicing=entry.slicing,
                title=f"the upload of {name!r}",
                flat=values,
                placed=placed,
            )
            await self._path.deliver(request, planner)

    async def _commit(self, name: str) -> None:
        mine, epoch = self._membership.registration, self._membership.view.cluster.epoch
        request = pb.CommitParametersRequest(**mine.caller(), parameters=name, epoch=epoch)
        reason = f"for {self._calls.peer} to commit {name!r}"
        await self._calls.call_until_answered(self._calls.stub.CommitParameters, lambda: request, reason)


def _primary(entry: ParametersEntry, index: int) -> Replica:
    return entry.shards[index % len(entry.shards)].primary
