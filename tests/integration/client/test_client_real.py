"""The client against the real scheduler and real servers: results, refusals, losses."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import numpy as np
import pytest

import psdist
from psdist import errors
from tests.integration.client.conftest import Join

pytestmark = pytest.mark.asyncio(loop_scope="session")

SGD = psdist.optim.SGD(lr=0.1, momentum=0.9)
_numbers = itertools.count()


@pytest.fixture
def name() -> str:
    """Name of this test's own parameters: the cluster is shared."""
    return f"parameters-{next(_numbers)}"


@pytest.fixture
def world_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")


async def test_readers_wait_see_and_do_not_push(join: Join, name: str) -> None:
    client = await join()
    weights = await client.parameters(name, {"w": np.ones(10, np.float32)}, SGD)
    reader = await (await join()).parameters(name)
    assert reader.layout == weights.layout and reader.spec.optimizer == SGD and not reader.is_member
    await weights.push({"w": np.ones(10)})
    assert (await reader.pull())["w"][0] == np.float32(1) - np.float32(0.1)
    assert reader.version == 1
    with pytest.raises(errors.NotMemberError, match="reading"):
        await reader.push({"w": np.ones(10)})


async def test_a_joiner_is_in_every_step_from_its_first(join: Join, name: str) -> None:
    first = await (await join()).parameters(name, {"w": np.zeros(10, np.float32)}, psdist.optim.SGD(lr=1.0))
    await first.push({"w": np.full(10, -1.0)})
    joining = asyncio.create_task(_join_and_pull(join, name))
    while not joining.done() and first.step < 40:
        await asyncio.wait({joining, asyncio.ensure_future(first.push({"w": np.full(10, -1.0)}))}, timeout=5)
        if joining.done():
            break
    second = await joining
    assert 1 < second.first_step <= 42
    await _meet(first, second)
    values = await asyncio.gather(first.push_pull({"w": np.full(10, -2.0)}), second.push_pull({"w": np.full(10, -4.0)}))
    assert values[0]["w"].tolist() == values[1]["w"].tolist() == [second.first_step + 3.0] * 10


async def _join_and_pull(join: Join, name: str) -> psdist.AsyncParameters:
    return await (await join()).parameters(name, {"w": np.zeros(10, np.float32)}, psdist.optim.SGD(lr=1.0))


async def _meet(first: psdist.AsyncParameters, second: psdist.AsyncParameters) -> None:
    """Let the older member make the steps before the joiner's first one."""
    while first.step < second.first_step:
        await first.push({"w": np.full(10, -1.0)})


@pytest.mark.parametrize(
    ("first", "again", "said"),
    [
        ({}, {"compression": "int8"}, r"compression=Int8\(.*\) is asked for, and it has Float32\(\)\. Leave it out"),
        ({"compression": "int8"}, {"compression": "none"}, r"compression=Float32\(\) is asked for, and it has Int8\("),
        ({"compression": "auto"}, {"compression": "int8"}, r"it has Auto\(\), which chose Float32\(\)\."),
        ({"compression": "bfloat16"}, {"compression": "auto"}, r"compression=Auto\(\) is asked for, and it has BFl"),
        (
            {"compression": psdist.compression.TopK(0.01)},
            {"compression": psdist.compression.TopK(0.02)},
            r"compression=TopK\(.*ratio=0.02.* is asked for, and it has TopK\(.*ratio=0.01",
        ),
        ({}, {"on_drop": "raise"}, r"on_drop='raise' is asked for, and it has 'warn'\. Leave it out"),
        ({}, {"pull_dtype": "float16"}, r"pull_dtype='float16' is asked for, and it has 'float32'\. Leave it out"),
        (
            {"pull_dtype": "float16"},
            {"pull_dtype": "bfloat16", "on_drop": "ignore"},
            r"pull_dtype='bfloat16' is asked for, and it has 'float16'; on_drop='ignore' is asked for",
        ),
    ],
)
async def test_a_handle_that_is_open_is_not_given_with_other_choices(
    join: Join, name: str, first: dict[str, Any], again: dict[str, Any], said: str
) -> None:
    client, same = await join(), {"init": {"w": np.zeros(10, np.float32)}, "optimizer": SGD}
    weights = await client.parameters(name, **same, **first)
    with pytest.raises(errors.SettingsMismatchError, match=f"this client has '{name}' open already: .*{said}"):
        await client.parameters(name, **same, **again)
    with pytest.raises(errors.SettingsMismatchError, match=said):
        await client.parameters(name, **again)
    assert await client.parameters(name, **same, **first) is weights
    assert (await weights.push_pull({"w": np.zeros(10)}))["w"].tolist() == [0.0] * 10  # the run continues


