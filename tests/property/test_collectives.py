"""Collectives of 1 to 5 ranks over a simulated network give what numpy gives, to the byte, in any order of events; and
every call ends, whatever ranks die."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from psdist.collectives.core import host_memory, plans
from psdist.collectives.core.machine import CallLane
from psdist.collectives.core.plans import Plan
from psdist.errors import ClosedError, CollectiveMismatchError, WorkerLostError
from tests.support.collective_network import Call, CollectiveNetwork

Array = NDArray[Any]

KINDS = (
    *("all_reduce", "all_reduce_in_place", "broadcast", "all_gather", "reduce", "reduce_scatter", "gather", "scatter"),
    *("all_to_all", "barrier", "all_reduce_of_a_buffer"),
)
DTYPES = (np.dtype(np.float32), np.dtype(np.int64), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
OPS = ("sum", "product", "min", "max")


@pytest.fixture(autouse=True, scope="module")
def small_parts() -> Iterator[None]:
    """Arrays of a hundred elements travel as those of a hundred megabytes do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "PART_BYTES", 64)
        patch.setattr(plans, "EAGER_BYTES", 32)
        patch.setattr(plans, "EAGER_REDUCED_BYTES", 48)
        patch.setattr(host_memory, "PIECE_BYTES", 512)
        patch.setattr(host_memory, "LARGE_GROUP_PIECE_BYTES", 768)
        patch.setattr(host_memory, "IN_PLACE_PIECE_BYTES", 64)
        patch.setattr(host_memory, "HOST_MEMORY_BYTES_MIN", 32)
        yield


def reduced(op: str, arrays: list[Array]) -> Array:
    """Return the reduction in rank order, by numpy alone."""
    function = {"sum": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum}[op]
    dtype = arrays[0].dtype
    if dtype.itemsize == 2 and op in ("sum", "product"):
        return reduce(function, [array.astype(np.float32) for array in arrays]).astype(dtype)
    return np.asarray(reduce(function, arrays), dtype)


class Scenario:
    """One kind of call: its inputs, plans and expected results at all ranks."""

    def __init__(self, kind: str, size: int, count: int, dtype: np.dtype[Any], op: str, root: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.kind, self.size, self.op, self.root = kind, size, op, root
        # One element is a number, not an array of one.
        shape = (size,) if count == 1 else (size, count)
        self.inputs = [np.asarray(rng.standard_normal(shape) * 4).astype(dtype) for _ in range(size)]
        self.outs: dict[int, Array] = {}
        #: Ranks that reduce ordinary arrays, and memory of the others' arrays.
        self._ordinary = {rank for rank in range(size) if seed % 2 and rng.random() < 0.5}
        self._buffers: dict[int, Array] = {}

    def allocate(self, network: CollectiveNetwork) -> None:
        """Put the arrays of an all-reduce into a registered buffer, with room in front."""
        if self.kind == "all_reduce_of_a_buffer":
            row = self.inputs[0][0]
            memories = network.allocate(64 + row.nbytes)
            self._buffers = {
                rank: memory[64:].view(row.dtype).reshape(row.shape)
                for rank, memory in enumerate(memories)
                if rank not in self._ordinary
            }

    def plan(self, rank: int) -> Plan:
        size, op, root, row = self.size, self.op, self.root, np.asarray(self.inputs[rank][0])
        rows, given = np.empty_like(self.inputs[rank]), self.inputs[rank].copy()
        first, out = given[:1].reshape(row.shape), np.empty_like(row)
        match self.kind:
            case "all_reduce":
                plan = plans.all_reduce(rank, size, first, out, op)
            case "all_reduce_in_place":
                out = first
                plan = plans.all_reduce(rank, size, out, out, op)
            case "all_reduce_of_a_buffer":
                out = self._buffers.get(rank, first)
                out[...] = row
                plan = plans.all_reduce(rank, size, out, out, op)
            case "broadcast":
                out = first
                plan = plans.broadcast(rank, size, out, root)
            case "all_gather":
                plan, out = plans.all_gather(rank, size, first, rows), rows
            case "reduce":
                plan = plans.reduce(rank, size, first, out, op, root)
            case "reduce_scatter":
                plan = plans.reduce_scatter(rank, size, given, out, op)
            case "gather":
                plan, out = plans.gather(rank, size, first, rows if rank == root else None, root), rows
            case "scatter":
                plan = plans.scatter(rank, size, given if rank == root else None, out, root)
            case "all_to_all":
                plan, out = plans.all_to_all(rank, plans.rows_of(given), plans.rows_of(rows)), rows
            case _:
                plan = plans.barrier(rank, size)
        self.outs[rank] = out
        return plan

    def wanted(self, rank: int) -> Array | None:
        """Return the result at a rank, None if it has none."""
        firsts = [one[0] for one in self.inputs]
        match self.kind:
            case "all_reduce" | "all_reduce_in_place" | "all_reduce_of_a_buffer":
                return reduced(self.op, firsts)
            case "broadcast":
                return firsts[self.root]
            case "all_gather":
                return np.stack(firsts)
            case "reduce":
                return reduced(self.op, firsts) if rank == self.root else None
            case "reduce_scatter":
                return reduced(self.op, [one[rank] for one in self.inputs])
            case "gather":
                return np.stack(firsts) if rank == self.root else None
            case "scatter":
                return self.inputs[self.root][rank]
            case "all_to_all":
                return np.stack([one[rank] for one in self.inputs])
        return None

    def check(self, rank: int) -> None:
        wanted = self.wanted(rank)
        assert wanted is None or wanted.tobytes() == self.outs[rank].tobytes(), (self.kind, rank)


@st.composite
def scenarios(draw: st.DrawFn) -> list[Scenario]:
    size = draw(st.integers(1, 5))

    def one(seed: int) -> Scenario:
        dtype, op = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(OPS))
        count = draw(st.one_of(st.just(1), st.integers(0, 120)))
        return Scenario(draw(st.sampled_from(KINDS)), size, count, dtype, op, draw(st.integers(0, size - 1)), seed)

    return [one(seed) for seed in range(draw(st.integers(1, 4)))]


