"""Placement: every element on exactly one server, balanced, and a function of its arguments only."""

from __future__ import annotations

import itertools
from fnmatch import fnmatchcase

from hypothesis import given
from hypothesis import strategies as st

from psdist.consistency import ASP
from psdist.optim import SGD, override
from psdist.types import SHARDS_PER_SERVER, Layout, ParametersEntry, ParametersSpec, Replica, Shard, Slicing, TensorSpec
from psdist_scheduler.decide.parameter_creation import group_ranges, held_elements, place
from psdist_scheduler.decide.shard_placement import shard_elements

slicings = st.builds(Slicing, st.integers(0, 5000), st.integers(1, 64))
server_ids = st.lists(st.integers(0, 99).map("server-{}".format), min_size=1, max_size=8, unique=True)


def entry(slicing: Slicing, shards: tuple[str, ...]) -> ParametersEntry:
    spec = ParametersSpec("p", SGD(lr=0.1), ASP(), slice_elements=slicing.slice_elements)
    return ParametersEntry(spec, slicing.total, tuple(Shard(Replica(name, 1)) for name in shards))


@given(slicings, server_ids)
def test_every_slice_lies_on_one_server(slicing: Slicing, servers: list[str]) -> None:
    placed = entry(slicing, place(slicing, servers, {}))
    slices = [index for server in servers for index in placed.slices_of(server)] if placed.shards else []
    assert sorted(slices) == list(range(slicing.count))
    assert len(placed.shards) == min(slicing.count, SHARDS_PER_SERVER * len(servers))


@given(slicings.filter(lambda s: s.total > 0), st.integers(1, 64))
def test_shard_sizes_are_those_of_their_slices(slicing: Slicing, shards: int) -> None:
    shards = min(shards, slicing.count)
    summed = [0] * shards
    for index in range(slicing.count):
        summed[index % shards] += slicing.size(index)
    assert shard_elements(slicing, shards) == summed


@given(slicings, server_ids)
def test_equal_servers_stay_equal_to_one_slice(slicing: Slicing, servers: list[str]) -> None:
    held = held_elements([entry(slicing, place(slicing, servers, {}))])
    loads = [held.get(server, 0) for server in servers]
    assert max(loads) - min(loads) <= slicing.slice_elements
    assert sum(loads) == slicing.total


@given(st.lists(slicings, max_size=6), server_ids)
def test_the_gap_is_at_most_the_old_one_or_a_shard(vectors: list[Slicing], servers: list[str]) -> None:
    entries: list[ParametersEntry] = []
    for slicing in vectors:
        before = held_elements(entries)
        shards = place(slicing, servers, before)
        entries.append(entry(slicing, shards))
        largest = max(shard_elements(slicing, len(shards)), default=0) if shards else 0
        assert _gap(held_elements(entries), servers) <= max(_gap(before, servers), largest)


@given(slicings, server_ids, st.randoms())
def test_the_order_of_servers_means_nothing(slicing: Slicing, servers: list[str], random: object) -> None:
    shuffled = list(servers)
    random.shuffle(shuffled)
    assert place(slicing, servers, {}) == place(slicing, shuffled, {})


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5)), max_size=12))
def test_ranges_are_the_tensors_that_match(drawn: list[tuple[str, int]]) -> None:
    tensors = tuple(TensorSpec(f"{letter}{number}", (size,)) for number, (letter, size) in enumerate(drawn))
    overrides = (override("a*", lr=1.0), override("b*", lr=2.0))
    ranges = group_ranges(Layout(tensors), overrides)
    groups = [0] * Layout(tensors).total
    for item in ranges:
        assert item.start < item.stop and item.group > 0
        assert groups[item.start : item.stop] == [0] * (item.stop - item.start)
        groups[item.start : item.stop] = [item.group] * (item.stop - item.start)
    wanted = [_group(tensor.name) for tensor in tensors for _ in range(tensor.size)]
    assert groups == wanted
    touching = [(a, b) for a, b in itertools.pairwise(ranges) if a.stop == b.start]
    assert all(a.group != b.group for a, b in touching)


def _group(name: str) -> int:
    return 1 if fnmatchcase(name, "a*") else 2 if fnmatchcase(name, "b*") else 0


def _gap(held: dict[str, int], servers: list[str]) -> int:
    loads = [held.get(server, 0) for server in servers]
    return max(loads) - min(loads)
