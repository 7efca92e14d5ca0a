"""Learning rates: those that torch shows, a torch scheduler, and the servers' schedule.

If the servers run a schedule, torch must show the same rates. Otherwise pushes carry the current rates as a factor on
the initial ones.

The servers count their steps by themselves; a scheduler counts calls of the script's loop. Both agree as long as the
loop makes each step. After a step that was dropped, skipped or made elsewhere, the scheduler is moved to the servers'
step.

Conversion of schedulers is in ``conversion``.
"""

from __future__ import annotations

import logging
import warnings
from copy import deepcopy
from dataclasses import replace
from typing import Any, Final

import torch
from torch.optim import lr_scheduler

from psdist.client.sync_client import Parameters
from psdist.consistency import BSP, Consistency
from psdist.errors import InvalidArgumentError
from psdist.hyperparameters import END_FACTOR
from psdist.optim import Constant, Cosine, Optimizer, Schedule
from psdist.torch.conversion import end_factors

logger = logging.getLogger("psdist")

#: Tolerated difference between schedulers and the servers' schedules. torch multiplies factors step by step, in
#: float64, or in float32 if the rate is a tensor.
_RATE_TOLERANCE: Final = 1e-6
_TENSOR_TOLERANCE: Final = 1e-3
#: Settings that some schedulers change together with the rate.
_CYCLED: Final = ("momentum", "betas")


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
        #: True if the servers have no schedule, so that pushes carry a factor.
        self._sends = spec.schedule == Constant()
        #: Factor of the step under way, once its first push has started.
        self._sent: float | None = None
        #: First step of this worker if the script sets the rates; 0 after these were seen to change.
        self._began_at = handle.step if self._sends and scheduler is None else 0
        self._base: list[float] = []
        self._schedules: list[Schedule] = []
        self._seen: list[dict[str, Any]] = []
        #: Initial state of the scheduler, and initial rates of the groups.
        self._fresh: tuple[dict[str, Any], list[float]] = {}, []
        #: The servers' step, if they made exactly the steps of this loop.
        self._expected_step = 0
        self._is_irregular = False

    def attach(self, groups: list[dict[str, Any]]) -> None:
        """Start after the optimizer is made. A scheduler is advanced to the step from which the run resumes."""
        self._base = [float(group.get("initial_lr", group["lr"])) for group in groups]
        self._schedules = _schedules_of(self._spec, self._scheduler, groups)
        if self._scheduler is not None:
            self._fresh = deepcopy(self._scheduler.state_dict()), [float(group["lr"]) for group in groups]
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
                state, rates = self._fresh
                self._scheduler.load_state_dict(deepcopy(state))
                for group, rate in zip(groups, rates, strict=True):
                    _set_rate(group, rate)
            for _ in range(self._handle.step - self._scheduler.last_epoch):
                self._scheduler.step()

    def load(self, groups: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
        """Show the rates of a saved state, if the script sets them. Many schedulers compute a rate from the last."""
        if self._sends and self._scheduler is None:
            self._began_at = 0
            for group, one in zip(groups, saved, strict=False):
                _set_rate(group, float(one["lr"]))

    def check(self, groups: list[dict[str, Any]]) -> float | None:
        """Return the factor of the next push on the servers' rates, or None if the servers run a schedule.

        Moves the scheduler to the servers' step if they made other steps than the script's loop. Raises
        InvalidArgumentError if a setting differs from the servers'.
        """
        if self._is_irregular or self._handle.step != self._expected_step:
            self._move_scheduler(groups)
        for number, (group, seen) in enumerate(zip(groups, self._seen, strict=True)):
            for key, value in seen.items():
                if key != "lr" and _plain(group[key]) != value:
                    remedy = " Make the scheduler with cycle_momentum=False" if key in _CYCLED else ""
                    raise InvalidArgumentError(
                        f"{key} of parameter group {number} was changed from {value} to {_plain(group[key])}, but the "
                        f"servers have it for the whole run.{remedy}"
                    )
        if not self._sends:
            self._check_shown(groups)
            return None
        if self._scheduler is not None and self._scheduler.last_epoch != self._handle.step:
            raise InvalidArgumentError(
                f"the scheduler has made {self._scheduler.last_epoch} steps at step {self._handle.step}: call "
                "scheduler.step() after each step of the optimizer. Do not pass a scheduler that is stepped once per "
                "data epoch as scheduler=; its rates are used as they are"
            )
        self._sent = self._factor(groups)
        if self._sent != 1.0 and self._spec.delay:
            raise InvalidArgumentError(
                f"lr was changed by a factor of {self._sent:g}: torch's ASGD uses a changed rate one step later, and "
                "the servers immediately. Pass a scheduler that the servers run (psdist.torch.convert_scheduler) as "
                "scheduler=, or use psdist.torch.DistributedDataParallel, which keeps the optimizer"
            )
        if self._began_at and (self._sent != 1.0 or any("initial_lr" in group for group in groups)):
            logger.warning(
                "this worker started at step %d, and its script sets the rates (lr=%g at step %d): if the script "
                "restarted, pass its scheduler as scheduler=, which advances it to that step, or load the scheduler's "
                "state",
                self._began_at, float(groups[0]["lr"]), self._handle.step,
            )  # fmt: skip
            self._began_at = 0
        return self._sent

    def check_unchanged(self, groups: list[dict[str, Any]]) -> None:
        """Raise InvalidArgumentError if rates were changed after the first push of the step."""
        if self._sent is not None and (factor := self._factor(groups)) != self._sent:
            raise InvalidArgumentError(
                f"lr was changed after the backward pass had pushed gradients: its factor is {factor:g} now, and "
                f"{self._sent:g} in the pushes. Set it before backward(), or, with DistributedOptimizer, use "
                "overlap=False, which pushes in step()"
            )

    def _factor(self, groups: list[dict[str, Any]]) -> float:
        """Return the common factor of all groups' rates on those of the servers.

        Raises InvalidArgumentError if it differs between groups.
        """
        rates = [(float(group["lr"]), base) for group, base in zip(groups, self._base, strict=True)]
        first = next((number for number, (_, base) in enumerate(rates) if base), 0)
        rate, base = rates[first]
        factor = rate / base if base else 1.0
        for number, (mine, began) in enumerate(rates):
            if not began and mine:
                raise InvalidArgumentError(
                    f"lr of parameter group {number} is {mine:g}, but was 0 when the optimizer was wrapped, and the "
                    "servers multiply the original rate: make the optimizer with a rate, and set 0 afterwards"
                )
            if abs(mine - began * factor) > _tolerance(groups) * began * abs(factor):
                raise InvalidArgumentError(
                    f"lr of parameter group {number} went from {began:g} to {mine:g}, and that of group {first} from "
                    f"{base:g} to {rate:g}, but the servers multiply all rates by one factor. Give min_lr, eta_min and "
                    "their like for each group in proportion to its lr, or use psdist.torch.DistributedDataParallel, "
                    "which keeps the optimizer"
                )
        if factor < -_RATE_TOLERANCE:
            raise InvalidArgumentError(f"lr of parameter group {first} is {rate:g}: use 0 or more")
        return max(factor, 0.0)

    def _check_shown(self, groups: list[dict[str, Any]]) -> None:
        """Raise InvalidArgumentError if torch shows other rates than the servers' schedule gives."""
        for number, (group, seen) in enumerate(zip(groups, self._seen, strict=True)):
            shown = _plain(group["lr"])
            if self._scheduler is not None:
                expected = self._base[number] * self._schedules[number].factor(self._handle.step)
                self._check_scheduled(number, float(shown), expected, _tolerance(groups))
            elif shown != seen["lr"]:
                raise InvalidArgumentError(
                    f"lr of parameter group {number} was changed from {seen['lr']} to {shown}, but the servers follow "
                    "the schedule of the specification: leave schedule= out of it to set rates in the script"
                )

    def _check_scheduled(self, number: int, shown: float, expected: float, tolerance: float) -> None:
        if abs(shown - expected) > tolerance * self._base[number]:
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
        self._sent = None
        if self._wrapped is not None:
            self._wrapped._opt_called = True  # type: ignore[attr-defined]  # read by schedulers
        self._show_next(groups)

    def on_empty_step(self, groups: list[dict[str, Any]]) -> None:
        """Record a step that the script's loop did not make."""
        self.on_step(groups)
        if self._scheduler is not None:
            self._scheduler.step()

    def on_irregular_step(self, groups: list[dict[str, Any]]) -> None:
        """Record a step that the loop does not count, or one that it counts and that was not made."""
        self._is_irregular = True
        self._sent = None
        self._show_next(groups)

    def _show_next(self, groups: list[dict[str, Any]]) -> None:
        if self._scheduler is None and not self._sends:
            self._show(groups)

    def _show(self, groups: list[dict[str, Any]]) -> None:
        """Write the current rates to ``param_groups`` for scripts to read, unless the script sets them."""
        if self._scheduler is None and not self._sends:
            for base, schedule, group in zip(self._base, self._schedules, groups, strict=True):
                _set_rate(group, base * schedule.factor(self._handle.step))
        self._seen = [{key: _plain(group[key]) for key in _settings(self._spec) if key in group} for group in groups]


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


def shown_settings(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the settings of each group as plain values, without its parameters."""
    return [{key: _plain(value) for key, value in group.items() if key != "params"} for group in groups]


def _settings(spec: Optimizer) -> list[str]:
    return [name for name in spec.__dataclass_fields__ if name not in ("schedule", "max_grad_norm", "overrides")]


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
    if getattr(scheduler, "cycle_momentum", False):
        raise InvalidArgumentError(
            f"this {kind} changes the momentum, which is fixed on the servers for the whole run: make it with "
            "cycle_momentum=False"
        )
    if not isinstance(consistency, BSP):
        raise InvalidArgumentError(
            f"scheduler={kind} counts this worker's steps, but in {type(consistency).__name__} the servers count the "
            "pushes of all workers: give a schedule in a specification of psdist.optim, or leave it out of scheduler=, "
            "so that each push uses the rate that its worker shows at that time"
        )
