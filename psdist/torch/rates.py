"""Settings of parameter groups: those that torch shows, a torch scheduler, and the servers' schedule.

If the servers run a schedule, torch must show the same rates. Otherwise pushes carry the current rates. They carry all
other numbers of the groups in any case, so that scripts and schedulers may change them at each step.

The servers count their steps by themselves; a scheduler counts calls of the script's loop. Both agree as long as the
loop makes each step. After a step that was dropped, skipped or made elsewhere, the scheduler is moved to the servers'
step.

Conversion of schedulers is in ``conversion``.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, Final

import torch
from torch.optim import lr_scheduler

from psdist.client.sync_client import Parameters
from psdist.consistency import BSP, Consistency
from psdist.errors import InvalidArgumentError
from psdist.hyperparameters import END_FACTOR, PAIRS, SMALLEST
from psdist.optim import Constant, Cosine, Optimizer, Schedule, group_of
from psdist.torch.conversion import end_factors

logger = logging.getLogger("psdist")

#: Tolerated difference between schedulers and the servers' schedules. torch multiplies factors step by step, in
#: float64, or in float32 if the rate is a tensor.
_RATE_TOLERANCE: Final = 1e-6
_TENSOR_TOLERANCE: Final = 1e-3
#: Numbers by name.
Values = dict[str, float]


class LearningRates:
    """Learning rates and other settings as torch shows them, compared with the servers' settings."""

    def __init__(
        self,
        spec: Optimizer,
        wrapped: torch.optim.Optimizer | None,
        scheduler: lr_scheduler.LRScheduler | None,
        handle: Parameters,
    ) -> None:
        self._spec = spec
        self._wrapped = wrapped
        self._scheduler = scheduler
        self._handle = handle
        #: Numbers that pushes carry: all except those that only begin the state.
        self._names = [name for name in spec.values() if name == "lr" or name not in spec.initial]
        #: True if the servers have no schedule, so that pushes carry the rates.
        self._sends = spec.schedule == Constant()
        #: Settings of the step under way, once its first push has started.
        self._pushed: list[Values] | None = None
        #: Settings of the step before, if the optimizer uses these; None if they are unknown.
        self._before: list[Values] | None = None
        #: First step of this worker if the script sets the rates; 0 after these were seen to change.
        self._began_at = handle.step if self._sends and scheduler is None else 0
        self._schedules: list[Schedule] = []
        #: Rates that the script must not change, because the servers run a schedule.
        self._shown: list[float] = []
        #: Settings with which the groups began.
        self._initial: list[Values] = []
        #: Parameter sets that settings are sent to, and their groups on the servers.
        self._sets: list[tuple[Parameters, ServerGroups]] = []
        #: Settings of each group that the sets' pushes carry; None if they are unknown.
        self._carried: list[Values] | None = None
        #: Initial state of the scheduler, and initial settings of the groups, as torch stores them.
        self._fresh: tuple[dict[str, Any], list[dict[str, Any]]] = {}, []
        #: The servers' step, if they made exactly the steps of this loop.
        self._expected_step = 0
        self._is_irregular = False

    def attach(
        self,
        groups: list[dict[str, Any]],
        sets: Iterable[tuple[Parameters, Mapping[str, torch.nn.Parameter]]] = (),
    ) -> None:
        """Start after the optimizer is made. A scheduler is advanced to the step from which the run resumes.

        sets: parameter sets that the settings are sent to, each with its parameters by name.
        """
        self._sets = [(handle, ServerGroups(handle.spec.optimizer, trained, groups)) for handle, trained in sets]
        self._initial = [self._values(group) | {"lr": float(group.get("initial_lr", group["lr"]))} for group in groups]
        self._schedules = _schedules_of(self._spec, self._scheduler, groups)
        if self._scheduler is not None:
            self._fresh = deepcopy(self._scheduler.state_dict()), deepcopy(self._settings_of(groups))
        self._move_scheduler(groups)
        self._show(groups)

    def _move_scheduler(self, groups: list[dict[str, Any]]) -> None:
        """Bring the scheduler to the servers' step."""
        self._expected_step, self._is_irregular = self._handle.step, False
        if self._scheduler is None:
            return
        with warnings.catch_warnings():  # A scheduler warns if it is stepped before its optimizer.
            warnings.simplefilter("ignore")
            if self._scheduler.last_epoch > self._handle.step:  # The run rolled back to a snapshot.
                state, settings = deepcopy(self._fresh)
                self._scheduler.load_state_dict(state)
                _restore(groups, settings)
                self._before = None
            for _ in range(self._handle.step - self._scheduler.last_epoch):
                self._before = [self._values(group) for group in groups]
                self._scheduler.step()

    def state(self) -> dict[str, Any]:
        """Return the part of a saved state beside the groups: the settings of the step before, if they are used."""
        return {"settings_before": deepcopy(self._before)} if self._spec.delay and self._before is not None else {}

    def load(self, groups: list[dict[str, Any]], saved: Mapping[str, Any]) -> None:
        """Show the settings of a saved state, if the script sets them. Many schedulers compute a rate from the last."""
        if self._scheduler is not None:
            return
        self._began_at = 0
        self._before = saved.get("psdist", {}).get("settings_before")
        _restore(groups, self._settings_of(saved["param_groups"], has_rates=self._sends))

    def _settings_of(self, groups: Sequence[Mapping[str, Any]], has_rates: bool = True) -> list[dict[str, Any]]:
        """Return the settings that schedulers and scripts may change, as torch stores them."""
        names = {*self._spec.values(), *PAIRS} - (set() if has_rates else {"lr"})
        return [{name: value for name, value in group.items() if name in names} for group in groups]

    def send(self, groups: list[dict[str, Any]]) -> None:
        """Let the pushes of the next step carry the settings of all groups.

        Raises as ``check``, and InvalidArgumentError for a setting that the servers cannot change.
        """
        values = self.check(groups)
        if values != self._carried:
            for handle, own in self._sets:
                handle.settings = own.settings(values)
            self._carried = values

    def leave_to_others(self) -> None:
        """Let the pushes of the next step carry no settings: other workers set them."""
        self._carried = None
        for handle, _ in self._sets:
            handle.settings = None

    def check(self, groups: list[dict[str, Any]]) -> list[Values]:
        """Return the settings of each group that the next push carries; without rates if the servers run a schedule.

        Moves the scheduler to the servers' step if they made other steps than the script's loop. Raises
        InvalidArgumentError if the rates differ from those of the servers' schedule.
        """
        if self._is_irregular or self._handle.step != self._expected_step:
            self._move_scheduler(groups)
        if not self._sends:
            self._check_shown(groups)
        elif self._scheduler is not None and self._scheduler.last_epoch != self._handle.step:
            raise InvalidArgumentError(
                f"the scheduler has made {self._scheduler.last_epoch} steps at step {self._handle.step}: call "
                "scheduler.step() after each step of the optimizer. Do not pass a scheduler that is stepped once per "
                "data epoch as scheduler=; its rates are used as they are"
            )
        self._pushed = [self._values(group) for group in groups]
        if self._began_at and (self._pushed != self._initial or any("initial_lr" in group for group in groups)):
            logger.warning(
                "this worker started at step %d, and its script sets the rates (lr=%g at step %d): if the script "
                "restarted, pass its scheduler as scheduler=, which advances it to that step, or load the scheduler's "
                "state",
                self._began_at, float(groups[0]["lr"]), self._handle.step,
            )  # fmt: skip
            self._began_at = 0
        return [self._sent(number, values) for number, values in enumerate(self._pushed)]

    def _sent(self, number: int, values: Values) -> Values:
        """Return the settings of a group as the servers use them."""
        sent = {name: value for name, value in values.items() if self._sends or name != "lr"}
        if self._spec.delay and self._before is not None:  # ASGD's step size is that of the step before, as in torch.
            before = self._before[number]
            sent |= {name: before[name] for name in ("lr", "alpha", "t0") if name in sent}
            sent["lambd_before"] = before["lambd"]
        elif self._spec.delay:
            sent["lambd_before"] = values["lambd"]
        return sent

    def check_unchanged(self, groups: list[dict[str, Any]]) -> None:
        """Raise InvalidArgumentError if settings were changed after the first push of the step."""
        if self._pushed is None:
            return
        for number, (group, pushed) in enumerate(zip(groups, self._pushed, strict=True)):
            for name, value in self._values(group).items():
                if value != pushed[name]:
                    raise InvalidArgumentError(
                        f"{name} of parameter group {number} was changed from {pushed[name]:g} to {value:g} after the "
                        "backward pass had pushed gradients: set it before backward(), or, with "
                        "DistributedOptimizer, use overlap=False, which pushes in step()"
                    )

    def _values(self, group: Mapping[str, Any]) -> Values:
        """Return the numbers of a group by their names on the servers."""
        values = {name: float(group[name]) for name in self._names if name in group}
        for name, pair in PAIRS.items():
            if name in group:
                values |= zip(pair, map(float, group[name]), strict=True)
        if -_RATE_TOLERANCE <= values["lr"] < 0:  # Schedulers round.
            values["lr"] = 0.0
        if "lr" in self._spec.initial:  # The servers do not take 0, which has the same effect here.
            values["lr"] = max(values["lr"], SMALLEST)
        return values

    def _check_shown(self, groups: list[dict[str, Any]]) -> None:
        """Raise InvalidArgumentError if torch shows other rates than the servers' schedule gives."""
        for number, (group, seen) in enumerate(zip(groups, self._shown, strict=True)):
            shown = float(group["lr"])
            if self._scheduler is not None:
                expected = self._initial[number]["lr"] * self._schedules[number].factor(self._handle.step)
                self._check_scheduled(number, shown, expected, _tolerance(groups))
            elif shown != seen:
                raise InvalidArgumentError(
                    f"lr of parameter group {number} was changed from {seen} to {shown}, but the servers follow "
                    "the schedule of the specification: leave schedule= out of it to set rates in the script"
                )

    def _check_scheduled(self, number: int, shown: float, expected: float, tolerance: float) -> None:
        if abs(shown - expected) > tolerance * self._initial[number]["lr"]:
            schedule, step = self._spec.schedule, self._handle.step
            if isinstance(schedule, Cosine) and step - schedule.warmup_steps > schedule.total_steps:
                raise InvalidArgumentError(
                    f"step {step} is past T_max={schedule.total_steps} of the cosine scheduler. torch's rate rises "
                    "again there, and the servers' stays at its end: set T_max to the number of steps, or stop there"
                )
            raise InvalidArgumentError(
                f"the scheduler gives parameter group {number} lr={shown:g} at step {self._handle.step}, but the "
                f"servers follow it with {expected:g}: call scheduler.step() after each step of the optimizer, and "
                "not once for each data epoch; or give a schedule to a specification of psdist.optim"
            )

    def on_step(self, groups: list[dict[str, Any]]) -> None:
        """Record that a step was made."""
        self._expected_step += 1
        self._before, self._pushed = self._pushed or self._before, None
        if self._wrapped is not None:
            self._wrapped._opt_called = True  # type: ignore[attr-defined]  # read by schedulers
        self._show_next(groups)

    def on_empty_step(self, groups: list[dict[str, Any]]) -> None:
        """Record a step that the script's loop did not make."""
        self._pushed = [self._values(group) for group in groups]
        self.on_step(groups)
        if self._scheduler is not None:
            self._scheduler.step()

    def on_irregular_step(self, groups: list[dict[str, Any]]) -> None:
        """Record a step that the loop does not count, or one that it counts and that was not made."""
        self._is_irregular = True
        self._before, self._pushed = self._pushed or self._before, None
        self._show_next(groups)

    def _show_next(self, groups: list[dict[str, Any]]) -> None:
        if self._scheduler is None and not self._sends:
            self._show(groups)

    def _show(self, groups: list[dict[str, Any]]) -> None:
        """Write the current rates to ``param_groups`` for scripts to read, unless the script sets them."""
        if self._scheduler is None and not self._sends:
            for initial, schedule, group in zip(self._initial, self._schedules, groups, strict=True):
                _set_rate(group, initial["lr"] * schedule.factor(self._handle.step))
        self._shown = [float(group["lr"]) for group in groups]


