"""Start of a run: reasons to end it before training has begun. Pure.

A run that never starts would occupy its machines forever: scripts that fail before ``psdist.init()`` never reach the
scheduler. Two conditions end it, with RunNotStartedError at every member:

* The required members were not all present at one time within ``start_timeout_seconds``.
* An agent with a fixed number of nodes gave up, and its workers are still missing. An elastic run may use others.

Once a parameter set is ready, the run has begun. From then on, ``rollback`` and ``exit_requests`` decide about its end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from psdist.errors import RunNotStartedError
from psdist.wire.limits import REPORT_WAIT_SECONDS
from psdist_scheduler.events.cluster_events import Answer, Done, Effect, GiveUp, LogEvent
from psdist_scheduler.events.cluster_state import ClusterSettings
from psdist_scheduler.members.membership import Membership
from psdist_scheduler.placement.registry import Registry

#: Interval in seconds at which a wait is reported after its first report.
REPEAT_SECONDS: Final = 60.0
_RANKS_SHOWN: Final = 8


@dataclass(slots=True)
class RunStart:
    """Waits for one run to begin.

    _since: start of this scheduler.
    _is_complete: True if the required members were present at one time.
    """

    _settings: ClusterSettings
    _members: Membership
    _registry: Registry
    _since: float
    _report_at: float = field(init=False)
    _is_complete: bool = False
    _has_begun: bool = False
    #: Why the first agent gave up; empty if none did.
    _given_up: str = ""

    def __post_init__(self) -> None:
        self._report_at = self._since + REPORT_WAIT_SECONDS

    def give_up(self, event: GiveUp) -> list[Effect]:
        """Process the end of an agent whose script fails. Raises WrongRunError."""
        text = f"the launcher on {event.host or 'an unknown host'} gave up: {event.reason}"
        if not event.elastic:
            self._given_up = self._given_up or text
        return [LogEvent(text, "warning"), Answer(event.call, Done())]

    def progress(self, now: float) -> list[Effect]:
        """Report the members that the run waits for, and end it if it cannot begin."""
        self._has_begun = self._has_begun or any(entry.ready for entry in self._registry.entries)
        if self._has_begun:
            return []
        shortage = self._members.demand.shortage(begun=True)
        if not shortage:
            self._is_complete = True
            return []
        if self._given_up:
            self._fail(f"{self._given_up}. Fix the script, and start the run again")
        if self._is_complete:
            return []
        waited, limit = now - self._since, self._settings.start_timeout_seconds
        text = f"waiting {shortage}{self._missing_ranks()}"
        if limit and waited >= limit:
            remedy = "See the logs of their launchers, and start the run again"
            self._fail(f"the run did not start within {limit:g} s (--start-timeout), {text}. {remedy}")
        if now < self._report_at:
            return []
        self._report_at = now + REPEAT_SECONDS
        until = f" of at most {limit:g} s (--start-timeout)" if limit else ""
        return [LogEvent(f"the run has not started: {text}, {waited:.0f} s so far{until}", "wait")]

    def _fail(self, text: str) -> None:
        self._registry.resume.fail(RunNotStartedError(text))

    def _missing_ranks(self) -> str:
        """Return the missing ranks if some are present; empty if all of them are missing."""
        there = set(self._members.demand.ranks_in_service)
        missing = [rank for rank in range(self._members.demand.workers_min) if rank not in there]
        if not there or not missing:
            return ""
        more = f" and {len(missing) - _RANKS_SHOWN} more" if len(missing) > _RANKS_SHOWN else ""
        return f" (rank {', '.join(map(str, missing[:_RANKS_SHOWN]))}{more})"
