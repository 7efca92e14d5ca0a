"""The membership of this client in the run, over all of its incarnations. It does no I/O.

``worker_session`` reports registrations and expulsions. Every unit of work that an incarnation may not survive runs
by ``run_in_incarnation``: the only place, with ``unless_dropped`` for blocking callers, that catches FencedError.

Invariants: at most one incarnation of this client counts. Between the end of one and the start of the next,
``view.fenced`` holds the reason. ``view.fatal`` is set once, and no incarnation follows it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar, cast

from psdist.client.session.cluster_view import ClusterView
from psdist.client.session.registration import Registration
from psdist.client.session.wait_tracker import WaitTracker
from psdist.errors import ClosedError, FencedError, copy_error
from psdist.types import ClusterMap
from psdist.v1 import scheduler_pb2
from psdist.wire import convert

T = TypeVar("T")


async def run_in_incarnation(
    work: Callable[[], Awaitable[T]],
    on_fenced: Callable[[FencedError, int], Awaitable[bool]],
    incarnation: Callable[[], int] = lambda: 0,
) -> T | None:
    """Run a unit of work, again if its incarnation ends meanwhile. Returns None if the work was dropped.

    on_fenced: called with the error that ended the incarnation, and its number. Returns True to run the work again,
        in the next incarnation that it has waited for; False to drop the work. Raises why neither can be done.
    incarnation: the number of the incarnation that takes part now.
    """
    while True:
        number = incarnation()
        try:
            return await work()
        except FencedError as error:
            if not await on_fenced(error, number):
                return None


async def drop_when_fenced(_: FencedError, __: int) -> bool:
    """Drop the work: nobody needs its result once its incarnation has ended."""
    return False


def unless_dropped(call: Callable[[], T]) -> T | None:
    """Return the result of a blocking call on a step in buckets; None if the step was dropped."""
    try:
        return call()
    except FencedError:
        return None


@dataclass(frozen=True, slots=True)
class Expulsion:
    """Why an incarnation of this client ended. rolled_back: because the run rolled back to a snapshot."""

    reason: str
    rolled_back: bool


class WorkerMembership:
    """Membership of one client.

    peer: the scheduler's name for messages.
    rejoins: True if it registers again after it was expelled; else that is the end.
    """

    def __init__(self, peer: str, waits: WaitTracker, *, rejoins: bool) -> None:
        self.peer = peer
        self.rejoins = rejoins
        self.view = ClusterView()
        #: How the previous incarnation ended.
        self.expulsion = Expulsion("", rolled_back=False)
        #: Parameter sets that were ready when this incarnation began. A worker that takes part in one joins a training
        #: under way.
        self.ready_before: frozenset[str] = frozenset()
        self._waits = waits
        self._registration: Registration | None = None

    @property
    def registration(self) -> Registration:
        """Identity of this client in the run. Raises ClosedError before it was registered."""
        if self._registration is None:
            raise ClosedError("the client is not connected: use it in a with block, or call connect() first")
        return self._registration

    def start_incarnation(self, response: scheduler_pb2.RegisterResponse) -> None:
        """Start the incarnation that was just registered."""
        self._registration = Registration.from_response(response)
        cluster = convert.map_from_proto(response.map) if response.HasField("map") else ClusterMap("", 0)
        self.ready_before = frozenset(entry.spec.name for entry in cluster.parameters if entry.ready)
        self.view.start_incarnation(cluster)

    def on_expelled(self, fenced: FencedError, silence: str) -> None:
        """End the incarnation. silence: how long this process gave no sign of life, for a message."""
        rolled_back = "rolled_back" in fenced.details
        # The errors advise to register again, which this client does.
        text = fenced.message.removesuffix("; register again").removesuffix(": register again")
        self.expulsion = Expulsion(text if rolled_back else f"{text} ({silence})", rolled_back)
        self.view.on_fenced(fenced)

    def raise_if_expelled(self, incarnation: int | None = None) -> None:
        """Raise the reason if this client is no member; FencedError if ``incarnation`` has ended."""
        if self.view.fatal is not None:
            raise copy_error(self.view.fatal)
        if incarnation is None:
            return
        if self.view.fenced is not None:
            raise copy_error(self.view.fenced)
        if incarnation != self.registration.incarnation:
            raise FencedError(f"incarnation {incarnation} of {self.registration.worker_id} was fenced")

    async def wait_until_rejoined(self, fenced: FencedError, incarnation: int) -> bool:
        """Wait for the next incarnation after ``fenced`` ended work of ``incarnation``. Returns True.

        Raises what ends the membership for good.
        """
        if not self.rejoins:
            raise copy_error(fenced)
        with self._waits.open(f"for {self.peer} to take {self.registration.worker_id} back"):
            while self.view.fenced is not None or self.registration.incarnation == incarnation:
                self.raise_if_expelled()
                await self.view.changed()
        return True

    async def retry_across_incarnations(self, work: Callable[[Registration], Awaitable[T]]) -> T:
        """Run ``work``, and run it again as the next incarnation if this one ended meanwhile."""

        def attempt() -> Awaitable[T]:
            self.raise_if_expelled()
            if self.view.fenced is not None:
                raise self.view.fenced
            return work(self.registration)

        result = await run_in_incarnation(attempt, self.wait_until_rejoined, lambda: self.registration.incarnation)
        return cast(T, result)
