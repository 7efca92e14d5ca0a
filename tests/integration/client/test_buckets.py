"""Steps in buckets, and calls that copy nothing: the same bytes as ``push_pull``, over each transport."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import statistics
import subprocess
import sys
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio

import psdist
from psdist import errors
from psdist.launcher.embedded import EmbeddedCluster
from tests.integration.client.conftest import Join

pytestmark = pytest.mark.asyncio(loop_scope="session")

TRANSPORTS = ("grpc", "tcp", "shm")
#: 4096 elements are whole pages, so that all servers' slices can be shown as one vector; 1000 are not.
ADAM = psdist.optim.Adam(lr=0.01)
RNG = np.random.default_rng(7)
INIT = {
    "embedding": RNG.normal(size=(64, 100)).astype(np.float32),
    "bias": RNG.normal(size=17).astype(np.float32),
    "empty": np.zeros((0, 3), np.float32),
    "scale": np.float64(0.5),
    "block": RNG.normal(size=(9000,)).astype(np.float32),
    "half": np.ones(300, np.float16),
    "head": RNG.normal(size=(33, 40)).astype(np.float32),
}
BUCKETINGS = {
    "one": [list(INIT)],
    "backwards": [[name] for name in reversed(INIT)],
    "mixed": [["head", "embedding"], ["empty", "half"], ["block", "scale", "bias"]],
}
_numbers = itertools.count()


@pytest_asyncio.fixture(
    loop_scope="session",
    scope="module",
    params=[pytest.param(1, marks=pytest.mark.long), 2],
    ids=lambda servers: f"S{servers}",
)
async def cluster(request: pytest.FixtureRequest) -> AsyncIterator[EmbeddedCluster]:
    cluster = await asyncio.to_thread(EmbeddedCluster, request.param)
    yield cluster
    await asyncio.to_thread(cluster.close)


def new_name() -> str:
    """Return a name for a test's own parameters: the cluster is shared."""
    return f"parameters-{next(_numbers)}"


async def two_handles(join: Join, transport: str, **settings: Any) -> list[psdist.AsyncParameters]:
    """Return the handles of one parameter set in two workers."""
    clients = [await join(rank=rank, transport=transport) for rank in (0, 1)]
    return await handles_of(clients, **settings)


async def handles_of(clients: list[psdist.AsyncClient], **settings: Any) -> list[psdist.AsyncParameters]:
    name = new_name()
    arguments = {"init": INIT, "optimizer": ADAM} | settings
    return list(await asyncio.gather(*(client.parameters(name, **arguments) for client in clients)))


def zeros() -> dict[str, np.ndarray]:
    return {name: np.zeros(np.shape(value), np.float32) for name, value in INIT.items()}


def gradient(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=np.shape(value)).astype(np.float32) for name, value in INIT.items()}


def raw(values: dict[str, np.ndarray]) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in values.items()}


async def push_in_buckets(
    handle: psdist.AsyncParameters, gradients: dict[str, np.ndarray], buckets: list[list[str]]
) -> dict[str, bytes]:
    under_way = [await handle.push_pull_async({name: gradients[name] for name in names}) for names in buckets]
    return {name: data for bucket in under_way for name, data in raw(await bucket).items()}


# --- the same bytes ---------------------------------------------------------------------------------------------------


NARROW = {"compression": "bfloat16", "pull_dtype": "float16"}
CLIPPED = {"optimizer": psdist.optim.Adam(max_grad_norm=0.5)}


