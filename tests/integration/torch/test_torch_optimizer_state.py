"""Training that continues without psdist: a snapshot's weights and optimizer state in torch's own optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import psdist
from psdist.client.context import Context
from psdist.consistency import ASP, BSP, Consistency
from psdist.errors import InvalidArgumentError, MissingTensorError, SettingsMismatchError, ShapeMismatchError
from psdist.launcher.embedded import EmbeddedCluster
from psdist.torch import DistributedOptimizer, load_optimizer_state, offload
from tests.support import torch_models
from tests.support.torch_models import BATCHES, distance, loss_of, same_bytes

BEFORE, AFTER = 5, 4
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, eps=1e-4),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, lr_decay=0.1, initial_accumulator_value=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, eps=1e-4, momentum=0.9, centered=True),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4, amsgrad=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0, eps=1e-4),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-2, eps=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2, eps=1e-4, decoupled_weight_decay=True, weight_decay=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2, eps=1e-4, betas=(0.9, 0.9)),
    "rprop": lambda p: torch.optim.Rprop(without_decay(p), lr=1e-3),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1, lambd=0.1, t0=2),
    "momentum of weights": lambda p: torch.optim.SGD([p[0], p[1] | {"momentum": 0.9}], lr=0.1),
}
#: Their state differs from that of another one by names alone.
LONG = ("sgd", "adamw", "amsgrad", "adadelta", "adamax", "nadam", "radam", "rprop", "asgd")


def without_decay(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"params": group["params"]} for group in groups]


def mlp() -> nn.Module:
    """Model with the same weights each time."""
    torch.manual_seed(0)
    return torch_models.mlp()


@contextmanager
def saved(storage: Path) -> Iterator[Context]:
    """Worker of a run whose snapshot is taken at the end."""
    cluster = EmbeddedCluster(servers=2, storage=storage, run_id="saved")
    client = psdist.Client(cluster.address, cluster.token)
    yield Context(0, 1, 0, client)
    client.snapshot()
    client.close()
    cluster.close()


def train(model: nn.Module, optimizer: Any, first: int, steps: int) -> None:
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss_of(model, BATCHES(step)).backward()
        optimizer.step()


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    layers = [module for module in model if list(module.parameters())]  # type: ignore[attr-defined]
    return [
        {"params": [p for layer in layers for p in layer.parameters() if p.ndim == 1], "weight_decay": 0.0},
        {"params": [p for layer in layers for p in layer.parameters() if p.ndim > 1]},
    ]


def run(storage: Path, make: Callable[[Any], torch.optim.Optimizer], wrap: Any, steps: int, **options: Any) -> None:
    """Make a run of ``steps`` steps that ends with a snapshot."""
    with saved(storage) as context:
        model = mlp()
        inner = make(groups_of(model))
        train(model, wrap(model, inner, context=context, **options), 0, steps)


def loaded(storage: Path) -> nn.Module:
    """Return a model with the weights of the newest snapshot."""
    model = mlp()
    arrays = psdist.load_snapshot(str(storage))
    model.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in arrays.items()})
    return model


@pytest.mark.parametrize("wrap", [DistributedOptimizer, pytest.param(offload, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "make",
    [pytest.param(one, id=name, marks=[pytest.mark.long] * (name in LONG)) for name, one in OPTIMIZERS.items()],
)
def test_torch_goes_on_where_the_servers_were(
    tmp_path: Path, make: Callable[[Any], torch.optim.Optimizer], wrap: Any
) -> None:
    run(tmp_path, make, wrap, BEFORE)
    model, expected = loaded(tmp_path), mlp()
    optimizer, plain = make(groups_of(model)), make(groups_of(expected))
    assert load_optimizer_state(optimizer, model, str(tmp_path)) == BEFORE
    train(model, optimizer, BEFORE, AFTER)
    train(expected, plain, 0, BEFORE + AFTER)
    assert distance(model, expected) < 1e-5
    other = loaded(tmp_path)
    train(other, make(groups_of(other)), BEFORE, AFTER)
    assert isinstance(optimizer, torch.optim.SGD) or distance(other, expected) > 1e-3, "the state matters"


@pytest.mark.parametrize(
    "name", ["adam", *(pytest.param(one, marks=pytest.mark.long) for one in ("momentum", "adagrad"))]
)
def test_before_the_first_update_an_optimizer_is_as_new(tmp_path: Path, name: str) -> None:
    run(tmp_path, OPTIMIZERS[name], DistributedOptimizer, 0)
    model, expected = loaded(tmp_path), mlp()
    optimizer, plain = OPTIMIZERS[name](groups_of(model)), OPTIMIZERS[name](groups_of(expected))
    assert load_optimizer_state(optimizer, model, str(tmp_path)) == 0
    train(model, optimizer, 0, AFTER)
    train(expected, plain, 0, AFTER)
    assert same_bytes(model, expected)


@pytest.mark.parametrize("consistency", [BSP(), pytest.param(ASP(), marks=pytest.mark.long)])
def test_updates_are_counted_since_the_state_began(tmp_path: Path, consistency: Consistency) -> None:
    """Check a run that resumed with another optimizer: its state starts then."""
    run(tmp_path, OPTIMIZERS["momentum"], DistributedOptimizer, 3, consistency=consistency)
    with saved(tmp_path) as context:
        model = mlp()
        inner = OPTIMIZERS["adam"](groups_of(model))
        wrapped = DistributedOptimizer(model, inner, context=context, consistency=consistency, reset_optimizer=True)
        train(model, wrapped, 3, 2)
    optimizer = OPTIMIZERS["adam"](groups_of(model))
    assert load_optimizer_state(optimizer, model, str(tmp_path)) == 5
    assert {float(state["step"]) for state in optimizer.state.values()} == {2.0}


def test_state_has_the_dtype_of_its_parameter(tmp_path: Path) -> None:
    run(tmp_path, OPTIMIZERS["adam"], DistributedOptimizer, BEFORE)
    model = mlp().to(torch.bfloat16)
    optimizer = OPTIMIZERS["adam"](groups_of(model))
    load_optimizer_state(optimizer, model, str(tmp_path))
    for parameter, state in optimizer.state.items():
        assert state["exp_avg"].dtype == torch.bfloat16 and state["exp_avg"].shape == parameter.shape
        assert state["step"].dtype == torch.float32


def test_frozen_parameters_have_theirs_for_a_later_step(tmp_path: Path) -> None:
    run(tmp_path, OPTIMIZERS["adam"], DistributedOptimizer, BEFORE)
    model = mlp()
    optimizer = OPTIMIZERS["adam"](groups_of(model))
    frozen = next(iter(model.parameters())).requires_grad_(False)
    load_optimizer_state(optimizer, model, str(tmp_path))
    assert frozen in optimizer.state and len(optimizer.state) == len(list(model.parameters()))


def test_what_does_not_fit_is_named_and_changes_nothing(tmp_path: Path) -> None:
    run(tmp_path, OPTIMIZERS["adam"], DistributedOptimizer, BEFORE)
    url, model = str(tmp_path), mlp()
    for other in ("adamw", "sgd", "rmsprop", "nadam"):
        optimizer = OPTIMIZERS[other](groups_of(model))
        with pytest.raises(
            SettingsMismatchError, match=r"the snapshot has exp_avg, exp_avg_sq of Adam for '0\.\w+', but this torch"
        ):
            load_optimizer_state(optimizer, model, url)
    longer, wider = nn.Sequential(*copy.deepcopy(model), nn.Linear(2, 2)), copy.deepcopy(model)
    wider[0] = nn.Linear(3, 5)
    for strange, error in ((longer, MissingTensorError), (wider, ShapeMismatchError)):
        optimizer = OPTIMIZERS["adam"](strange.parameters())
        with pytest.raises(error, match="'0.weight'" if strange is wider else "has no parameter"):
            load_optimizer_state(optimizer, strange, url)
        assert not optimizer.state
    with pytest.raises(InvalidArgumentError, match="that are not the model's"):
        load_optimizer_state(OPTIMIZERS["adam"](wider.parameters()), model, url)
    with pytest.raises(psdist.errors.UnknownSnapshotError, match="no snapshot of step 77"):
        load_optimizer_state(OPTIMIZERS["adam"](model.parameters()), model, url, step=77)
    with pytest.raises(psdist.errors.UnknownParametersError, match="other"):
        load_optimizer_state(OPTIMIZERS["adam"](model.parameters()), model, url, parameters="other")
