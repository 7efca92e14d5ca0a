"""Creating parameters, attaching to them, describing them: the talk with the scheduler before the first pull.

The scheduler gathers all creators and lets the lowest rank's values count: that one uploads them to the servers and
commits; the others wait. Not here: what the handle does afterwards (``parameters``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from psdist.client import routing
from psdist.client.connection import SchedulerLink
from psdist.client.jobs import InstallJob, Sender
from psdist.client.partition import Flat
from psdist.client.routing import Route
from psdist.client.session import Request
from psdist.client.transfer import DataPath
from psdist.errors import SchedulerUnreachableError
from psdist.types import Layout, ParametersEntry, ParametersSpec
from psdist.v1 import scheduler_pb2 as pb
from psdist.wire import convert

#: Pause before a commit is sent again to a scheduler that could not be reached.
_COMMIT_AGAIN_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Ready:
    """Parameters that can be used."""

    entry: ParametersEntry
    layout: Layout
    holders: dict[str, int]
    first_step: int


async def create(link: SchedulerLink, data: DataPath, spec: ParametersSpec, layout: Layout, values: Flat) -> Ready:
    """Creates the parameters, or attaches to them. Returns when they are ready.

    Raises LayoutMismatchError, SettingsMismatchError and whatever else scheduler or servers refuse with.
    """
    mine = link.registration
    request = pb.CreateParametersRequest(
        run_id=mine.run_id,
        worker_id=mine.worker_id,
        incarnation=mine.incarnation,
        spec=convert.spec_to_proto(spec),
        layout=convert.layout_to_proto(layout),
    )

    async def handle(response: Any) -> Ready | None:
        if response.HasField("map"):
            link.watch.see_map(convert.map_from_proto(response.map))
        if response.state == pb.CreateParametersResponse.STATE_UPLOAD:
            await _upload(link, data, spec.name, values)
        elif response.state == pb.CreateParametersResponse.STATE_READY:
            return _ready(link, spec.name, layout, response.first_step)
        return None

    with link.waits.open(f"for {link.peer} to create {spec.name!r}") as wait:
        return await link.follow(link.stub.CreateParameters, request, wait, handle)


async def describe(link: SchedulerLink, name: str) -> Ready:
    """Waits until the parameters exist and are ready."""
    mine = link.registration
    request = pb.DescribeParametersRequest(
        run_id=mine.run_id, worker_id=mine.worker_id, incarnation=mine.incarnation, parameters=name
    )

    async def handle(response: Any) -> Ready | None:
        if not response.HasField("spec"):
            return None
        link.watch.see_map(convert.map_from_proto(response.map))
        return _ready(link, name, convert.layout_from_proto(response.layout), 0)

    with link.waits.open(f"for {name!r} to be created") as wait:
        return await link.follow(link.stub.DescribeParameters, request, wait, handle)


def _ready(link: SchedulerLink, name: str, layout: Layout, first_step: int) -> Ready:
    cluster = link.watch.cluster
    entry = routing.find_entry(cluster, name)
    return Ready(entry, layout, routing.holders_of(cluster, entry), first_step)


async def _upload(link: SchedulerLink, data: DataPath, name: str, values: Flat) -> None:
    entry = routing.find_entry(link.watch.cluster, name)
    mine = link.registration
    job = InstallJob(
        sender=Sender(mine.run_id, mine.worker_id, mine.incarnation, name),
        request=Request(0, set(range(entry.slicing.count))),
        slicing=entry.slicing,
        flat=values,
        title=f"the upload of {name!r}",
    )

    def planner(slices: Sequence[int]) -> tuple[Route, ...]:
        return routing.plan(link.watch.cluster, name, {}, slices)

    await data.deliver(job, planner)
    await _commit(link, name)


async def _commit(link: SchedulerLink, name: str) -> None:
    mine = link.registration
    request = pb.CommitParametersRequest(
        run_id=mine.run_id, worker_id=mine.worker_id, incarnation=mine.incarnation, parameters=name
    )
    with link.waits.open(f"for {link.peer} to commit {name!r}"):
        while True:
            try:
                await link.call(link.stub.CommitParameters, request)
                return
            except SchedulerUnreachableError:
                link.raise_if_out()
            await asyncio.sleep(_COMMIT_AGAIN_SECONDS)
