"""Gates: may a slice be updated now, and may it be read now? Pure functions that return a reason.

The empty reason means yes. Any other reason completes a sentence that begins with "waiting", such as "for worker-1
(rank 1) to push step 12".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from psdist.types import ParametersMember

_NAMED_MAX = 4


def name_members(members: Collection[ParametersMember]) -> str:
    """``worker-1 (rank 1), worker-3 (rank 3)``, in rank order, at most four of them by name."""
    ordered = sorted(members, key=lambda member: member.rank)
    named = ", ".join(f"{member.worker_id} (rank {member.rank})" for member in ordered[:_NAMED_MAX])
    return named + (f" and {len(ordered) - _NAMED_MAX} more" if len(ordered) > _NAMED_MAX else "")


def bsp_apply(
    step: int,
    members: Collection[ParametersMember],
    contributed: Collection[tuple[str, int]],
    backup_workers: int,
    final_step: int = 0,
) -> str:
    """May ``step`` be applied? ``members`` are all there are; those whose first step is later are not asked for.

    contributed: producers of the contributions that are there, of members or not: what a worker had contributed before
        it left counts.
    final_step: the step that a snapshot wants where nobody is left who could push a lower one; else 0.
    """
    if bsp_complete(step, members, contributed, backup_workers, final_step):
        return ""
    missing = _missing([member for member in members if member.first_step <= step], contributed)
    return f"for {name_members(missing) or 'a worker'} to push step {step}"


def bsp_complete(
    step: int,
    members: Collection[ParametersMember],
    contributed: Collection[tuple[str, int]],
    backup_workers: int,
    final_step: int = 0,
) -> bool:
    """Whether ``bsp_apply`` has no reason, without the time to write one: this is asked for every contribution."""
    if not contributed:  # No worker can contribute to this step any more, and a later one is awaited.
        return (bool(members) or step < final_step) and all(member.first_step > step for member in members)
    asked = [member for member in members if member.first_step <= step]
    if len(asked) - len(contributed) > backup_workers:
        return False
    return len(_missing(asked, contributed)) <= backup_workers


def _missing(asked: Collection[ParametersMember], contributed: Collection[tuple[str, int]]) -> list[ParametersMember]:
    return [member for member in asked if member.producer not in contributed]


def ssp_read(
    clock: int,
    worker_id: str,
    members: Mapping[str, ParametersMember],
    clocks: Mapping[str, int],
    staleness: int | None,
) -> str:
    """May ``worker_id``, which has completed ``clock`` pushes, read? Yes if no other member is more than ``staleness``
    clocks behind. ``staleness`` None is no bound (ASP)."""
    if staleness is None:
        return ""
    behind = [
        member for other, member in members.items() if other != worker_id and clocks.get(other, 0) < clock - staleness
    ]
    if not behind:
        return ""
    return f"for {name_members(behind)} to reach clock {clock - staleness} (staleness bound {staleness})"
