"""Loading of a snapshot's optimizer state into an optimizer of torch, to continue training without psdist."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from psdist.errors import MissingTensorError, ShapeMismatchError
from psdist.optim import asgd_average_weight, asgd_step_size, nadam_log_product
from psdist.snapshots import optimizer_state as snapshots
from psdist.snapshots.optimizer_state import TensorState
from psdist.torch.conversion import check_same_state
from psdist.torch.inspection import inspect
from psdist.torch.values import as_real


def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    url: str,
    *,
    step: int | None = None,
    parameters: str | None = None,
) -> int:
    """Load the servers' optimizer state from a snapshot into ``optimizer``. Returns the step that comes next.

    The snapshot is of a run of ``DistributedOptimizer`` or ``offload``. A script without psdist can continue from it:

        model.load_state_dict(torch.load("model.pt"))  # by psdist snapshot export
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step = psdist.torch.load_optimizer_state(optimizer, model, "psdist-runs/digits")

    optimizer: an optimizer of torch.optim, of the kind that was given to psdist, with parameters of ``model``. Its
        settings, such as the learning rate, do not change; its previous state is replaced.
    url, step, parameters: as for ``psdist.load_snapshot``.

    ASGD's step size is computed from the specification, as snapshots do not contain settings that the script changed.
    State takes the dtype of its parameter here. After SSP and ASP, Adam's step count is that of the slice with the
    fewest updates. Weights are not loaded.

    Raises SettingsMismatchError if the optimizer has other state tensors, MissingTensorError and ShapeMismatchError if
    the snapshot is of another model, InvalidArgumentError as ``DistributedOptimizer`` for a model that it cannot train,
    and the errors of ``psdist.load_snapshot``. A call that raises changes nothing.
    """
    groups = [group for group in optimizer.param_groups for _ in group["params"]]
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    names = {
        parameter: name
        for name, parameter in inspect(model, ordered, has_values=False, with_frozen=True).trained.items()
    }
    found = snapshots.load_optimizer_state(url, step, parameters)
    states: dict[int, dict[str, Tensor]] = {}
    for number, (group, parameter) in enumerate(zip(groups, ordered, strict=True)):
        if (name := names.get(parameter)) is None:  # A frozen parameter.
            continue
        if name not in found.tensors:
            if not parameter.requires_grad:  # It was fixed in the run.
                continue
            raise MissingTensorError(
                f"snapshot {found.directory} has no parameter {name!r}: load it for the model that was trained"
            )
        state = found.tensors[name]
        check_same_state(optimizer, group, name, state.optimizer, state.arrays)
        if entry := _entry(name, parameter, state):
            states[number] = entry
    optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})
    return found.step


def _entry(name: str, parameter: Tensor, state: TensorState) -> dict[str, Any]:
    """Return torch's state entry of a parameter. It is empty before the first update, except for Adagrad."""
    entry: dict[str, Any] = {}
    expected = tuple(as_real(parameter).shape)
    for key, array in state.arrays.items():
        if array.shape != expected:
            raise ShapeMismatchError(f"{key} of {name!r} has shape {array.shape}, expected {expected}")
        tensor = torch.from_numpy(array.copy())
        entry[key] = torch.view_as_complex(tensor) if parameter.is_complex() else tensor
    if not state.updates and state.optimizer.kind != "adagrad":
        return {}
    if state.optimizer.kind != "sgd":
        entry["step"] = torch.tensor(float(state.updates), dtype=torch.float32)
    return entry | {name: torch.tensor(number, dtype=torch.float32) for name, number in _numbers(state).items()}


def _numbers(state: TensorState) -> dict[str, float]:
    """Return the numbers that torch keeps in a parameter's state and the servers compute."""
    spec, updates = state.optimizer, state.updates
    values = spec.group_values(state.group)
    if spec.kind == "nadam":
        return {"mu_product": math.exp(nadam_log_product(values["beta1"], values["momentum_decay"], updates))}
    if spec.kind == "asgd":
        rate = values["lr"] * spec.group_schedule(state.group).factor(state.since + updates - 1)
        return {"eta": asgd_step_size(values, rate, updates), "mu": asgd_average_weight(values, updates)}
    return {}