class ServerGroups:
    """Groups of one parameter set on the servers that each parameter group of an optimizer belongs to.

    spec: the set's specification.
    trained: its parameters by name.
    """

    def __init__(
        self, spec: Optimizer, trained: Mapping[str, torch.nn.Parameter], groups: Sequence[Mapping[str, Any]]
    ) -> None:
        self._spec = spec
        numbers = {id(parameter): number for number, group in enumerate(groups) for parameter in group["params"]}
        pairs = {(group_of(name, spec.overrides), numbers[id(one)]) for name, one in trained.items()}
        #: Group on the servers, and number of the parameter group.
        self._pairs = sorted(pairs)

    def settings(self, values: Sequence[Values]) -> dict[int, Values]:
        """Return the settings of a push. values: those of each parameter group.

        Raises InvalidArgumentError for a setting that the servers cannot change.
        """
        found: dict[int, Values] = {}
        first: dict[int, int] = {}
        for group, number in self._pairs:
            try:
                changes = self._spec.check_group_settings(group, values[number])
            except InvalidArgumentError as error:
                raise InvalidArgumentError(
                    f"parameter group {number}: {error.message}. psdist.torch.DistributedDataParallel keeps the "
                    "optimizer in the script, where every setting may change",
                    **error.details,
                ) from None
            if found.setdefault(group, changes) != changes:
                raise InvalidArgumentError(
                    f"parameter groups {first[group]} and {number} were equal when they were wrapped, and the servers "
                    f"hold them as one, because they need more than 256 patterns: change both equally, or name their "
                    "parameters by patterns such as '*.bias'"
                )
            first.setdefault(group, number)
        return {group: changes for group, changes in found.items() if changes}


