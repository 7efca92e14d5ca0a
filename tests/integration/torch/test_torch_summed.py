"""Losses that are sums over the samples: with ``reduction="sum"`` two workers make the steps of one process.

Two workers run in two threads of this process, with real servers.
"""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import psdist
from psdist.client.context import Context
from psdist.errors import InvalidArgumentError
from psdist.torch import DistributedDataParallel, DistributedOptimizer
from tests.support.torch_models import mlp

MAX_NORM = 0.5
#: Samples of each worker, by step.
SIZES = [(1, 9), (4, 4), (7, 1), (3, 2)]


def batches(step: int) -> list[tuple[Tensor, Tensor]]:
    """Return the batches of both workers in a step."""
    random = torch.Generator().manual_seed(step)
    return [(torch.randn(size, 12, generator=random), torch.arange(size) % 4) for size in SIZES[step]]


def summed_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def alone(model: nn.Module, clips: bool) -> nn.Module:
    """Train a copy in one process on the samples of both workers."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for step in range(len(SIZES)):
        optimizer.zero_grad()
        for batch in batches(step):
            summed_loss(model, batch).backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    return model


@pytest.mark.parametrize("wrapper", ["optimizer", "clipped", "compressed", "data parallel"])
def test_it_equals_one_process(contexts: list[Context], name: str, wrapper: str) -> None:
    at_first = mlp()

    def worker(context: Context) -> nn.Module:
        model = copy.deepcopy(at_first)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        network: nn.Module = model
        if wrapper == "data parallel":
            network = DistributedDataParallel(model, reduction="sum", name=name, context=context)
        else:
            optimizer = DistributedOptimizer(
                model, optimizer, reduction="sum", name=name, context=context,
                max_grad_norm=MAX_NORM if wrapper == "clipped" else None,
                compression=psdist.compression.Int8() if wrapper == "compressed" else None,
            )  # fmt: skip
        for step in range(len(SIZES)):
            optimizer.zero_grad()
            summed_loss(network, batches(step)[context.rank]).backward()
            optimizer.step()
        return model

    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(worker, contexts)
    expected = alone(at_first, clips=wrapper == "clipped")
    within = {"rtol": 0.0, "atol": 0.02} if wrapper == "compressed" else {"rtol": 1e-5, "atol": 1e-6}
    for mine, same, theirs in zip(one.parameters(), other.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, same)
        torch.testing.assert_close(mine, theirs, **within)


def test_it_is_refused_outside_bsp(contexts: list[Context], name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="in ASP, which applies each push by itself, so that all gradients"):
        DistributedOptimizer(
            mlp(), psdist.optim.SGD(), reduction="sum", consistency=psdist.ASP(), name=name, context=contexts[0]
        )
    with pytest.raises(InvalidArgumentError, match="reduction='max' is unknown: use 'mean' or 'sum'"):
        DistributedDataParallel(mlp(), reduction="max", name=name, context=contexts[0])