# Every transport meets both sizes, and every setting both sizes.
@pytest.mark.parametrize(
    ("transport", "slice_elements", "settings"),
    [
        ("grpc", 4096, {}),
        ("grpc", 1000, NARROW),
        ("tcp", 4096, NARROW),
        ("tcp", 1000, CLIPPED),
        ("shm", 4096, CLIPPED),
        ("shm", 1000, {}),
        ("shm", 1000, NARROW),
    ],
)
async def test_buckets_give_the_bytes_of_push_pull(
    join: Join, transport: str, slice_elements: int, settings: dict[str, Any]
) -> None:
    clients = [await join(rank=rank, transport=transport) for rank in (0, 1)]
    whole = await handles_of(clients, slice_elements=slice_elements, **settings)
    cut = await handles_of(clients, slice_elements=slice_elements, **settings)
    for step, (mine, theirs) in enumerate(itertools.permutations(BUCKETINGS, 2)):
        pair = gradient(2 * step), gradient(2 * step + 1)
        expected = await asyncio.gather(*(h.push_pull(g) for h, g in zip(whole, pair, strict=True)))
        results = await asyncio.gather(
            push_in_buckets(cut[0], pair[0], BUCKETINGS[mine]), push_in_buckets(cut[1], pair[1], BUCKETINGS[theirs])
        )
        assert raw(expected[0]) == results[0] == results[1]
    assert raw(await cut[0].pull()) == raw(await whole[1].pull())
    assert cut[0].step == whole[0].step and cut[0].statistics().pushes == whole[0].statistics().pushes
    assert {cut[0].statistics().transport, whole[1].statistics().transport} == {transport}


@pytest.mark.parametrize(
    ("transport", "slice_elements", "compression"),
    [
        ("grpc", 1000, "float32"),
        ("grpc", 4096, "bfloat16"),
        ("tcp", 4096, "float32"),
        ("tcp", 1000, "bfloat16"),
        ("shm", 1000, "float32"),
        ("shm", 4096, "bfloat16"),
    ],
)
async def test_buffers_and_views_give_the_bytes_of_push_pull(
    join: Join, transport: str, slice_elements: int, compression: str
) -> None:
    client = await join(transport=transport)
    arguments = {"init": INIT, "optimizer": ADAM, "slice_elements": slice_elements, "compression": compression}
    plain = await client.parameters(new_name(), **arguments)
    lean = await client.parameters(new_name(), **arguments)
    buffers = await lean.gradient_buffers()
    assert raw(await plain.pull()) == raw(await lean.pull(copy=False))
    addresses = set()
    for step in range(4):
        gradients = gradient(step)
        for name, buffer in buffers.items():
            buffer[...] = gradients[name]
        expected = raw(await plain.push_pull(gradients))
        if step % 2:
            values = await lean.push_pull(buffers, copy=False)
        else:
            values = {}
            for bucket in [await lean.push_pull_async(names) for names in BUCKETINGS["mixed"]]:
                values |= await bucket.wait()
        assert raw(values) == expected == raw(await lean.pull(copy=False))
        assert {name: value.dtype for name, value in values.items()} == {
            n: np.asarray(v).dtype for n, v in INIT.items()
        }
        assert not any(value.flags.writeable for value in values.values())
        addresses.add(tuple(values[name].ctypes.data for name in INIT if name != "empty"))
        for name in INIT:
            assert buffers[name].tobytes() == gradients[name].tobytes()
    assert len(addresses) == 1, "the steady state used new memory"
    out = zeros() | {"scale": np.zeros((), np.float64), "half": np.zeros(300, np.float16)}
    assert raw(await lean.pull(out)) == raw(out) == raw(await plain.pull())


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("consistency", [psdist.SSP(1), psdist.SSP(0), psdist.ASP()], ids=repr)
async def test_asynchronous_buckets_each_count_once(join: Join, transport: str, consistency: object) -> None:
    client = await join(transport=transport)
    handle = await client.parameters(
        new_name(), INIT, psdist.optim.SGD(lr=1.0), consistency=consistency, slice_elements=1000
    )
    start = await handle.pull()
    for step in range(4):
        await push_in_buckets(handle, zeros() | {"block": np.full(9000, -1.0)}, BUCKETINGS["backwards"])
        assert handle.step == step + 1
    assert np.allclose((await handle.pull())["block"], start["block"] + 4, atol=1e-5)
    assert handle.version == 4


