"""Groups that outlive their members: asks the scheduler for the next group of a name, until it is formed.

The scheduler decides who is in it. The caller reports which ranks of its former group it cannot reach. Then the members
confirm the group to each other, so that a member that has gone since does not fail the first call of the script.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar

from psdist.client.session.waits import Wait
from psdist.client.session.worker_session import WorkerSession
from psdist.collectives.core import plans
from psdist.collectives.core.machine import COLLECTIVES
from psdist.collectives.frames import Sender
from psdist.collectives.group_runner import GroupRunner
from psdist.collectives.mesh import Mesh
from psdist.errors import (
    ClosedError,
    FencedError,
    LateWorkerError,
    PeerUnreachableError,
    PsdistError,
    SchedulerUnreachableError,
    WaitTimeoutError,
    WorkerLeftError,
    WorkerLostError,
)
from psdist.settings.debugging import time_limit
from psdist.types import WorkerEntry
from psdist.v1 import scheduler_pb2 as pb
from psdist.wire import convert

_P = ParamSpec("_P")
_T = TypeVar("_T")

#: Errors that another worker may cause by leaving.
_LOST: Final = (
    WorkerLostError, WaitTimeoutError, ClosedError, PeerUnreachableError, LateWorkerError, WorkerLeftError,
)  # fmt: skip
#: Pauses between two requests, in seconds: the first, and the longest.
_PAUSE: Final = 0.005
_LONGEST_PAUSE: Final = 0.05
#: Longest time for an answer of the scheduler that is not needed.
_ANSWER_SECONDS: Final = 1.0
#: Longest time in which the members of a new group confirm it.
_CONFIRM_SECONDS: Final = 5.0
#: Pause before they tell the scheduler of it, meanwhile.
_TELL_SECONDS: Final = 0.25


class _HasSession(Protocol):
    """Object of one worker, with calls that other workers take part in."""

    _session: WorkerSession


_Owner = TypeVar("_Owner", bound=_HasSession)


def outlasts_stop(
    call: Callable[Concatenate[_Owner, _P], Awaitable[_T]],
) -> Callable[Concatenate[_Owner, _P], Coroutine[Any, Any, _T]]:
    """Let ``call`` raise no error that another worker has caused by leaving, if all workers stop together."""

    @wraps(call)
    async def outlasting(owner: _Owner, /, *arguments: _P.args, **keywords: _P.kwargs) -> _T:
        calls_ = owner._session.waits.group_calls
        entered = calls_.enter()
        try:
            return await call(owner, *arguments, **keywords)
        except _LOST:
            await owner._session.outlast_stop()
            raise
        finally:
            calls_.leave(entered)

    return outlasting


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """Settings that all groups of a name share.

    name: see ``join_group``.
    size, size_min: workers that the first group needs, and that every group needs.
    silence: see ``GroupRunner``.
    """

    name: str
    size: int = 1
    size_min: int = 1
    silence: float | None = None


@dataclass(frozen=True, slots=True)
class FormedGroup:
    """One group of a name.

    rank: this worker's number in it.
    ticket: of the request for the next one, which may be repeated.
    """

    epoch: int
    rank: int
    runner: GroupRunner
    ticket: int


class GroupFormer:
    """Forms groups of one worker. mesh: of the worker's incarnation."""

    def __init__(self, session: WorkerSession, mesh: Mesh) -> None:
        self._session = session
        self.mesh = mesh
        self._mine = session.membership.registration

    @outlasts_stop
    async def form(
        self, settings: GroupSettings, before: FormedGroup | None, *, admits: bool, timeout: float | None
    ) -> FormedGroup:
        """Form the group after ``before``; None if this worker was in no group of the name.

        admits: True if new workers may be added.

        Raises ExcludedError if the others continued without this worker, LateWorkerError and WorkerLeftError if too few
        workers are left, WaitTimeoutError after ``timeout`` seconds, FencedError, ClosedError.
        """
        timeout = time_limit(timeout)
        given, until = before, math.inf if timeout is None else asyncio.get_running_loop().time() + timeout
        try:
            while True:
                former, before = before, await self._form_once(settings, before, admits, until, timeout)
                if former is not None:
                    self.mesh.remove(former.runner)
                if await self._is_confirmed(settings, before):
                    await self._session.outlast_stop()
                    return before
        except PsdistError:
            if before is not None and before is not given:
                self.mesh.remove(before.runner)
            raise

    async def _form_once(
        self, settings: GroupSettings, before: FormedGroup | None, admits: bool, until: float, timeout: float | None
    ) -> FormedGroup:
        request = self._request(settings, before, admits)
        left = None if timeout is None else max(0.0, until - asyncio.get_running_loop().time())
        with self._session.waits.open(f"to join group {settings.name!r}") as wait:
            try:
                async with asyncio.timeout(left):
                    reply = await self._ask_until_formed(request, before, settings, wait)
            except TimeoutError:
                raise WaitTimeoutError(
                    f"group {settings.name!r} was not formed within {timeout:g} s: waiting {wait.reason}"
                ) from None
        return self._enter(settings, reply.epoch, list(map(convert.worker_from_proto, reply.members)))

    @outlasts_stop
    async def enter(
        self, settings: GroupSettings, epoch: int, members: Sequence[Sender], timeout: float | None
    ) -> FormedGroup:
        """Form a group without the scheduler's choice: all ``members`` call this with the same arguments.

        members: ids and incarnations of workers of the run, by rank, this one among them.

        Raises WorkerLostError if another incarnation of a member is in the run, WaitTimeoutError after ``timeout``
        seconds, and what ends the group's first call.
        """
        timeout = time_limit(timeout)
        until = math.inf if timeout is None else asyncio.get_running_loop().time() + timeout
        workers = [await self._find(member, settings.name, until, timeout) for member in members]
        formed = self._enter(settings, epoch, workers)
        try:
            call_id = formed.runner.start(COLLECTIVES, plans.barrier(formed.rank, len(workers)))
            left = None if timeout is None else max(_PAUSE, round(until - asyncio.get_running_loop().time(), 3))
            await formed.runner.result(call_id, f"the first call of group {settings.name!r}", left)
        except BaseException:  # Also if the caller gives up: frames of the group are dropped from now on.
            self.mesh.remove(formed.runner)
            raise
        await self._session.outlast_stop()
        return formed

    async def _find(self, member: Sender, group: str, until: float, timeout: float | None) -> WorkerEntry:
        """Wait until a member is in the map, and return it."""
        (name, incarnation), view = member, self._session.membership.view
        with self._session.waits.open(f"for {name} to join the run"):
            while True:
                self._session.membership.raise_if_expelled(self._mine.incarnation)
                found = next((worker for worker in view.cluster.workers if worker.worker_id == name), None)
                if found is not None and found.incarnation == incarnation:
                    return found
                if found is not None and found.incarnation > incarnation:
                    raise WorkerLostError(
                        f"{name} started again as incarnation {found.incarnation}: group {group!r} has its "
                        f"incarnation {incarnation}, which is gone"
                    )
                left = until - asyncio.get_running_loop().time()
                if left <= 0:
                    raise WaitTimeoutError(
                        f"group {group!r} was not formed within {timeout:g} s: {name} (incarnation {incarnation}) is "
                        "not in the run"
                    )
                await view.changed(None if left == math.inf else left)

    def start(self, runner: GroupRunner, rank: int) -> FormedGroup:
        """Return a group that was made without the scheduler, as the first of its name."""
        return FormedGroup(1, rank, runner, self._draw())

    def _draw(self) -> int:
        return 1 + self._session.calls.rng.getrandbits(62)

    def _request(self, settings: GroupSettings, before: FormedGroup | None, admits: bool) -> pb.FormGroupRequest:
        request = pb.FormGroupRequest(
            **self._mine.caller(), name=settings.name, ticket=self._draw() if before is None else before.ticket,
            admits=admits, size=settings.size, size_min=settings.size_min,
        )  # fmt: skip
        if before is not None:
            request.epoch = before.epoch
            request.members.extend(map(convert.worker_to_proto, before.runner.members))
        return request

    async def _ask_until_formed(
        self, request: pb.FormGroupRequest, before: FormedGroup | None, settings: GroupSettings, wait: Wait
    ) -> pb.FormGroupResponse:
        session, pause, ticket = self._session, _PAUSE, request.ticket
        if before is None:  # Only look at the group first.
            request.ticket = 0
        while True:
            if before is not None:
                del request.unreachable[:], request.closed[:]
                request.unreachable.extend(before.runner.watch.unreachable())
                request.closed.extend(before.runner.watch.closed)
            reply: pb.FormGroupResponse = await session.calls.call_until_answered(
                session.calls.stub.FormGroup, lambda: request, wait.reason, self._mine.incarnation
            )
            if reply.formed:
                return reply
            reason = reply.waiting_for or wait.reason
            if before is None:
                # A worker that cannot reach a member would be left out again and again.
                unreached = self._unreached(reply, settings)
                request.ticket = 0 if unreached else ticket
                reason = f"to reach {unreached}" if unreached else reason
            wait.update_reason(reason)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _unreached(self, reply: pb.FormGroupResponse, settings: GroupSettings) -> str:
        """Return the id of a member of the newest group that this worker has no link to; empty if it reaches all."""
        for member in map(convert.worker_from_proto, reply.members):
            if member.worker_id != self._mine.worker_id and self.mesh.knows(member):
                silence = math.inf if settings.silence is None else settings.silence
                link, identity = self.mesh.link(member), (member.worker_id, member.incarnation)
                if self.mesh.liveness.check(identity, link, silence) or not link.is_open:
                    return member.worker_id
        return ""

    def _enter(self, settings: GroupSettings, epoch: int, members: list[WorkerEntry]) -> FormedGroup:
        mine = self._mine
        rank = next(
            (
                rank
                for rank, member in enumerate(members)
                if (member.worker_id, member.incarnation) == (mine.worker_id, mine.incarnation)
            ),
            None,
        )
        if rank is None:
            raise FencedError(f"the scheduler formed group {settings.name!r} without {mine.worker_id}, which asked")
        ranks = [member.rank for member in members]
        runner = GroupRunner(self.mesh, self._session.waits, ranks, rank, settings.silence)
        self.mesh.enter(runner, settings.name, epoch, members)
        return FormedGroup(epoch, rank, runner, self._draw())

    async def _is_confirmed(self, settings: GroupSettings, formed: FormedGroup) -> bool:
        """Return True once all members have entered a group. Raises what ends this worker's membership."""
        runner = formed.runner
        telling = asyncio.ensure_future(self._tell_scheduler(settings, formed))
        try:
            # Not a timeout of the call: a script that was confirmed in the last moment would get an error that names a
            # timeout it has not set.
            async with asyncio.timeout(_CONFIRM_SECONDS):
                call_id = runner.start(COLLECTIVES, plans.barrier(formed.rank, len(runner.members)))
                await runner.result(call_id, "the first call of a group", None)
        except (PsdistError, TimeoutError):
            self._session.membership.raise_if_expelled(self._mine.incarnation)
            return False
        finally:
            telling.cancel()
        return True

    async def _tell_scheduler(self, settings: GroupSettings, formed: FormedGroup) -> None:
        """Tell the scheduler of a group until all have entered it. A scheduler that restarted after it formed the group
        does not know of it, and the members that had no answer would wait for the others to ask."""
        request = self._request(settings, formed, admits=False)
        request.ticket = 0
        while True:
            await asyncio.sleep(_TELL_SECONDS)
            with suppress(PsdistError):
                await self._ask_once(request)

    async def count_newcomers(self, settings: GroupSettings, formed: FormedGroup) -> int:
        """Return the number of workers that wait to be added; 0 if the scheduler does not answer.

        A scheduler that has restarted learns of the group. It can then tell workers that were left out.
        """
        if len(self._session.membership.view.cluster.workers) <= sum(map(self.mesh.knows, formed.runner.members)):
            return 0
        request = self._request(settings, formed, admits=False)
        request.ticket = 0
        reply = await self._ask_once(request)
        return reply.newcomers if reply is not None else 0

    async def finish(self, settings: GroupSettings, formed: FormedGroup) -> None:
        """Tell the scheduler, if it answers, that the members have completed their work."""
        request = self._request(settings, formed, admits=False)
        request.finishes = True
        await self._ask_once(request)

    async def _ask_once(self, request: pb.FormGroupRequest) -> pb.FormGroupResponse | None:
        with suppress(SchedulerUnreachableError, ClosedError, TimeoutError):
            async with asyncio.timeout(_ANSWER_SECONDS):
                calls_ = self._session.calls
                reply: pb.FormGroupResponse = await calls_.call(calls_.stub.FormGroup, request)
                return reply
        return None
