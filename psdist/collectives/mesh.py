"""Links of one worker to the others of its run, the groups that use them, and signs of life of the others.

The scheduler introduces the workers: the cluster map has the address of each. Links are dialed when they are first
needed. A frame names its group. Calls of a group that this worker has not opened yet are kept, up to a limit. Those
of a group that has ended here, or has a successor, are answered with its error.

A worker counts as lost when its links in both directions have ended, or a second after one has, or after the map has
another incarnation of it, or none: frames that it sent before may still arrive.

Slow is not dead: a worker that computes, or whose process is starved, still counts as alive. It counts as silent while
its process is stopped (on this machine), or its host acknowledges nothing. It is gone if it refuses a new link.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from typing import Final

from psdist.client.session.membership import ClusterView, WorkerMembership
from psdist.collectives import frames
from psdist.collectives.core.machine import SendFailure
from psdist.collectives.core.plans import Bytes
from psdist.collectives.frames import (
    GroupFrames,
    IncomingLink,
    Sender,
    epoch_of,
    key_of,
    make_key,
    name_members,
    series_of,
)
from psdist.errors import (
    ClosedError,
    LimitExceededError,
    PeerUnreachableError,
    PsdistError,
    WorkerLeftError,
    copy_error,
)
from psdist.link import processes
from psdist.link.frame_connection import FrameConnection
from psdist.link.peer_links import PeerLink, PeerListener, check_hello
from psdist.security.tls import Credentials
from psdist.security.tokens import Audience, present
from psdist.types import WorkerEntry
from psdist.v1 import common_pb2, scheduler_pb2
from psdist.v1 import worker_pb2 as pb
from psdist.wire import limits

#: Looks per time limit.
LOOKS: Final = 8
#: Pauses between two looks, in intervals, after which this process itself was stopped or starved.
_OWN_STALL: Final = 3.0
#: Pauses between two looks, within which an acknowledgement must arrive.
_ACKNOWLEDGED: Final = 2.0


class PeerSilence:
    """Silence of one peer. interval: seconds between two looks."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._looked: float | None = None
        self._since: float | None = None

    def look(self, now: float, *, is_silent: bool) -> float:
        """Return the seconds of silence at this look.

        Time in which this process did not look does not count: it may have been stopped itself.
        """
        gap = 0.0 if self._looked is None else now - self._looked
        self._looked = now
        if not is_silent:
            self._since = None
        elif self._since is None:
            self._since = now - self._interval  # It has been silent since the previous look.
        elif gap > _OWN_STALL * self._interval:
            self._since += gap
        return 0.0 if self._since is None else now - self._since


class PeerLiveness:
    """Signs of life of the workers that one worker has links to."""

    def __init__(self) -> None:
        #: Process ids of workers on this machine, and reasons why workers could not be dialed.
        self._pids: dict[Sender, int] = {}
        self._refusals: dict[Sender, str] = {}
        self._silences: dict[Sender, PeerSilence] = {}

    def on_hello(self, hello: pb.PeerHello) -> None:
        """Record the process of a worker that made a link."""
        if hello.pid and hello.pid_scope and hello.pid_scope == processes.own_scope():
            self._pids[hello.sender.worker_id, hello.sender.incarnation] = hello.pid

    def on_link_ended(self, worker: Sender, link: PeerLink, reason: str) -> None:
        """Record the end of a link that this worker dialed."""
        if not link.is_open:
            self._refusals[worker] = reason

    def forget(self, worker: Sender) -> None:
        """Forget a worker that has left the run."""
        for known in (self._pids, self._refusals, self._silences):
            known.pop(worker, None)

    def check(self, worker: Sender, link: PeerLink, limit: float) -> str:
        """Look at a worker, and ping it. Returns why it is gone or silent for ``limit`` seconds; empty if it is not.

        limit: infinite if silence means nothing; half of it is enough for a stopped process, because that is certain.
        Called every ``limit / LOOKS`` seconds.
        """
        if link.is_open:
            self._refusals.pop(worker, None)
        if refusal := self._refusals.get(worker):
            return refusal
        if math.isinf(limit):
            return ""
        interval = limit / LOOKS
        pid = self._pids.get(worker, 0)
        is_stopped = bool(pid) and processes.is_stopped(pid)
        is_silent = is_stopped or link.is_silent(_ACKNOWLEDGED * interval)
        silence = self._silences.setdefault(worker, PeerSilence(interval))
        seconds = silence.look(asyncio.get_running_loop().time(), is_silent=is_silent)
        link.ping()
        if seconds < (limit / 2 if is_stopped else limit):
            return ""
        cause = "its process is stopped" if is_stopped else "its host acknowledges nothing"
        return f"{worker[0]} was silent for {seconds:.1f} s: {cause}"


