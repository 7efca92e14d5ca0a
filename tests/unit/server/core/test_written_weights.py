"""Weights that scripts write, in the shard machines: compared over the workers of a step, and assigned with it."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from psdist.consistency import ASP, BSP, Consistency
from psdist.errors import WrittenWeightsError
from psdist.types import ParametersMember
from psdist_server.core.async_shard import AsyncShard
from psdist_server.core.bsp_shard import BspShard
from psdist_server.core.role_changes import make_shard
from psdist_server.core.shard import (
    Aggregate,
    Apply,
    Cancelled,
    Effect,
    Forget,
    MembersChanged,
    RefuseSlice,
    Reply,
    SliceAggregated,
    SliceApplied,
    SlicePushed,
)

THREE = tuple(ParametersMember(f"worker-{rank}", 1, rank) for rank in range(3))
ONE, OTHER = b"one", b"other"
tokens = count(1)


def push(worker: int, step: int, written: bytes = b"", **rest: Any) -> SlicePushed:
    return SlicePushed(next(tokens), 0, f"worker-{worker}", 1, step, written=written, **rest)


def shard_at(
    step: int,
    members: tuple[ParametersMember, ...] = THREE,
    consistency: Consistency | None = None,
    clips: bool = False,
) -> BspShard | AsyncShard:
    """Return a machine of one slice after this many steps of all members."""
    shard = make_shard(range(1), members, consistency or BSP(), clips)
    for number in range(step):
        for rank in range(len(members)):
            shard.on(push(rank, number))
        shard.on(SliceApplied(0))
    return shard


def give(shard: BspShard | AsyncShard, *pushes: SlicePushed) -> list[Effect]:
    effects = [effect for event in pushes for effect in shard.on(event)]
    shard.validate()
    return effects


def applied(effects: list[Effect]) -> Apply:
    (found,) = (effect for effect in effects if isinstance(effect, Apply))
    return found


def refusals(effects: list[Effect]) -> dict[int, str]:
    found = [effect for effect in effects if isinstance(effect, RefuseSlice)]
    assert len(found) == len(effects) and all(isinstance(one.error, WrittenWeightsError) for one in found)
    return {one.token: str(one.error) for one in found}


def test_the_lowest_rank_of_equal_writers_is_the_writer() -> None:
    pushes = [push(rank, 1, ONE) for rank in (2, 0, 1)]
    assert applied(give(shard_at(1), *pushes)).writer == pushes[1].token
    assert applied(give(shard_at(1), *[push(rank, 1) for rank in range(3)])).writer == 0


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ((ONE, b"", b""), "rank 0 wrote one thing, ranks 1, 2 wrote nothing"),
        ((b"", ONE, OTHER), "rank 1 wrote one thing, rank 2 wrote another, rank 0 wrote nothing"),
        ((ONE, ONE, OTHER), "ranks 0, 1 wrote one thing, rank 2 wrote another"),
    ],
)
def test_different_writes_are_refused_and_change_nothing(written: tuple[bytes, ...], expected: str) -> None:
    shard = shard_at(1)
    pushes = [push(rank, 1, one) for rank, one in enumerate(written)]
    refused = refusals(give(shard, *pushes))
    assert refused.keys() == {one.token for one in pushes} and all(expected in text for text in refused.values())
    assert shard.slices[0].version == 1 and not shard.slices[0].busy
    again = [push(rank, 1, ONE, attempt=1) for rank in range(3)]
    assert applied(give(shard, *again)).parts == tuple(one.token for one in again)


def test_a_refusal_that_was_lost_is_repeated() -> None:
    """A connection may break before the worker reads the refusal. Its push would wait for a worker that was refused
    and makes no other."""
    shard = shard_at(1)
    first = refusals(give(shard, *[push(rank, 1, one) for rank, one in enumerate((ONE, b"", b""))]))
    shard.on(push(1, 1, attempt=1, withdraws=True))
    again = push(0, 1, ONE)
    assert refusals(give(shard, again)) == {again.token: next(iter(first.values()))}


def test_a_repeat_of_a_refused_push_is_refused_with_it() -> None:
    shard, first = shard_at(1), push(0, 1, ONE)
    repeat = push(0, 1, ONE)
    assert give(shard, first, repeat) == [Forget(repeat.token)]
    rest = [push(1, 1), push(2, 1)]
    assert refusals(give(shard, *rest)).keys() == {first.token, repeat.token, *(one.token for one in rest)}


def test_a_withdrawn_attempt_is_never_applied() -> None:
    """A slice may hold a contribution of an attempt that another slice refused, and may get it even later."""
    shard, left = shard_at(1), push(0, 1, OTHER)
    shard.on(left)
    shard.on(Cancelled(left.token, 0))
    withdrawal = push(0, 1, attempt=1, withdraws=True)
    answer = Reply(withdrawal.token, 0, version=1)
    assert give(shard, withdrawal) == [Forget(left.token), Forget(withdrawal.token), answer]
    assert list(refusals(give(shard, late := push(0, 1, OTHER)))) == [late.token]
    others = [push(1, 1, ONE), push(2, 1, ONE)]
    assert give(shard, *others) == [], "they wait for the next attempt of rank 0"
    again = push(0, 1, ONE, attempt=1)
    assert applied(give(shard, again)).parts == (again.token, *(one.token for one in others))


def test_a_withdrawal_comes_too_late_for_an_applied_step() -> None:
    shard = shard_at(1)
    for late in (push(0, 0, attempt=1, withdraws=True), push(1, 0, attempt=1, withdraws=True)):
        assert give(shard, late) == [Forget(late.token), Reply(late.token, 0, version=1, ignored=True)]


def test_only_earlier_attempts_are_refused_if_others_have_made_their_next() -> None:
    """Workers learn of a refusal one after the other. None of them is refused twice for it."""
    shard, earlier, later = shard_at(1), push(0, 1, OTHER), [push(1, 1, attempt=1), push(2, 1, attempt=1)]
    assert list(refusals(give(shard, earlier, *later))) == [earlier.token]
    again = push(0, 1, attempt=1)
    assert applied(give(shard, again)).parts == (again.token, *(one.token for one in later))


def test_a_refusal_names_the_next_attempt() -> None:
    refused = give(shard_at(1), push(0, 1, ONE, attempt=3), push(1, 1, attempt=3), push(2, 1))
    assert [one.error.details["attempt"] for one in refused if isinstance(one, RefuseSlice)] == ["3"]
    refused = give(shard_at(1), push(0, 1, ONE, attempt=3), *(push(rank, 1, attempt=3) for rank in (1, 2)))
    assert [one.error.details["attempt"] for one in refused if isinstance(one, RefuseSlice)] == ["4"] * 3


def test_a_cancelled_push_is_replaced_by_one_with_other_writes() -> None:
    shard, left, again = shard_at(1), push(0, 1, OTHER), push(0, 1, ONE)
    assert give(shard, left, again) == [Forget(left.token)]
    assert applied(give(shard, push(1, 1, ONE), push(2, 1, ONE))).writer == again.token


def test_a_worker_that_left_a_different_write_does_not_hold_the_others() -> None:
    shard = shard_at(1)
    refused = give(shard, push(0, 1, OTHER), push(1, 1, ONE), push(2, 1, ONE))
    assert len(refusals(refused)) == 3
    give(shard, push(1, 1, ONE, attempt=1), push(2, 1, ONE, attempt=1))
    assert applied(shard.on(MembersChanged(THREE[1:]))).contributors == (("worker-1", 1), ("worker-2", 1))


def test_following_and_joining_workers_need_not_write() -> None:
    pushes = [push(0, 1, ONE), push(1, 1, follows_writes=True), push(2, 1, ONE)]
    assert applied(give(shard_at(1), *pushes)).writer == pushes[0].token
    pushes = [push(0, 1, ONE), push(1, 1, abstain=True), push(2, 1, ONE)]
    assert len(refusals(give(shard_at(1), *pushes))) == 3, "it abstains in this slice only"
    joined = (*THREE[:2], ParametersMember("worker-2", 1, 2, first_step=1))
    shard = shard_at(0, THREE[:2])
    give(shard, push(0, 0), push(1, 0))
    shard.on(SliceApplied(0))
    shard.on(MembersChanged(joined))
    pushes = [push(0, 1, ONE), push(1, 1, ONE), push(2, 1)]
    assert applied(give(shard, *pushes)).writer == pushes[0].token


def test_all_workers_write_before_the_first_step_of_all() -> None:
    pushes = [push(0, 0, ONE), push(1, 0), push(2, 0)]
    assert len(refusals(give(shard_at(0), *pushes))) == 3


def test_an_abstaining_writer_is_forgotten_after_it_was_used() -> None:
    for shard in (shard_at(1, THREE[:1]), shard_at(1, THREE[:1], ASP())):
        only = push(0, 1, ONE, abstain=True)
        apply, forget = give(shard, only)
        assert isinstance(apply, Apply) and (apply.parts, apply.writer) == ((), only.token)
        assert forget == Forget(only.token)


def test_clipping_takes_the_written_weights_with_the_mean() -> None:
    shard = shard_at(0, THREE[:1], clips=True)
    only = push(0, 0, ONE)
    assert give(shard, only) == [Aggregate(0, 0, (only.token,), only.token)]
    shard.on(SliceAggregated(0))


def test_without_common_steps_each_push_has_its_own_writes() -> None:
    shard = shard_at(0, THREE, ASP())
    for written in (ONE, OTHER, b""):
        one = push(0, 0, written)
        if written == ONE:
            assert applied(give(shard, one)).writer == one.token
    shard.on(SliceApplied(0))
    other = push(1, 0, OTHER)
    assert applied(give(shard, other)).writer == other.token


def test_a_caller_that_repeats_its_push_is_not_gone() -> None:
    """Its contribution would be dropped otherwise, and it would wait for itself."""
    shard, first, repeat = shard_at(1), push(0, 1, ONE), push(0, 1, ONE)
    give(shard, first)
    shard.on(Cancelled(first.token, 0))
    give(shard, repeat, push(1, 1))
    assert repeat.token in refusals(give(shard, push(2, 1)))