# --- overlap ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_bucket_is_answered_before_the_rest_is_given(join: Join, transport: str) -> None:
    handles = await two_handles(join, transport, slice_elements=1000)
    before = raw(await handles[0].pull())
    step = handles[0].step
    buckets = [await handle.push_pull_async({"head": np.ones((33, 40)), "half": np.ones(300)}) for handle in handles]
    for bucket in buckets:
        with pytest.raises(errors.InvalidArgumentError, match="block must be given first"):
            await bucket  # its first slice has elements of "block"
    buckets = [await handle.push_pull_async({"block": np.ones(9000)}) for handle in handles]
    with pytest.raises(errors.InvalidArgumentError, match="scale must be given"):
        await buckets[0].wait(60)
    late = [
        await handle.push_pull_async({"scale": 1.0, "bias": np.ones(17), "empty": np.zeros((0, 3))})
        for handle in handles
    ]
    assert not late[0].done()  # "embedding" is missing in its slice
    for handle in handles:
        assert handle.step == step
        with pytest.raises(errors.InvalidArgumentError, match="misses embedding"):
            await handle.pull()
    rest = [await handle.push_pull_async({"embedding": np.ones((64, 100))}) for handle in handles]
    values = await asyncio.gather(*rest)
    assert raw(values[0]) == raw(values[1]) and raw(values[0])["embedding"] != before["embedding"]
    assert raw(await buckets[0])["block"] == raw(await handles[0].pull())["block"]
    assert handles[0].step == step + 1


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_slices_of_a_bucket_come_back_while_the_step_is_open(join: Join, transport: str) -> None:
    clients = [await join(rank=rank, transport=transport) for rank in (0, 1)]
    init = {"first": np.zeros(4096, np.float32), "last": np.zeros(4096, np.float32)}
    handles = await handles_of(clients, init=init, optimizer=psdist.optim.SGD(lr=1.0), slice_elements=4096)
    last = [
        await handle.push_pull_async({"last": np.full(4096, -value)})
        for handle, value in zip(handles, (1.0, 3.0), strict=True)
    ]
    async with asyncio.timeout(60):
        for bucket in last:
            assert set((await bucket)["last"]) == {np.float32(2)}
            assert bucket.done() and bucket.names == ("last",)
    first = await asyncio.gather(*(handle.push_pull_async({"first": np.full(4096, -1.0)}) for handle in handles))
    for bucket in [*first, *last]:
        await bucket
    # The next step is taken as soon as this one is complete, and the user no longer owns this one's results.
    await asyncio.gather(*(handle.push_pull_async({"last": np.full(4096, -1.0)}) for handle in handles))
    with pytest.raises(errors.InvalidArgumentError, match="not valid any more"):
        await last[0]


async def test_the_next_step_waits_for_this_one(join: Join) -> None:
    handles = await two_handles(join, "grpc", slice_elements=1000)
    step = handles[0].step
    await handles[0].push_pull_async(gradient(1))
    queued = asyncio.create_task(handles[0].push_pull_async(gradient(2)))
    pull = asyncio.create_task(handles[1].push_pull(gradient(3)))
    await pull
    bucket = await queued  # not before the other worker made the first step
    assert handles[0].step == step + 1 and not bucket.done()
    await handles[1].push(gradient(4))
    assert raw(await bucket) == raw(await handles[1].pull())


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bucket", "error", "words"),
    [
        ({"head": np.ones((40, 33))}, errors.ShapeMismatchError, r"'head' has shape \(40, 33\)"),
        ({"head": np.ones((33, 40), int)}, errors.DTypeMismatchError, "'head' has dtype int64"),
        ({"tail": np.ones(3)}, errors.UnknownTensorError, "'tail' is unknown"),
        ({}, errors.InvalidArgumentError, "names no tensor"),
        ("head", errors.InvalidArgumentError, "not 'head'"),
        (None, errors.InvalidArgumentError, "not None"),
        (["head"], errors.InvalidArgumentError, "gradient_buffers"),
        ({"head": np.full((33, 40), np.nan)}, errors.NonFiniteGradientError, "'head' holds 1320 NaN"),
        ({"bias": np.ones(17), "block": np.full(9000, 1e300)}, errors.NonFiniteGradientError, "'block' holds 9000 NaN"),
    ],
)
async def test_what_is_wrong_with_a_bucket_is_said_and_changes_nothing(
    join: Join, bucket: object, error: type[Exception], words: str
) -> None:
    handle = await (await join()).parameters(new_name(), INIT, ADAM)
    before = raw(await handle.pull())
    with pytest.raises(error, match=words):
        await handle.push_pull_async(bucket)
    assert raw(await handle.pull()) == before and handle.step == 0  # no step was started
    await handle.push_pull_async({"scale": np.float64(1)})
    with pytest.raises(error, match=words):
        await handle.push_pull_async(bucket)
    with pytest.raises(errors.InvalidArgumentError, match="'scale' was given twice"):
        await handle.push_pull_async({"scale": np.float64(1)})
    await handle.push_pull_async({name: value for name, value in zeros().items() if name != "scale"})
    assert (await handle.pull())["scale"] != np.float64(0.5) and handle.step == 1


