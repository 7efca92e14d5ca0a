"""The process group of psdist: all-gathers of bytes, collectives of tensors, and workers that leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import psdist
from psdist.client.context import Context
from psdist.errors import InvalidArgumentError, LimitExceededError
from psdist.launcher.embedded import EmbeddedCluster
from psdist.process_group import broadcast_value, group, is_launched, start
from psdist.process_group.group import AllGather, PsdistGroup

WORKERS = 3


class World:
    """Workers of one run, which are threads of this process."""

    def __init__(self) -> None:
        self.cluster = EmbeddedCluster(servers=2)
        self.contexts = [self._context(rank) for rank in range(WORKERS)]
        self._threads = ThreadPoolExecutor(WORKERS)
        self.groups = [PsdistGroup(one.rank, WORKERS, lambda one=one: one) for one in self.contexts]
        self.each(lambda rank: self.groups[rank].open())

    def _context(self, rank: int) -> Context:
        client = psdist.Client(self.cluster.address, self.cluster.token, rank=rank)
        return Context(rank, WORKERS, rank, client)

    def each(self, work: Callable[[int], Any], ranks: int = WORKERS) -> list[Any]:
        """Return what all workers return."""
        return list(self._threads.map(work, range(ranks)))

    def close(self) -> None:
        self._threads.shutdown()
        for context in self.contexts:
            context.close()
        self.cluster.close()


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


PAYLOADS = st.lists(
    st.one_of(st.binary(max_size=40), st.integers(0, 3000).map(lambda size: bytes(range(256)) * (size // 100))),
    min_size=WORKERS, max_size=WORKERS,
)  # fmt: skip


@given(PAYLOADS)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_all_workers_receive_each_payload(world: World, payloads: list[bytes]) -> None:
    found = world.each(lambda rank: world.groups[rank].open().exchange(payloads[rank]))
    assert found == [payloads] * WORKERS


def test_a_long_payload_travels_beside_an_empty_one(world: World) -> None:
    payloads = [b"", torch.arange(60_000).numpy().tobytes(), b"\xff"]
    assert world.each(lambda rank: world.groups[rank].open().exchange(payloads[rank])) == [payloads] * WORKERS


def tensors(kind: torch.dtype) -> list[Tensor]:
    return [torch.tensor([[rank + 1, 2 * rank]]).to(kind) for rank in range(WORKERS)]


def reduced(world: World, operation: Any, values: list[Tensor]) -> list[Tensor]:
    def work(rank: int) -> Tensor:
        tensor = values[rank].clone()
        world.groups[rank].allreduce([tensor], SimpleNamespace(reduceOp=operation)).wait()
        return tensor

    return world.each(work)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_tensors_of_each_dtype_are_reduced(world: World, kind: torch.dtype) -> None:
    values = tensors(kind)
    for operation, expected in (
        (dist.ReduceOp.SUM, [[6, 6]]), (dist.ReduceOp.PRODUCT, [[6, 0]]), (dist.ReduceOp.MIN, [[1, 0]]),
        (dist.ReduceOp.MAX, [[3, 4]]),
    ):  # fmt: skip
        assert all(torch.equal(one, torch.tensor(expected).to(kind)) for one in reduced(world, operation, values))


def test_values_that_are_not_finite_are_averaged_and_gathered(world: World) -> None:
    values = [torch.tensor([1.0, torch.nan, torch.inf]), torch.ones(3), torch.ones(3)]
    for mean in reduced(world, dist.ReduceOp.AVG, values):
        assert mean[0] == 1 and mean[1].isnan() and mean[2] == torch.inf
    places = [[torch.empty(3) for _ in range(WORKERS)] for _ in range(WORKERS)]
    world.each(lambda rank: world.groups[rank].allgather([places[rank]], [values[rank]]).wait())
    assert all(
        torch.equal(a, b) or rank == 0 for row in places for rank, (a, b) in enumerate(zip(row, values, strict=True))
    )
    assert places[2][0][1].isnan()


def test_a_root_broadcasts_and_gathers(world: World) -> None:
    values, root = tensors(torch.float32), SimpleNamespace(rootRank=1)
    world.each(lambda rank: world.groups[rank].broadcast([values[rank]], root).wait())
    assert all(torch.equal(one, torch.tensor([[2.0, 2.0]])) for one in values)
    places = [[torch.zeros(1) for _ in range(WORKERS)] for _ in range(WORKERS)]
    world.each(lambda rank: world.groups[rank].gather([places[rank]], [torch.tensor([rank + 1.0])], root).wait())
    assert [[float(one) for one in row] for row in places] == [[0, 0, 0], [1, 2, 3], [0, 0, 0]]
    world.each(lambda rank: world.groups[rank].barrier().wait())


def test_different_shapes_and_operations_are_refused(world: World) -> None:
    def gather(rank: int) -> None:
        with pytest.raises(InvalidArgumentError, match="tensors of the same shape and dtype"):
            world.groups[rank].allgather([[torch.empty(1)] * WORKERS], [torch.ones(rank + 1)])

    world.each(gather)
    with pytest.raises(InvalidArgumentError, match="use one of SUM, AVG"):
        world.groups[0].allreduce([torch.ones(1)], SimpleNamespace(reduceOp=dist.ReduceOp.PREMUL_SUM))


def test_limits_name_their_numbers(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgumentError, match=r"600 workers are too many .* use at most 512"):
        AllGather(world.contexts[0].client, "many", 0, 600)
    monkeypatch.setattr(group, "COLLECTIVE_BYTES_MAX", 10)

    def exchange(rank: int) -> None:
        with pytest.raises(LimitExceededError, match=r"a worker gives 11 bytes .* use at most 10"):
            world.groups[rank].open().exchange(b"." * (9 + rank))

    world.each(exchange)


def test_a_value_is_plain_json() -> None:
    assert broadcast_value({"path": "a", "version": [1, None, True]}) == {"path": "a", "version": [1, None, True]}
    with pytest.raises(InvalidArgumentError, match="value of type object cannot be broadcast"):
        broadcast_value(object())


def test_without_a_launcher_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_launched() and not start() and not dist.is_initialized()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not is_launched(), "by torchrun"
    monkeypatch.setenv("PSDIST_SCHEDULER", "127.0.0.1:1")
    assert is_launched()


def test_the_lowest_rank_takes_the_place_of_one_that_left(caplog: pytest.LogCaptureFixture) -> None:
    with closing(World()) as world:
        world.contexts[2].close()
        found = world.each(lambda rank: world.groups[rank]._gather(torch.tensor([rank + 1.0])), 2)
        assert [[float(one) for one in row] for row in found] == [[1, 2, 1], [1, 2, 1]]
        assert caplog.text.count("rank 2 has left the run") == 2
        world.each(lambda rank: world.groups[rank]._gather(torch.ones(1)), 2)
        assert caplog.text.count("rank 2 has left the run") == 2
