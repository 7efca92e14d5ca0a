"""Conversion of ``torch.optim`` optimizers, schedulers and saved states to and from those of ``psdist.optim``.

Only settings that train exactly as before are converted. Everything else is refused by name. Classes are compared
exactly, because a subclass may compute something else.

The parameters of a model are found by ``inspection``.

The state of psdist's optimizers is on the servers, and what ``state_dict`` returns has settings alone. torch's own
optimizers refuse it with the remedy: training that continued with an empty state would differ without notice.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from psdist import optim
from psdist.errors import InvalidArgumentError, MissingTensorError, SettingsMismatchError, ShapeMismatchError
from psdist.hyperparameters import END_FACTOR, PAIRS
from psdist.optim import Optimizer, Override, Schedule, asgd_average_weight, asgd_step_size, nadam_log_product
from psdist.snapshots import load as snapshots
from psdist.snapshots.load import TensorState
from psdist.torch.inspection import inspect
from psdist.torch.values import as_real

#: Counterparts of torch's optimizers.
_SPECIFICATIONS: Final[dict[type[torch.optim.Optimizer], type[Optimizer]]] = {
    torch.optim.SGD: optim.SGD,
    torch.optim.Adam: optim.Adam,
    torch.optim.AdamW: optim.AdamW,
    torch.optim.Adagrad: optim.Adagrad,
    torch.optim.RMSprop: optim.RMSprop,
    torch.optim.Adadelta: optim.Adadelta,
    torch.optim.Adamax: optim.Adamax,
    torch.optim.NAdam: optim.NAdam,
    torch.optim.RAdam: optim.RAdam,
    torch.optim.Rprop: optim.Rprop,
    torch.optim.ASGD: optim.ASGD,
}
#: Settings that change only how fast torch computes.
_SPEED: Final = ("foreach", "fused", "capturable")
#: Settings that the servers do not support.
_REFUSED: Final = ("differentiable",)
#: Setting of the groups of Adam and AdamW, which are one class in torch. AdamW of psdist.optim has it in all groups.
_DECOUPLED: Final = "decoupled_weight_decay"
#: Limit of psdist.optim.
_PATTERNS: Final = 256


def convert_optimizer(
    optimizer: torch.optim.Optimizer,
    names: Mapping[torch.nn.Parameter, str],
    scheduler: lr_scheduler.LRScheduler | None = None,
) -> Optimizer:
    """Return the specification that updates as ``optimizer`` does. Its parameter groups become overrides.

    names: name of each parameter of the optimizer.
    scheduler: scheduler of this optimizer; see ``convert_scheduler``.

    Raises InvalidArgumentError for an optimizer, a setting or a scheduler that the servers do not support, for an
    optimizer that has already made steps, for a scheduler that exists but was not passed, and for groups that 256
    patterns cannot tell apart.
    """
    schedule = optim.Constant() if scheduler is None else _checked_schedule(scheduler)
    if scheduler is None and any("initial_lr" in group for group in optimizer.param_groups):
        raise InvalidArgumentError(
            f"this {_title(optimizer)} has a learning-rate scheduler, which the servers must know: pass it as "
            "scheduler="
        )
    return convert_settings(optimizer, names, schedule, () if scheduler is None else end_factors(scheduler))


def convert_settings(
    optimizer: torch.optim.Optimizer,
    names: Mapping[torch.nn.Parameter, str],
    schedule: Schedule,
    ends: Sequence[float] = (),
) -> Optimizer:
    """Do the work of ``convert_optimizer`` with a given schedule. Rates are those before a scheduler's first step.

    ends: the schedule's ``end_factor`` for each group; empty if that is the same for all.
    """
    kind = _kind_of(optimizer)
    groups, title = optimizer.param_groups, _title(optimizer)
    if any(float(state.get("step", 1)) > 0 for state in optimizer.state.values()):  # Adagrad has a state from the start
        raise InvalidArgumentError(
            f"this {title} has already made steps: the servers start with an empty state. Wrap a new one; a run "
            "resumes from a snapshot by its --run-id"
        )
    hyperparameters = [_hyperparameters(optimizer, kind, group) for group in groups]
    base = max(range(len(groups)), key=lambda number: len(groups[number]["params"]))
    spec = kind(**hyperparameters[base])
    changes = [_changes(spec, values) for values in hyperparameters]
    named = _names_of_groups(groups, names)
    if len(set(ends)) > 1:
        schedule = replace(schedule, end_factor=ends[base])  # type: ignore[call-arg]  # only schedules with one have ends
        for number, end in enumerate(ends):
            changes[number] |= {END_FACTOR: end} if end != ends[base] else {}
    # Equal groups may differ later. They are one only if that takes too many patterns.
    apart = [values or {"lr": spec.values()["lr"]} if number != base else {} for number, values in enumerate(changes)]
    overrides = _overrides(apart, named)
    if len(overrides) > _PATTERNS:
        overrides = _overrides(changes, named)
    if len(overrides) > _PATTERNS:
        raise InvalidArgumentError(
            f"the parameter groups need {len(overrides)} overrides, more than {_PATTERNS}: group parameters by "
            "patterns that psdist.optim.override can name, such as '*.bias', and pass a specification of psdist.optim"
        )
    return replace(spec, overrides=overrides, schedule=schedule)


def check_same_state(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], name: str, spec: Optimizer, saved: Collection[str]
) -> None:
    """Raise SettingsMismatchError unless ``optimizer`` keeps the state tensors that a snapshot has.

    group: parameter group of the optimizer.
    name: name of a parameter of this group.
    spec, saved: specification of the snapshot, and names of the state arrays that it has of this parameter.
    """
    kind = _kind_of(optimizer)
    mine = kind(**_hyperparameters(optimizer, kind, group)).state_names
    if type(spec) is not kind or set(mine) != set(saved):
        raise SettingsMismatchError(
            f"the snapshot has {', '.join(saved) or 'no state'} of {type(spec).__name__} for {name!r}, but this "
            f"{_title(optimizer)} keeps {', '.join(mine) or 'none'}, as psdist.optim.{kind.__name__}: make one of the "
            "kind and the settings of the run"
        )


def _title(optimizer: torch.optim.Optimizer) -> str:
    return f"torch.optim.{type(optimizer).__name__}"


def _kind_of(optimizer: torch.optim.Optimizer) -> type[Optimizer]:
    kind = _SPECIFICATIONS.get(type(optimizer))
    if kind is None:
        known = ", ".join(one.__name__ for one in _SPECIFICATIONS)
        raise InvalidArgumentError(
            f"{type(optimizer).__module__}.{type(optimizer).__qualname__} has no counterpart on the servers: use one "
            f"of torch.optim.{{{known}}}, a specification of psdist.optim, or psdist.torch.DistributedDataParallel, "
            "which keeps your optimizer"
        )
    if kind in (optim.Adam, optim.AdamW):
        are_decoupled = all(group.get(_DECOUPLED, kind is optim.AdamW) for group in optimizer.param_groups)
        return optim.AdamW if are_decoupled else optim.Adam
    return kind


def _hyperparameters(
    optimizer: torch.optim.Optimizer, kind: type[Optimizer], group: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings of one parameter group, by their names in psdist.optim.

    Keys without a default in the optimizer are those of schedulers and of the script: torch keeps and ignores them.
    """
    title = _title(optimizer)
    for name in _REFUSED:
        if group.get(name):
            raise InvalidArgumentError(f"{title}({name}=True) has no counterpart on the servers: use {name}=False")
    out: dict[str, Any] = {}
    known = set(kind.__dataclass_fields__)
    others = (*_SPEED, *_REFUSED, _DECOUPLED)
    for name, value in group.items():
        if name in known:
            out[name] = value.item() if isinstance(value, torch.Tensor) else value
        elif name in optimizer.defaults and name not in others:
            raise InvalidArgumentError(f"{title}: the setting {name}={value!r:.60} is not known to psdist")
    if "initial_lr" in group:
        out["lr"] = float(group["initial_lr"])
    return out | {name: tuple(map(float, out[name])) for name in PAIRS if name in out}