@pytest.mark.parametrize(
    ("first", "again"),
    [
        ({"compression": "auto", "on_drop": "raise"}, {}),
        ({"compression": "auto"}, {"compression": "auto"}),
        ({"compression": "auto"}, {"compression": "float32"}),  # That is its choice.
        ({}, {"compression": "none", "on_drop": "warn"}),
        ({"compression": "int8"}, {"compression": psdist.compression.Int8()}),
        (
            {"compression": psdist.compression.PerTensor({"w": psdist.compression.TopK(0.01)})},
            {"compression": psdist.compression.PerTensor({"w": psdist.compression.TopK(0.01)})},
        ),
        ({"pull_dtype": "float16"}, {}),
    ],
)
async def test_a_call_that_asks_for_nothing_else_gets_the_same_handle(
    join: Join, name: str, first: dict[str, Any], again: dict[str, Any]
) -> None:
    client, same = await join(), {"init": {"w": np.zeros(10, np.float32)}, "optimizer": SGD}
    weights = await client.parameters(name, **same, **first)
    assert await client.parameters(name, **same, **first) is weights
    assert await client.parameters(name, **same, **again) is weights
    assert await client.parameters(name, **again) is weights


async def test_a_reader_is_not_given_with_another_dtype(join: Join, name: str) -> None:
    await (await join()).parameters(name, {"w": np.zeros(10, np.float32)}, SGD)
    client = await join()
    reader = await client.parameters(name, pull_dtype="float16")
    with pytest.raises(errors.SettingsMismatchError, match="pull_dtype='bfloat16' is asked for, and it has 'float16'"):
        await client.parameters(name, pull_dtype="bfloat16")
    assert await client.parameters(name, pull_dtype="float16") is await client.parameters(name) is reader


async def test_numbers_of_numpy_are_weights_of_a_push(join: Join, name: str) -> None:
    weights = await (await join()).parameters(name, {"w": np.zeros(10, np.float32)}, psdist.optim.SGD(lr=1.0))
    for step, weight in enumerate((np.int64(3), np.float32(0.5), np.array(2), np.array([True, True]).sum())):
        values = await weights.push_pull({"w": np.full(10, -1.0)}, weight=weight)
        assert values["w"].tolist() == [step + 1.0] * 10


@pytest.mark.usefixtures("world_of_two")
async def test_barriers_wait_for_all_and_name_who_is_missing(join: Join) -> None:
    clients = [await join(rank=0), await join(rank=1)]
    with pytest.raises(errors.WaitTimeoutError, match="worker-1"):
        await clients[0].barrier("eval", timeout=0.5)
    for _ in range(2):
        await asyncio.gather(*(client.barrier("eval") for client in clients))


async def test_declared_iterations_count_whatever_the_order(join: Join, name: str) -> None:
    client = await join()
    first, second = [await client.parameters(f"{name}-{part}", {"w": np.ones(10)}, SGD) for part in "ab"]
    assert client.session is not None
    order = client.session.alignment.order
    for pushes in ([first, second], [first, first, second], [second]):
        with client.iteration():
            assert order.is_at_start
            for weights in pushes:
                await weights.push({"w": np.ones(10)})
            assert order.is_inside
    assert order.standing.is_declared and order.is_at_start
    assert (order.standing.start, order.standing.position) == (6, 6)


async def test_an_iteration_that_failed_is_not_over(join: Join, name: str) -> None:
    client = await join()
    first, second = [await client.parameters(f"{name}-{part}", {"w": np.ones(10)}, SGD) for part in "ab"]
    assert client.session is not None
    with pytest.raises(ZeroDivisionError), client.iteration():
        await first.push({"w": np.ones(10)})
        raise ZeroDivisionError
    assert client.session.alignment.order.is_inside
    await second.push({"w": np.ones(10)})


async def test_a_closed_client_declares_no_iteration(join: Join) -> None:
    client = await join()
    await client.close()
    with pytest.raises(errors.ClosedError), client.iteration():
        pass


async def test_no_elements_at_all(join: Join, name: str) -> None:
    weights = await (await join()).parameters(name, {"e": np.zeros((0, 2), np.float32)}, SGD)
    assert (await weights.push_pull({"e": np.zeros((0, 2))}))["e"].shape == (0, 2)
    assert (await weights.pull())["e"].shape == (0, 2)