async def test_calls_while_a_step_misses_tensors(join: Join) -> None:
    handle = await (await join()).parameters(new_name(), INIT, ADAM)
    bucket = await handle.push_pull_async({"bias": np.ones(17), "empty": np.zeros((0, 3))})
    for call in (handle.pull(), handle.push(zeros()), handle.push_pull(zeros())):
        with pytest.raises(errors.InvalidArgumentError, match="misses embedding, scale, block, half, head"):
            await call
    with pytest.raises(errors.InvalidArgumentError, match="embedding, scale"):
        await bucket.wait(60)


async def test_out_and_no_copy_exclude_each_other(join: Join) -> None:
    handle = await (await join()).parameters(new_name(), INIT, ADAM)
    for call in (handle.pull(zeros(), copy=False), handle.push_pull(zeros(), zeros(), copy=False)):
        with pytest.raises(errors.InvalidArgumentError, match="exclude"):
            await call
    assert handle.step == 0


async def test_readers_and_clipping_without_common_steps(join: Join) -> None:
    client = await join()
    clipped = psdist.optim.SGD(max_grad_norm=1.0)
    handle = await client.parameters(new_name(), INIT, clipped, consistency=psdist.ASP())
    with pytest.raises(errors.InvalidArgumentError, match="norm of the whole gradient"):
        await handle.push_pull_async(zeros())
    reader = await (await join()).parameters(handle.name)
    with pytest.raises(errors.NotMemberError):
        await reader.push_pull_async(zeros())
    assert raw(await reader.pull(copy=False)) == raw(await handle.pull())


async def test_clipping_needs_the_whole_step(join: Join) -> None:
    handle = await (await join()).parameters(new_name(), INIT, psdist.optim.SGD(max_grad_norm=1.0))
    first = await handle.push_pull_async({"block": np.ones(9000)})
    with pytest.raises(errors.InvalidArgumentError, match="clipped together"):
        await first
    rest = await handle.push_pull_async({name: value for name, value in zeros().items() if name != "block"})
    assert set(await first) == {"block"} and "block" not in await rest


async def test_a_bucket_with_nan_abstains_where_that_is_wanted(join: Join) -> None:
    handle = await (await join()).parameters(
        new_name(), INIT, psdist.optim.SGD(lr=1.0), non_finite="skip", slice_elements=1000
    )
    before = await handle.pull()
    await handle.push_pull_async({"head": np.full((33, 40), np.nan)})
    await handle.push_pull_async({name: value + 1 for name, value in zeros().items() if name != "head"})
    after = await handle.pull()
    assert after["head"].tobytes() == before["head"].tobytes()
    assert np.array_equal(after["embedding"], before["embedding"] - 1)
    assert handle.statistics().abstained == 1 and handle.step == 1


