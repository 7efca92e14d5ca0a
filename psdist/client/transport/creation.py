"""Creating, attaching to and describing parameter sets: the calls to the scheduler before the first pull.

The scheduler gathers all creators. The one of lowest rank uploads its values to the servers and commits; the others
wait. Where a server is lost meanwhile, its slices are uploaded to the server that has them next.

Not here: what the handle does afterwards (``parameters``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from psdist.client.core import routing
from psdist.client.core.partition import Flat
from psdist.client.core.push_sequence import PendingRequest
from psdist.client.core.routing import RoutingPlan
from psdist.client.session.scheduler_session import WorkerSession
from psdist.client.transport.data_path import DataPath
from psdist.client.transport.requests import InstallJob, RequestIdentity
from psdist.errors import SchedulerUnreachableError, StaleEpochError, UnknownParametersError
from psdist.types import Layout, ParametersEntry, ParametersSpec, Replica
from psdist.v1 import scheduler_pb2 as pb
from psdist.wire import convert

logger = logging.getLogger("psdist")

#: Pause before a commit is sent again to a scheduler that could not be reached.
_COMMIT_AGAIN_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class CreatedParameters:
    """Parameters that can be used.

    resumed: the push that was asked for goes on, under its number. notice: what their user should know of how they
    began; empty for nothing.
    """

    entry: ParametersEntry
    layout: Layout
    first_step: int
    resumed: bool = False
    notice: str = ""

    def announce(self) -> None:
        """Logs the notice, as a warning: that is what a script that does not configure logging shows."""
        if self.notice:
            logger.warning("%s", self.notice)


async def create(
    link: WorkerSession,
    data: DataPath,
    spec: ParametersSpec,
    layout: Layout,
    values: Flat | None,
    resume: pb.ResumePush | None = None,
) -> CreatedParameters:
    """Creates the parameters, or attaches to them. Returns when they are ready.

    values: None where they were ready before, and this worker takes part again; then ``resume`` is the push that it
        would make next.
    Raises LayoutMismatchError, SettingsMismatchError and whatever else scheduler or servers refuse with.
    """
    mine = link.registration
    placed: dict[int, Replica] = {}
    request = pb.CreateParametersRequest(
        run_id=mine.run_id,
        worker_id=mine.worker_id,
        incarnation=mine.incarnation,
        spec=convert.spec_to_proto(spec),
        layout=convert.layout_to_proto(layout),
        resume=resume,
    )
    waits = link.activities.waits(limited=False, call=True)

    async def handle(response: Any) -> CreatedParameters | None:
        if response.HasField("map"):
            link.watch.on_map(convert.map_from_proto(response.map))
        if response.state == pb.CreateParametersResponse.STATE_UPLOAD:
            if values is None:
                raise UnknownParametersError(f"{link.peer} does not know {spec.name!r} any more: restart the run")
            await _upload(link, data, spec.name, values, placed)
            # A server that is gone by now had some of them: the scheduler asks again.
            with suppress(StaleEpochError):
                await _commit(link, spec.name)
        elif response.state == pb.CreateParametersResponse.STATE_READY:
            link.raise_if_expelled(
                mine.incarnation
            )  # It was long on its way: this worker's new incarnation is no member yet.
            entry = routing.find_entry(link.watch.cluster, spec.name)
            return CreatedParameters(entry, layout, response.first_step, response.resumed, response.notice)
        return None

    with waits, link.waits.open(f"for {link.peer} to create {spec.name!r}") as wait:
        request.activity.CopyFrom(waits.activity)
        return await link.follow(link.stub.CreateParameters, request, wait, handle)


async def describe(link: WorkerSession, name: str) -> CreatedParameters:
    """Waits until the parameters exist and are ready."""
    mine = link.registration
    request = pb.DescribeParametersRequest(
        run_id=mine.run_id, worker_id=mine.worker_id, incarnation=mine.incarnation, parameters=name
    )

    async def handle(response: Any) -> CreatedParameters | None:
        if not response.HasField("spec"):
            return None
        link.watch.on_map(convert.map_from_proto(response.map))
        layout = convert.layout_from_proto(response.layout)
        return CreatedParameters(routing.find_entry(link.watch.cluster, name), layout, first_step=0)

    with link.waits.open(f"for {name!r} to be created") as wait:
        return await link.follow(link.stub.DescribeParameters, request, wait, handle)


async def _upload(link: WorkerSession, data: DataPath, name: str, values: Flat, placed: dict[int, Replica]) -> None:
    """Puts all slices on their primaries. ``placed`` says which of them have theirs, and to whom they went."""
    mine = link.registration

    def planner(slices: Sequence[int]) -> RoutingPlan:
        link.raise_if_expelled(mine.incarnation)
        return routing.plan(link.watch.cluster, name, slices, link.watch.news)

    while True:
        link.raise_if_expelled(mine.incarnation)
        entry = routing.find_entry(link.watch.cluster, name)
        missing = [index for index in range(entry.slicing.count) if placed.get(index) != _primary(entry, index)]
        if not missing:
            return
        job = InstallJob(
            sender=RequestIdentity(mine.run_id, mine.worker_id, mine.incarnation, name),
            request=PendingRequest(0, set(missing)),
            slicing=entry.slicing,
            flat=values,
            title=f"the upload of {name!r}",
            placed=placed,
        )
        await data.deliver(job, planner)


def _primary(entry: ParametersEntry, index: int) -> Replica:
    return entry.shards[index % len(entry.shards)].primary


async def _commit(link: WorkerSession, name: str) -> None:
    mine = link.registration
    request = pb.CommitParametersRequest(
        run_id=mine.run_id,
        worker_id=mine.worker_id,
        incarnation=mine.incarnation,
        parameters=name,
        epoch=link.watch.cluster.epoch,
    )
    with link.waits.open(f"for {link.peer} to commit {name!r}"):
        while True:
            try:
                await link.call(link.stub.CommitParameters, request)
                return
            except SchedulerUnreachableError:
                link.raise_if_expelled()
            await asyncio.sleep(_COMMIT_AGAIN_SECONDS)
