"""PyTorch scripts whose run goes on from a snapshot under its run id, with real servers: two lives of a cluster with
two workers, which are threads of this process.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import psdist
from psdist.client.context import Context
from psdist.launch.embedded import EmbeddedCluster
from psdist.torch import DistributedDataParallel

Work = Callable[[Context], Any]


@contextmanager
def life(storage: Path) -> Iterator[Callable[[Work], list[Any]]]:
    """One life of the run. Gives what does the same in both workers, and returns what they return."""
    cluster = EmbeddedCluster(servers=1, storage=storage, run_id="resumed")
    clients = [psdist.Client(cluster.address, cluster.token, rank=rank) for rank in range(2)]
    contexts = [Context(rank, 2, rank, client) for rank, client in enumerate(clients)]
    with ThreadPoolExecutor(2) as threads:
        yield lambda work: list(threads.map(work, contexts))
        list(threads.map(lambda context: context.client.snapshot(), contexts))
        list(threads.map(lambda client: client.close(), clients))
    cluster.close()


def statistics_and_weights() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(10 * step + rank)) * 5


def test_data_parallel_training_goes_on_from_what_the_script_loaded(tmp_path: Path) -> None:
    """And not from the values of the first start, which the snapshot has."""

    def train(context: Context, loaded: dict[str, Any] | None, first: int) -> tuple[dict[str, Any], dict[str, Any]]:
        torch.manual_seed(context.rank)
        model = statistics_and_weights()
        if loaded is not None:
            model.load_state_dict(loaded)
        wrapped = DistributedDataParallel(model, context=context)
        begun = copy.deepcopy(model.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(first, first + 3):
            optimizer.zero_grad()
            wrapped(batch(step, context.rank)).pow(2).mean().backward()
            optimizer.step()
        return begun, copy.deepcopy(model.state_dict())

    with life(tmp_path) as both:
        (_, saved), _ = both(lambda context: train(context, None, 0))
    with life(tmp_path) as both:
        ends = both(lambda context: train(context, saved if context.rank == 0 else None, 3))
    for begun, _ in ends:
        for name, value in saved.items():
            assert torch.equal(begun[name], value), f"{name} as rank 0 loaded it"
    (_, one), (_, other) = ends
    assert all(torch.equal(one[name], other[name]) for name in one if "running" not in name)
