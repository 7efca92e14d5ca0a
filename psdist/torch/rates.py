"""Learning rates: what torch's side shows of them, and a torch scheduler, beside the schedule that the servers follow.

Where the servers have a schedule, torch's side must show the same rates. Where they have none, pushes carry the factor
that the script's rates have over those at the beginning.

The servers count their steps by themselves. A scheduler counts the calls of the script's loop. Both agree as long as
the loop makes each step. After a step that was dropped, skipped or made elsewhere, the scheduler is brought to where
the servers are.

Not here: what a scheduler means for the servers (``conversion``).
"""

from __future__ import annotations

import logging
import warnings
from copy import deepcopy
from typing import Any, Final

import torch
from torch.optim import lr_scheduler

from psdist.client.sync_client import Parameters
from psdist.consistency import BSP, Consistency
from psdist.errors import InvalidArgumentError
from psdist.optim import Constant, Cosine, Optimizer

logger = logging.getLogger("psdist")

#: What schedulers and the servers' schedules may differ by: torch multiplies factors step by step, in float64, or where
#: the rate is a tensor, in float32.
_RATE_TOLERANCE: Final = 1e-6
_TENSOR_TOLERANCE: Final = 1e-3
#: Settings that some schedulers change together with the rate.
_CYCLED: Final = ("momentum", "betas")


class Rates:
    """The learning rates and other settings that torch's side shows, beside those that the servers have."""

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
        #: The servers have no schedule: pushes carry a factor.
        self._sends = spec.schedule == Constant()
        #: The factor that the step under way has, once its first push has begun.
        self._sent: float | None = None
        #: The step that this worker began at with rates of its own, until it was seen that these change.
        self._began_at = handle.step if self._sends and scheduler is None else 0
        self._base: list[float] = []
        self._seen: list[dict[str, Any]] = []
        #: The scheduler's state before its first step, and the rates of the groups then.
        self._fresh: tuple[dict[str, Any], list[float]] = {}, []
        #: Where the servers are, if they made the steps of this loop and no others.
        self._expected_step = 0
        self._is_irregular = False

    def begin(self, groups: list[dict[str, Any]]) -> None:
        """The optimizer is made. A scheduler is brought to the step that the run goes on from."""
        self._base = [float(group.get("initial_lr", group["lr"])) for group in groups]
        if self._scheduler is not None:
            self._fresh = deepcopy(self._scheduler.state_dict()), [float(group["lr"]) for group in groups]
        self._follow(groups)
        self._show(groups)

    def _follow(self, groups: list[dict[str, Any]]) -> None:
        """Brings the scheduler to the step that the servers are at."""
        self._expected_step, self._is_irregular = self._handle.step, False
        if self._scheduler is None:
            return
        with warnings.catch_warnings():  # of a scheduler that is stepped before its optimizer
            warnings.simplefilter("ignore")
            if self._scheduler.last_epoch > self._handle.step:  # The run went back to a snapshot.
                state, rates = self._fresh
                self._scheduler.load_state_dict(deepcopy(state))
                for group, rate in zip(groups, rates, strict=True):
                    _set_rate(group, rate)
            for _ in range(self._handle.step - self._scheduler.last_epoch):
                self._scheduler.step()

    def check(self, groups: list[dict[str, Any]]) -> float | None:
        """What the push that begins multiplies the servers' rate by; None where they follow a schedule. A scheduler
        follows them where they made other steps than the script's loop. Raises InvalidArgumentError where a setting is
        not the servers'."""
        if self._is_irregular or self._handle.step != self._expected_step:
            self._follow(groups)
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
                "scheduler.step() after each step of the optimizer. One that is stepped once for each data epoch is "
                "not given as scheduler=; its rates are used as they are"
            )
        self._sent = self._factor(groups)
        if self._began_at and (self._sent != 1.0 or any("initial_lr" in group for group in groups)):
            logger.warning(
                "this worker began at step %d, and its script sets the rates (lr=%g at step %d): if it begins anew, "
                "pass its scheduler as scheduler=, which brings it there, or load the scheduler's state",
                self._began_at, float(groups[0]["lr"]), self._handle.step,
            )  # fmt: skip
            self._began_at = 0
        return self._sent

    def check_unchanged(self, groups: list[dict[str, Any]]) -> None:
        """Raises InvalidArgumentError where rates were changed after the first push of the step."""
        if self._sent is not None and (factor := self._factor(groups)) != self._sent:
            raise InvalidArgumentError(
                f"lr was changed after the backward pass had pushed gradients: it is {factor:g} times that at the "
                f"beginning, and the pushes say {self._sent:g}. Set it before backward(), or, with "
                "DistributedOptimizer, use overlap=False, which pushes in step()"
            )

    def _factor(self, groups: list[dict[str, Any]]) -> float:
        """What the rates of all groups are multiples of, over those that the servers have. Raises InvalidArgumentError
        where that differs between groups."""
        rates = [(float(group["lr"]), base) for group, base in zip(groups, self._base, strict=True)]
        first = next((number for number, (_, base) in enumerate(rates) if base), 0)
        rate, base = rates[first]
        factor = rate / base if base else 1.0
        for number, (mine, began) in enumerate(rates):
            if not began and mine:
                raise InvalidArgumentError(
                    f"lr of parameter group {number} is {mine:g}, but was 0 when the optimizer was wrapped, and the "
                    "servers multiply what it was: make the optimizer with a rate, and set 0 after that"
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
        """Raises InvalidArgumentError where torch's side shows other rates than those that the servers' schedule
        gives."""
        factor = self._spec.schedule.factor(self._handle.step)
        for number, (group, seen) in enumerate(zip(groups, self._seen, strict=True)):
            shown = _plain(group["lr"])
            if self._scheduler is not None:
                self._check_scheduled(number, float(shown), self._base[number] * factor, _tolerance(groups))
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
                    f"step {step} is past T_max={schedule.total_steps} of the cosine scheduler, where torch's rate "
                    "rises again, and the servers' stays at its end: give T_max all steps, or end there"
                )
            raise InvalidArgumentError(
                f"the scheduler gives parameter group {number} lr={shown:g} at step {self._handle.step}, but the "
                f"servers follow it with {expected:g}: call scheduler.step() after each step of the optimizer, and "
                "not once for each data epoch; or give a schedule to a specification of psdist.optim"
            )

    def on_step(self, groups: list[dict[str, Any]]) -> None:
        """A step was made."""
        self._expected_step += 1
        self._sent = None
        if self._wrapped is not None:
            self._wrapped._opt_called = True  # type: ignore[attr-defined]  # what schedulers look for
        self._show_next(groups)

    def on_empty_step(self, groups: list[dict[str, Any]]) -> None:
        """A step was made that the loop of the script did not make."""
        self.on_step(groups)
        if self._scheduler is not None:
            self._scheduler.step()

    def on_irregular_step(self, groups: list[dict[str, Any]]) -> None:
        """A step was made that the loop of the script does not count, or one that it counts was not made."""
        self._is_irregular = True
        self._sent = None
        self._show_next(groups)

    def _show_next(self, groups: list[dict[str, Any]]) -> None:
        if self._scheduler is None and not self._sends:
            self._show(groups)

    def _show(self, groups: list[dict[str, Any]]) -> None:
        """Writes the current rates where scripts read them, unless the script sets them."""
        if self._scheduler is None and not self._sends:
            factor = self._spec.schedule.factor(self._handle.step)
            for base, group in zip(self._base, groups, strict=True):
                _set_rate(group, base * factor)
        self._seen = [{key: _plain(group[key]) for key in _settings(self._spec) if key in group} for group in groups]


