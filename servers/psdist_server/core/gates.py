"""Gates: conditions for updating and for reading a slice. Pure functions that return a reason.

An empty reason means the gate is open. Any other reason completes a sentence that begins with "waiting", such as "for
worker-1 (rank 1) to push step 12".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from psdist.types import ParametersMember

_NAMED_MAX = 4


def name_members(members: Collection[ParametersMember]) -> str:
    """Format members as ``worker-1 (rank 1), worker-3 (rank 3)``, in rank order. At most four are named."""
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
    """Return why ``step`` cannot be applied yet, or "".

    members: all members; those whose first step is later are not waited for.
    contributed: producers of the contributions received so far, members or not: a contribution counts even if its
        worker has left.
    final_step: the step of a snapshot's cut if no worker is left to push the steps below it; else 0.
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
    """True if ``bsp_apply`` would return "". Skips formatting a reason, since it runs for every contribution."""
    if not contributed:  # No worker can contribute any more; a later step is awaited.
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
    """Return why ``worker_id``, which has completed ``clock`` pushes, may not read yet, or "".

    Reading is allowed if no other member is more than ``staleness`` clocks behind. ``staleness`` None means no bound
    (ASP).
    """
    if staleness is None:
        return ""
    behind = [
        member for other, member in members.items() if other != worker_id and clocks.get(other, 0) < clock - staleness
    ]
    if not behind:
        return ""
    return f"for {name_members(behind)} to reach clock {clock - staleness} (staleness bound {staleness})"
