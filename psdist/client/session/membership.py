"""Which incarnation of this client is a member of the run. It does no I/O.

``scheduler_session`` reports registrations and expulsions. Calls under way wait here for the next incarnation, and are
made again as it.

Invariants: at most one incarnation of this client counts. Between its end and the begin of the next, ``view.fenced``
says why it ended. ``view.fatal`` is set once, and then no incarnation follows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from psdist.client.session.cluster_view import ClusterView
from psdist.client.session.registration import Registration
from psdist.client.session.wait_tracker import WaitTracker
from psdist.errors import ClosedError, FencedError, again
from psdist.types import ClusterMap
from psdist.v1 import scheduler_pb2
from psdist.wire import convert

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Expulsion:
    """Why an incarnation of this client ended. rolled_back: because the run went back to a snapshot."""

    reason: str
    rolled_back: bool


class WorkerMembership:
    """The membership of one client.

    peer: the scheduler's name for messages.
    rejoins: whether it registers again when it was expelled; else that is the end.
    """

    def __init__(self, peer: str, waits: WaitTracker, *, rejoins: bool) -> None:
        self.peer = peer
        self.rejoins = rejoins
        self.view = ClusterView()
        #: How the incarnation before this one ended.
        self.expulsion = Expulsion("", rolled_back=False)
        #: Parameter sets that were ready when this incarnation began: a worker that takes part in them joins a training
        #: under way.
        self.ready_before: frozenset[str] = frozenset()
        self._waits = waits
        self._registration: Registration | None = None

    @property
    def registration(self) -> Registration:
        """Who this client is. Raises ClosedError before it was registered."""
        if self._registration is None:
            raise ClosedError("the client is not connected: use it in a with block, or call connect() first")
        return self._registration

    def start_incarnation(self, response: scheduler_pb2.RegisterResponse) -> None:
        """This client was registered."""
        self._registration = Registration.of(response)
        cluster = convert.map_from_proto(response.map) if response.HasField("map") else ClusterMap("", 0)
        self.ready_before = frozenset(entry.spec.name for entry in cluster.parameters if entry.ready)
        self.view.start_incarnation(cluster)

    def on_expelled(self, fenced: FencedError, silence: str) -> None:
        """The incarnation ended. silence: how long this process gave no sign of life, for a message."""
        rolled_back = "rolled_back" in fenced.details
        # The errors advise to register again, which this client does.
        text = fenced.message.removesuffix("; register again").removesuffix(": register again")
        self.expulsion = Expulsion(text if rolled_back else f"{text} ({silence})", rolled_back)
        self.view.on_fenced(fenced)

    def raise_if_expelled(self, incarnation: int | None = None) -> None:
        """Raises why this client is no member, if it is none; FencedError if ``incarnation`` has ended."""
        if self.view.fatal is not None:
            raise again(self.view.fatal)
        if incarnation is None:
            return
        if self.view.fenced is not None:
            raise again(self.view.fenced)
        if incarnation != self.registration.incarnation:
            raise FencedError(f"incarnation {incarnation} of {self.registration.worker_id} does not count any more")

    async def wait_until_rejoined(self, fenced: FencedError, incarnation: int) -> None:
        """After ``fenced`` ended what this client did as ``incarnation``: returns when the next one has begun.

        Raises what ends the membership for good.
        """
        if not self.rejoins:
            raise again(fenced)
        with self._waits.open(f"for {self.peer} to take {self.registration.worker_id} back"):
            while self.view.fenced is not None or self.registration.incarnation == incarnation:
                self.raise_if_expelled()
                await self.view.changed()

    async def retry_across_incarnations(self, work: Callable[[Registration], Awaitable[T]]) -> T:
        """Runs ``work``, and runs it again as the next incarnation if this one ended meanwhile."""
        while True:
            self.raise_if_expelled()
            mine = self.registration
            try:
                if self.view.fenced is not None:
                    raise self.view.fenced
                return await work(mine)
            except FencedError as error:
                await self.wait_until_rejoined(error, mine.incarnation)
