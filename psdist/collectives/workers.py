"""Groups of a client's run: the entry to the asyncio API of collectives."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence

from psdist.client.session.membership import Registration
from psdist.client.session.worker_session import WorkerSession
from psdist.collectives import SILENCE_SECONDS
from psdist.collectives.forming import GroupFormer, GroupSettings
from psdist.collectives.frames import Sender
from psdist.collectives.group import AsyncWorkerGroup
from psdist.collectives.group_runner import GroupRunner
from psdist.collectives.mesh import Mesh
from psdist.errors import ExcludedError, InvalidArgumentError, check_integer
from psdist.settings.debugging import time_limit
from psdist.types import check_name
from psdist.wire.limits import WORLD_MAX


class AsyncCollectives:
    """Collectives between the workers of a run. session: of a connected client; make one object for each."""

    def __init__(self, session: WorkerSession) -> None:
        self._session = session
        self._incarnation = 0
        self._former = self._make_former()

    def _make_former(self) -> GroupFormer:
        membership, listener = self._session.membership, self._session.registrar.listener
        membership.raise_if_expelled(membership.registration.incarnation)
        self._incarnation = membership.registration.incarnation
        mesh = Mesh(membership, listener, listener.credentials)
        group_calls = self._session.waits.group_calls
        group_calls.lacks, group_calls.end = mesh.lacks, mesh.end
        return GroupFormer(self._session, mesh)

    def _current_former(self) -> GroupFormer:
        if self._session.membership.registration.incarnation != self._incarnation:
            self._former = self._make_former()  # The links of the earlier incarnation have ended.
        return self._former

    def new_group(self, ranks: Iterable[int] | None = None, *, ordered: bool = False) -> AsyncWorkerGroup:
        """Return a group of the workers with these ranks in the run; None means all.

        Its members make it in the same order as other groups of the same workers. It waits for those that have not
        joined the run. Numbers of ranks in the calls of the group are positions in ``ranks``, which are sorted unless
        they are ``ordered``.

        Raises InvalidArgumentError unless this worker is among them, LimitExceededError, and FencedError.
        """
        mine = self._session.membership.registration
        world = max(1, mine.world_size)
        given = list(range(world) if ranks is None else dict.fromkeys(ranks))
        try:
            members = [operator.index(rank) for rank in given]
        except TypeError:
            raise InvalidArgumentError(f"{given!r:.60} are no ranks: use whole numbers from 0") from None
        if not ordered:
            members.sort()
        if not all(0 <= rank < WORLD_MAX for rank in members):
            raise InvalidArgumentError(f"ranks {members} are out of range: ranks count from 0")
        if mine.rank not in members:
            raise InvalidArgumentError(f"rank {mine.rank} is not among {members}: only members make a group")
        former = self._current_former()
        former.mesh.remove_ended()
        runner = GroupRunner(former.mesh, self._session.waits, members, members.index(mine.rank))
        former.mesh.add(runner)
        return AsyncWorkerGroup(former, former.start(runner, members.index(mine.rank)))

    async def join_group(
        self,
        name: str = "workers",
        *,
        size: int | None = None,
        size_min: int = 1,
        silence: float | None = SILENCE_SECONDS,
        timeout: float | None = None,
    ) -> AsyncWorkerGroup:
        """Join the group ``name``, whose members may die, leave and be added: see ``AsyncWorkerGroup.reconfigure``.

        The first workers form it, once ``size`` of them have called this. Later ones wait until the members admit them.
        A worker that was expelled joins again.

        size: None is the number of workers that the run was started with.
        size_min: workers that every successor of the group needs; fewer survivors wait for new ones.
        silence: seconds after which a rank that a call needs is lost if its process is stopped, or its host
            acknowledges nothing. None leaves that to its lease.

        Raises InvalidNameError, InvalidArgumentError, LateWorkerError if the members have completed their work, or have
        ended, WorkerLeftError if workers have ended without the group, and too few are left, WaitTimeoutError after
        ``timeout`` seconds, LimitExceededError, FencedError if the worker may not rejoin, and ClosedError.
        """
        check_name(name, "group name")
        _check_seconds(timeout=timeout, silence=silence)
        membership = self._session.membership
        world = max(1, membership.registration.world_size)
        check_integer("size_min", size_min, 1, WORLD_MAX)
        check_integer("size", world if size is None else size, size_min, WORLD_MAX)
        settings = GroupSettings(name, world if size is None else size, size_min, time_limit(silence))

        async def attempt(_: Registration) -> AsyncWorkerGroup:
            while True:
                former = self._current_former()
                former.mesh.remove_ended()
                try:
                    formed = await former.form(settings, None, admits=True, timeout=timeout)
                except ExcludedError:  # Members could not reach it while it joined.
                    continue
                return AsyncWorkerGroup(former, formed, settings)

        return await membership.retry_across_incarnations(attempt)

    async def outlast_stop(self) -> None:
        """See ``WorkerSession``."""
        await self._session.outlast_stop()

    @property
    def identity(self) -> Sender:
        """This worker's id and incarnation, by which ``enter_group`` names it. Raises ClosedError."""
        mine = self._session.membership.registration
        return mine.worker_id, mine.incarnation

    async def enter_group(
        self,
        name: str,
        epoch: int,
        members: Sequence[Sender],
        *,
        silence: float | None = SILENCE_SECONDS,
        timeout: float | None = None,
    ) -> AsyncWorkerGroup:
        """Return the group of ``members``, which the scheduler has not chosen, once all of them have called this.

        name, epoch: number ``epoch`` of the groups ``name``, higher than those that a member was in before.
        members: the ``identity`` of each member, by rank, the same at all of them.
        silence: as for ``join_group``.

        Raises InvalidNameError, InvalidArgumentError unless this worker is among them once, WorkerLostError if one of
        them is gone, WaitTimeoutError after ``timeout`` seconds, LimitExceededError, FencedError and ClosedError.
        """
        check_name(name, "group name")
        _check_seconds(timeout=timeout, silence=silence)
        check_integer("epoch", epoch, 1, 2**63 - 1)
        check_integer("number of members", len(members), 1, WORLD_MAX)
        if self.identity not in members or len(set(members)) < len(members):
            raise InvalidArgumentError(
                f"group {name!r} cannot have these members: name each worker once, this one ({self.identity[0]}, "
                f"incarnation {self.identity[1]}) among them"
            )
        former = self._current_former()
        former.mesh.remove_ended()
        formed = await former.enter(GroupSettings(name, silence=time_limit(silence)), epoch, members, timeout)
        return AsyncWorkerGroup(former, formed)


def _check_seconds(**given: float | None) -> None:
    for name, seconds in given.items():
        if seconds is not None and not 0.01 <= seconds < math.inf:
            raise InvalidArgumentError(f"{name}={seconds!r:.60} is out of range: use seconds from 0.01, or None")