async def test_closing_ends_buckets_under_way(join: Join) -> None:
    clients = [await join(rank=0), await join(rank=1)]
    handles = await handles_of(clients)
    bucket = await handles[0].push_pull_async(gradient(0))
    waiting = asyncio.create_task(bucket.wait())
    await asyncio.sleep(0)
    await clients[0].close()
    with pytest.raises(errors.ClosedError):
        await waiting
    with pytest.raises(errors.ClosedError):
        await handles[0].push_pull_async(gradient(0))
    async with asyncio.timeout(60):
        await handles[1].push(gradient(1))  # the other continues alone


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("method", ["push", "push_pull"])
async def test_closing_ends_a_call_under_way(join: Join, transport: str, method: str) -> None:
    clients = [await join(rank=rank, transport=transport) for rank in (0, 1)]
    handles = await handles_of(clients)
    before = handles[1].statistics().push_bytes
    call = asyncio.create_task(getattr(handles[0], method)(gradient(0)))
    while handles[0].statistics().push_bytes == before:  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await clients[0].close()
        with pytest.raises(errors.ClosedError):
            await call


# --- the synchronous face ---------------------------------------------------------------------------------------------

SCRIPT = """
from concurrent.futures import ThreadPoolExecutor
import numpy as np, psdist
from psdist.errors import InvalidArgumentError, WaitTimeoutError
init = {"a": np.zeros(5000, np.float32), "b": np.zeros(5000, np.float32)}
with psdist.Client() as client, psdist.Client() as second, ThreadPoolExecutor() as threads:
    made = [threads.submit(one.parameters, "w", init, psdist.optim.SGD(lr=1.0)) for one in (client, second)]
    weights, other = [handle.result() for handle in made]
    buffers = weights.gradient_buffers()
    for step in range(3):
        other.push_pull_async({"a": np.full(5000, -1.0), "b": np.full(5000, -3.0)})
        for name in ("b", "a"):
            buffers[name][...] = -1
            bucket = weights.push_pull_async([name])
            if name == "b":
                try:
                    bucket.wait(60)
                except InvalidArgumentError as error:
                    assert "a must be given first" in str(error), error
        values = bucket.wait()
        assert bucket.done() and bucket.names == ("a",) and set(values["a"]) == {step + 1}, values
    assert set(weights.pull(copy=False)["b"]) == {6}
    bucket = weights.push_pull_async(buffers)
    try:
        bucket.wait(timeout=0.2)
    except WaitTimeoutError as error:
        print("waited:", error)
    other.push(buffers)
    assert set(bucket.wait()["a"]) == {4}
    print("transport:", weights.statistics().transport)
"""


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_the_synchronous_face(cluster: EmbeddedCluster, transport: str) -> None:
    environment = os.environ | {
        "PSDIST_SCHEDULER": cluster.address,
        "PSDIST_TOKEN": cluster.token,
        "PSDIST_TRANSPORT": transport,
    }
    command = [sys.executable, "-c", SCRIPT.replace('"w"', f'"{new_name()}"')]
    done = await asyncio.to_thread(
        subprocess.run, command, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "waited: the new weights of a, b did not come within 0.2 s" in done.stdout
    assert f"transport: {transport}" in done.stdout


# --- the steady state -------------------------------------------------------------------------------------------------


@pytest.mark.long  # Tracing memory takes seconds.
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_the_steady_state_takes_no_more_memory(join: Join, transport: str) -> None:
    handle = await (await join(transport=transport)).parameters(new_name(), INIT, ADAM)
    buffers = await handle.gradient_buffers()
    gradients = gradient(0)

    async def steps(count: int) -> None:
        for _ in range(count):
            await handle.push_pull(buffers, copy=False)
            await handle.push_pull(gradients)
            for bucket in [await handle.push_pull_async(names) for names in BUCKETINGS["mixed"]]:
                await bucket

    process = psutil.Process()
    await steps(40)
    resident = process.memory_info().rss
    tracemalloc.start()
    try:
        traced = []
        for _ in range(6):
            await steps(30)
            gc.collect()
            traced.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    # Python's own tables grow for some thousand steps, and change their size in jumps now and then. A step that leaked
    # its request, its bucket or its arrays would take some 500 bytes each time.
    growth = statistics.median(later - before for before, later in itertools.pairwise(traced))
    assert growth < 25_000, f"{growth} bytes more after each 150 steps: {traced}"
    await steps(20)
    assert process.memory_info().rss - resident < 8 << 20