def _restore(groups: Sequence[dict[str, Any]], saved: Sequence[Mapping[str, Any]]) -> None:
    """Write saved settings to groups."""
    for group, settings in zip(groups, saved, strict=False):
        if "lr" in settings:
            _set_rate(group, float(settings["lr"]))
        group |= {name: value for name, value in settings.items() if name != "lr"}


def _schedules_of(
    spec: Optimizer, scheduler: lr_scheduler.LRScheduler | None, groups: list[dict[str, Any]]
) -> list[Schedule]:
    """Return the schedule of each parameter group. Groups may end at different factors."""
    schedule: Any = spec.schedule
    if not hasattr(schedule, END_FACTOR):
        return [schedule] * len(groups)
    ends = [] if scheduler is None else end_factors(scheduler)
    ends = ends or [group.get(END_FACTOR, schedule.end_factor) for group in groups]
    return [replace(schedule, end_factor=end) for end in ends]


def _set_rate(group: dict[str, Any], rate: float) -> None:
    """Set the rate of a group, in place if the script made it a tensor."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _tolerance(groups: list[dict[str, Any]]) -> float:
    """Return the relative tolerance of these groups' rates."""
    are_tensors = any(isinstance(group["lr"], torch.Tensor) for group in groups)
    return _TENSOR_TOLERANCE if are_tensors else _RATE_TOLERANCE


