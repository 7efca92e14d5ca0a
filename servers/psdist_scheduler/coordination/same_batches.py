"""Warning about workers that read the same batches: servers see that their gradients are equal, byte for byte. Pure.

The worker with the lowest rank logs it, since its log is the one that people read. It is said once per parameter set,
however many servers report it. Workers that average their gradients before they push them (``MEANS_SUFFIX``) are not
warned: these are equal.
"""

from __future__ import annotations

from psdist.optim import MEANS_SUFFIX
from psdist_scheduler.events.cluster_events import Answer, Effect, LogEvent
from psdist_scheduler.events.cluster_state import Member
from psdist_scheduler.events.worker_events import EqualContributions, Notice
from psdist_scheduler.members.membership import Membership
from psdist_scheduler.placement.registry import Registry


class SameBatchWarnings:
    """Warnings about equal contributions, by parameter set."""

    def __init__(self, members: Membership, registry: Registry) -> None:
        self._members = members
        self._registry = registry
        self._said: set[str] = set()

    def on_report(self, event: EqualContributions) -> list[Effect]:
        """Process a server's report. It counts if the workers are still members."""
        wanted = set(event.worker_ids)
        alike = sorted((m for m in self._members.workers if m.member_id in wanted), key=lambda worker: worker.rank)
        is_known = self._registry.get(event.parameters) is not None
        are_means = self._registry.get(event.parameters + MEANS_SUFFIX) is not None
        if len(alike) < 2 or not is_known or are_means or event.parameters in self._said:
            return []
        self._said.add(event.parameters)
        text = _warning(event.parameters, event.step, alike)
        session = self._members.sessions.call_of(alike[0].member_id)
        # Once in the launcher's output: it shows the scheduler's warnings beside those of the worker.
        return [LogEvent(text), Answer(session, Notice(text))] if session else [LogEvent(text, "warning")]


def _warning(parameters: str, step: int, alike: list[Member]) -> str:
    *ranks, last = [str(worker.rank) for worker in alike]
    return (
        f"ranks {', '.join(ranks)} and {last} push the same gradients of {parameters!r}, byte for byte (steps up to "
        f"{step}): they train on the same batches, and {len(alike)} workers learn no more than one. Divide the data: "
        "psdist.data.DistributedSampler, data[context.rank::context.world_size], or psdist.torch.LeasedDataLoader. "
        "A script that draws its samples at random must include the rank in its seed"
    )
