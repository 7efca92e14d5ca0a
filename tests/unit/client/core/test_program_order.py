"""Order of a script's pushes: starts of its iterations, inferred or declared."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psdist.client.core.program_order import PATIENCE, PeriodFinder, ProgramOrder
from psdist.client.core.push_sequence import PushSequence
from psdist.consistency import BSP
from psdist.wire.limits import ORDER_PUSHES_MAX


class Script:
    """A script that trains these sets, each of one slice."""

    def __init__(self, names: str = "DG") -> None:
        self.order = ProgramOrder()
        self.sequences = {name: PushSequence(1, BSP()) for name in names}
        for name, sequence in self.sequences.items():
            self.order.enter(name, sequence)

    def push(self, names: str) -> None:
        """Make pushes of these sets, in this order."""
        for name in names:
            self.begin(name)
            push = self.sequences[name].begin_push()
            push.answer(0, push.number + 1)
            self.sequences[name].end_push(push, seen=True)

    def begin(self, name: str) -> None:
        """Start a push that is not answered yet."""
        self.order.begin_push(name)
        self.sequences[name].send(0)


def test_an_iteration_is_inferred_once_it_was_seen_twice() -> None:
    for iteration in ["DG", "DDDDDG", "DGG", "DDGG", "DGE", "DDGDGE"]:
        script = Script("".join(sorted(set(iteration))))
        assert script.order.is_at_start, "nothing was pushed"
        script.push(iteration)
        assert script.order.standing.start is None, "it may be longer"
        script.push(iteration)
        for number in range(3 * len(iteration)):
            standing = script.order.standing
            assert (standing.period, standing.position) == (len(iteration), 2 * len(iteration) + number)
            assert standing.start == standing.position - number % len(iteration)
            assert script.order.is_at_start == (number % len(iteration) == 0) != script.order.is_inside
            script.push(iteration[number % len(iteration)])


def test_a_push_that_has_begun_is_inside_the_iteration() -> None:
    script = Script()
    script.push("DGDGDG")
    script.begin("D")
    standing = script.order.standing
    assert (standing.position, standing.start, standing.next) == (7, 6, {"D": 4, "G": 3})


def test_a_set_that_was_never_pushed_is_waited_for() -> None:
    script = Script()
    script.push("D" * (PATIENCE - 1))
    assert script.order.standing.start is None, "five steps of D to one of G begin like this"
    script.push("D")
    assert script.order.is_at_start, "G is for something else"
    script.push("DDDDDG" * 20)
    assert script.order.standing.start is None, "it was not"


def test_a_longer_pattern_replaces_a_shorter_one() -> None:
    script = Script()
    script.push("DGDG")
    assert script.order.standing.period == 2
    script.push("DDG")
    assert script.order.standing.start is None
    script.push("DGDGDDG")
    assert (script.order.standing.period, script.order.is_at_start) == (7, True)


def test_an_order_that_does_not_repeat_has_no_iterations() -> None:
    finder = PeriodFinder(frozenset("DG"))
    length = 1
    while finder.count < ORDER_PUSHES_MAX and not finder.is_irregular:
        for name in "D" * length + "G":
            finder.add(name)
        length += 1
    assert finder.is_irregular and not finder.pattern


def test_declared_iterations_count_whatever_the_order() -> None:
    script = Script()
    script.order.mark_boundary()
    for iteration in ("DG", "DDDG", "G"):
        assert script.order.is_at_start
        script.push(iteration)
        assert script.order.is_inside and script.order.standing.is_declared
        script.order.mark_boundary()
    assert script.order.standing.start == 7


def test_a_set_that_is_opened_later_begins_another_order() -> None:
    script = Script()
    script.push("DGDGD")
    script.sequences["E"] = PushSequence(1, BSP())
    script.order.enter("E", script.sequences["E"])
    assert script.order.is_at_start
    script.push("DGEDGE")
    assert (script.order.standing.period, script.order.standing.start) == (3, 11)


def test_one_set_alone_is_not_watched() -> None:
    script = Script("D")
    script.push("DDDD")
    assert not script.order.is_shared and script.order.is_at_start


def test_a_worker_that_rejoins_within_an_iteration_skips_its_rest() -> None:
    script = Script()
    script.push("DGDGD")
    script.order.lose_place()
    assert script.order.drops_next("D") and script.order.is_at_start
    script.order.drop_push("G", has_begun=False)
    assert not script.order.drops_next("D") and script.order.is_at_start


def test_a_worker_that_rejoins_between_iterations_skips_the_next_one_whole() -> None:
    script = Script()
    script.push("DGDG")
    script.order.lose_place()
    script.order.outdated.add("G")
    assert script.order.drops_next("D"), "D would count in an iteration in which G does not"
    script.order.drop_push("D", has_begun=False)
    assert script.order.drops_next("D") and not script.order.outdated
    script.order.drop_push("G", has_begun=False)
    assert not script.order.drops_next("D")


def test_weights_that_were_pulled_lose_no_iteration() -> None:
    script = Script()
    script.push("DGDG")
    script.order.lose_place()
    assert not script.order.drops_next("D")


def test_a_worker_that_rejoins_with_unknown_iterations_skips_until_they_are_known() -> None:
    script = Script()
    script.push("DGD")
    script.order.lose_place()
    assert script.order.drops_next("D")
    script.order.drop_push("G", has_begun=False)
    assert not script.order.drops_next("D") and script.order.is_at_start


def test_an_order_that_repeats_nothing_for_long_is_not_skipped() -> None:
    script = Script()
    script.push("D" * (PATIENCE - 1))
    script.order.lose_place()
    assert script.order.drops_next("D")
    script.push("GDDG")
    script.order.lose_place()
    assert not script.order.drops_next("D")


def lose_course(script: Script, names: str) -> None:
    """Roll the run back to a snapshot, which the script learns by a push or pull of ``names``."""
    script.order.lose_place()
    for name in script.sequences:
        script.order.lose_course(name, incarnation=2)
    script.order.lost_course -= set(names)


def test_after_a_rollback_iterations_are_dropped_until_all_weights_are_new() -> None:
    script = Script()
    script.push("DGDGD")
    lose_course(script, "")
    script.order.drop_push("G", has_begun=False)  # Its answer has the new weights of G.
    assert script.order.drops_next("D"), "its gradient is of weights of D from before"
    script.order.drop_push("D", has_begun=False)
    assert script.order.drops_next("G"), "an iteration counts as a whole or not at all"
    script.order.drop_push("G", has_begun=False)
    assert not script.order.drops_next("D") and script.order.is_at_start


@pytest.mark.parametrize("names", ["D", "DG"])
def test_after_a_rollback_an_iteration_of_an_older_range_is_dropped_though_its_weights_are_new(names: str) -> None:
    script = Script(names)
    script.push(names * 3)
    script.order.ranges = {("train", 7): 1}
    lose_course(script, names)
    for name in names:
        assert script.order.drops_next(name), "its samples will be leased again"
        script.order.drop_push(name, has_begun=False)
    assert not script.order.drops_next("D")
    script.order.ranges = {("train", 8): 2}
    lose_course(script, names)
    assert not script.order.drops_next("D"), "the range was leased after the rollback"


def test_after_a_rollback_a_declared_iteration_without_a_set_does_not_make_it_new() -> None:
    script = Script()
    script.order.mark_boundary()
    lose_course(script, "")
    for _ in range(PATIENCE // 2 - 1):
        assert script.order.drops_next("D")
        script.order.drop_push("D", has_begun=False)
        script.order.drop_push("D", has_begun=False)
        script.order.mark_boundary()
    assert script.order.drops_next("D"), "the script has weights of G from before"
    script.order.lost_course.discard("G")  # It pulls them.
    assert not script.order.drops_next("D")
    lose_course(script, "D")
    for _ in range(PATIENCE // 2):
        script.order.drop_push("D", has_begun=False)
        script.order.drop_push("D", has_begun=False)
        script.order.mark_boundary()
    assert not script.order.drops_next("D"), "a set that is never trained again costs no more than this"


def test_after_a_rollback_sets_that_the_pattern_leaves_out_are_not_waited_for() -> None:
    script = Script("DGE")
    script.push("DG" * PATIENCE)
    lose_course(script, "DG")
    assert script.order.standing.period == 2 and not script.order.drops_next("D")


@pytest.mark.parametrize("names", ["D", "DG"])
def test_after_a_rollback_pushes_without_iterations_are_judged_one_by_one(names: str) -> None:
    script = Script(names)
    script.push("D" * (PATIENCE - 1) + "".join(sorted(names, reverse=True)) * 2 + "D")
    lose_course(script, "")
    assert script.order.drops_next("D")
    script.order.drop_push("D", has_begun=False)
    assert not script.order.drops_next("D")


def test_no_start_is_known_before_all_sets_have_entered() -> None:
    script = Script()
    script.push("DGDGD")
    script.order.start_incarnation()
    script.order.enter("D", PushSequence(1, BSP()))
    assert script.order.standing.start is None, "it would be before the first position"
    script.order.lose_place()
    script.order.enter("G", PushSequence(1, BSP()))
    assert script.order.standing.start == 0


@given(st.text("ab", min_size=1, max_size=8), st.integers(2, 5), st.integers(0, 7))
def test_the_period_is_the_shortest_that_explains_all(pattern: str, times: int, more: int) -> None:
    names = (pattern * (times + 1))[: len(pattern) * times + more % len(pattern)]
    finder = PeriodFinder(frozenset(pattern))
    for name in names:
        finder.add(name)
    found = "".join(finder.pattern)
    assert found and len(found) <= len(pattern)
    assert (found * len(names))[: len(names)] == names
