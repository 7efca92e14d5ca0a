"""Shard machines: one test per rule, events in and effects out."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from psdist.consistency import ASP, BSP, SSP
from psdist.errors import FencedError, FutureStepError, InvalidArgumentError, NotMemberError, SequenceGapError
from psdist.types import ParametersMember
from psdist_server.core.async_shard import AsyncShard
from psdist_server.core.bsp_shard import BspShard
from psdist_server.core.role_changes import make_shard
from psdist_server.core.shard import (
    Aggregate,
    Apply,
    Cancelled,
    CutArmed,
    CutEnded,
    Forget,
    JoinProposed,
    JoinWithdrawn,
    MembersChanged,
    NormKnown,
    PullRequested,
    RefuseSlice,
    Reply,
    SliceAggregated,
    SliceApplied,
    SlicePushed,
    SliceRecord,
    StepsEnded,
    name_members,
)

TWO = (ParametersMember("worker-0", 1, 0), ParametersMember("worker-1", 1, 1))
tokens = count(1)


def push(worker: int, step: int, index: int = 0, incarnation: int = 1, **rest: Any) -> SlicePushed:
    return SlicePushed(next(tokens), index, f"worker-{worker}", incarnation, step, **rest)


def bsp(members=TWO, clipping=False, backup=0, slices=1) -> BspShard:
    shard = make_shard(range(slices), members, BSP(backup), clipping)
    assert isinstance(shard, BspShard)
    return shard


def asynchronous(consistency=None, members=TWO, slices=1) -> AsyncShard:
    shard = make_shard(range(slices), members, consistency or ASP(), False)
    assert isinstance(shard, AsyncShard)
    return shard


def step(shard, *pushes: SlicePushed, index: int = 0):
    effects = [effect for event in pushes for effect in shard.on(event)]
    effects += shard.on(SliceApplied(index))
    shard.validate()
    return bare(effects)


def bare(effects):
    """The effects without what is only for the duplicate table."""
    return [
        replace(effect, contributors=(), sequence=None) if isinstance(effect, Apply) else effect for effect in effects
    ]


# --- BSP --------------------------------------------------------------------------------------------------------------


def test_bsp_applies_once_all_are_there_in_rank_order() -> None:
    shard = bsp()
    late, early = push(1, 0), push(0, 0)
    assert shard.on(late) == []
    assert bare(shard.on(early)) == [Apply(0, 0, (early.token, late.token))]
    assert shard.on(SliceApplied(0)) == [Reply(late.token, 0, 1), Reply(early.token, 0, 1)]


def test_bsp_repeat_is_acknowledged_and_ignored_before_during_and_after_the_update() -> None:
    shard = bsp()
    first, again = push(0, 0), push(0, 0)
    shard.on(first)
    assert shard.on(again) == [Forget(again.token)]
    shard.on(push(1, 0))
    during = push(1, 0)
    assert shard.on(during) == [Forget(during.token)]
    answers = shard.on(SliceApplied(0))
    assert Reply(again.token, 0, 1, ignored=True) in answers
    assert Reply(during.token, 0, 1, ignored=True) in answers
    after = push(0, 0)
    assert shard.on(after) == [Forget(after.token), Reply(after.token, 0, 1, ignored=True)]


def test_bsp_backup_worker_is_late() -> None:
    shard = bsp(backup=1)
    prompt = push(0, 0)
    assert step(shard, prompt) == [Apply(0, 0, (prompt.token,)), Reply(prompt.token, 0, 1)]
    late = push(1, 0)
    assert shard.on(late) == [Forget(late.token), Reply(late.token, 0, 1, ignored=True, late=True)]


def test_bsp_step_from_the_future_is_refused_and_changes_nothing() -> None:
    shard = bsp()
    future = push(0, 1)
    (refusal,) = shard.on(future)
    assert isinstance(refusal, RefuseSlice) and isinstance(refusal.error, FutureStepError)
    assert "step 0" in str(refusal.error)
    assert shard.on(push(0, 0)) == []


@pytest.mark.parametrize("shard", [bsp(), asynchronous()])
def test_strangers_and_old_lives_are_refused(shard) -> None:
    (refusal,) = shard.on(push(7, 0))
    assert isinstance(refusal.error, NotMemberError)
    (refusal,) = shard.on(push(0, 0, incarnation=0))
    assert isinstance(refusal.error, FencedError)


def test_bsp_goes_on_when_a_member_leaves_and_counts_what_it_gave() -> None:
    shard = bsp()
    mine = push(1, 0)
    shard.on(mine)
    assert bare(shard.on(MembersChanged((TWO[1],)))) == [Apply(0, 0, (mine.token,))]
    shard.on(SliceApplied(0))
    gone, stays = push(1, 1), push(0, 1)
    shard.on(MembersChanged(TWO))
    shard.on(gone)
    shard.on(MembersChanged((TWO[0],)))
    assert bare(shard.on(stays)) == [Apply(0, 1, (stays.token, gone.token))]


def test_bsp_joiner_is_waited_for_from_its_first_step_on_even_before_it_is_confirmed() -> None:
    shard = bsp(members=(TWO[0],))
    joiner = ParametersMember("worker-1", 1, 1, first_step=1)
    assert shard.step_next == 0
    assert shard.on(JoinProposed(joiner)) == []
    assert step(shard, push(0, 0))
    waits = push(0, 1)
    assert shard.on(waits) == []
    assert "worker-1" in shard.waiting_for(waits.token, 0)
    assert bare(shard.on(JoinWithdrawn("worker-1"))) == [Apply(0, 1, (waits.token,))]


def test_bsp_joiner_must_not_push_before_its_first_step() -> None:
    shard = bsp(members=(TWO[0], ParametersMember("worker-1", 1, 1, first_step=3)))
    (refusal,) = shard.on(push(1, 0))
    assert isinstance(refusal.error, NotMemberError)
    assert "joins at step 3" in str(refusal.error)


def test_bsp_steps_that_nobody_can_contribute_to_are_empty() -> None:
    shard = bsp(members=(ParametersMember("worker-1", 2, 1, first_step=2),))
    pull = PullRequested(next(tokens), 0, "worker-1", min_version=2)
    assert shard.on(pull) == []
    assert shard.on(MembersChanged(tuple(shard.members.values()))) == [Apply(0, 0, ())]
    assert bare(shard.on(SliceApplied(0))) == [Apply(0, 1, ())]
    assert shard.on(SliceApplied(0)) == [Reply(pull.token, 0, 2)]


def test_bsp_the_rest_of_a_step_is_empty_for_a_snapshot_of_what_dead_workers_left() -> None:
    shard = bsp(members=TWO[:1], slices=2)
    step(shard, push(0, 0), index=0)
    assert shard.on(CutArmed(7)) == [] and shard.on(StepsEnded(1)) == []  # worker-0 may push yet
    assert shard.on(MembersChanged(())) == [Apply(1, 0, ())]
    assert shard.on(SliceApplied(1)) == []
    assert [state.version for state in shard.slices.values()] == [1, 1]
    shard.on(CutEnded())
    assert shard.on(MembersChanged(())) == []


def test_bsp_abstention_counts_as_made_and_contributes_nothing() -> None:
    shard = bsp()
    nothing, something = push(0, 0, abstain=True), push(1, 0)
    shard.on(nothing)
    assert bare(shard.on(something)) == [Apply(0, 0, (something.token,)), Forget(nothing.token)]


def test_bsp_pull_waits_for_its_version() -> None:
    shard = bsp(members=(TWO[0],))
    pull = PullRequested(next(tokens), 0, "anybody", min_version=1)
    assert shard.on(pull) == []
    assert Reply(pull.token, 0, 1) in step(shard, push(0, 0))


def test_bsp_clipping_aggregates_first_and_applies_when_the_norm_is_known() -> None:
    shard = bsp(members=(TWO[0],), clipping=True, slices=2)
    first, second = push(0, 0, 0), push(0, 0, 1)
    assert shard.on(first) == [Aggregate(0, 0, (first.token,))]
    assert shard.on(SliceAggregated(0)) == []
    assert "clipping" in shard.waiting_for(first.token, 0)
    shard.on(second)
    shard.on(SliceAggregated(1))
    assert bare(shard.on(NormKnown(0))) == [Apply(0, 0, ()), Apply(1, 0, ())]
    assert shard.on(SliceApplied(0)) == [Reply(first.token, 0, 1)]
    shard.validate()


def test_cancelled_call_is_not_answered_and_its_contribution_stays() -> None:
    shard = bsp()
    gone, stays = push(0, 0), push(1, 0)
    shard.on(gone)
    shard.on(Cancelled(gone.token, gone.index))
    assert bare(shard.on(stays)) == [Apply(0, 0, (gone.token, stays.token))]
    assert shard.on(SliceApplied(0)) == [Reply(stays.token, 0, 1)]


# --- SSP and ASP ------------------------------------------------------------------------------------------------------


def test_asp_applies_on_arrival_one_at_a_time_and_reports_staleness() -> None:
    shard = asynchronous()
    one, two = push(0, 0), push(1, 0)
    assert bare(shard.on(one)) == [Apply(0, 0, (one.token,))]
    assert shard.on(two) == []
    assert bare(shard.on(SliceApplied(0))) == [Reply(one.token, 0, 1), Apply(0, 1, (two.token,))]
    assert shard.on(SliceApplied(0)) == [Reply(two.token, 0, 2, staleness=1)]


def test_asp_inverse_staleness_scales_the_learning_rate() -> None:
    shard = asynchronous(ASP("inverse"))
    step(shard, push(0, 0))
    stale = push(1, 0, base_version=0)
    assert bare(shard.on(stale)) == [Apply(0, 1, (stale.token,), 0.5)]


def test_asp_refuses_a_gradient_on_a_version_that_the_slice_has_not_had() -> None:
    shard = asynchronous(slices=2)
    (refusal,) = shard.on(push(0, 0, base_version=1))
    assert isinstance(refusal.error, InvalidArgumentError) and "slice is at version 0" in refusal.error.message
    step(shard, push(0, 0))
    step(shard, push(0, 0, index=1), index=1)
    assert bare(shard.on(push(0, 1, base_version=1)))


def test_asp_takes_a_gradient_on_an_update_whose_end_is_not_known_yet() -> None:
    """A worker that shares memory may read it before."""
    shard = asynchronous()
    shard.on(push(0, 0))
    assert shard.on(push(1, 0, base_version=1)) == []
    (refusal,) = shard.on(push(1, 1, base_version=2))
    assert isinstance(refusal, RefuseSlice)


def test_asp_takes_any_base_version_after_a_promotion() -> None:
    """The lost primary may have shown updates that no copy has."""
    records = {0: SliceRecord(3, producers={TWO[0].producer: 3})}
    shard = make_shard([0], TWO, ASP(), clipping=False, records=records)
    ahead = push(0, 3, base_version=5)
    (apply,) = bare(shard.on(ahead))
    assert apply == Apply(0, 3, (ahead.token,))
    assert shard.on(SliceApplied(0)) == [Reply(ahead.token, 0, 4, staleness=0)]


def test_asp_repeats_are_applied_once() -> None:
    shard = asynchronous(slices=2)
    first, again = push(0, 0, 0), push(0, 0, 0)
    shard.on(first)
    assert shard.on(again) == [Forget(again.token)]
    assert shard.on(SliceApplied(0)) == [Reply(first.token, 0, 1), Reply(again.token, 0, 1, ignored=True)]
    step(shard, push(0, 0, 1), index=1)
    old = push(0, 0, 0)
    assert shard.on(old) == [Forget(old.token), Reply(old.token, 0, 1, ignored=True)]


def test_asp_gap_is_an_error() -> None:
    (refusal,) = asynchronous().on(push(0, 1))
    assert isinstance(refusal.error, SequenceGapError)


def test_ssp_holds_the_fast_worker_until_the_slow_one_catches_up() -> None:
    shard = asynchronous(SSP(1))
    fast = push(0, 0)
    assert Reply(fast.token, 0, 1) in step(shard, fast)
    ahead = push(0, 1, base_version=1)
    assert not any(isinstance(effect, Reply) for effect in step(shard, ahead))
    assert shard.waiting_for(ahead.token, 0) == "for worker-1 (rank 1) to reach clock 1 (staleness bound 1)"
    slow = push(1, 0)
    answers = step(shard, slow)
    assert Reply(ahead.token, 0, 3) in answers
    assert Reply(slow.token, 0, 3, staleness=2) in answers


def test_ssp_push_without_weights_is_acknowledged_when_applied() -> None:
    shard = asynchronous(SSP(0))
    only = push(0, 0, wants_weights=False)
    assert Reply(only.token, 0, 1) in step(shard, only)


def test_ssp_pull_waits_for_the_bound_too() -> None:
    shard = asynchronous(SSP(0))
    step(shard, push(0, 0, wants_weights=False))
    pull = PullRequested(next(tokens), 0, "worker-0")
    reader = PullRequested(next(tokens), 0, "somebody")
    assert shard.on(pull) == []
    assert shard.on(reader) == [Reply(reader.token, 0, 1)]
    assert Reply(pull.token, 0, 2) in step(shard, push(1, 0))


def test_ssp_member_that_leaves_no_longer_holds_the_others() -> None:
    shard = asynchronous(SSP(0))
    ahead = push(0, 0)
    step(shard, ahead)
    assert shard.on(MembersChanged((TWO[0],))) == [Reply(ahead.token, 0, 1)]


def test_ssp_newcomers_clock_does_not_depend_on_when_a_shard_hears_of_it() -> None:
    """Else one shard may let the first wait for the second, and another the second for the first."""
    early, late = (asynchronous(SSP(0), members=(TWO[0],)) for _ in range(2))
    both = MembersChanged((TWO[0], ParametersMember("worker-1", 1, 1, first_step=1)))
    early.on(both)
    for number in range(3):
        step(early, push(0, number))
        step(late, push(0, number))
    late.on(both)
    assert early.clocks == late.clocks == {"worker-0": 3, "worker-1": 1}


def test_asp_new_life_starts_a_new_sequence() -> None:
    shard = asynchronous(members=(TWO[0],))
    step(shard, push(0, 0))
    shard.on(MembersChanged((ParametersMember("worker-0", 2, 0),)))
    fresh = push(0, 0, incarnation=2)
    assert bare(shard.on(fresh)) == [Apply(0, 1, (fresh.token,))]


# --- another machine continues ----------------------------------------------------------------------------------------


def test_an_update_says_what_the_duplicate_table_learns_by_it() -> None:
    shard = bsp()
    shard.on(push(1, 0, abstain=True))
    (applied, _) = shard.on(push(0, 0))
    assert (applied.contributors, applied.sequence) == ((("worker-0", 1), ("worker-1", 1)), None)
    shard = asynchronous()
    (applied,) = shard.on(push(1, 0))
    assert (applied.contributors, applied.sequence) == ((("worker-1", 1),), 0)


def test_a_worker_that_has_pushed_nothing_has_no_entry_at_the_primary_as_at_its_copies() -> None:
    """A copy learns of lives by their updates: an entry more at the primary would say nothing more, and differ."""
    shard = asynchronous(SSP(0))
    shard.on(push(1, 0))  # Under way: not in the record.
    assert shard.record(0) == SliceRecord()
    shard.on(SliceApplied(0))
    assert shard.record(0) == SliceRecord(1, (), {("worker-1", 1): 1})


def test_bsp_goes_on_from_a_record_and_knows_what_was_applied() -> None:
    shard = bsp()
    step(shard, push(0, 0), push(1, 0))
    shard.on(push(0, 1))
    shard.on(push(1, 1))  # Under way: not in the record.
    successor = make_shard([0], TWO, BSP(), False, records={0: shard.record(0)})
    again, fresh = push(0, 0), [push(0, 1), push(1, 1)]
    assert successor.on(again) == [Forget(again.token), Reply(again.token, 0, 1, ignored=True)]
    assert successor.on(fresh[0]) == []
    assert bare(successor.on(fresh[1])) == [Apply(0, 1, tuple(part.token for part in fresh))]


def test_asp_goes_on_from_records_of_slices_that_differ() -> None:
    shard = asynchronous(slices=2)
    step(shard, push(0, 0, index=0), index=0)
    step(shard, push(0, 0, index=1), index=1)
    step(shard, push(0, 1, index=1), index=1)
    shard.on(push(0, 1, index=0))  # Under way: not in the record.
    successor = make_shard(range(2), TWO, ASP(), False, records={index: shard.record(index) for index in range(2)})
    successor.validate()
    assert successor.clocks == {"worker-0": 1, "worker-1": 0}
    again = push(0, 1, index=1)
    assert successor.on(again) == [Forget(again.token), Reply(again.token, 1, 2, ignored=True)]
    lost = push(0, 1, index=0)
    assert bare(successor.on(lost)) == [Apply(0, 1, (lost.token,))]
    successor.on(SliceApplied(0))
    assert successor.clocks["worker-0"] == 2


@pytest.mark.parametrize(("rule", "expected"), [("none", 1.0), ("linear", 0.25), ("sqrt", 0.5)])
def test_bsp_scales_the_learning_rate_by_who_took_part(rule: str, expected: float) -> None:
    shard = make_shard([0], TWO[:1], BSP(resize_lr=rule), False, reference_workers=4)
    (applied,) = shard.on(push(0, 0))
    assert applied.lr_scale == expected


# --- workers that were expelled and continue --------------------------------------------------------------------------


def again(worker: int, first_step: int, first_push: int = 0) -> ParametersMember:
    """Return the second incarnation of a worker, which continues the pushes of its first."""
    return ParametersMember(f"worker-{worker}", 2, worker, first_step, origin=1, first_push=first_push)


def test_bsp_what_an_expelled_worker_contributed_counts_once_when_it_goes_on() -> None:
    shard = bsp(slices=2)
    before = push(1, 0)
    assert shard.on(before) == []
    shard.on(MembersChanged(()))  # Both are expelled; slice 0 is being updated by the contributions so far.
    assert not shard.admits(ParametersMember("worker-0", 2, 0, 0, origin=1))
    assert shard.admits(again(1, 0))
    shard.on(SliceApplied(0))
    assert shard.admits(again(1, 0))
    shard.on(JoinProposed(again(1, 0)))
    shard.on(MembersChanged((again(1, 0),)))
    repeat = push(1, 0, incarnation=2)
    assert shard.on(repeat) == [Forget(repeat.token), Reply(repeat.token, 0, 1, ignored=True)]
    rest = push(1, 0, index=1, incarnation=2)
    assert bare(shard.on(rest)) == [Apply(1, 0, (rest.token,))]


def test_bsp_a_contribution_of_before_is_waited_for_no_more() -> None:
    shard = bsp()
    shard.on(push(1, 0))
    shard.on(MembersChanged(TWO[:1]))
    shard.on(JoinProposed(again(1, 0)))
    shard.on(MembersChanged((TWO[0], again(1, 0))))
    mine = push(0, 0)
    [apply] = shard.on(mine)
    assert apply.contributors == (("worker-0", 1), ("worker-1", 1)), "its contribution is there already"


def test_bsp_nobody_goes_on_with_a_step_that_was_closed_without_it() -> None:
    shard = bsp(slices=2)
    shard.on(push(1, 0, index=0))
    shard.on(MembersChanged(TWO[:1]))
    for index in (0, 1):
        step(shard, push(0, 0, index=index), index=index)
    assert not shard.admits(again(1, 0)), "slice 1 has step 0 without it"


def test_an_old_incarnation_is_refused_although_its_pushes_go_on() -> None:
    for shard in (bsp(), asynchronous()):
        shard.on(MembersChanged((TWO[0], again(1, 0))))
        stale = push(1, 0)
        [refusal] = shard.on(stale)
        assert isinstance(refusal, RefuseSlice) and isinstance(refusal.error, FencedError)


def test_asynchronous_what_departed_workers_pushed_is_known_when_they_go_on() -> None:
    shard = asynchronous(slices=2)
    step(shard, push(1, 0), index=0)
    shard.on(MembersChanged(TWO[:1], TWO[1:]))
    shard.on(MembersChanged((TWO[0], again(1, 0))))
    repeat = push(1, 0, incarnation=2)
    assert shard.on(repeat) == [Forget(repeat.token), Reply(repeat.token, 0, 1, ignored=True)]
    rest = push(1, 0, index=1, incarnation=2)
    assert step(shard, rest, index=1) == [Apply(1, 0, (rest.token,)), Reply(rest.token, 1, 1)]
    assert shard.record(0).producers == {("worker-1", 1): 1}


def test_asynchronous_a_queued_push_of_before_answers_its_repeat() -> None:
    shard = asynchronous()
    first, queued = push(0, 0), push(1, 0)
    shard.on(first)
    shard.on(queued)
    shard.on(Cancelled(queued.token, 0))
    shard.on(MembersChanged((TWO[0], again(1, 0))))
    repeat = push(1, 0, incarnation=2)
    assert shard.on(repeat) == [Forget(repeat.token)]
    shard.on(SliceApplied(0))
    assert shard.on(SliceApplied(0)) == [Reply(repeat.token, 0, 2, ignored=True, staleness=1)]


def test_who_departs_for_good_is_forgotten() -> None:
    shard = asynchronous()
    step(shard, push(1, 0))
    shard.on(MembersChanged(TWO[:1], TWO[1:]))
    shard.on(MembersChanged(TWO[:1]))
    assert shard.record(0).producers == {}


def test_ssp_a_worker_that_goes_on_counts_from_the_clock_that_was_agreed() -> None:
    shard = asynchronous(SSP(0))
    for number in range(3):
        step(shard, push(1, number, wants_weights=False))
    shard.on(MembersChanged(TWO[:1], TWO[1:]))
    assert shard.clocks == {"worker-0": 0} and shard.step_next == 0
    for number in range(9):
        step(shard, push(0, number))
    shard.on(MembersChanged((TWO[0], again(1, first_step=9, first_push=3))))
    assert shard.clocks == {"worker-0": 9, "worker-1": 9}
    step(shard, push(1, 3, incarnation=2, wants_weights=False))
    assert shard.clocks["worker-1"] == 10


def test_a_promoted_machine_knows_what_departed_workers_pushed() -> None:
    shard = asynchronous(slices=2)
    step(shard, push(1, 0), index=0)
    shard.on(MembersChanged(TWO[:1], TWO[1:]))
    records = {index: shard.record(index) for index in range(2)}
    promoted = make_shard(range(2), TWO[:1], ASP(), False, records=records, departed=TWO[1:])
    promoted.on(MembersChanged((TWO[0], again(1, 0))))
    [_, reply] = promoted.on(push(1, 0, incarnation=2))
    assert reply.ignored


# --- whom a step waits for --------------------------------------------------------------------------------------------

W0, W1, W2 = (ParametersMember(f"worker-{rank}", 1, rank) for rank in range(3))
LATE, NEW_W0 = ParametersMember("worker-9", 1, 9, first_step=5), ParametersMember("worker-0", 2, 0)


@pytest.mark.parametrize(
    ("step", "members", "contributed", "options", "waits"),
    [
        (3, [W0, W1, W2], [W1], {}, "for worker-0 (rank 0), worker-2 (rank 2) to push step 3"),
        (3, [W0, W1], [W0, W1], {}, ""),
        (4, [W0, LATE], [W0], {}, ""),
        (5, [W0, LATE], [W0], {}, "for worker-9 (rank 9) to push step 5"),
        (0, [W0, W1, W2], [W0, W2], {"backup_workers": 1}, ""),
        (0, [W0, W1], [], {"backup_workers": 7}, "for worker-0 (rank 0), worker-1 (rank 1) to push step 0"),
        (0, [], [W1], {}, ""),
        (4, [LATE], [], {}, ""),
        (5, [LATE], [], {}, "for worker-9 (rank 9) to push step 5"),
        (4, [], [], {}, "for a worker to push step 4"),
        (4, [], [], {"final_step": 5}, ""),
        (5, [], [], {"final_step": 5}, "for a worker to push step 5"),
        (4, [W0], [], {"final_step": 5}, "for worker-0 (rank 0) to push step 4"),
        (0, [NEW_W0], [W0], {}, "for worker-0 (rank 0) to push step 0"),
    ],
)
def test_bsp_says_for_whom_a_step_waits(step, members, contributed, options, waits) -> None:
    consistency = BSP(options.get("backup_workers", 0))
    shard = BspShard([0], [*contributed, ParametersMember("waits", 1, 99)], consistency, records={0: SliceRecord(step)})
    events = [SlicePushed(next(tokens), 0, one.worker_id, one.incarnation, step) for one in contributed]
    if "final_step" in options:
        events.append(StepsEnded(options["final_step"]))
    effects = [effect for event in (*events, MembersChanged(tuple(members))) for effect in shard.on(event)]
    assert shard.waiting_for(0, 0) == waits
    assert any(isinstance(effect, Apply) for effect in effects) == (not waits)
    shard.validate()


def test_many_names_are_cut() -> None:
    members = [ParametersMember(f"worker-{rank}", 1, rank) for rank in range(10)]
    assert name_members(members).endswith("worker-3 (rank 3) and 6 more")
