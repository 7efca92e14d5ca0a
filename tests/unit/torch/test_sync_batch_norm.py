"""``SyncBatchNorm`` of two workers, as threads, against batch normalization of the whole batch in one."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from psdist.errors import ConfigurationError, InvalidArgumentError
from psdist.torch import SyncBatchNorm, sync_batch_norm

Worker = Callable[[int], Any]


class Workers:
    """Workers as threads; their tensors are collected in rank order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int = 2) -> None:
        self._barrier = threading.Barrier(count, timeout=60)
        self._given: dict[int, Tensor] = {}
        self._rank = threading.local()
        self._count = count
        monkeypatch.setattr(sync_batch_norm, "_world_size", lambda group: count)
        monkeypatch.setattr(sync_batch_norm, "_gather", self._gather)

    def run(self, worker: Worker) -> list[Any]:
        def call(rank: int) -> Any:
            self._rank.value = rank
            return worker(rank)

        with ThreadPoolExecutor(self._count) as pool:
            return list(pool.map(call, range(self._count)))

    def _gather(self, local: Tensor, group: Any) -> Tensor:
        self._given[self._rank.value] = local
        self._barrier.wait()
        found = torch.stack([self._given[rank] for rank in range(self._count)])
        self._barrier.wait()
        return found


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Workers:
    return Workers(monkeypatch)


@pytest.mark.parametrize("shape", [(), (5,), (4, 3)], ids=["1d", "sequence", "image"])
@pytest.mark.parametrize("sizes", [(4, 4), (1, 6), (0, 5)], ids=["even", "uneven", "empty"])
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.float64, {"momentum": None}),
        (torch.float32, {"affine": False}),
        (torch.float32, {"track_running_stats": False, "eps": 1e-2}),
    ],
    ids=["plain", "float64", "not affine", "not tracked"],
)
def test_workers_together_are_as_one_process(
    workers: Workers, shape: tuple[int, ...], sizes: tuple[int, int], dtype: torch.dtype, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    batches = [torch.randn(sum(sizes), 3, *shape, dtype=dtype) * 3 + 1 for _ in range(3)]
    factors = torch.randn(sum(sizes), 3, *shape, dtype=dtype)
    kind = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d}[len(shape)]
    whole: Any = kind(3, dtype=dtype, **options)
    if whole.affine:
        nn.init.uniform_(whole.weight, 0.5, 2.0)
        nn.init.normal_(whole.bias)
    parts: list[Any] = [SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(whole)) for _ in sizes]

    def train(layer: nn.Module, given: list[Tensor], factor: Tensor) -> list[Tensor]:
        found = []
        for batch in given:
            input = batch.clone().requires_grad_()
            output = layer(input)
            (output * factor).sum().backward()
            assert input.grad is not None
            found += [output.detach(), input.grad]
        return found

    expected = train(whole, batches, factors)
    cut = [batch.split(sizes) for batch in batches]
    found = workers.run(lambda rank: train(parts[rank], [part[rank] for part in cut], factors.split(sizes)[rank]))
    close = 1e-12 if dtype == torch.float64 else 1e-6
    for whole_value, *values in zip(expected, *found, strict=True):
        assert (torch.cat(values) - whole_value).norm() <= close * whole_value.norm()
    for part in parts:
        for name, buffer in whole.named_buffers():
            torch.testing.assert_close(getattr(part, name), buffer, rtol=1e-6, atol=1e-6)
            assert torch.equal(getattr(part, name), getattr(parts[0], name))
    for name, parameter in whole.named_parameters():
        total = sum(getattr(part, name).grad for part in parts)
        assert (total - parameter.grad).norm() <= 1e-6 * parameter.grad.norm()


def test_evaluation_and_a_world_of_one_are_batch_normalization() -> None:
    torch.manual_seed(0)
    whole = nn.BatchNorm2d(3)
    alone: Any = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(whole))
    batch = torch.randn(4, 3, 2, 2)
    assert torch.equal(alone(batch), whole(batch)) and torch.equal(alone.running_var, whole.running_var)
    assert torch.equal(alone.eval()(batch), whole.eval()(batch))


def test_half_precision_is_normalized_in_single(workers: Workers) -> None:
    torch.manual_seed(0)
    batch = (torch.randn(8, 3) + 20).bfloat16()
    outputs = workers.run(lambda rank: SyncBatchNorm(3)(batch[4 * rank : 4 * rank + 4]))
    expected = nn.BatchNorm1d(3)(batch.float())
    assert outputs[0].dtype == torch.bfloat16
    torch.testing.assert_close(torch.cat(outputs).float(), expected, rtol=1e-2, atol=1e-2)


def test_a_converted_model_keeps_its_parameters_names_and_mode() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.BatchNorm1d(3)), nn.BatchNorm1d(3)).eval()
    before, names = list(model.parameters()), list(model.state_dict())
    converted = SyncBatchNorm.convert_sync_batchnorm(model)
    assert all(one is other for one, other in zip(converted.parameters(), before, strict=True))
    assert list(converted.state_dict()) == names and not any(part.training for part in converted.modules())
    assert sum(isinstance(part, SyncBatchNorm) for part in converted.modules()) == 2


@pytest.mark.parametrize(
    ("shape", "text"),
    [((4,), r"got an input of shape \(4,\)"), ((2, 4), "must be its 3 channels"), ((1, 3), "over all workers.*has 1")],
)
def test_inputs_that_cannot_be_normalized_are_refused(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], text: str
) -> None:
    monkeypatch.setattr(sync_batch_norm, "_world_size", lambda group: 2)
    monkeypatch.setattr(sync_batch_norm, "_gather", lambda local, group: torch.stack([local, torch.zeros_like(local)]))
    with pytest.raises(InvalidArgumentError, match=text):
        SyncBatchNorm(3)(torch.zeros(shape))


def test_several_workers_without_a_process_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match=r'no process group for the 2 workers.*init_process_group\("psdist"\)'):
        SyncBatchNorm(3)(torch.zeros(2, 3))
