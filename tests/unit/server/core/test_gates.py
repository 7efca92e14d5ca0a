"""Gates: every decision, and the reason it gives."""

from hypothesis import given
from hypothesis import strategies as st

from psdist.types import ParametersMember
from psdist_server.core import gates

W0, W1, W2 = (ParametersMember(f"worker-{rank}", 1, rank) for rank in range(3))
LATE = ParametersMember("worker-9", 1, 9, first_step=5)


def life(member: ParametersMember) -> tuple[str, int]:
    return member.worker_id, member.incarnation


def test_bsp_waits_for_every_member_and_names_who_is_missing() -> None:
    assert gates.bsp_apply(3, [W0, W1, W2], {life(W1)}, 0) == (
        "for worker-0 (rank 0), worker-2 (rank 2) to push step 3"
    )
    assert gates.bsp_apply(3, [W0, W1], {life(W0), life(W1)}, 0) == ""


def test_bsp_does_not_ask_members_before_their_first_step() -> None:
    assert gates.bsp_apply(4, [W0, LATE], {life(W0)}, 0) == ""
    assert "worker-9" in gates.bsp_apply(5, [W0, LATE], {life(W0)}, 0)


def test_bsp_backup_workers_need_not_be_waited_for_but_somebody_must_contribute() -> None:
    assert gates.bsp_apply(0, [W0, W1, W2], {life(W0), life(W2)}, 1) == ""
    assert gates.bsp_apply(0, [W0, W1], set(), 7) != ""


def test_bsp_counts_what_a_worker_gave_before_it_left() -> None:
    assert gates.bsp_apply(0, [W0], {life(W0), life(W1)}, 0) == ""
    assert gates.bsp_apply(0, [], {life(W1)}, 0) == ""


def test_bsp_step_is_empty_when_only_later_members_are_left() -> None:
    assert gates.bsp_apply(4, [LATE], set(), 0) == ""
    assert gates.bsp_apply(5, [LATE], set(), 0) != ""
    assert gates.bsp_apply(4, [], set(), 0) != ""


def test_bsp_steps_that_nobody_pushed_are_empty_where_a_snapshot_wants_what_is_left() -> None:
    assert gates.bsp_apply(4, [], set(), 0, final_step=5) == "" and gates.bsp_complete(4, [], set(), 0, final_step=5)
    assert gates.bsp_apply(5, [], set(), 0, final_step=5) != "" and not gates.bsp_complete(5, [], set(), 0, 5)
    assert gates.bsp_apply(4, [W0], set(), 0, final_step=5) != "" and not gates.bsp_complete(4, [W0], set(), 0, 5)


def test_bsp_other_life_of_a_worker_does_not_count_for_this_one() -> None:
    assert "worker-0" in gates.bsp_apply(0, [W0], {("worker-0", 0)}, 0)


def test_ssp_bound_holds_against_the_slowest_other_member() -> None:
    members = {m.worker_id: m for m in (W0, W1)}
    assert gates.ssp_read(3, "worker-0", members, {"worker-0": 3, "worker-1": 1}, 2) == ""
    assert gates.ssp_read(4, "worker-0", members, {"worker-0": 4, "worker-1": 1}, 2) == (
        "for worker-1 (rank 1) to reach clock 2 (staleness bound 2)"
    )


def test_asp_never_waits() -> None:
    assert gates.ssp_read(1000, "worker-0", {"worker-1": W1}, {}, None) == ""


def test_many_names_are_cut() -> None:
    members = [ParametersMember(f"worker-{rank}", 1, rank) for rank in range(10)]
    assert gates.name_members(members).endswith("worker-3 (rank 3) and 6 more")


@given(
    step=st.integers(0, 4),
    firsts=st.lists(st.integers(0, 5), max_size=4),
    contributed=st.sets(st.tuples(st.sampled_from(["w0", "w1", "w2", "w3", "gone"]), st.integers(1, 2)), max_size=5),
    backup=st.integers(0, 3),
)
def test_complete_means_no_reason(step: int, firsts: list[int], contributed: set[tuple[str, int]], backup: int) -> None:
    members = [ParametersMember(f"w{rank}", 1, rank, first) for rank, first in enumerate(firsts)]
    reason = gates.bsp_apply(step, members, contributed, backup)
    assert gates.bsp_complete(step, members, contributed, backup) == (not reason)