def network_of(size: int, seed: int, made: Sequence[Scenario] = ()) -> CollectiveNetwork:
    """Return a network whose ranks all share memory, or none, or some."""
    rng = random.Random(seed)
    share = rng.choice([0.0, 0.8, 1.0])
    network = CollectiveNetwork(size, rng, [rank for rank in range(size) if rng.random() < share])
    for one in made:
        one.allocate(network)
    return network


@given(scenarios(), st.integers(0, 1 << 30))
def test_results_are_those_of_numpy_in_any_order_of_events(made: list[Scenario], seed: int) -> None:
    size = made[0].size
    network = network_of(size, seed, made)
    ended = [network.start(rank, one.plan(rank)) for one in made for rank in range(size)]
    network.run()
    assert all(call.has_ended and call.error is None for call in ended)
    for one in made:
        for rank in range(size):
            one.check(rank)


@given(scenarios(), st.integers(0, 1 << 30), st.data())
def test_every_call_ends_though_ranks_die(made: list[Scenario], seed: int, data: st.DataObject) -> None:
    size = made[0].size
    network = network_of(size, seed, made)
    victims = data.draw(st.lists(st.integers(0, size - 1), max_size=2, unique=True))
    deaths = {data.draw(st.integers(0, 60)): victim for victim in victims}
    events = 0

    def happened() -> None:
        nonlocal events
        events += 1
        if (victim := deaths.pop(events, None)) is not None:
            network.kill(victim)

    started = {
        (number, rank): network.start(rank, one.plan(rank)) for number, one in enumerate(made) for rank in range(size)
    }
    network.run(happened)
    for (number, rank), call in started.items():
        if rank in network.dead:
            continue
        assert call.has_ended, "a survivor's call hangs"
        if call.error is None:
            made[number].check(rank)
        else:
            assert isinstance(call.error, WorkerLostError) and call.error.details["rank"] in map(str, network.dead)
    if len(network.dead) == 1:
        (victim,) = network.dead
        for (number, _), call in started.items():
            if started[number, victim].has_ended and started[number, victim].error is None:
                assert call.error is None, "a call failed that had its result at the rank that was lost"


def end_by_calls_that_differ(size: int, seed: int) -> None:
    """Make two calls, and then, as each rank has their results, one that is another at one rank."""
    rng = random.Random(seed)
    made = [Scenario(rng.choice(KINDS), size, rng.choice([3, 120]), DTYPES[0], "sum", 0, number) for number in range(2)]
    network, odd = network_of(size, seed, made), rng.randrange(size)
    started = {(one, rank): network.start(rank, one.plan(rank)) for one in made for rank in range(size)}
    last: dict[int, Call] = {}

    def start_last() -> None:
        for rank in range(size):
            if rank not in last and all(call.has_ended for (_, other), call in started.items() if other == rank):
                array = np.zeros(2 + (rank == odd))
                last[rank] = network.start(rank, plans.all_reduce(rank, size, array, array, "sum"))

    network.run(start_last)
    for (one, rank), call in started.items():
        assert call.has_ended and call.error is None, f"a later call took the result: seed {seed}"
        one.check(rank)
    assert all(isinstance(call.error, CollectiveMismatchError) for call in last.values()) and len(last) == size


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_call_that_differs_takes_no_result_of_those_before(size: int) -> None:
    for seed in range(100):
        end_by_calls_that_differ(size, seed)


@given(scenarios(), st.integers(0, 1 << 30))
def test_closing_after_the_last_call_takes_no_result_from_others(made: list[Scenario], seed: int) -> None:
    size = made[0].size
    network = network_of(size, seed, made)
    ended = {(one, rank): network.start(rank, one.plan(rank)) for one in made for rank in range(size)}

    def happened() -> None:
        for rank in range(size):
            if all(call.has_ended for (_, other), call in ended.items() if other == rank):
                network.close(rank, ClosedError(f"rank {rank} closed the group"))

    network.run(happened)
    for (one, rank), call in ended.items():
        assert call.error is None
        one.check(rank)


@given(
    st.integers(2, 4),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 1), st.integers(0, 90))),
    st.integers(0, 1 << 30),
)
def test_messages_of_a_tag_arrive_in_order(size: int, sent: list[tuple[int, int, int, int]], seed: int) -> None:
    network = network_of(size, seed)
    ended, pairs = [], []
    for number, (source, target, tag, count) in enumerate(sent):
        source, target = source % size, target % size
        if source == target:
            continue
        data, out = np.full(count, number, np.int32), np.zeros(count, np.int32)
        ended.append(network.start(source, plans.send(data, target), CallLane(source, target, tag)))
        ended.append(network.start(target, plans.receive(out, source), CallLane(source, target, tag)))
        pairs.append((data, out))
    network.run()
    assert all(call.has_ended and call.error is None for call in ended)
    assert all((data == out).all() for data, out in pairs)
