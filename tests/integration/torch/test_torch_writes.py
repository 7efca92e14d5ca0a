"""Weights that a script writes in its loop: the training is that of torch, with one worker and with two."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel

from psdist.client.context import Context
from psdist.errors import InvalidArgumentError
from psdist.settings import exit_codes
from psdist.torch import DistributedOptimizer
from tests.support.launched import Run
from tests.support.torch_models import MODELS, loss_of, mlp

BATCHES = MODELS["mlp"][1]
ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "tests/support/torch_writes.py"


def clamp(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.05, 0.05)


def restore(model: nn.Module) -> None:
    torch.manual_seed(5)
    model.load_state_dict(mlp().state_dict())


def halve(model: nn.Module) -> None:
    vector_to_parameters(parameters_to_vector(model.parameters()).detach() / 2, model.parameters())


def prune(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].weight *= (torch.arange(model[0].weight.numel()).view_as(model[0].weight) % 2).float()


def reset(model: nn.Module) -> None:
    torch.manual_seed(9)
    model[2].reset_parameters()


WRITES: dict[str, Callable[[nn.Module], None]] = {
    "clamp": clamp, "load_state_dict": restore, "prune": prune, "reset": reset
}  # fmt: skip


def train(model: nn.Module, optimizer: torch.optim.Optimizer, write: Callable[[nn.Module], None]) -> None:
    """Train, and write after every other step."""
    for number in range(6):
        optimizer.zero_grad()
        loss_of(model, BATCHES(number)).backward()
        optimizer.step()
        if number % 2 == 0:
            write(model)


def assert_equal(model: nn.Module, other: nn.Module) -> None:
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=1e-6)


@pytest.mark.parametrize("overlap", ["auto", True, False])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_written_weights_are_trained_as_by_torch(
    alone: Context, name: str, write: Callable[[nn.Module], None], overlap: bool
) -> None:
    model = mlp()
    other = copy.deepcopy(model)
    inner = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, DistributedOptimizer(model, inner, name=name, overlap=overlap), write)
    train(other, torch.optim.Adam(other.parameters(), lr=0.01), write)
    assert_equal(model, other)


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
            assert_equal(model, average.module)
            loss_of(model, BATCHES(7))
            with pytest.raises(InvalidArgumentError, match=r"within swapped\(\)"):
                optimizer._writes.send()
        assert torch.equal(kept, parameters_to_vector(model.parameters()))
        average.update_parameters(model)

    train(model, optimizer, evaluate)
    train(other, torch.optim.Adam(other.parameters(), lr=0.01), evaluate)
    assert_equal(model, other)
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
    run = Run(tmp_path, SCRIPT.read_text(), str(ROOT), flags=("--nservers", "3", "--replicas", "2"))
    try:
        run.until("under way")
        run.child("psdist_server").kill()
        status, output = run.end()
    finally:
        run.stop()
    assert status == 0, output
    (difference,) = re.findall(r"difference (\S+)", "".join(run.seen) + output)
    assert float(difference) < 1e-6


@pytest.mark.long  # test_written_weights has the same without torch; here it is the exit status of a run.
def test_a_rank_that_writes_alone_is_named(tmp_path: Path) -> None:
    run = Run(tmp_path, SCRIPT.read_text(), str(ROOT), "differs", flags=("--nservers", "1"))
    try:
        status, output = run.end()
    finally:
        run.stop()
    assert status == exit_codes.CONFIGURATION, "a restart would not help"
    assert "would never end" not in output
    assert "rank 1 wrote one thing, rank 0 wrote nothing" in output
