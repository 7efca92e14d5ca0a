"""Weights that a script writes in its loop: the training is that of torch, with one worker and with two."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.optim.swa_utils import AveragedModel

from psdist.client.context import Context
from psdist.errors import InvalidArgumentError
from psdist.torch import DistributedOptimizer
from tests.support.launched import Run
from tests.support.torch_models import BATCHES, distance, loss_of, mlp

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "tests/support/torch_writes.py"


def clamp(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.05, 0.05)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, write: Callable[[nn.Module], None]) -> None:
    """Train, and write after every other step."""
    for number in range(6):
        optimizer.zero_grad()
        loss_of(model, BATCHES(number)).backward()
        optimizer.step()
        if number % 2 == 0:
            write(model)


def test_an_exchange_by_swapped_writes_nothing(alone: Context, name: str) -> None:
    model = mlp()
    other = copy.deepcopy(model)
    optimizer = DistributedOptimizer(model, torch.optim.Adam(model.parameters(), lr=0.01), name=name)
    average = AveragedModel(model)
    average.update_parameters(model)

    def evaluate(model: nn.Module) -> None:
        if model is other:
            return
        kept = parameters_to_vector(model.parameters()).clone()
        with optimizer.swapped(average):
            assert distance(model, average.module) < 1e-5
            loss_of(model, BATCHES(7))
            with pytest.raises(InvalidArgumentError, match=r"within swapped\(\)"):
                optimizer._writes.send()
        assert torch.equal(kept, parameters_to_vector(model.parameters()))
        average.update_parameters(model)

    train(model, optimizer, evaluate)
    train(other, torch.optim.Adam(other.parameters(), lr=0.01), evaluate)
    assert distance(model, other) < 1e-5
    assert not optimizer._writes.watch.written()


@pytest.mark.parametrize(
    ("source", "text"),
    [({}, "got no tensor for parameter"), ({name: torch.zeros(1) for name, _ in mlp().named_parameters()}, "of shape")],
)
def test_what_cannot_be_exchanged_is_refused(alone: Context, name: str, source: dict, text: str) -> None:
    model = mlp()
    optimizer = DistributedOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), name=name)
    before = parameters_to_vector(model.parameters()).clone()
    with pytest.raises(InvalidArgumentError, match=text), optimizer.swapped(source):
        raise AssertionError
    assert torch.equal(before, parameters_to_vector(model.parameters()))


def test_values_that_were_put_back_are_no_writes(alone: Context, name: str) -> None:
    model = mlp()
    optimizer = DistributedOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), name=name)
    kept = copy.deepcopy(model.state_dict())
    clamp(model)
    model.load_state_dict(kept)
    assert optimizer._writes.watch.written()
    optimizer._writes.send()
    assert optimizer.handle._async.participation.begin_push().options.written is None


def test_two_workers_write_through_the_loss_of_a_server(tmp_path: Path) -> None:
    with Run(tmp_path, SCRIPT.read_text(), str(ROOT), flags=("--nservers", "3", "--replicas", "2")) as run:
        run.until("under way")
        run.child("psdist_server").kill()
        status, output = run.end()
    assert status == 0, output
    (difference,) = re.findall(r"difference (\S+)", "".join(run.seen) + output)
    assert float(difference) < 1e-6
