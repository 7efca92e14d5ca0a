"""Models with gradients on a CUDA device train byte for byte like those with gradients in main memory.

The device is the processor here; the last test uses a real one if it exists.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from psdist import optim
from psdist.client import device_vectors as device_arrays
from psdist.client.context import Context
from psdist.compression import ChunkedTopK, Codec, Int8, RandomK, TopK
from psdist.device.device import open_device
from psdist.errors import DeviceUnavailableError, LimitExceededError, NonFiniteGradientError, PsdistError
from psdist.torch import DistributedDataParallel, DistributedOptimizer
from psdist.torch import gradients as torch_gradients
from tests.support.host_arrays import HostArray, HostArrays
from tests.support.host_device import needs_compiler
from tests.support.torch_models import BATCHES, loss_of

STEPS = 4
#: Wraps a model for one parameter set. Returns the loop's model and its optimizer.
Wrap = Callable[[nn.Module, str, Codec, Context], tuple[nn.Module, torch.optim.Optimizer]]


def mlp() -> nn.Module:
    """Return a model that is large enough for its weights to be compressed."""
    return nn.Sequential(nn.Linear(12, 256), nn.GELU(), nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 4))


@pytest.fixture
def arrays(monkeypatch: pytest.MonkeyPatch) -> HostArrays:
    """Arrays of a device on the processor; from now on it holds all models of the processor."""
    made = HostArrays()

    def as_tensor(array: HostArray | np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.values if isinstance(array, HostArray) else array)

    monkeypatch.setattr(device_arrays, "open_arrays", {0: made}.__getitem__)
    monkeypatch.setattr(torch_gradients, "cuda_number", lambda _: 0)
    monkeypatch.setattr(torch_gradients, "as_tensor", as_tensor)
    return made


def optimizer(
    model: nn.Module, name: str, codec: Codec, context: Context, *, overlap: bool = True
) -> tuple[nn.Module, torch.optim.Optimizer]:
    made = DistributedOptimizer(
        model, optim.Adam(lr=0.01), compression=codec, name=name, context=context, overlap=overlap, bucket_cap_mb=0.002
    )
    return model, made


def at_once(model: nn.Module, name: str, codec: Codec, context: Context) -> tuple[nn.Module, torch.optim.Optimizer]:
    return optimizer(model, name, codec, context, overlap=False)


def data_parallel(
    model: nn.Module, name: str, codec: Codec, context: Context
) -> tuple[nn.Module, torch.optim.Optimizer]:
    wrapped = DistributedDataParallel(
        model, compression=codec, name=name, context=context, bucket_cap_mb=0.002, find_unused_parameters=True
    )
    return wrapped, torch.optim.Adam(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device | str = "cpu") -> None:
    for step in range(STEPS):
        inputs, targets = (tensor.to(device) for tensor in BATCHES(step))
        optimizer.zero_grad()
        loss_of(model, (inputs, targets)).backward()
        optimizer.step()


def same_bytes(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@needs_compiler
@pytest.mark.parametrize("wrap", [optimizer, at_once, data_parallel])
@pytest.mark.parametrize("codec", [Int8(), TopK(0.05, momentum=0.9)], ids=["int8", "topk"])
def test_training_is_that_of_gradients_on_the_host(
    alone: Context, name: str, arrays: HostArrays, monkeypatch: pytest.MonkeyPatch, codec: Codec, wrap: Wrap
) -> None:
    model = mlp()
    begin, other = copy.deepcopy(model), copy.deepcopy(model)
    train(*wrap(model, f"{name}-device", codec, alone))
    size = sum(parameter.numel() for parameter in model.parameters())
    assert 0 < sum(arrays.device.copied) < 4 * size * STEPS / 2, "more than payloads came to the host"
    monkeypatch.setattr(torch_gradients, "cuda_number", lambda _: None)
    train(*wrap(other, f"{name}-host", codec, alone))
    assert same_bytes(model, other)
    assert not same_bytes(model, begin)


@needs_compiler
def test_gradients_are_views_of_the_devices_memory(alone: Context, name: str, arrays: HostArrays) -> None:
    model = mlp()
    wrapped, made = optimizer(model, name, Int8(), alone)
    train(wrapped, made)
    taken = [parameter.grad.data_ptr() for parameter in model.parameters() if parameter.grad is not None]
    assert len(taken) == len(list(model.parameters()))
    assert all(0 <= address - min(taken) < 4 * sum(p.numel() for p in model.parameters()) for address in taken)


@needs_compiler
def test_a_pass_with_nan_on_a_device_is_refused_and_training_goes_on(
    alone: Context, name: str, arrays: HostArrays
) -> None:
    model = mlp()
    wrapped, made = optimizer(model, name, Int8(), alone, overlap=False)
    (loss_of(wrapped, BATCHES(0)) * float("nan")).backward()
    with pytest.raises(NonFiniteGradientError):
        made.step()
    made.zero_grad()
    train(wrapped, made)
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


@needs_compiler
def test_gradients_of_nan_on_a_device_are_nan_for_all_workers(alone: Context, name: str, arrays: HostArrays) -> None:
    model = mlp()
    wrapped, made = data_parallel(model, name, Int8(), alone)
    (loss_of(wrapped, BATCHES(0)) * float("nan")).backward()
    assert all(one.grad is not None and bool(one.grad.isnan().all()) for one in model.parameters())
    train(wrapped, made)
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def test_what_a_device_does_not_encode_is_copied_to_the_host(
    alone: Context, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_gradients, "cuda_number", lambda _: 0)
    train(*optimizer(mlp(), name, RandomK(0.1), alone))  # CuPy is not requested: nothing is logged.


@pytest.mark.parametrize(
    "error",
    [DeviceUnavailableError("CuPy is not installed", missing="cupy"), LimitExceededError("CuPy has no room for it")],
)
def test_without_cupy_or_room_a_warning_says_what_is_missing(
    alone: Context, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: PsdistError
) -> None:
    def open_arrays(_: int) -> None:
        raise error

    monkeypatch.setattr(device_arrays, "open_arrays", open_arrays)
    monkeypatch.setattr(torch_gradients, "cuda_number", lambda _: 1)
    with caplog.at_level(logging.WARNING, "psdist"):
        train(*optimizer(mlp(), name, Int8(), alone))
    assert f"gradients of {name!r} are copied to main memory and encoded there, not on cuda:1: CuPy" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("wrap", [optimizer, at_once, data_parallel])
@pytest.mark.parametrize("codec", [Int8(), ChunkedTopK(), TopK(0.05)], ids=["int8", "chunked", "topk"])
def test_training_on_a_device_is_that_of_gradients_on_the_host(
    alone: Context, name: str, monkeypatch: pytest.MonkeyPatch, codec: Codec, wrap: Wrap
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch has no CUDA")
    try:
        open_device("cuda")
    except DeviceUnavailableError as error:
        pytest.skip(error.message)
    model = mlp().cuda()
    other = copy.deepcopy(model)
    train(*wrap(model, f"{name}-device", codec, alone), "cuda")
    assert all(parameter.is_cuda for parameter in model.parameters())
    monkeypatch.setattr(torch_gradients, "cuda_number", lambda _: None)
    train(*wrap(other, f"{name}-host", codec, alone), "cuda")
    assert same_bytes(model, other)