def _set_rate(group: dict[str, Any], rate: float) -> None:
    """Also into a tensor that the script has."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _tolerance(groups: list[dict[str, Any]]) -> float:
    """Relative, of their rates."""
    are_tensors = any(isinstance(group["lr"], torch.Tensor) for group in groups)
    return _TENSOR_TOLERANCE if are_tensors else _RATE_TOLERANCE


def _plain(value: Any) -> Any:
    """A setting as a number, which nobody changes in place."""
    if isinstance(value, tuple | list):
        return tuple(_plain(one) for one in value)
    return value.item() if isinstance(value, torch.Tensor) else value


def _settings(spec: Optimizer) -> list[str]:
    return [name for name in spec.__dataclass_fields__ if name not in ("schedule", "max_grad_norm", "overrides")]


def check_scheduler(optimizer: object, scheduler: object, consistency: Consistency) -> None:
    """Raises InvalidArgumentError for a scheduler that is not of this torch optimizer, or that cannot be brought to
    the step of a run."""
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
            f"scheduler={kind} cannot be brought to the step of a run: leave it out of scheduler=, and step it in the "
            "loop, alike on all workers. A script that goes on, or is started again, loads its state"
        )
    if getattr(scheduler, "cycle_momentum", False):
        raise InvalidArgumentError(
            f"this {kind} changes the momentum, which the servers have for the whole run: make it with "
            "cycle_momentum=False"
        )
    if not isinstance(consistency, BSP):
        raise InvalidArgumentError(
            f"scheduler={kind} counts this worker's steps, but in {type(consistency).__name__} the servers count the "
            "pushes of all workers: give a schedule in a specification of psdist.optim, or leave it out of scheduler=, "
            "and each push has the rate that its worker shows then"
        )
