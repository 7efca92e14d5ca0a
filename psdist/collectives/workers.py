"""Groups of a client's run: the entry to the asyncio API of collectives."""

from __future__ import annotations

from collections.abc import Iterable

from psdist.client.session.scheduler_session import WorkerSession
from psdist.collectives.group import AsyncWorkerGroup
from psdist.collectives.mesh import Mesh
from psdist.errors import InvalidArgumentError
from psdist.wire.limits import WORLD_MAX


class AsyncCollectives:
    """Collectives between the workers of a run. session: of a connected client; make one object for each."""

    def __init__(self, session: WorkerSession) -> None:
        self._session = session
        self._incarnation = 0
        self._mesh = self._make_mesh()

    def _make_mesh(self) -> Mesh:
        membership, listener = self._session.membership, self._session.registrar.listener
        membership.raise_if_expelled(membership.registration.incarnation)
        self._incarnation = membership.registration.incarnation
        return Mesh(membership, listener, listener.token)

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
        members = given if ordered else sorted(given)
        if not all(0 <= rank < WORLD_MAX for rank in members):
            raise InvalidArgumentError(f"ranks {list(members)} are out of range: ranks count from 0")
        if mine.rank not in members:
            raise InvalidArgumentError(f"rank {mine.rank} is not among {list(members)}: only members make a group")
        if mine.incarnation != self._incarnation:  # The links of the earlier one have ended.
            self._mesh = self._make_mesh()
        return AsyncWorkerGroup(self._mesh, self._session.waits, members, members.index(mine.rank))
