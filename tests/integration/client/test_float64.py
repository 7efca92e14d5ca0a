"""Parameter sets whose servers compute in float64: the exact bytes of plain numpy in one process, over each transport,
through the loss of a server, a snapshot and its export. What float64 excludes is refused."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import psdist
from psdist import AsyncClient, AsyncParameters, optim
from psdist.consistency import ASP, BSP
from psdist.errors import InvalidArgumentError, LayoutMismatchError, NonFiniteGradientError
from psdist.launcher.embedded import EmbeddedCluster
from psdist.settings.config import TransportName
from psdist.snapshots import load
from tests.support.clients import connected

Arrays = dict[str, NDArray[Any]]

STEPS, SLICE = 6, 4096
#: Three slices and a bit, with an empty tensor, a scalar, and tensors that start anywhere.
SHAPES = {"w1": (71, 51), "none": (0, 3), "scale": (), "w2": (2999,), "b": (7,)}
PLAIN = optim.SGD(lr=1.0)
SPEC = optim.Adam(lr=0.01, weight_decay=0.1, overrides=(optim.override("b", lr=0.1, beta1=0.5),))


def draw(*seed: int) -> Arrays:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape) for name, shape in SHAPES.items()}


class Reference:
    """Adam in plain numpy, with the mean of the gradients of all ranks."""

    def __init__(self, workers: int) -> None:
        self.weights, self.workers, self.step = draw(7), workers, 0
        self.m, self.v = ({name: np.zeros(shape) for name, shape in SHAPES.items()} for _ in range(2))

    def update(self) -> None:
        parts = [draw(self.step, rank) for rank in range(self.workers)]
        self.step += 1
        for name, weights in self.weights.items():
            values = SPEC.group_values(optim.group_of(name, SPEC.overrides))
            gradient = sum((part[name] for part in parts[1:]), parts[0][name]) / self.workers
            gradient = gradient + values["weight_decay"] * weights
            self.m[name] = self.m[name] + (1 - values["beta1"]) * (gradient - self.m[name])
            self.v[name] = values["beta2"] * self.v[name] + (1 - values["beta2"]) * gradient * gradient
            size = values["lr"] / (1 - values["beta1"] ** self.step)
            root = 1 / (1 - values["beta2"] ** self.step) ** 0.5
            self.weights[name] = weights - size * self.m[name] / (np.sqrt(self.v[name]) * root + values["eps"])


def same(one: Arrays, other: Arrays) -> bool:
    """True if two dicts have the same bytes."""
    return [(name, array.dtype, array.tobytes()) for name, array in one.items()] == [
        (name, array.dtype, array.tobytes()) for name, array in other.items()
    ]


async def model(clients: list[AsyncClient], name: str) -> list[AsyncParameters]:
    return await asyncio.gather(
        *(client.parameters(name, draw(7), SPEC, slice_elements=SLICE, master_dtype="float64") for client in clients)
    )


async def step(handles: list[AsyncParameters], number: int) -> list[Arrays]:
    return await asyncio.gather(*(handle.push_pull(draw(number, rank)) for rank, handle in enumerate(handles)))


@pytest.mark.parametrize("transport", ["auto", "tcp", "grpc"])
async def test_weights_are_those_of_one_process(cluster: EmbeddedCluster, transport: TransportName) -> None:
    reference = Reference(2)
    async with connected(cluster, transport, transport) as clients:
        handles = await model(clients, f"model-{transport}")
        assert same(await handles[1].pull(), draw(7))
        for number in range(STEPS):
            results = await step(handles, number)
            reference.update()
            assert all(same(values, reference.weights) for values in results), number
        assert same(await handles[0].pull(copy=False), reference.weights)


async def test_buffers_buckets_and_out_are_float64(cluster: EmbeddedCluster) -> None:
    reference, out = Reference(1), {name: np.zeros(shape) for name, shape in SHAPES.items()}
    async with connected(cluster, "auto") as clients:
        (handle,) = await model(clients, "buckets")
        buffers = await handle.gradient_buffers()

        def write(number: int) -> None:
            reference.update()
            for name, gradient in draw(number, 0).items():
                buffers[name][...] = gradient

        write(0)
        some = await handle.push_pull_async(["b", "w2"])
        rest = await handle.push_pull_async(["w1", "none", "scale"])
        values = await some.wait() | await rest.wait()
        assert same({name: values[name] for name in SHAPES}, reference.weights)
        write(1)
        await handle.push_pull(buffers, out=out)
        assert same(out, reference.weights)


async def test_the_loss_of_a_server_changes_no_byte() -> None:
    reference = Reference(2)
    with closing(EmbeddedCluster(servers=3, replicas=2)) as cluster:
        async with connected(cluster, "auto", "auto") as clients:
            handles = await model(clients, "model")
            for number in range(STEPS):
                if number == STEPS // 2:
                    cluster.processes[2].kill()
                results = await step(handles, number)
                reference.update()
                assert all(same(values, reference.weights) for values in results), number


async def test_a_snapshot_resumes_and_loads_with_all_digits(tmp_path: Path) -> None:
    reference = Reference(1)
    for life in range(2):
        with closing(EmbeddedCluster(servers=1 + life, storage=tmp_path, run_id="doubles")) as cluster:
            async with connected(cluster, "auto") as clients:
                (handle,) = await model(clients, "model")
                for number in range(3 * life, 3 * life + 3):
                    assert handle.step == number
                    (values,) = await step([handle], number)
                    reference.update()
                    assert same(values, reference.weights), number
                await clients[0].snapshot()
    loaded = psdist.load_snapshot(str(tmp_path))
    assert same({name: loaded[name] for name in SHAPES}, reference.weights)
    state = load.load_optimizer_state(str(tmp_path)).tensors
    assert same({name: np.asarray(state[name].arrays["exp_avg"]) for name in SHAPES}, reference.m)
    exported = tmp_path / "model.npz"
    export = [sys.executable, "-m", "psdist.cli.main", "snapshot", "export", str(tmp_path), "--out", str(exported)]
    await asyncio.to_thread(subprocess.run, export, check=True, capture_output=True)
    with np.load(exported) as arrays:
        assert same({name: arrays[name] for name in SHAPES}, reference.weights)


async def test_each_push_alone_and_weighted_means_keep_all_digits(cluster: EmbeddedCluster) -> None:
    tiny = 2.0**-50  # float32 would lose it beside 1.
    async with connected(cluster, "auto", "auto") as clients:
        late, handles, added = [
            await asyncio.gather(
                *(
                    client.parameters(name, {"w": np.ones(3)}, PLAIN, consistency, master_dtype="float64")
                    for client in clients
                )
            )
            for name, consistency in (("late", ASP()), ("mean", BSP()), ("sum", BSP(reduction="sum")))
        ]
        assert ((await late[0].push_pull({"w": np.full(3, tiny)}))["w"] == 1 - tiny).all()
        pushes = (handle.push_pull({"w": np.full(3, tiny * w)}, weight=w) for w, handle in enumerate(handles, 1))
        for values in await asyncio.gather(*pushes):
            assert (values["w"] == 1 - (1 * tiny + 2 * (2 * tiny)) / 3).all()
        for values in await asyncio.gather(*(handle.push_pull({"w": np.full(3, tiny)}) for handle in added)):
            assert (values["w"] == 1 - 2 * tiny).all()


async def test_an_infinite_gradient_is_refused_and_one_beyond_float32_is_not(cluster: EmbeddedCluster) -> None:
    async with connected(cluster, "auto") as clients:
        handle = await clients[0].parameters("large", {"w": np.zeros(2)}, PLAIN, master_dtype="float64")
        with pytest.raises(NonFiniteGradientError, match="'w' holds 1 NaN or Inf of 2 elements"):
            await handle.push_pull({"w": np.array([1.0, np.inf])})
        assert ((await handle.push_pull({"w": np.full(2, 1e300)}))["w"] == -1e300).all()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"compression": "int8"}, "compression=.* with master_dtype='float64'"),
        ({"compression": "bfloat16"}, "compression=.* with master_dtype='float64'"),
        ({"pull_dtype": "bfloat16"}, "pull_dtype=bfloat16 with master_dtype='float64'"),
        ({"pull_compression": "int8"}, "pull_compression=.* with master_dtype='float64'"),
        ({"slice_elements": 4097}, "slice_elements=4097 with master_dtype='float64'"),
        ({"master_dtype": "float16"}, "master_dtype='float16' is unknown"),
    ],
)
async def test_settings_that_exclude_each_other_are_refused(
    cluster: EmbeddedCluster, settings: dict[str, Any], words: str
) -> None:
    async with connected(cluster, "auto") as clients:
        with pytest.raises(InvalidArgumentError, match=words):
            await clients[0].parameters(
                "refused", {"w": np.zeros(3)}, PLAIN, **({"master_dtype": "float64"} | settings)
            )


async def test_workers_must_agree(cluster: EmbeddedCluster) -> None:
    async with connected(cluster, "auto") as clients:
        await clients[0].parameters("agreed", {"w": np.zeros(3)}, PLAIN)
        with pytest.raises(LayoutMismatchError, match="the servers compute in float64, not float32"):
            await clients[0].parameters("agreed", {"w": np.zeros(3)}, PLAIN, master_dtype="float64")


async def test_a_reader_sees_float64(cluster: EmbeddedCluster) -> None:
    async with connected(cluster, "auto", "auto") as clients:
        writer, reader = clients
        opened = await asyncio.gather(
            writer.parameters("read", {"w": np.full(3, np.pi)}, PLAIN, master_dtype="float64"),
            reader.parameters("read"),
        )
        assert (await opened[1].pull())["w"].tolist() == [np.pi] * 3
    async with connected(cluster, "auto") as clients:
        with pytest.raises(InvalidArgumentError, match="pull_dtype=bfloat16"):
            await clients[0].parameters("read", pull_dtype="bfloat16")
