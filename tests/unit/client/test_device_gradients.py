"""Gradients and weights in the memory of a device: payloads, copies, and refused arguments."""

from __future__ import annotations

import threading
import weakref
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from psdist import errors
from psdist.client import device_vectors as device_arrays
from psdist.client.core.flat_vector import layout_of
from psdist.client.device_vectors import DeviceVectors
from psdist.client.gradients import GradientVector, StaleBufferCheck
from psdist.client.session.worker_state import DeferredArray
from psdist.client.transport.buffers import OfferedArena
from psdist.compression import BFloat16, Cast, ChunkedTopK, Float16, Int8, PerTensor, RandomK, TopK
from tests.support.client_fakes import Setup, Start
from tests.support.host_arrays import HostArray, HostArrays
from tests.support.host_device import needs_compiler

pytestmark = needs_compiler

INIT = {"v": np.zeros((10, 8), np.float32), "b": np.zeros(7, np.float32), "w": np.zeros((9, 9), np.float32)}
CODEC = PerTensor({"*": Int8(block=16)}, min_elements=64)
RANDOM = PerTensor({"*": RandomK(0.25)}, min_elements=64)
MOMENTUM = PerTensor({"v": TopK(0.1, momentum=0.9), "w": Int8()}, 64)
ELEMENTS = 168
BYTES = 4 * ELEMENTS


def gradient(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(array.shape).astype(np.float32) for name, array in INIT.items()}


def there(values: dict[str, np.ndarray]) -> dict[str, HostArray]:
    return {name: HostArray(array.copy()) for name, array in values.items()}


def joined(values: dict[str, Any]) -> np.ndarray:
    return np.concatenate([np.asarray(getattr(values[name], "values", values[name])).reshape(-1) for name in INIT])


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> HostArrays:
    """Return the arrays of device 0."""
    found = HostArrays()
    monkeypatch.setattr(device_arrays, "open_arrays", {0: found}.__getitem__)
    return found


@pytest.fixture
def start(start: Start) -> Start:
    """Start clients that compress."""

    async def compressing(init: dict[str, np.ndarray] = INIT, **settings: Any) -> Setup:
        return await start(init, **{"compression": CODEC} | settings)

    return compressing


def sent(setup: Setup) -> dict[tuple[int, int], bytes]:
    return {(step, index): payload for server in setup.servers for step, index, payload in server.payloads}


def residual(setup: Setup) -> np.ndarray:
    return setup.weights._order.encoding._encoder.residual


@pytest.mark.parametrize("codec", [CODEC, PerTensor({"v": ChunkedTopK(4, 32, bits=2), "w": TopK(0.1)}, 64)], ids=repr)
async def test_what_is_sent_and_left_out_is_that_of_gradients_on_the_host(
    start: Start, made: HostArrays, codec: PerTensor
) -> None:
    host, device = await start(compression=codec), await start(compression=codec)
    for seed in range(3):
        await host.weights.push_pull(gradient(seed))
        await device.weights.push_pull(there(gradient(seed)))
    assert sent(device) == sent(host) and len(sent(host)) > 3
    np.testing.assert_array_equal(residual(device), residual(host))
    assert residual(host).any() and made.device.launches
    assert device.weights.statistics().compression == host.weights.statistics().compression


async def test_only_payloads_are_copied_to_the_host(start: Start, made: HostArrays) -> None:
    setup = await start()
    await setup.weights.push(there(gradient(0)))
    payloads = sum(len(payload) for payload in sent(setup).values())
    # Flags of NaN, in the gradient and by region, come too.
    assert made.device.copied == [4, 4 * len(INIT), payloads]


async def test_buffers_are_pushed_where_they_are(start: Start, made: HostArrays) -> None:
    host, device = await start(), await start()
    buffers = await device.weights.gradient_buffers(device="cuda")
    assert {name: array.shape for name, array in buffers.items()} == {name: one.shape for name, one in INIT.items()}
    again = await device.weights.gradient_buffers(device="cuda:0")
    assert all(again[name] is array for name, array in buffers.items())
    launches = []
    for seed in range(3):
        for name, values in gradient(seed).items():
            buffers[name].values[...] = values
        before = made.device.launches
        await device.weights.push(buffers)
        launches.append(made.device.launches - before)
        await host.weights.push(gradient(seed))
    assert sent(device) == sent(host)
    assert launches[1:] == [3, 3]  # The NaN check, whole numbers and casts: nothing was gathered.


