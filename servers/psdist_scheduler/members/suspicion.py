"""Suspicion: the evidence on a silent member, and the rule that decides whether it is lost. Pure.

Silence alone proves little: the member may be slow, the network between it and the scheduler may be down, or the
scheduler itself may be cut off. So the rule asks three questions before it expels anybody:

1. Has somebody else reached the scheduler meanwhile? If not, the scheduler suspects itself and waits. When its network
  is back, everybody has ``RETURN_LEASES`` to return.
2. Have others heard from the member? Then it is alive and only cut off from the scheduler.
3. What is the cost of a mistake? If every shard of the member has another complete copy, one lease is enough. If its
  loss would take the last copy of a shard, the scheduler waits much longer, because a member that returns brings
  everything with it.

A process that is gone needs no patience: its kernel ends its session, and refuses connections to its port. Nor does a
member whose id is requested by another process: whoever starts members has replaced it.

A silent worker with an open session is alive. Threads that need no interpreter answer the pings of its connection; if
the process is stopped or cut off, missing answers break the session. So a worker may hold its interpreter in one call
of C code for any time.

``sessions`` knows who is silent; ``member_losses`` collects the evidence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from psdist_scheduler.events.cluster_state import ProbeResult

#: Leases within which members may return after the scheduler was restarted, or nobody could reach it.
RETURN_LEASES: Final = 3
#: Leases after which a member is expelled that others hear, and the scheduler does not, if there are other copies: it
#: misses new maps, and others may have to wait for it.
HEARD_LEASES: Final = 3
#: Leases for which a server with the last copy of a shard is awaited.
LAST_COPY_LEASES: Final = 30


@dataclass(frozen=True, slots=True)
class Evidence:
    """Evidence on a member whose lease has expired or whose session ended.

    overdue: seconds since its lease expired; negative before.
    lease: its length in seconds.
    others: True if somebody else has recently reached the scheduler.
    probe: result of a connection to its port during this silence.
    ended: True if its own side ended the session while the connection worked, as a dying process does.
    heard: True if others have heard from it since.
    last_copy: True if a shard has no other complete copy on a server that is not silent itself.
    asked_for: seconds during which another process has requested its id.
    answers: True for a worker with an open session: its process answers the pings of the connection.
    """

    overdue: float
    lease: float
    others: bool = True
    probe: ProbeResult = ""
    ended: bool = False
    heard: bool = False
    last_copy: bool = False
    asked_for: float = 0.0
    answers: bool = False


def is_lost(e: Evidence) -> bool:
    """Return True if the member is to be expelled now."""
    if e.probe == "refused" and (e.others or e.ended):
        return True
    if e.asked_for >= e.lease and e.overdue > 0:
        return True
    return e.others and e.overdue > (_leases(e) - 1) * e.lease


def excuse(e: Evidence) -> str:
    """Return why a member whose lease has expired is not expelled yet."""
    if not e.others:
        return "nobody else reached the scheduler meanwhile, which may be cut off itself"
    if e.answers:
        return "its process answers pings, so it is busy, perhaps in one long call of C code; the run waits for it"
    leases = _leases(e)
    until = f"it is expelled after {leases * e.lease:g} s" if leases != float("inf") else "the run waits for it"
    if e.heard:
        return f"others hear from it; {until}"
    kernel = ", and its host accepts connections" if e.probe == "accepted" else ""
    return f"it may have the last copy of a shard{kernel}; {until}"


def _leases(e: Evidence) -> float:
    """Return the number of leases for which the member may be silent."""
    if e.answers:
        return float("inf")
    if e.last_copy:
        return float("inf") if e.heard else LAST_COPY_LEASES
    return HEARD_LEASES if e.heard else 1
