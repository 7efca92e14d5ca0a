"""Differences between cluster maps, applied in order, reproduce the maps, including over the wire."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psdist.consistency import ASP, BSP
from psdist.errors import StaleEpochError
from psdist.map_difference import apply, difference
from psdist.optim import SGD
from psdist.types import (
    ClusterMap,
    ParametersEntry,
    ParametersMember,
    ParametersSpec,
    Replica,
    ServerEntry,
    Shard,
    WorkerEntry,
)
from psdist.v1 import common_pb2
from psdist.wire import convert

numbers = st.integers(1, 3)


@st.composite
def servers(draw: st.DrawFn) -> tuple[ServerEntry, ...]:
    names = draw(st.sets(st.sampled_from("abcde")))
    return tuple(ServerEntry(name, draw(numbers), f"10.0.0.{draw(numbers)}:1") for name in sorted(names))


@st.composite
def workers(draw: st.DrawFn) -> tuple[WorkerEntry, ...]:
    """Return workers. Any id may have any rank: a worker may register again with another."""
    ranks = sorted(draw(st.sets(st.integers(0, 9))))
    names = draw(st.permutations([f"w{number}" for number in range(10)]))
    return tuple(WorkerEntry(name, draw(numbers), rank) for name, rank in zip(names, ranks, strict=False))


@st.composite
def entry(draw: st.DrawFn, name: str) -> ParametersEntry:
    spec = ParametersSpec(name, SGD(lr=0.1), draw(st.sampled_from((BSP(), ASP()))), slice_elements=8)
    members = tuple(ParametersMember(f"w{n}", draw(numbers), n, draw(numbers)) for n in range(draw(numbers)))
    shards = tuple(Shard(Replica("a", draw(numbers)), draw(numbers)) for _ in range(2))
    return ParametersEntry(spec, 20, shards, members, ready=draw(st.booleans()), layout_digest=b"x")


@st.composite
def maps(draw: st.DrawFn) -> ClusterMap:
    """Return maps in the scheduler's order, with parameter sets in any order."""
    names = draw(st.lists(st.sampled_from(("p", "q", "r", "s")), unique=True))
    entries = tuple(draw(entry(name)) for name in names)
    done = tuple(sorted(draw(st.sets(numbers))))
    paused = draw(st.sampled_from(("", "for a node")))
    return ClusterMap("run", 0, draw(servers()), draw(workers()), entries, paused, ranks_done=done)


courses = st.lists(maps(), min_size=1, max_size=6).map(
    lambda course: [replace(cluster, epoch=epoch) for epoch, cluster in enumerate(course, 1)]
)


@given(courses)
def test_differences_in_order_give_the_whole_maps(course: list[ClusterMap]) -> None:
    have = course[0]
    for before, after in pairwise(course):
        sent = convert.difference_to_proto(difference(before, after)).SerializeToString()
        have = apply(have, convert.difference_from_proto(common_pb2.ClusterMapDifference.FromString(sent)))
        assert have == after


@given(courses)
def test_some_epochs_may_be_left_out(course: list[ClusterMap]) -> None:
    assert apply(course[0], difference(course[0], course[-1])) == course[-1]


@given(maps())
def test_what_did_not_change_is_not_sent(cluster: ClusterMap) -> None:
    change = difference(cluster, replace(cluster, epoch=1))
    assert not any((change.servers, change.workers, change.parameters))
    assert not any((change.servers_gone, change.workers_gone, change.parameters_gone))


def test_a_difference_from_another_map_is_refused() -> None:
    one, two, three = (ClusterMap("run", epoch) for epoch in (1, 2, 3))
    for have in (one, three):
        with pytest.raises(StaleEpochError, match=rf"map 2 to 3 does not apply to map {have.epoch}: open a new"):
            apply(have, difference(two, three))
