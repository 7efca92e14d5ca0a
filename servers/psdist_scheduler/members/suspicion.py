"""Whether a silent member is lost: the evidence, and the one rule that judges it. Pure.

Silence alone says little: the member may be slow, or the network between it and the scheduler may be down, or the
scheduler itself may be cut off. So the rule asks three questions before it expels anybody:

1. Has somebody else reached the scheduler meanwhile? If not, the scheduler suspects itself and waits. When its network
   is back, everybody has ``RETURN_LEASES`` to come back.
2. Have others heard from the member? Then it is alive and only cut off from the scheduler.
3. What does it cost to be wrong? Where every shard of the member has another complete copy, a lease is enough. Where
   its loss would take the last copy of a shard, the scheduler waits much longer, because a member that comes back
   brings everything with it.

A process that is gone needs no patience: its kernel ends its session, and refuses connections to its port. Nor does a
member whose id another process asks for: whoever starts members has replaced it, and the question has reached us.

Not here: who is silent (``sessions``), where the evidence comes from (``membership_changes``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from psdist_scheduler.events.records import ProbeResult

#: Leases that members have to come back after the scheduler was restarted, or nobody could reach it.
RETURN_LEASES: Final = 3
#: A member that others hear, and the scheduler does not, is expelled after so many leases, if there are other copies:
#: it does not learn of new maps, and the others may come to wait for it.
HEARD_LEASES: Final = 3
#: A server that has the last copy of a shard is waited for during so many leases.
LAST_COPY_LEASES: Final = 30


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of a member whose lease is over or whose session ended.

    overdue: seconds since its lease was over; negative while it lasts.
    lease: its length in seconds.
    others: somebody else has reached the scheduler lately.
    probe: of its port, since it fell silent.
    ended: its session was ended by its own side while the connection worked, as a dying process does.
    heard: others have heard from it since.
    last_copy: a shard has no other complete copy on a server that is not silent itself.
    asked_for: seconds during which another process has asked for its id.
    """

    overdue: float
    lease: float
    others: bool = True
    probe: ProbeResult = ""
    ended: bool = False
    heard: bool = False
    last_copy: bool = False
    asked_for: float = 0.0


def is_lost(e: Evidence) -> bool:
    """Whether the member is to be expelled now."""
    if e.probe == "refused" and (e.others or e.ended):
        return True
    if e.asked_for >= e.lease and e.overdue > 0:
        return True
    return e.others and e.overdue > (_leases(e) - 1) * e.lease


def excuse(e: Evidence) -> str:
    """Why a member whose lease is over is not expelled yet."""
    if not e.others:
        return "nobody else reached the scheduler meanwhile, which may be cut off itself"
    leases = _leases(e)
    until = f"it is expelled after {leases * e.lease:g} s" if leases != float("inf") else "it is waited for"
    if e.heard:
        return f"others hear from it; {until}"
    kernel = ", and its host accepts connections" if e.probe == "accepted" else ""
    return f"it may have the last copy of a shard{kernel}; {until}"


def _leases(e: Evidence) -> float:
    """How many leases of silence the member is allowed."""
    if e.last_copy:
        return float("inf") if e.heard else LAST_COPY_LEASES
    return HEARD_LEASES if e.heard else 1
