"""``SyncBatchNorm`` under ``DistributedOptimizer`` in two workers, against one process with the whole batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

import psdist
import psdist.torch

_STEPS = 10


def model_of(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))


def train(model: nn.Sequential, optimizer: Any, rank: int, world_size: int) -> NDArray[np.float32]:
    """Train by every ``world_size``-th sample of each batch. Returns the weights and the running statistics."""
    for step in range(_STEPS):
        drawn = torch.Generator().manual_seed(step)
        images, labels = torch.randn(16, 1, 8, 8, generator=drawn), torch.randint(0, 3, (16,), generator=drawn)
        optimizer.zero_grad()
        output = model(images[rank::world_size])
        nn.functional.cross_entropy(output, labels[rank::world_size]).backward()
        optimizer.step()
    return np.concatenate([value.detach().double().numpy().ravel() for value in model.state_dict().values()])


def train_in_a_worker() -> NDArray[np.float32]:
    dist.init_process_group("gloo")
    try:
        with psdist.init() as context:
            model: Any = psdist.torch.SyncBatchNorm.convert_sync_batchnorm(model_of(0))
            optimizer = psdist.torch.DistributedOptimizer(model, torch.optim.SGD(model.parameters(), 0.1, 0.9))
            return train(model, optimizer, context.rank, context.world_size)
    finally:
        dist.destroy_process_group()


@pytest.mark.long
def test_two_workers_train_as_one_process() -> None:
    model = model_of(0)
    expected = train(model, torch.optim.SGD(model.parameters(), 0.1, 0.9), 0, 1)
    result = psdist.launch(train_in_a_worker, nproc_per_node=2, storage_path="none", max_restarts=0)
    for values in result.returned.values():
        assert np.linalg.norm(values - expected) <= 1e-6 * np.linalg.norm(expected)
    assert len(result.returned) == 2