#: Time for frames of a worker that the map lacks to arrive.
_GRACE_SECONDS: Final = 1.0
#: Time in which a worker that has left, its work done, may start again before groups that wait for it end.
RETURN_SECONDS: Final = 10.0
_NOTHING: Final = memoryview(b"")


class Mesh:
    """Links and groups of one worker. Groups are opened in the order of their creation."""

    #: True if workers of one host share memory.
    shares = True

    def __init__(self, membership: WorkerMembership, listener: PeerListener, credentials: Credentials) -> None:
        self._membership = membership
        self._credentials = credentials
        self._proof = present(credentials.token, Audience.WORKER)
        self._mine = membership.registration
        self._outgoing: dict[Sender, PeerLink] = {}
        self._incoming: dict[Sender, IncomingLink] = {}
        self._waiting: list[GroupFrames] = []
        #: Ranks whose workers have left, their work done, and when this worker learned of it.
        self._done: dict[int, float] = {}
        #: Open groups by key.
        self._groups: dict[bytes, GroupFrames] = {}
        #: Highest epoch opened here, by series of groups. Late frames of lower ones are dropped.
        self._epochs: dict[bytes, int] = {}
        #: Groups made so far with the same members, without those that wait for some.
        self._made: Counter[str] = Counter()
        self.liveness = PeerLiveness()
        #: Calls and failures of groups that are not open here.
        self._early: list[tuple[Sender, bytes, pb.PeerFrame, Bytes]] = []
        #: Answers to calls of groups that have ended here, by their keys, the newest last.
        self._farewells: dict[bytes, bytes] = {}
        #: Groups that share memory of the host.
        self._sharing: set[object] = set()
        self._ends: set[asyncio.TimerHandle] = set()
        self._watcher = asyncio.create_task(self._watch(), name="psdist collectives")
        listener.serve(self)

    @property
    def _view(self) -> ClusterView:
        return self._membership.view

    # --- groups -------------------------------------------------------------------------------------------------------

    def add(self, group: GroupFrames) -> None:
        """Open a group once all of its ranks are in the map. Raises LimitExceededError."""
        self._check_limit()
        self._waiting.append(group)
        self._open_groups()

    def _check_limit(self) -> None:
        if max(len(self._groups), len(self._epochs)) + len(self._waiting) >= limits.GROUPS_MAX:
            raise LimitExceededError(f"{limits.GROUPS_MAX} groups of workers were made, which is the limit: close some")

    def remove(self, group: GroupFrames) -> None:
        """Forget a group that has ended. One whose members have not all joined is counted with their groups first."""
        for key in [key for key, other in self._groups.items() if other is group]:
            del self._groups[key]
            self._keep_farewell(key, group)

    def _keep_farewell(self, key: bytes, group: GroupFrames) -> None:
        if group.has_ended:
            self._farewells[key] = group.farewell(key)
        if len(self._farewells) > limits.ENDED_GROUPS_MAX:
            del self._farewells[next(iter(self._farewells))]

    def remove_ended(self) -> None:
        """Forget groups that have ended by errors."""
        for group in list(self._groups.values()):
            if group.has_ended:
                self.remove(group)

    def lacks(self, check: scheduler_pb2.CheckCall) -> bool:
        """Return True if this worker has not made the call of a group that another one waits for."""
        if (group := self._groups.get(check.group)) is not None:
            return group.lacks(check)
        # A group that is not open yet has no key, and a closed one is about to end at the other worker.
        return all(group.has_ended for group in self._waiting) and not self._is_late(check.group)

    def end(self, names: Collection[str], error: PsdistError) -> None:
        """End groups, named by their keys in hexadecimal, at all of their ranks."""
        for key, group in list(self._groups.items()):
            if key.hex() in names and not group.has_ended:
                group.end(copy_error(error))

    def knows(self, worker: WorkerEntry) -> bool:
        """Return True if a worker is in the map, in this incarnation."""
        mine = worker.worker_id, worker.incarnation
        return any((one.worker_id, one.incarnation) == mine for one in self._view.cluster.workers)

    def claim_memory(self, owner: object) -> bool:
        """Return True if a group may share memory of the host, until ``return_memory`` with the same ``owner``."""
        if self.shares and len(self._sharing) < limits.HOST_GROUPS_MAX:
            self._sharing.add(owner)
        return owner in self._sharing

    def return_memory(self, owner: object) -> None:
        """Let another group share memory of the host."""
        self._sharing.discard(owner)

    def absent(self, group: GroupFrames) -> list[int]:
        """Return the ranks of a group that the map lacks."""
        known = {worker.rank for worker in self._view.cluster.workers}
        return [rank for rank in group.ranks if rank not in known]

    def _open_groups(self) -> None:
        workers = {worker.rank: worker for worker in self._view.cluster.workers}
        self._note_done()
        for group in list(self._waiting):
            if absent := [rank for rank in group.ranks if rank not in workers]:
                self._end_if_left(group, absent)
                continue
            self._waiting.remove(group)
            members = [workers[rank] for rank in group.ranks]
            names = name_members(members)
            self._made[names] += 1
            key = make_key(names, self._made[names], members)
            silent = [worker for worker in members if not worker.address and worker.rank != self._mine.rank]
            if silent and not group.has_ended:
                group.abandon(
                    PeerUnreachableError(
                        f"{silent[0].worker_id} (rank {silent[0].rank}) accepts no links, for a reason in its log: "
                        "beyond one machine give the run TLS, or set PSDIST_INSECURE=1 on a private network"
                    )
                )
            if group.has_ended:
                self._keep_farewell(key, group)
                self._note_epoch(key)
            else:
                self._open(group, key, members)

    def _note_done(self) -> None:
        """Note the ranks whose workers have left, and look at the waiting groups again when they will not return."""
        loop, before = asyncio.get_running_loop(), self._done
        self._done = {rank: before.get(rank, loop.time()) for rank in self._view.cluster.ranks_done}
        if self._done.keys() - before.keys():
            self._call_later(RETURN_SECONDS + 0.1, self._open_groups)  # Timers may be a little early.

    def _end_if_left(self, group: GroupFrames, absent: list[int]) -> None:
        """End a group that waits for workers that have left, unless they may still start again.

        It stays among the waiting ones: other ranks may have opened it with a worker that came back late.
        """
        now = asyncio.get_running_loop().time()
        left = [rank for rank in absent if rank in self._done and now >= self._done[rank] + RETURN_SECONDS]
        if left and not group.has_ended:
            group.abandon(
                WorkerLeftError(
                    f"rank {', '.join(map(str, left[:8]))} ended its script without making this group: make groups in "
                    "all of their ranks before any of these ends"
                )
            )

    def enter(self, group: GroupFrames, name: str, epoch: int, members: list[WorkerEntry]) -> None:
        """Open a group whose members are known. Raises LimitExceededError."""
        self._check_limit()
        self._open(group, make_key(name, epoch, members), members)

    def _open(self, group: GroupFrames, key: bytes, members: list[WorkerEntry]) -> None:
        self._groups[key] = group
        group.open(key, members)
        self._note_epoch(key)

    def _note_epoch(self, key: bytes) -> None:
        """Note the epoch of a group that was made, and process the frames that have arrived for it, or too late."""
        self._epochs[series_of(key)] = max(epoch_of(key), self._epochs.get(series_of(key), 0))
        early, self._early = self._early, []
        for sender, other, frame, data in early:
            if other == key or self._is_late(other):
                self.on_frame(sender, frame, data)
            else:
                self._early.append((sender, other, frame, data))

    def _answer(self, sender: Sender, key: bytes, frame: pb.PeerFrame) -> None:
        """Tell the sender of a call that its group has ended here."""
        member = next((one for one in self._view.cluster.workers if (one.worker_id, one.incarnation) == sender), None)
        if frame.WhichOneof("kind") != "call" or member is None:
            return
        error = ClosedError(f"{self._mine.worker_id} has ended the group")
        self.link(member).send(self._farewells.get(key) or frames.encode(key, SendFailure(0, error)))

    def _is_late(self, key: bytes) -> bool:
        """Return True for the key of a group that was closed here, or that has a successor here."""
        return key not in self._groups and epoch_of(key) <= self._epochs.get(series_of(key), 0)

    def _all_groups(self) -> list[GroupFrames]:
        return [*self._waiting, *self._groups.values()]

    # --- links --------------------------------------------------------------------------------------------------------

    def link(self, worker: WorkerEntry) -> PeerLink:
        """Return the link to a worker, and dial it if there is none."""
        key = worker.worker_id, worker.incarnation
        if key not in self._outgoing:
            mine = common_pb2.WorkerEntry(worker_id=self._mine.worker_id, incarnation=self._mine.incarnation)
            hello = pb.PeerHello(
                token=self._proof, run_id=self._mine.run_id, sender=mine,
                pid=os.getpid(), pid_scope=processes.own_scope(),
                receiver=common_pb2.WorkerEntry(
                    worker_id=worker.worker_id, incarnation=worker.incarnation, address=worker.address
                ),
            )  # fmt: skip
            ended = partial(self._link_broke, key)
            self._outgoing[key] = PeerLink(hello, self._credentials.tls, ended, shares=self.shares)
        return self._outgoing[key]

    def _link_broke(self, worker: Sender, error: PsdistError) -> None:
        """Process the end of a link that this worker dialed. The next frame dials another."""
        self.liveness.on_link_ended(worker, self._outgoing.pop(worker), error.message)
        if worker in self._incoming:
            self._lose_later(worker, error.message)
        else:
            _lose(self._all_groups(), worker, error.message)

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
        self.liveness.on_hello(hello)
        if (before := self._incoming.get(sender)) is not None:  # The sender has ended it, which is not noticed yet.
            before.close()
            self.link_ended(sender, before.used, f"{sender[0]} made another link")
        if len(self._incoming) >= limits.MEMBERS_MAX:
            raise LimitExceededError(f"{limits.MEMBERS_MAX} workers have links to this one, which is the limit")
        self._incoming[sender] = IncomingLink(self, sender, connection)

    def open_group(self, key: bytes) -> GroupFrames | None:
        """Return the open group with this key."""
        return self._groups.get(key)

    def on_frame(self, sender: Sender, frame: pb.PeerFrame, data: Bytes) -> None:
        """Process a frame, whose payload is complete. Raises PsdistError for one that makes no sense."""
        key = key_of(frame)
        if (group := self._groups.get(key)) is not None:
            group.on_frame(sender, frame, data)
        elif self._is_late(key):
            self._answer(sender, key, frame)
        else:
            kept = sum(early.nbytes for *_, early in self._early) + data.nbytes
            if len(self._early) >= limits.EARLY_CALLS_MAX or kept > limits.EARLY_BYTES_MAX:
                raise LimitExceededError(
                    f"{len(self._early)} calls of collectives arrived before this worker made them, and {kept} bytes "
                    f"with them; the limits are {limits.EARLY_CALLS_MAX} calls and {limits.EARLY_BYTES_MAX} bytes: let "
                    "all workers make groups in the same order"
                )
            self._early.append((sender, key, frame, data))

    def link_ended(self, sender: Sender, used: set[bytes], reason: str) -> None:
        """Process the end of an accepted link, which ends the worker for the groups that have used the link.

        A worker whose call has ended in the middle of its data closes the link, and tells why on another one.
        """
        self._incoming.pop(sender, None)
        self._early = [entry for entry in self._early if entry[0] != sender]
        groups = [group for key in used if (group := self._groups.get(key)) is not None]
        if sender in self._outgoing:
            self._lose_later(sender, reason, groups)
        else:
            _lose(groups, sender, reason)

    def _lose_later(self, worker: Sender, reason: str, groups: list[GroupFrames] | None = None) -> None:
        # Not those that are made until then, which may use another link.
        lost = self._all_groups() if groups is None else groups
        self._call_later(_GRACE_SECONDS, lambda: _lose(lost, worker, reason))

    def _call_later(self, seconds: float, action: Callable[[], None]) -> None:
        def act() -> None:
            self._ends.discard(timer)
            action()

        timer = asyncio.get_running_loop().call_later(seconds, act)
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
                self.liveness.forget(worker)
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
