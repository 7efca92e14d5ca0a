"""Orders of shuffling loaders as functions of the data epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

pytest.importorskip("accelerate")

from psdist.hf.accelerator import ReplayedSampler, replay

DATA = list(range(20))
SAMPLERS: dict[str, Callable[[torch.Generator], Any]] = {
    "shuffled": lambda generator: RandomSampler(DATA, generator=generator),
    "with replacement": lambda generator: RandomSampler(DATA, True, 30, generator=generator),
    "weighted": lambda generator: WeightedRandomSampler([1.0 + i for i in DATA], 20, generator=generator),
    "subset": lambda generator: SubsetRandomSampler(DATA[::2], generator=generator),
}


def loader_of(kind: str, *, shares: bool) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    return DataLoader(DATA, 4, sampler=SAMPLERS[kind](generator), generator=generator if shares else None)


def passes(loader: Any, count: int) -> list[list[int]]:
    return [[index for batch in loader for index in batch.tolist()] for _ in range(count)]


def test_the_order_of_torch_can_start_at_any_data_epoch() -> None:
    for shares in [False, True]:
        for kind in SAMPLERS:
            expected = passes(loader_of(kind, shares=shares), 5)
            loader = loader_of(kind, shares=shares)
            order = replay(loader)
            assert order is not None and len(loader) == len(loader_of(kind, shares=shares))
            assert passes(loader, 2) == expected[:2]
            assert next(iter(loader)).tolist() == expected[2][:4]  # A pass that the script ends early.
            assert passes(loader, 1) == expected[3:4]
            order.epoch = 1
            assert passes(loader, 2) == expected[1:3]
            resumed = loader_of(kind, shares=shares)
            other = replay(resumed)
            assert other is not None
            other.epoch = 3
            assert passes(resumed, 2) == expected[3:]


def test_a_shared_state_is_that_of_all_passes() -> None:
    one, other = loader_of("shuffled", shares=False), loader_of("shuffled", shares=False)
    other.sampler.generator.manual_seed(4)  # type: ignore[attr-defined]
    mine, its = replay(one), replay(other)
    assert mine is not None and its is not None
    its.first_state.copy_(mine.first_state)
    assert passes(one, 2) == passes(other, 2)


def test_other_loaders_stay_as_they_are() -> None:
    assert replay(DATA) is None and replay(DataLoader(DATA, 4)) is None
    assert replay(DataLoader(DATA, batch_size=None)) is None
    torch.manual_seed(5)
    loader = DataLoader(DATA, 4, shuffle=True)
    order = replay(loader)
    torch.manual_seed(5)
    same = ReplayedSampler(RandomSampler(DATA), shares_generator=False)
    assert order is not None and list(order) == list(same)
    assert replay(loader) is None