@pytest.mark.parametrize("by_name", [False, True])
async def test_steps_in_buckets(start: Start, made: HostArrays, by_name: bool) -> None:
    host, device = await start(), await start()
    buffers = await device.weights.gradient_buffers(device="cuda") if by_name else {}
    for seed in range(3):
        for name, values in gradient(seed).items():
            bucket = await host.weights.push_pull_async({name: values})
            if by_name:
                buffers[name].values[...] = values
            other = await device.weights.push_pull_async([name] if by_name else there({name: values}))
        np.testing.assert_array_equal(joined(await bucket | INIT), joined(await other | INIT))
    assert sent(device) == sent(host)
    np.testing.assert_array_equal(residual(device), residual(host))


async def test_a_step_may_have_arrays_of_both_memories(start: Start, made: HostArrays) -> None:
    host, device = await start(), await start()
    for first in (True, False):
        values = gradient(first)
        await host.weights.push(values)
        await device.weights.push({**values, "v": HostArray(values["v"])})
        for name in INIT:
            mixed = there({name: values[name]}) if (name == "v") == first else {name: values[name]}
            bucket = await host.weights.push_pull_async({name: values[name]})
            other = await device.weights.push_pull_async(mixed)
        await bucket, await other
    assert sent(device) == sent(host)


