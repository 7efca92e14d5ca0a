"""``DistributedDataParallel`` over links: two workers, in two threads of this process with real servers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import psdist
from psdist.client.context import Context
from psdist.errors import InvalidArgumentError
from psdist.launcher.embedded import EmbeddedCluster
from psdist.torch import DistributedDataParallel

Work = Callable[[Context], Any]
STEPS = 4


@contextmanager
def workers(count: int) -> Iterator[Callable[[Work], list[Any]]]:
    """Do the same in all workers of a run. Returns their results."""
    cluster = EmbeddedCluster(servers=1, workers=count)
    clients = [psdist.Client(cluster.address, cluster.token, rank=rank) for rank in range(count)]
    contexts = [Context(rank, count, rank, client) for rank, client in enumerate(clients)]

    def run(work: Work) -> list[Any]:
        with ThreadPoolExecutor(count) as threads:
            return list(threads.map(work, contexts))

    try:
        yield run
    finally:
        for client in clients:
            client.close()
        cluster.close()


@pytest.fixture
def both() -> Iterator[Callable[[Work], list[Any]]]:
    """Do the same in two workers of a run."""
    with workers(2) as run:
        yield run


class Forked(nn.Module):
    """Rank 0 reaches one layer, rank 1 the other one, and nobody the third."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 40) for _ in range(3)])

    def forward(self, x: Tensor, rank: int) -> Tensor:
        result: Tensor = self.layers[rank](x)
        return result


def gradients(wrapped: DistributedDataParallel) -> list[bytes | None]:
    return [None if one.grad is None else one.grad.numpy().tobytes() for one in wrapped.module.parameters()]


def inputs(rank: int, step: int) -> Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(10 * step + rank))


@pytest.mark.parametrize(
    ("reduction", "as_views"),
    [("mean", False), *(pytest.param(*one, marks=pytest.mark.long) for one in (("mean", True), ("sum", False)))],
)
def test_both_paths_give_the_same_bytes(both: Callable[[Work], list[Any]], reduction: Any, as_views: bool) -> None:
    """Check this with several buckets, and layers that some workers or all do not reach."""
    at_first = Forked()

    def worker(context: Context) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for path in ("servers", "collectives"):
            wrapped = DistributedDataParallel(
                copy.deepcopy(at_first), path=path, name=path, context=context, reduction=reduction,
                find_unused_parameters=True, gradient_as_bucket_view=as_views, bucket_cap_mb=0.0005,
            )  # fmt: skip
            found[path] = []
            for step in range(STEPS):
                wrapped(inputs(context.rank, step), context.rank).square().sum().backward()
                found[path].append(gradients(wrapped))
                if step % 2:
                    wrapped.zero_grad()
            assert wrapped.path == path and wrapped.handle.step == STEPS
        assert found["servers"] == found["collectives"]
        return found

    one, other = both(worker)
    assert one == other and one["servers"][0][0] is not None and one["servers"][0][5] is None


@pytest.mark.long
def test_gradients_that_are_not_finite_become_nan_everywhere(both: Callable[[Work], list[Any]]) -> None:
    def worker(context: Context) -> None:
        wrapped = DistributedDataParallel(nn.Linear(5, 1), path="collectives", context=context)
        for step in range(3):
            wrapped.zero_grad()
            factor = torch.inf if context.rank == step == 1 else 1.0
            (wrapped(inputs(0, 0)).sum() * factor).backward()
            assert all(bool(one.grad.isnan().all()) == (step == 1) for one in wrapped.parameters())

    both(worker)


@pytest.mark.long
@pytest.mark.parametrize("cause", ["a weight", "join()", "two models in a pass"])
def test_steps_that_links_cannot_make_go_through_the_servers(both: Callable[[Work], list[Any]], cause: str) -> None:
    at_first = nn.Linear(5, 2)

    def worker(context: Context) -> None:
        model, other = copy.deepcopy(at_first), copy.deepcopy(at_first)
        wrapped = DistributedDataParallel(model, context=context)
        second = DistributedDataParallel(other, context=context, name="second")
        for step in range(6):
            assert wrapped.path == second.path == ("servers" if step > 3 else "collectives")
            wrapped.zero_grad()
            second.zero_grad()
            x, mean = inputs(context.rank, step), torch.cat([inputs(rank, step) for rank in range(2)])
            if step == 3 and cause == "a weight":
                wrapped.set_weight(2.0)
            if step == 3 and cause == "join()":
                with wrapped.join():
                    wrapped(x).mean().backward()
            elif step == 3 and cause == "two models in a pass":
                (wrapped(x).mean() + second(x).mean()).backward()
                assert torch.equal(model.weight.grad, other.weight.grad)
            else:
                wrapped(x).mean().backward()
            assert wrapped.handle.step == step + 1
            (expected,) = torch.autograd.grad(at_first(mean).mean(), [at_first.weight])
            torch.testing.assert_close(model.weight.grad, expected)

    both(worker)


def test_subsets_of_a_run_use_the_servers() -> None:
    at_first = nn.Linear(2, 1)

    def worker(context: Context) -> tuple[str, float]:
        ranks = [0, 3] if context.rank in (0, 3) else [1, 2]
        part, name = context.subset(ranks), f"part-{ranks[0]}"
        with pytest.raises(InvalidArgumentError, match="the context is that of some workers"):
            DistributedDataParallel(copy.deepcopy(at_first), context=part, name=name, path="collectives")
        wrapped = DistributedDataParallel(copy.deepcopy(at_first), context=part, name=name)
        wrapped(torch.full((1, 2), 4.0**context.rank)).sum().backward()
        return wrapped.path, wrapped.module.weight.grad[0, 0].item()  # type: ignore[index]  # has a gradient

    with workers(4) as all_do:
        assert all_do(worker) == [("servers", mean) for mean in (32.5, 10.0, 10.0, 32.5)]


def test_unusable_arguments_are_refused(both: Callable[[Work], list[Any]]) -> None:
    def worker(context: Context) -> None:
        with pytest.raises(InvalidArgumentError, match="path='ring' is unknown: use one of 'servers'"):
            DistributedDataParallel(nn.Linear(5, 1), path="ring", context=context)
        with pytest.raises(InvalidArgumentError, match="impossible, because gradients are compressed by Int8"):
            DistributedDataParallel(nn.Linear(5, 1), path="collectives", compression="int8", context=context)
        with pytest.raises(InvalidArgumentError, match="impossible, because buffers are copied in each step"):
            DistributedDataParallel(nn.BatchNorm1d(5), path="collectives", context=context)

    both(worker)
    with pytest.raises(InvalidArgumentError, match="impossible, because the run has 1 workers"):
        both(
            lambda context: DistributedDataParallel(
                nn.Linear(5, 1), path="collectives", context=Context(0, 1, 0, context.client)
            )
        )
