"""Saved states of optimizers: loading those of snapshots into torch's optimizers, and refusing those of the other kind.

The state of psdist's optimizers is on the servers, and what ``state_dict`` returns has settings alone. torch's own
optimizers refuse it with the remedy: training that continued with an empty state would differ without notice.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from psdist.errors import InvalidArgumentError, MissingTensorError, ShapeMismatchError
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


#: Key of a saved state that marks it as one of psdist's optimizers.
KEY: Final = "psdist"


def has_settings_alone(state_dict: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> bool:
    """Return True if this is a state of torch's form with this optimizer's settings, and nothing for any parameter.

    So are states from before the first step, and all of SGD without momentum.
    """
    saved, groups = state_dict.get("param_groups", ()), optimizer.param_groups
    sizes = [len(group.get("params", ())) for group in saved]
    if state_dict.get("state", True) or sizes != [len(group["params"]) for group in groups]:
        return False
    return all(name in group for group in saved for name in optimizer.defaults)


def refuse_in_torch() -> None:
    """Let torch's optimizers refuse the states of psdist's. A second call changes nothing."""
    load = torch.optim.Optimizer.load_state_dict
    if hasattr(load, "refuses_psdist"):
        return

    @functools.wraps(load)
    def load_state_dict(self: torch.optim.Optimizer, state_dict: Any) -> None:
        own = state_dict.get(KEY) if isinstance(state_dict, Mapping) else None
        if own is not None:
            raise InvalidArgumentError(
                f"this state is of psdist's parameter set {own.get('name')!r} at step {own.get('step')}, and has "
                f"settings alone: what torch.optim.{type(self).__name__} keeps for each parameter is on the servers, "
                "and in the run's snapshots. To continue the run, wrap the model first, and start it with its earlier "
                "--run-id and --storage-path; to continue without the servers, load a snapshot by "
                "psdist.torch.load_optimizer_state; to begin with an empty state, do not load this one"
            )
        load(self, state_dict)

    load_state_dict.refuses_psdist = True  # type: ignore[attr-defined]  # a mark
    torch.optim.Optimizer.load_state_dict = load_state_dict  # type: ignore[method-assign]  # for all optimizers
