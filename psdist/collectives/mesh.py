"""Links of one worker to the others of its run, and the groups that use them.

The scheduler introduces the workers: the cluster map has the address of each. Links are dialed when they are first
needed. A frame names its group. Calls of a group that this worker has not opened yet are kept, up to a limit.

A worker counts as lost when its link ends, and a second after the map has another incarnation of it, or none: frames
that it sent before may still arrive.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from functools import partial
from typing import Final

from psdist.client.session.cluster_view import ClusterView
from psdist.client.session.membership import WorkerMembership
from psdist.collectives.core.plan import Bytes
from psdist.collectives.incoming import GroupFrames, IncomingLink, Sender, digest_of
from psdist.errors import LimitExceededError, PeerUnreachableError, PsdistError, copy_error
from psdist.link.frame_connection import FrameConnection
from psdist.link.peer_link import PeerLink
from psdist.link.peers import PeerListener, check_hello
from psdist.types import WorkerEntry
from psdist.v1 import common_pb2
from psdist.v1 import worker_pb2 as pb
from psdist.wire import limits

#: Time for frames of a worker that the map lacks to arrive.
_GRACE_SECONDS: Final = 1.0
_NOTHING: Final = memoryview(b"")


class Mesh:
    """Links and groups of one worker. Groups are opened in the order of their creation."""

    #: True if workers of one host share memory.
    shares = True

    def __init__(self, membership: WorkerMembership, listener: PeerListener, token: str) -> None:
        self._membership = membership
        self._token = token
        self._mine = membership.registration
        self._outgoing: dict[Sender, PeerLink] = {}
        self._incoming: dict[Sender, IncomingLink] = {}
        self._waiting: list[GroupFrames] = []
        #: Open groups by digest; None for closed ones, whose late frames are dropped.
        self._groups: dict[bytes, GroupFrames | None] = {}
        #: Groups opened so far with the same members.
        self._opened: Counter[str] = Counter()
        #: Calls and failures of groups that are not open here.
        self._early: list[tuple[Sender, bytes, pb.PeerFrame, Bytes]] = []
        #: Groups that share memory of the host.
        self._sharing: set[GroupFrames] = set()
        self._ends: set[asyncio.TimerHandle] = set()
        self._watcher = asyncio.create_task(self._watch(), name="psdist collectives")
        listener.serve(self)

    @property
    def _view(self) -> ClusterView:
        return self._membership.view

    # --- groups -------------------------------------------------------------------------------------------------------

    def add(self, group: GroupFrames) -> None:
        """Open a group once all of its ranks are in the map. Raises LimitExceededError."""
        if len(self._groups) + len(self._waiting) >= limits.GROUPS_MAX:
            raise LimitExceededError(f"{limits.GROUPS_MAX} groups of workers were made, which is the limit")
        self._waiting.append(group)
        self._open_groups()

    def remove(self, group: GroupFrames) -> None:
        """Forget a group that was closed."""
        if group in self._waiting:
            self._waiting.remove(group)
        for digest, other in self._groups.items():
            if other is group:
                self._groups[digest] = None

    def claim_memory(self, group: GroupFrames) -> bool:
        """Return True if a group may share memory of the host, until ``return_memory``."""
        if self.shares and len(self._sharing) < limits.HOST_GROUPS_MAX:
            self._sharing.add(group)
        return group in self._sharing

    def return_memory(self, group: GroupFrames) -> None:
        """Let another group share memory of the host."""
        self._sharing.discard(group)

    def absent(self, group: GroupFrames) -> list[int]:
        """Return the ranks of a group that the map lacks."""
        known = {worker.rank for worker in self._view.cluster.workers}
        return [rank for rank in group.ranks if rank not in known]

    def _open_groups(self) -> None:
        workers = {worker.rank: worker for worker in self._view.cluster.workers}
        for group in list(self._waiting):
            if not all(rank in workers for rank in group.ranks):
                continue
            self._waiting.remove(group)
            members = [workers[rank] for rank in group.ranks]
            if silent := [worker for worker in members if not worker.address and worker.rank != self._mine.rank]:
                group.abandon(PeerUnreachableError(f"{silent[0].worker_id} (rank {silent[0].rank}) accepts no links"))
                continue
            names = json.dumps([[worker.worker_id, worker.incarnation] for worker in members])
            digest = hashlib.blake2b(f"{self._opened[names]} {names}".encode(), digest_size=16).digest()
            self._opened[names] += 1
            self._groups[digest] = group
            group.open(digest, members)
            self._deliver_early(digest, group)

    def _deliver_early(self, digest: bytes, group: GroupFrames) -> None:
        mine = [entry for entry in self._early if entry[1] == digest]
        self._early = [entry for entry in self._early if entry[1] != digest]
        for sender, _, frame, data in mine:
            group.on_frame(sender, frame, data)

    def _all_groups(self) -> list[GroupFrames]:
        return [*self._waiting, *(group for group in self._groups.values() if group is not None)]

    # --- links --------------------------------------------------------------------------------------------------------

    def link(self, worker: WorkerEntry) -> PeerLink:
        """Return the link to a worker, and dial it if there is none."""
        key = worker.worker_id, worker.incarnation
        if key not in self._outgoing:
            mine = common_pb2.WorkerEntry(worker_id=self._mine.worker_id, incarnation=self._mine.incarnation)
            hello = pb.PeerHello(
                token=self._token, run_id=self._mine.run_id, sender=mine,
                receiver=common_pb2.WorkerEntry(
                    worker_id=worker.worker_id, incarnation=worker.incarnation, address=worker.address
                ),
            )  # fmt: skip
            ended = partial(self._link_broke, key)
            self._outgoing[key] = PeerLink(hello, ended, shares=self.shares)
        return self._outgoing[key]

    def _link_broke(self, worker: Sender, error: PsdistError) -> None:
        """Process the end of a link that this worker dialed. The next frame dials another."""
        del self._outgoing[worker]
        self._lose_later(worker, error.message)

    def drop(self, group: GroupFrames) -> None:
        """Stop reading and writing the memory of a group's calls, which belongs to the caller again."""
        for outgoing in list(self._outgoing.values()):
            outgoing.drop(group)
        for incoming in self._incoming.values():
            if incoming.receiving is group:
                incoming.receiving = None
                incoming.connection.discard_payload()

    def accepted(self, hello: pb.PeerHello, connection: FrameConnection) -> None:
        """Take over a link of another worker. Raises PsdistError to refuse it."""
        check_hello(hello, self._mine.run_id, self._mine.worker_id, self._mine.incarnation)
        sender = hello.sender.worker_id, hello.sender.incarnation
        if (before := self._incoming.get(sender)) is not None:  # The sender has ended it, which is not noticed yet.
            before.close()
            self.link_ended(sender, before.used, f"{sender[0]} made another link")
        if len(self._incoming) >= limits.MEMBERS_MAX:
            raise LimitExceededError(f"{limits.MEMBERS_MAX} workers have links to this one, which is the limit")
        self._incoming[sender] = IncomingLink(self, sender, connection)

    def is_open(self, digest: bytes) -> GroupFrames | None:
        """Return the open group with this digest."""
        return self._groups.get(digest)

    def on_frame(self, sender: Sender, frame: pb.PeerFrame, data: Bytes) -> None:
        """Process a frame, whose payload is complete. Raises PsdistError for one that makes no sense."""
        digest = digest_of(frame)
        if (group := self._groups.get(digest)) is not None:
            group.on_frame(sender, frame, data)
        elif digest not in self._groups:
            if len(self._early) >= limits.EARLY_CALLS_MAX:
                raise LimitExceededError(
                    f"{len(self._early)} calls of collectives arrived before this worker made them, which is the limit"
                )
            self._early.append((sender, digest, frame, data))

    def link_ended(self, sender: Sender, used: set[bytes], reason: str) -> None:
        """Process the end of an accepted link, which ends the worker for the groups that have used the link."""
        self._incoming.pop(sender, None)
        self._early = [entry for entry in self._early if entry[0] != sender]
        _lose([group for digest in used if (group := self._groups.get(digest)) is not None], sender, reason)

    def _lose_later(self, worker: Sender, reason: str) -> None:
        loop = asyncio.get_running_loop()
        groups = self._all_groups()  # Not those that are made until then, which may use another link.

        def lose() -> None:
            self._ends.discard(timer)
            _lose(groups, worker, reason)

        timer = loop.call_later(_GRACE_SECONDS, lose)
        self._ends.add(timer)

    # --- the map ------------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        before: set[Sender] = set()
        while True:
            if error := self._view.fatal or self._view.fenced:
                self.close(error)
                return
            self._open_groups()
            now = {(worker.worker_id, worker.incarnation) for worker in self._view.cluster.workers}
            for worker in before - now:
                self._lose_later(worker, f"{worker[0]} left the run, or was lost")
            before = now
            await self._view.changed()

    def close(self, error: PsdistError) -> None:
        """End all groups with ``error``, and all links."""
        for group in self._all_groups():
            group.abandon(copy_error(error))
        for outgoing in self._outgoing.values():
            outgoing.close()
        for incoming in self._incoming.values():
            incoming.close()
        for timer in self._ends:
            timer.cancel()
        self._watcher.cancel()


def _lose(groups: list[GroupFrames], worker: Sender, reason: str) -> None:
    for group in groups:
        group.on_lost(worker, reason)
