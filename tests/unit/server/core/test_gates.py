"""Gates of the shard machines: for whom a step or a read waits, and the reason that it gives."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from psdist.consistency import ASP, BSP, SSP
from psdist.types import ParametersMember
from psdist_server.core.bsp_shard import BspShard
from psdist_server.core.events import (
    Apply,
    MembersChanged,
    PullRequested,
    SliceApplied,
    SlicePushed,
    SliceRecord,
    StepsEnded,
)
from psdist_server.core.role_changes import make_shard
from psdist_server.core.shard import name_members

W0, W1, W2 = (ParametersMember(f"worker-{rank}", 1, rank) for rank in range(3))
LATE = ParametersMember("worker-9", 1, 9, first_step=5)
OLD_W0 = ParametersMember("worker-0", 1, 0)
NEW_W0 = ParametersMember("worker-0", 2, 0)


def wait_of_step(
    step: int,
    members: Sequence[ParametersMember],
    contributed: Sequence[ParametersMember],
    backup_workers: int = 0,
    final_step: int = 0,
) -> str:
    """Return why ``step`` is not applied while these are the members; "" if it is."""
    shard = BspShard(
        [0], [*contributed, ParametersMember("waits", 1, 99)], BSP(backup_workers), records={0: SliceRecord(step)}
    )
    effects = [
        effect
        for token, member in enumerate(contributed, 1)
        for effect in shard.on(SlicePushed(token, 0, member.worker_id, member.incarnation, step))
    ]
    if final_step:
        effects += shard.on(StepsEnded(final_step))
    effects += shard.on(MembersChanged(tuple(members)))
    waits = shard.waiting_for(0, 0)
    assert any(isinstance(effect, Apply) for effect in effects) == (not waits)
    shard.validate()
    return waits


def test_bsp_waits_for_every_member_and_names_who_is_missing() -> None:
    assert wait_of_step(3, [W0, W1, W2], [W1]) == "for worker-0 (rank 0), worker-2 (rank 2) to push step 3"
    assert wait_of_step(3, [W0, W1], [W0, W1]) == ""


def test_bsp_does_not_ask_members_before_their_first_step() -> None:
    assert wait_of_step(4, [W0, LATE], [W0]) == ""
    assert "worker-9" in wait_of_step(5, [W0, LATE], [W0])


def test_bsp_backup_workers_need_not_be_waited_for_but_somebody_must_contribute() -> None:
    assert wait_of_step(0, [W0, W1, W2], [W0, W2], 1) == ""
    assert wait_of_step(0, [W0, W1], [], 7) == "for worker-0 (rank 0), worker-1 (rank 1) to push step 0"


def test_bsp_counts_what_a_worker_gave_before_it_left() -> None:
    assert wait_of_step(0, [W0], [W0, W1]) == ""
    assert wait_of_step(0, [], [W1]) == ""


def test_bsp_step_is_empty_when_only_later_members_are_left() -> None:
    assert wait_of_step(4, [LATE], []) == ""
    assert wait_of_step(5, [LATE], []) == "for worker-9 (rank 9) to push step 5"
    assert wait_of_step(4, [], []) == "for a worker to push step 4"


def test_bsp_steps_that_nobody_pushed_are_empty_where_a_snapshot_wants_what_is_left() -> None:
    assert wait_of_step(4, [], [], final_step=5) == ""
    assert wait_of_step(5, [], [], final_step=5) != ""
    assert wait_of_step(4, [W0], [], final_step=5) != ""


def test_bsp_other_life_of_a_worker_does_not_count_for_this_one() -> None:
    assert "worker-0" in wait_of_step(0, [NEW_W0], [OLD_W0])


@pytest.mark.parametrize(
    ("consistency", "pushes", "waits"),
    [
        (SSP(2), 2, ""),
        (SSP(2), 3, "for worker-1 (rank 1) to reach clock 1 (staleness bound 2)"),
        (ASP(), 3, ""),
    ],
)
def test_the_staleness_bound_holds_against_the_slowest_other_member(
    consistency: SSP | ASP, pushes: int, waits: str
) -> None:
    shard = make_shard([0], [W0, W1], consistency, False)
    for step in range(pushes):
        shard.on(SlicePushed(step + 1, 0, "worker-0", 1, step, wants_weights=False))
        shard.on(SliceApplied(0))
    shard.on(PullRequested(9, 0, "worker-0"))
    assert shard.waiting_for(9, 0) == waits


def test_many_names_are_cut() -> None:
    members = [ParametersMember(f"worker-{rank}", 1, rank) for rank in range(10)]
    assert name_members(members).endswith("worker-3 (rank 3) and 6 more")
