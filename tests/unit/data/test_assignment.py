"""The sampler deals every sample, evenly, and the same way on every rank. torch's sampler is the second opinion."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psdist.data import DataPosition, DatasetSpec, DistributedSampler, RangeOrder
from psdist.errors import InvalidArgumentError, LimitExceededError

sizes = st.integers(0, 200)
worlds = st.integers(1, 12)
seeds = st.integers(0, 2**63 - 1)


def deal(size: int, world: int, epoch: int = 0, **settings: Any) -> list[list[int]]:
    """Return the indices of each rank."""
    hands = []
    for rank in range(world):
        sampler = DistributedSampler(size, world, rank, **settings)
        sampler.set_epoch(epoch)
        hands.append(list(sampler))
        assert len(sampler) == len(hands[-1])
    return hands


@given(sizes, worlds, seeds, st.booleans(), st.booleans())
def test_all_ranks_get_equally_many(size: int, world: int, seed: int, shuffle: bool, drop_last: bool) -> None:
    hands = deal(size, world, seed=seed, shuffle=shuffle, drop_last=drop_last)
    assert {len(hand) for hand in hands} == {size // world if drop_last else -(-size // world)}


@given(sizes, worlds, seeds, st.booleans())
def test_ranks_together_cover_everything(size: int, world: int, seed: int, shuffle: bool) -> None:
    hands = deal(size, world, seed=seed, shuffle=shuffle)
    assert {index for hand in hands for index in hand} == set(range(size))


@given(sizes, worlds, seeds, st.booleans())
def test_drop_last_deals_nothing_twice(size: int, world: int, seed: int, shuffle: bool) -> None:
    dealt = [index for hand in deal(size, world, seed=seed, shuffle=shuffle, drop_last=True) for index in hand]
    assert len(set(dealt)) == len(dealt) == size - size % world
    assert set(dealt) <= set(range(size))


@given(st.integers(1, 200), st.integers(1, 6), st.integers(1, 6), seeds, st.integers(0, 2**63 - 1))
def test_order_depends_on_seed_and_epoch_alone(size: int, one: int, other: int, seed: int, epoch: int) -> None:
    def order(world: int) -> list[int]:
        hands = deal(size, world, epoch, seed=seed)
        return [index for round_ in zip(*hands, strict=True) for index in round_][:size]

    assert order(one) == order(other)


def test_each_seed_and_epoch_has_another_order() -> None:
    orders = {tuple(deal(100, 1, epoch, seed=seed)[0]) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


@given(sizes, worlds, st.booleans())
def test_unshuffled_is_what_torch_deals(size: int, world: int, drop_last: bool) -> None:
    torch_data = pytest.importorskip("torch.utils.data.distributed", reason="torch is not installed")
    for rank, hand in enumerate(deal(size, world, shuffle=False, drop_last=drop_last)):
        theirs = torch_data.DistributedSampler(range(size), world, rank, shuffle=False, drop_last=drop_last)
        assert hand == list(theirs)


def test_indices_are_the_iteration() -> None:
    sampler = DistributedSampler(range(10), num_replicas=3, rank=1)
    assert sampler.indices().tolist() == list(sampler)


def test_world_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert list(DistributedSampler(8, shuffle=False)) == [2, 6]
    monkeypatch.setenv("WORLD_SIZE", "four")
    with pytest.raises(InvalidArgumentError, match="WORLD_SIZE='four'"):
        DistributedSampler(8)
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    assert list(DistributedSampler(3, shuffle=False)) == [0, 1, 2]


def test_a_value_out_of_range_is_refused() -> None:
    for arguments, message in [
        ({"dataset": -1}, "dataset size=-1"),
        ({"dataset": iter([1])}, "has no length"),
        ({"dataset": 5, "num_replicas": 0, "rank": 0}, "num_replicas=0"),
        ({"dataset": 5, "num_replicas": 2, "rank": 2}, "rank=2 is out of range: use a whole number from 0 to 1"),
        ({"dataset": 5, "num_replicas": 2, "rank": -1}, "rank=-1"),
        ({"dataset": 5, "num_replicas": 1, "rank": 0, "seed": -3}, "seed=-3"),
        ({"dataset": 5, "num_replicas": 1.0, "rank": 0}, "num_replicas=1.0"),
    ]:
        with pytest.raises(InvalidArgumentError, match=message):
            DistributedSampler(**arguments)


def test_epoch_must_be_a_whole_number_from_zero() -> None:
    with pytest.raises(InvalidArgumentError, match="epoch=-1"):
        DistributedSampler(5, 1, 0).set_epoch(-1)


@pytest.mark.parametrize("shuffle", [True, False])
def test_range_orders_are_kept_for_two_data_epochs(shuffle: bool) -> None:
    order = RangeOrder(DatasetSpec("train", 10, 4, shuffle))
    first = [order.indices(epoch, 1).tolist() for epoch in (0, 1, 0, 2)]
    assert first[0] == first[2] and (first[0] != first[1]) == shuffle
    assert order.knows(0) and order.knows(2) and order.knows(1) != shuffle
    assert order.indices(1, 1).tolist() == first[1]
    order.indices(1, 0)[:] = -1
    assert -1 not in order.indices(1, 0), "what is given is the caller's own"


def test_a_position_is_text_and_back() -> None:
    position = DataPosition(2, ((0, 3), (7, 1)), 4, 5)
    assert DataPosition.from_json(position.to_json()) == position


def test_other_text_is_no_position() -> None:
    for text in [
        *("", "[]", "{}", '{"done": 3}', '{"done": [[1]]}', '{"done": [], "data_epoch": -1}', '{"done": [["a", 1]]}'),
        *('{"done": [], "more": 1}', '{"done": [], "data_epoch": 1.5}'),
    ]:
        with pytest.raises(InvalidArgumentError, match="not a position"):
            DataPosition.from_json(text)


def test_data_sets_that_cannot_be() -> None:
    values: Any
    for values in [
        *({"size": 0}, {"range_size": 0}, {"seed": -1}, {"data_epochs": -1}, {"retries_max": -1}, {"size": 1.0}),
        *({"size": True}, {"name": "a b"}, {"size": 1 << 62}, {"shuffle": 1}),
    ]:
        with pytest.raises((InvalidArgumentError, LimitExceededError)):
            DatasetSpec(**({"name": "train", "size": 10, "range_size": 2} | values))