def _plain(value: Any) -> Any:
    """Return a setting as plain numbers that nothing changes in place."""
    if isinstance(value, tuple | list):
        return tuple(_plain(one) for one in value)
    return value.item() if isinstance(value, torch.Tensor) else value


def shown_settings(groups: list[dict[str, Any]], defaults: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the optimizer's settings of each group as plain values, without keys of the script. defaults: the
    optimizer's."""
    return [{key: _plain(value) for key, value in group.items() if key in defaults} for group in groups]


def check_scheduler(optimizer: object, scheduler: object, consistency: Consistency) -> None:
    """Raise InvalidArgumentError for a scheduler of another optimizer, or one that cannot be moved to a run's step."""
    if scheduler is None:
        return
    if not isinstance(optimizer, torch.optim.Optimizer) or getattr(scheduler, "optimizer", None) is not optimizer:
        raise InvalidArgumentError(
            f"scheduler is of type {type(scheduler).__name__}: give the torch scheduler of this torch optimizer, or "
            "a schedule in a specification of psdist.optim"
        )
    kind = type(scheduler).__name__
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) or not hasattr(scheduler, "last_epoch"):
        raise InvalidArgumentError(
            f"scheduler={kind} cannot be moved to the step of a run: leave it out of scheduler=, and step it in the "
            "loop, equally on all workers. A script that resumes or restarts loads its state"
        )
    if not isinstance(consistency, BSP):
        raise InvalidArgumentError(
            f"scheduler={kind} counts this worker's steps, but in {type(consistency).__name__} the servers count the "
            "pushes of all workers: give a schedule in a specification of psdist.optim, or leave it out of scheduler=, "
            "so that each push uses the rate that its worker shows at that time"
        )
