"""The collectives of a run's context, loaded on first use.

Most scripts exchange gradients through servers alone. The modules of collectives would take an eighth of their start.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from psdist.client.process import loop
from psdist.client.process.loop import on_loop
from psdist.client.session.worker_session import WorkerSession

if TYPE_CHECKING:
    from psdist.collectives.group import AsyncWorkerGroup
    from psdist.collectives.sync_group import WorkerGroup
    from psdist.collectives.workers import AsyncCollectives


class BlockingClient(Protocol):
    """The part of ``Client`` that groups need."""

    @property
    def session(self) -> WorkerSession:
        """Membership of this worker. Raises ClosedError."""


class Collectives:
    """Groups of the workers of a run, made on first use. client: connected."""

    def __init__(self, client: BlockingClient) -> None:
        self._client = client
        self._async: AsyncCollectives | None = None
        #: Group of all workers.
        self.world: WorkerGroup | None = None

    def new_group(self, ranks: Iterable[int] | None = None, ordered: bool = False) -> WorkerGroup:
        """See ``Context.new_group``."""
        from psdist.collectives.sync_group import WorkerGroup

        return WorkerGroup(loop.shared().call(on_loop(lambda: self.started().new_group(ranks, ordered=ordered))))

    def join_group(self, name: str, **settings: Any) -> WorkerGroup:
        """See ``Context.join_group``."""
        from psdist.collectives.sync_group import WorkerGroup

        return WorkerGroup(loop.shared().call(self._join_group(name, settings)))

    async def _join_group(self, name: str, settings: dict[str, Any]) -> AsyncWorkerGroup:
        return await self.started().join_group(name, **settings)

    def started(self) -> AsyncCollectives:
        """Return the groups for code on psdist's loop thread."""
        from psdist.collectives.workers import AsyncCollectives

        if self._async is None:
            self._async = AsyncCollectives(self._client.session)
        return self._async