@pytest.mark.parametrize("codec", [BFloat16(), Float16()], ids=["bfloat16", "float16"])
async def test_casts_are_made_on_the_device(start: Start, made: HostArrays, codec: Cast) -> None:
    host, device = await start(compression=codec), await start(compression=codec)
    for seed in range(3):
        await host.weights.push(gradient(seed)), await device.weights.push(there(gradient(seed)))
        if seed:
            for name, values in gradient(seed).items():
                one = await host.weights.push_pull_async({name: values})
                other = await device.weights.push_pull_async(there({name: values}))
            await one, await other
    assert sent(device) == sent(host)
    made.device.copied.clear()
    await device.weights.push(there(gradient(5)))
    assert made.device.copied == [4, BYTES // 2]
    large = gradient(0)
    large["b"][2] = 3.4e38
    with pytest.raises(
        errors.NonFiniteGradientError, match=f"'b' holds 1 NaN or Inf .* after the cast to {codec.dtype}"
    ):
        await device.weights.push(there(large))


@pytest.mark.parametrize("codec", [None, RANDOM], ids=["raw", "randomk"])
async def test_a_codec_without_kernels_has_the_gradient_copied(start: Start, made: HostArrays, codec: Any) -> None:
    host, device = await start(compression=codec), await start(compression=codec)
    for seed in range(2):
        await host.weights.push(gradient(seed)), await device.weights.push(there(gradient(seed)))
    assert sent(device) == sent(host)
    if codec is None:
        vector = np.concatenate([array.reshape(-1) for array in gradient(2).values()])
        parts = np.split(vector, [80, 87])
        whole = {name: HostArray(part.reshape(INIT[name].shape)) for name, part in zip(INIT, parts, strict=True)}
        made.device.copied.clear()
        launches = made.device.launches
        await device.weights.push(whole)
        assert made.device.copied == [BYTES] and made.device.launches == launches
        await host.weights.push(gradient(2))
        assert sent(device) == sent(host)
    assert len(made.device.registered) == 1
    await device.weights.release_memory()
    assert not made.device.registered


async def test_nothing_is_registered_once_a_client_is_closed(start: Start, made: HostArrays) -> None:
    setup = await start(compression=None)
    await setup.weights.push(there(gradient(0)))
    assert len(made.device.registered) == 1
    await setup.client.close("done")
    assert not made.device.registered


async def test_a_device_that_is_lost_does_not_keep_a_client_from_closing(start: Start, made: HostArrays) -> None:
    setup = await start(compression=None)
    await setup.weights.push(there(gradient(0)))
    made.device.failure = "it fell off the bus"
    await setup.client.close("done")


async def test_memory_is_not_registered_any_more_when_other_pages_take_its_place(made: HostArrays) -> None:
    """Check memory after a failed push, or the end of a client. Otherwise copies would go to the former pages."""
    arena, registered = OfferedArena(ELEMENTS, "float32"), list[int]()
    assert await arena.prepare() == ""
    layout = layout_of(INIT)
    vector = GradientVector(layout, "float32", "reject", lambda: arena.gradients, StaleBufferCheck("p"))

    class User:
        def before_replaced(self) -> None:
            registered.append(len(made.device.registered))
            vector.unregister()

        def on_detached(self) -> None:
            """Do nothing: no server has the memory."""

    arena.join(User())
    for replace in (arena.release, arena.detach, arena.share):
        flat = vector.gather(there(gradient(0)), 0)
        assert flat is vector.vector and len(made.device.registered) == 1
        np.testing.assert_array_equal(flat, joined(gradient(0)))
        await replace()
        assert not made.device.registered
    assert registered == [1, 1, 1]


async def test_registered_memory_lasts_until_that_is_taken_back(made: HostArrays) -> None:
    vectors = DeviceVectors(layout_of(INIT), made)
    memory = np.zeros(ELEMENTS, np.float32)
    kept = weakref.ref(memory)
    vectors.register(memory)
    del memory
    assert kept() is not None and len(made.device.registered) == 1
    del vectors
    assert kept() is None and not made.device.registered


@pytest.mark.parametrize("codec", [CODEC, BFloat16(), None], ids=["int8", "bfloat16", "raw"])
async def test_the_event_loop_never_waits_for_a_device(start: Start, made: HostArrays, codec: Any) -> None:
    """Check this for a script that may have queued minutes of work: this worker would miss its heartbeats."""
    setup = await start(compression=codec)
    buffers = await setup.weights.gradient_buffers(device="cuda")
    await setup.weights.push(buffers)
    await setup.weights.push_pull(there(gradient(0)), device="cuda")
    await setup.weights.pull(copy=False, device="cuda")
    if codec is not CODEC:  # The residual would move to the host, once.
        await setup.weights.push_pull(gradient(0), device="cuda")
    else:  # Other codecs copy the gathered vector to the host's when all work that this waits for is done.
        for name, values in gradient(1).items():
            bucket = await setup.weights.push_pull_async(there({name: values}) if name == "v" else {name: values})
        await bucket
    await setup.weights.release_memory()
    assert made.device.threads and threading.get_ident() not in made.device.threads


async def test_a_step_that_is_lost_while_a_bucket_waits_for_the_device_is_dropped(
    start: Start, made: HostArrays
) -> None:
    setup = await start()
    await setup.weights.push_pull_async(there({"v": gradient(0)["v"]}))
    push = setup.weights._order._push
    made.synchronize = lambda: setattr(push, "_origin", None)
    with pytest.raises(errors.FencedError, match="step 0 was dropped, with all of its buckets"):
        await setup.weights.push_pull_async(there({"w": gradient(0)["w"]}))
    assert setup.weights._order._push is None


@pytest.mark.parametrize("codec", [CODEC, MOMENTUM], ids=["int8", "momentum"])
async def test_gradients_may_move_between_memories(start: Start, made: HostArrays, codec: PerTensor) -> None:
    host, device = await start(compression=codec), await start(compression=codec)
    for seed in range(4):
        await host.weights.push(gradient(seed))
        await device.weights.push(there(gradient(seed)) if seed % 2 else gradient(seed))
    assert sent(device) == sent(host)
    assert device.weights.statistics().compression == host.weights.statistics().compression


async def test_what_is_left_out_is_read_where_a_snapshot_wants_it(start: Start, made: HostArrays) -> None:
    setup = await start()
    await setup.weights.push(there(gradient(0)))
    kept, before = residual(setup), len(made.device.copied)
    state = setup.weights._order.encoding.save()
    assert isinstance(state["residual"], DeferredArray) and state["residual"].nbytes == BYTES
    assert len(made.device.copied) == before
    np.testing.assert_array_equal(state["residual"].copy(), kept)
    assert "velocity" not in state
    setup.weights._order.encoding.restore({name: array.copy() for name, array in state.items()})
    np.testing.assert_array_equal(residual(setup), kept)


async def test_a_velocity_is_restored(start: Start, made: HostArrays) -> None:
    host, device = await start(compression=MOMENTUM), await start(compression=MOMENTUM)
    await host.weights.push(gradient(0)), await device.weights.push(there(gradient(0)))
    state = device.weights._order.encoding.save()
    assert isinstance(state["velocity"], DeferredArray) and state["velocity"].nbytes == BYTES
    kept = {name: array.copy() for name, array in state.items()}
    await device.weights.push(there(gradient(1)))
    device.weights._order.encoding.restore(kept)
    host.weights._order.encoding.restore(kept)
    await host.weights.push(gradient(2)), await device.weights.push(there(gradient(2)))
    assert kept["velocity"].any()
    assert [sent(device)[2, index] for index in range(3)] == [sent(host)[1, index] for index in range(3)]


@pytest.mark.parametrize("codec", [None, CODEC], ids=["raw", "int8"])
@pytest.mark.parametrize("bucketed", [False, True])
async def test_a_value_that_is_not_finite_is_refused(
    start: Start, made: HostArrays, codec: Any, bucketed: bool
) -> None:
    setup = await start(compression=codec)
    bad = gradient(0)
    bad["w"][3, 3] = np.nan
    with pytest.raises(errors.NonFiniteGradientError, match=r"gradient 'w' holds 1 NaN or Inf of 81 elements"):
        if bucketed:
            await setup.weights.push_pull_async(there({"w": bad["w"]}))
        else:
            await setup.weights.push(there(bad))
    assert not sent(setup)


@pytest.mark.parametrize("codec", [None, CODEC], ids=["raw", "int8"])
async def test_a_value_that_is_not_finite_may_abstain(start: Start, made: HostArrays, codec: Any) -> None:
    setup = await start(compression=codec, non_finite="skip")
    bad = gradient(0)
    bad["w"][3, 3] = np.inf
    await setup.weights.push(there(bad))
    assert set(sent(setup).values()) == {b""} and setup.weights.statistics().abstained == 1


async def test_weights_in_the_memory_of_a_device(start: Start, made: HostArrays) -> None:
    init = INIT | {"h": np.full(5, 1.5, np.float16)}
    setup = await start(init=init)
    await setup.weights.push({**gradient(0), "h": np.ones(5, np.float32)})
    expected, found = await setup.weights.pull(), await setup.weights.pull(device="cuda")
    for name, array in expected.items():
        assert found[name].values.dtype == array.dtype and found[name].shape == array.shape
        np.testing.assert_array_equal(found[name].values, array)
    first = await setup.weights.pull(copy=False, device="cuda:0")
    second = await setup.weights.pull(copy=False, device="cuda:0")
    other = await setup.weights.pull(device="cuda:0")
    addresses = [one["v"].values.ctypes.data for one in (first, second, other)]
    assert addresses[0] == addresses[1] != addresses[2]


async def test_one_step_ends_with_weights_in_the_memory_of_a_device(start: Start, made: HostArrays) -> None:
    setup = await start()
    first = await setup.weights.push_pull(there(gradient(0)), device="cuda")
    second = await setup.weights.push_pull(there(gradient(1)), copy=False, device="cuda")
    expected = await setup.weights.pull()
    for name, array in expected.items():
        np.testing.assert_array_equal(second[name].values, array)
    assert not np.array_equal(first["w"].values, second["w"].values)


@pytest.mark.parametrize("pushes", [False, True])
async def test_weights_are_overwritten_once_what_reads_them_is_done(
    start: Start, made: HostArrays, pushes: bool
) -> None:
    """Check work that the script queued on its streams before the call."""
    setup = await start(compression=None)
    call = partial(setup.weights.push_pull, gradient(0)) if pushes else setup.weights.pull
    for _ in range(2):
        made.device.events.clear()
        await call(copy=False, device="cuda")
        assert made.device.events[:2] == ["synchronize", "copy_in"]


async def test_bad_arguments(start: Start, made: HostArrays) -> None:
    setup = await start()
    with pytest.raises(errors.InvalidArgumentError, match="out and device exclude each other"):
        await setup.weights.pull(out={name: array.copy() for name, array in INIT.items()}, device="cuda")
    with pytest.raises(errors.InvalidArgumentError, match="out and device exclude each other"):
        out = {name: array.copy() for name, array in INIT.items()}
        await setup.weights.push_pull(there(gradient(0)), out, device="cuda")
    assert not sent(setup)
    push_pull = partial(setup.weights.push_pull, gradient(0))
    for call in (setup.weights.pull, setup.weights.gradient_buffers, push_pull):
        with pytest.raises(errors.InvalidArgumentError, match="'tpu' is neither"):
            await call(device="tpu")
    with pytest.raises(errors.ShapeMismatchError, match=r"'b' has shape \(8,\), expected \(7,\)"):
        await setup.weights.push(there({**gradient(0), "b": np.zeros(8, np.float32)}))
    with pytest.raises(errors.MissingTensorError, match="'v' is missing"):
        await setup.weights.push(there({"b": np.zeros(7)}))
    with pytest.raises(errors.InvalidArgumentError, match="cuda:1: this parameter set has its arrays on cuda:0"):
        await setup.weights.push({name: HostArray(array, number=1) for name, array in INIT.items()})


async def test_a_device_that_fails_is_a_typed_error(start: Start, made: HostArrays) -> None:
    setup = await start()
    await setup.weights.push(there(gradient(0)))
    made.device.failure = "it fell off the bus"
    with pytest.raises(errors.DeviceLostError, match="fell off the bus"):
        await setup.weights.push(there(gradient(1)))
    assert {step for step, _ in sent(setup)} == {0}


@pytest.mark.skipif(find_spec("cupy") is not None, reason="CuPy is installed")
async def test_without_cupy_a_device_is_refused(start: Start) -> None:
    setup = await start()
    for call in (setup.weights.pull, setup.weights.gradient_buffers):
        with pytest.raises(errors.DeviceUnavailableError, match=r"CuPy is not installed.*cupy-cuda12x") as caught:
            await call(device="cuda")
        assert caught.value.details["missing"] == "cupy"
    with pytest.raises(errors.InvalidArgumentError, match="call that first"):  # No buffers exist to name.
        await setup.weights.push_pull_async(["v"])
    with pytest.raises(errors.DeviceUnavailableError, match="CuPy is not installed"):
        await setup.weights.push(there(gradient(0)))
    await setup.weights.push(gradient(0))
