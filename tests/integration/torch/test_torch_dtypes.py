"""Models in float64 and with complex parameters train as in one process with torch, in all their digits.

Two workers run in two threads of this process, with real servers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from psdist import optim
from psdist.client.context import Context
from psdist.errors import DTypeMismatchError, InvalidArgumentError
from psdist.torch import DistributedDataParallel, DistributedOptimizer, offload

STEPS = 6
#: Largest difference relative to the weights, by the real dtype that has the digits.
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-13}


class Spectral(nn.Module):
    """Complex layer between real ones, of a dtype and the complex dtype with its digits."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8, dtype=dtype)
        self.mix = nn.Parameter(torch.randn(5, 5, dtype=dtype.to_complex()) / 5)
        self.phase = nn.Parameter(torch.randn((), dtype=dtype.to_complex()))
        self.last = nn.Linear(8, 1, dtype=dtype)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map real[batch, 6] to real[batch, 1]."""
        spectrum = torch.fft.rfft(self.first(inputs)) @ self.mix * self.phase
        return self.last(torch.fft.irfft(spectrum, n=8))


def plain(dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 1)).to(dtype)


def mixed(_: torch.dtype) -> nn.Module:
    """Return a model whose parameters have several dtypes, float64 among them."""
    return nn.Sequential(nn.Linear(6, 8), _Widen(), nn.Linear(8, 1, dtype=torch.float64))


class _Widen(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.double()


def batch(step: int, rank: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64).to(dtype)


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    return (model(inputs).squeeze(1) - inputs.sum(1)).square().mean()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-4, weight_decay=0.1)


def alone(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Train a copy in one process on the batches of both workers."""
    model = copy.deepcopy(model)
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        (sum(loss_of(model, batch(step, rank, dtype)) for rank in range(2)) / 2).backward()
        optimizer.step()
    return model


def by_servers(context: Context, model: nn.Module, dtype: torch.dtype, name: str) -> nn.Module:
    optimizer = DistributedOptimizer(model, optimizer_of(model), name=name, context=context)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch(step, context.rank, dtype)).backward()
        optimizer.step()
    return model


def by_averages(context: Context, model: nn.Module, dtype: torch.dtype, name: str) -> nn.Module:
    wrapped, optimizer = DistributedDataParallel(model, name=name, context=context), optimizer_of(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(wrapped, batch(step, context.rank, dtype)).backward()
        optimizer.step()
    return model


def distance(one: nn.Module, other: nn.Module) -> float:
    """Return the largest relative difference of a parameter."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().norm() / b.detach().norm()) for a, b in pairs)


@pytest.mark.parametrize("train", [by_servers, by_averages])
@pytest.mark.parametrize(
    ("make", "dtype", "digits"),
    [
        (plain, torch.float64, torch.float64),
        (Spectral, torch.float32, torch.float32),
        (Spectral, torch.float64, torch.float64),
        (mixed, torch.float32, torch.float32),
    ],
    ids=["float64", "complex64", "complex128", "mixed"],
)
def test_two_workers_train_as_one_process(
    contexts: list[Context],
    request: pytest.FixtureRequest,
    make: Callable[[torch.dtype], nn.Module],
    dtype: torch.dtype,
    digits: torch.dtype,
    train: Callable[..., nn.Module],
) -> None:
    torch.manual_seed(5)
    model, name = make(dtype), request.node.name.replace("[", "-").replace("]", "")
    with ThreadPoolExecutor(2) as pool:
        trained = list(pool.map(lambda one: train(one, copy.deepcopy(model), dtype, name), contexts))
    expected = alone(model, dtype)
    for one in trained:
        assert [parameter.dtype for parameter in one.parameters()] == [p.dtype for p in model.parameters()]
        assert distance(one, expected) < TOLERANCES[digits]
    assert distance(*trained) == 0.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_offloaded_models_refuse_them(dtype: torch.dtype) -> None:
    with pytest.raises(DTypeMismatchError, match=f"'weight' has dtype {dtype}.*DistributedOptimizer"):
        offload(nn.Linear(2, 2, dtype=dtype), optim.SGD())


@pytest.mark.parametrize("settings", [{"compression": "int8"}, {"pull_dtype": "bfloat16"}], ids=str)
def test_compression_of_float64_is_refused(contexts: list[Context], settings: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="with master_dtype='float64'"):
        DistributedOptimizer(nn.Linear(2, 2).double(), optim.SGD(), name="compressed", context=contexts[0], **settings)
