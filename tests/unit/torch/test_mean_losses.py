"""Closures of optimizers that search by the loss: they return the mean of all workers' losses."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from psdist.errors import InvalidArgumentError
from psdist.torch.averaging import MeanLosses


class Other:
    """Parameter set of this worker and another one, whose loss is given."""

    def __init__(self, loss: float, invalid: float = 0.0) -> None:
        self.loss, self.invalid = loss, invalid

    def push_pull(self, values: dict[str, Any], **_: Any) -> dict[str, Any]:
        return {"loss": (values["loss"] + self.loss) / 2, "invalid": (values["invalid"] + self.invalid) / 2}


class Search(torch.optim.Optimizer):
    """Optimizer of a package: returns the loss of its closure."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> Any:
        return closure()


def averaged(model: nn.Module, other: Other, *, in_join: bool = False) -> MeanLosses:
    client = SimpleNamespace(parameters=lambda *_, **__: other)
    context: Any = SimpleNamespace(client=client)
    return MeanLosses(context, "losses", dict(model.named_parameters()), "mean", lambda: in_join)


def test_closures_return_the_mean_in_the_form_of_the_loss() -> None:
    model = nn.Linear(2, 1)
    losses = averaged(model, Other(3.0))
    optimizer = Search(model.parameters())
    found = optimizer.step(lambda: torch.tensor(1.0, requires_grad=True))
    assert torch.equal(found, torch.tensor(2.0)) and not found.requires_grad
    assert optimizer.step(closure=lambda: 2) == 2.5
    assert Search(nn.Linear(2, 1).parameters()).step(lambda: 1.0) == 1.0, "another model's"
    del losses
    assert optimizer.step(lambda: 1.0) == 1.0


def test_optimizers_that_only_pass_the_loss_on_keep_it() -> None:
    model = nn.Linear(2, 1)
    losses = averaged(model, Other(3.0))
    assert torch.optim.SGD(model.parameters(), lr=0.1).step(lambda: 1.0) == 1.0
    assert losses.trains(torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(("mine", "invalid"), [(math.inf, 0.0), (math.nan, 0.0), (1.0, 1.0)])
def test_a_loss_that_is_not_finite_is_so_for_all(mine: float, invalid: float) -> None:
    model = nn.Linear(2, 1)
    losses = averaged(model, Other(1.0, invalid))
    assert math.isnan(Search(model.parameters()).step(lambda: mine))
    del losses


def test_a_result_that_cannot_be_averaged_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 1)
    losses = averaged(model, Other(1.0))
    optimizer = Search(model.parameters())
    with caplog.at_level(logging.WARNING, logger="psdist"):
        for _ in range(2):
            assert optimizer.step(lambda: (1.0, "text")) == (1.0, "text")
    assert [record.getMessage().count("returned tuple") for record in caplog.records] == [1]
    del losses


def test_join_is_refused() -> None:
    model = nn.Linear(2, 1)
    losses = averaged(model, Other(1.0), in_join=True)
    with pytest.raises(InvalidArgumentError, match=r"cannot be used in join\(\)"):
        Search(model.parameters()).step(lambda: 1.0)
    del losses