def _names_of_groups(groups: Sequence[Mapping[str, Any]], names: Mapping[torch.nn.Parameter, str]) -> list[list[str]]:
    return [[names[parameter] for parameter in group["params"] if parameter in names] for group in groups]


def _overrides(changes: Sequence[Mapping[str, float]], names: Sequence[Sequence[str]]) -> tuple[Override, ...]:
    """Return the overrides that make these changes for the tensors of each group."""
    changed = [number for number, values in enumerate(changes) if values and names[number]]
    kept = [name for number, group in enumerate(names) if number not in changed for name in group]
    out: list[Override] = []
    for number in changed:
        others = kept + [name for other in changed if other != number for name in names[other]]
        out += [optim.override(pattern, **changes[number]) for pattern in _patterns(names[number], others)]
    return tuple(out)


def _changes(spec: Optimizer, values: Mapping[str, Any]) -> dict[str, float]:
    mine, theirs = spec.values(), type(spec)(**values).values()
    return {name: value for name, value in theirs.items() if value != mine[name]}


def _patterns(names: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return patterns that match all of ``names`` and none of ``others``.

    A pattern is the last word of a name if possible (``*.bias``), else the whole name.
    """
    found: dict[str, None] = {}
    for name in names:
        ending = f"*.{_escaped(name.rpartition('.')[2])}"
        is_exact = "." in name and not any(fnmatchcase(other, ending) for other in others)
        found[ending if is_exact else _escaped(name)] = None
    return list(found)


def _escaped(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)


# --- schedulers -------------------------------------------------------------------------------------------------------


class _NoScheduleError(Exception):
    """The servers support no schedule with the same factors. The text says why."""


def convert_scheduler(scheduler: lr_scheduler.LRScheduler) -> Schedule:
    """Return the schedule with the same factor at each step. The scheduler is stepped after every optimizer step.

    Converted are LinearLR from 1, and as a warm-up to 1; CosineAnnealingLR, up to its ``T_max``; StepLR, ExponentialLR
    and PolynomialLR; ConstantLR(factor=1); and SequentialLR of a warm-up by LinearLR and one of these. Raises
    InvalidArgumentError for all others, and for one that has already made steps.
    """
    schedule = _checked_schedule(scheduler)
    if len(set(end_factors(scheduler))) > 1:
        raise InvalidArgumentError(
            f"{type(scheduler).__name__} cannot be converted alone: its eta_min is a different fraction of the rate in "
            "each group. Convert it with its optimizer, by psdist.torch.convert_optimizer(optimizer, names, scheduler)"
        )
    return schedule


def _checked_schedule(scheduler: lr_scheduler.LRScheduler) -> Schedule:
    """Return the schedule, for the first group if groups end at different factors. Raises InvalidArgumentError."""
    try:
        return _schedule_of(scheduler)
    except _NoScheduleError as error:
        raise InvalidArgumentError(
            f"{type(scheduler).__name__} cannot be converted: {error}. Use a schedule of psdist.optim, such as "
            "psdist.optim.Cosine(total_steps, warmup_steps=...), in a specification of psdist.optim; or pass it as "
            "scheduler= to psdist.torch.DistributedOptimizer, which sends its rates to the servers"
        ) from None


def schedule_or_none(scheduler: lr_scheduler.LRScheduler) -> Schedule | None:
    """Return the schedule of a scheduler, as ``convert_settings`` takes it, or None if there is none."""
    try:
        return _schedule_of(scheduler)
    except _NoScheduleError:
        return None


def _schedule_of(scheduler: lr_scheduler.LRScheduler) -> Schedule:
    if getattr(scheduler, "last_epoch", 0) > 0:
        raise InvalidArgumentError(
            f"this {type(scheduler).__name__} has already made {scheduler.last_epoch} steps: the servers count from 0. "
            "Pass a new one; in a resumed run it is advanced to the run's step"
        )
    if type(scheduler) is lr_scheduler.SequentialLR:
        return _sequence(scheduler)
    if type(scheduler) is lr_scheduler.LinearLR and _is_warm_up(scheduler):
        return optim.Constant(warmup_steps=scheduler.total_iters, warmup_start=scheduler.start_factor)
    return _simple(scheduler)


def _sequence(scheduler: lr_scheduler.SequentialLR) -> Schedule:
    parts, milestones = list(scheduler._schedulers), list(scheduler._milestones)
    first = parts[0]
    if len(parts) != 2 or type(first) is not lr_scheduler.LinearLR or not _is_warm_up(first):
        raise _NoScheduleError("it is not LinearLR up to end_factor=1, and then one other scheduler")
    if milestones != [first.total_iters]:
        raise _NoScheduleError(f"its milestone {milestones[0]} is not the warm-up's total_iters={first.total_iters}")
    return replace(_simple(parts[1]), warmup_steps=first.total_iters, warmup_start=first.start_factor)


def _is_warm_up(scheduler: lr_scheduler.LinearLR) -> bool:
    if scheduler.total_iters < 1:
        raise _NoScheduleError(f"total_iters={scheduler.total_iters} leaves the rate at start_factor forever")
    return scheduler.end_factor == 1.0 and scheduler.start_factor < 1.0


def _simple(scheduler: lr_scheduler.LRScheduler) -> Schedule:
    convert = _SCHEDULES.get(type(scheduler))
    if convert is None:
        raise _NoScheduleError("the servers have no such schedule")
    return convert(scheduler)


def _constant(scheduler: Any) -> Schedule:
    if scheduler.factor != 1:
        raise _NoScheduleError(f"factor={scheduler.factor} is not 1")
    return optim.Constant()


def _linear(scheduler: Any) -> Schedule:
    if scheduler.start_factor != 1:
        raise _NoScheduleError(f"start_factor={scheduler.start_factor:g} is not 1, and end_factor is not 1 either")
    return optim.Linear(scheduler.total_iters, scheduler.end_factor)


def _cosine(scheduler: Any) -> Schedule:
    return optim.Cosine(scheduler.T_max, end_factors(scheduler)[0])


def end_factors(scheduler: lr_scheduler.LRScheduler) -> list[float]:
    """Return the fraction of its rate at which each parameter group ends, of a schedule that ``convert_settings``
    takes. Empty if the scheduler has no such rate.

    Raises _NoScheduleError for a group whose rate is 0 at first and then rises: no factor on it gives such rates.
    """
    last = scheduler._schedulers[-1] if isinstance(scheduler, lr_scheduler.SequentialLR) else scheduler
    if type(last) is not lr_scheduler.CosineAnnealingLR:
        return []
    rates = [float(rate) for rate in last.base_lrs]
    if last.eta_min and not all(rates):
        raise _NoScheduleError(
            f"eta_min={last.eta_min:g} with a parameter group of lr=0, but a schedule multiplies its rate"
        )
    return [last.eta_min / rate if rate else 0.0 for rate in rates]


_SCHEDULES: Final[dict[type[lr_scheduler.LRScheduler], Callable[[Any], Schedule]]] = {
    lr_scheduler.ConstantLR: _constant,
    lr_scheduler.LinearLR: _linear,
    lr_scheduler.CosineAnnealingLR: _cosine,
    lr_scheduler.StepLR: lambda scheduler: optim.Step(scheduler.step_size, scheduler.gamma),
    lr_scheduler.ExponentialLR: lambda scheduler: optim.Step(1, scheduler.gamma),
    lr_scheduler.PolynomialLR: lambda scheduler: optim.Polynomial(scheduler.total_iters, scheduler.power),
}


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
