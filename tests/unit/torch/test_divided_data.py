"""Loaders that the script has divided among the workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

import psdist.data
from psdist.torch.leased_loader import is_divided

accelerate: Any = pytest.importorskip("accelerate")

DATA: Any = list(range(12))


class Stream(IterableDataset[int]):
    _distributed: object = None

    def __iter__(self) -> Any:
        return iter(DATA)


def test_divided_loaders_are_told_from_others() -> None:
    ours = psdist.data.DistributedSampler(DATA, 2, 0)
    split = Stream()
    split._distributed = SimpleNamespace(rank=0, world_size=2)
    samplers: list[Any] = [DistributedSampler(DATA, 2, 0), ours]
    divided: list[Any] = [*(DataLoader(DATA, 2, sampler=sampler) for sampler in samplers), DataLoader(split, 2)]
    divided.append(DataLoader(DATA, sampler=BatchSampler(ours, 2, False), batch_size=None))
    assert all(is_divided(loader) for loader in divided)
    whole: list[Any] = [DataLoader(DATA, 2, shuffle=True), DataLoader(Stream(), 2), DataLoader(DATA, batch_size=None)]
    assert not any(is_divided(loader) for loader in whole)


@pytest.mark.parametrize("kind", ["sampler", "stream", "whole"])
def test_an_accelerator_does_not_divide_again(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import psdist.hf

    accelerator = psdist.hf.Accelerator(cpu=True)
    monkeypatch.setattr(psdist.hf.Accelerator, "num_processes", 2)
    if kind == "stream":
        stream = Stream()
        stream._distributed = True
        loader: Any = DataLoader(stream, 2)
    else:
        sampler: Any = psdist.data.DistributedSampler(DATA, 2, 1, shuffle=False) if kind == "sampler" else None
        loader = DataLoader(DATA, 2, sampler=sampler)
    found = [number for batch in accelerator.prepare_data_loader(loader) for number in batch.tolist()]
    assert found == {"sampler": DATA[1::2], "stream": DATA, "whole": [0, 1, 4, 5, 8, 9]}[kind]


@pytest.mark.parametrize("shuffles", [True, False])
def test_lightning_warns_of_an_order_that_a_resumed_run_does_not_continue(
    shuffles: bool, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("lightning")
    from psdist.lightning import PsdistStrategy

    strategy: Any = PsdistStrategy()
    loader: Any = DataLoader(DATA, 2, shuffle=shuffles)
    strategy.process_dataloader(loader)
    assert not caplog.text
    strategy._distributed = [SimpleNamespace(handle=SimpleNamespace(step=7))]
    strategy.process_dataloader(loader)
    assert ("resumes at step 7" in caplog.text and "psdist.data.DistributedSampler(" in caplog.text) == shuffles
