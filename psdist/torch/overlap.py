"""Choice between pushes during the backward pass and pushes in ``step``, from the first steps of a script.

Gradients that are pushed during the backward pass can no longer change, and weights that are written after it come too
late for their step. A script that clips gradients, restores weights, adds up several backward passes, or skips a step
needs pushes in ``step``. The first steps are pushed there while this module watches, so nothing wrong is ever sent.
Each worker decides alone: buckets and whole pushes carry the same slices.

A loss of one model may reach another, as a generator's reaches the critic, which has made several steps by then. So the
choice is made after whole iterations: when every optimizer of the script has made its first steps.

Not here: pushing (``gradients``).
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from psdist.errors import InvalidArgumentError
from psdist.torch.writes import Fingerprint

logger = logging.getLogger("psdist")

Overlap = bool | Literal["auto"]

#: Steps of each optimizer that are watched. The second one shows gradients that another model's loss left between two.
_WATCHED_STEPS: Final = 2
#: Relative difference of two factors that rounding explains.
_ROUNDING: Final = 1e-4
#: Writes to the weights between backward passes of one step. One is part of some methods, such as SAM.
_WRITES: Final = 2


def check_overlap(overlap: object) -> None:
    """Raise InvalidArgumentError if this is no value of ``overlap``."""
    if not isinstance(overlap, bool) and overlap != "auto":
        raise InvalidArgumentError(f"overlap={overlap!r:.40} is not allowed: use 'auto', True or False")


class OverlapProbe:
    """Watches gradients and weights of the first steps between the backward pass and ``step``.

    trained: parameters by name.
    is_paused: returns True while backward passes only accumulate; their gradients may grow.
    settings_of: returns the optimizer's settings, which pushes carry.
    """

    def __init__(
        self,
        trained: Mapping[str, nn.Parameter],
        is_paused: Callable[[], bool],
        settings_of: Callable[[], Sequence[Any]],
    ) -> None:
        self._parameters = list(trained.items())
        self._is_paused = is_paused
        self._settings_of = settings_of
        self._settings: Sequence[Any] = ()
        #: Gradients of this step's backward pass, with autograd's version of each when it was made.
        self._seen: dict[int, tuple[Tensor, int]] = {}
        #: Content of the gradients at the end of the pass.
        self._values = Fingerprint()
        #: Content and autograd's versions of the weights at the end of the pass.
        self._weights = Fingerprint()
        self._weight_versions: list[int] = []
        #: Autograd's number of the latest backward pass, the weights' versions at its start, and how many passes since
        #: the latest step came after a write to the weights.
        self._pass = -1
        self._versions: list[int] = []
        self._writes = 0
        #: Reason for pushes in ``step``; empty if none was seen.
        self.reason = ""
        #: A gradient that the script changes by more than a constant factor, which the mean does not commute with.
        self.changed = ""
        #: Factors of the first step, by parameter; None before.
        self._factors: dict[str, float] | None = None
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]  # torch gives it no types
                partial(self._on_gradient, number)
            )
            for number, (_, parameter) in enumerate(self._parameters)
            if parameter.requires_grad  # A frozen one takes no hook. It gets no gradient that could change.
        ]

    def _on_gradient(self, number: int, parameter: Tensor) -> None:
        if self._pass != (current := torch._C._current_graph_task_id()):
            self._pass = current
            self._check_steps()
            torch.autograd.Variable._execution_engine.queue_callback(self._on_pass_end)
        if self._is_paused() or parameter.grad is None:
            return
        if number in self._seen:
            self.reason = self.reason or f"{self._parameters[number][0]!r} got two gradients in a step"
        if not self._seen:
            self._settings = self._settings_of()
        self._seen[number] = parameter.grad, parameter.grad._version

    def _on_pass_end(self) -> None:
        self._values.take((self._parameters[number][0], gradient) for number, (gradient, _) in self._seen.items())
        self._weights.take(self._parameters)
        self._weight_versions = self._current_versions()

    def _current_versions(self) -> list[int]:
        return [parameter._version for _, parameter in self._parameters]

    def _check_steps(self) -> None:
        """Raise InvalidArgumentError for a script that updates the weights by itself, so that workers train apart."""
        versions = self._current_versions()
        self._writes += bool(self._versions) and versions != self._versions
        self._versions = versions
        if self._writes == _WRITES:
            raise InvalidArgumentError(
                f"the script wrote to the weights after each of {_WRITES} backward passes and did not call step(), so "
                "its steps never reach the servers: call step() of the DistributedOptimizer, or, to update weights by "
                "hand, use psdist.torch.DistributedDataParallel, whose backward() leaves the mean gradient in p.grad"
            )

    def on_step(self, *, is_scaled: bool) -> None:
        """Compare gradients and weights with those at the end of the backward pass, before a step is pushed.

        is_scaled: True if a GradScaler decides about the step.
        """
        if is_scaled:
            self.reason = self.reason or "a GradScaler may skip steps"
        hidden = self._values.changed()
        changed = {
            name: parameter.grad
            for number, (gradient, version) in self._seen.items()
            for name, parameter in [self._parameters[number]]
            if parameter.grad is not gradient or gradient._version != version or name in hidden
        }
        if changed:
            self.reason = self.reason or f"the gradient of {next(iter(changed))!r} changed after backward()"
        self._check_factors(changed, is_scaled=is_scaled)
        if not self._seen:
            self.reason = self.reason or "step() came without a backward pass that would push"
        if name := self._written_weight():
            self.reason = self.reason or f"the weight {name!r} was written to after backward()"
        if self._seen and self._settings_of() != self._settings:
            self.reason = self.reason or "settings of the optimizer changed after backward()"
        self._forget()
        self._versions, self._writes = [], 0

    def _check_factors(self, changed: Mapping[str, Tensor | None], *, is_scaled: bool) -> None:
        """Record a change of gradients that is no multiplication by the same numbers in each step.

        changed: gradients that were changed in this step. is_scaled: a GradScaler divides by powers of two.
        """
        taken = [gradient for gradient, _ in self._seen.values()]
        if is_scaled and not all(bool(one.isfinite().all()) for one in taken if one.layout is torch.strided):
            return  # The step is skipped.
        given = {name: gradient for name, gradient in changed.items() if gradient is not None}
        factors = self._values.factors(given.items()) if given else {}
        if factors is None:
            self.changed = self.changed or next(iter(given))
            return
        if is_scaled:
            factors = {name: math.frexp(factor)[0] * 2 for name, factor in factors.items()}
        first = self._factors = factors if self._factors is None else self._factors
        for name in sorted(factors.keys() | first.keys()):
            if not math.isclose(factors.get(name, 1.0), first.get(name, 1.0), rel_tol=_ROUNDING):
                self.changed = self.changed or name

    def _written_weight(self) -> str:
        """Return the name of a parameter that was written to since the backward pass; empty if there is none."""
        hidden = self._weights.changed()
        versions = zip(self._parameters, self._current_versions(), self._weight_versions, strict=False)
        seen = [name for (name, _), now, then in versions if now != then]
        return next(iter(seen + hidden), "")

    def on_clear(self) -> None:
        """Record that the script clears the gradients."""
        if self._seen:
            self.reason = self.reason or "gradients were cleared before step()"
        self._forget()

    def _forget(self) -> None:
        self._seen.clear()
        self._values.forget()
        self._weights.forget()
        self._weight_versions = []

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


#: Choices of all optimizers of this process, except for those that were closed.
_choices: weakref.WeakSet[OverlapChoice] = weakref.WeakSet()
_lock = threading.Lock()


class OverlapChoice:
    """Present choice: ``is_active`` is True if backward passes push.

    overlap: the script's choice.
    can_overlap: False pushes in ``step`` regardless of it.
    name: parameter set, for the log.
    workers: number of workers whose gradients a step averages.
    script: the same object for all optimizers of one worker.
    start: makes backward passes push.
    probe: watches the first steps for "auto".
    """

    def __init__(
        self,
        overlap: Overlap,
        can_overlap: bool,
        name: str,
        workers: int,
        script: object,
        start: Callable[[], None],
        probe: Callable[[], OverlapProbe],
    ) -> None:
        self.is_active = overlap is True and can_overlap
        self._name, self._workers, self._script, self._start = name, workers, script, start
        self._steps = 0
        self._probe = probe() if overlap == "auto" and can_overlap else None
        if self.is_active:
            start()
        with _lock:
            _choices.add(self)

    def on_step(self, *, is_scaled: bool) -> None:
        """Look at the gradients before they are pushed in ``step``. is_scaled: a GradScaler decides about the step."""
        if self._probe is not None:
            self._probe.on_step(is_scaled=is_scaled)

    def on_step_end(self) -> None:
        """Choose once enough steps were seen: whole iterations, or two steps and a reason."""
        self._steps += 1
        if self._probe is None or self._steps < _WATCHED_STEPS:
            return
        if not (reason := self._probe.reason) and not _have_made_first_steps(self._script):
            return
        self._warn_of_changes()
        self.close()
        if reason:
            logger.info("%r pushes gradients in step(), not during the backward pass (%s)", self._name, reason)
        else:
            self.is_active = True
            self._start()

    def on_average(self) -> None:
        """Stop watching: gradients are averaged from now on, and the script changes the mean."""
        if self._probe is not None:
            self._probe.on_step(is_scaled=True)  # It may be.
            self._warn_of_changes()
        self.close()

    def _warn_of_changes(self) -> None:
        """Warn of a gradient that the script changed before the mean, if there are several workers."""
        if self._probe is not None and self._probe.changed and self._workers > 1:
            logger.warning(
                "the script changes gradients of %r after backward(), such as that of %r, on each worker before the "
                "mean, and not by a constant factor: the step differs from that of one process, unless all workers add "
                "the same numbers. To change the mean call average_gradients() of the DistributedOptimizer first; "
                "overlap=False turns this message off",
                self._name, self._probe.changed,
            )  # fmt: skip

    def on_clear(self) -> None:
        """Record that the script clears the gradients."""
        if self._probe is not None:
            self._probe.on_clear()

    def close(self) -> None:
        """Stop watching: the choice stays as it is."""
        if self._probe is not None:
            self._probe.close()
            self._probe = None

    def release(self) -> None:
        """Let other optimizers choose without this one, which is closed."""
        self.close()
        with _lock:
            _choices.discard(self)


def _have_made_first_steps(script: object) -> bool:
    """Return True if all optimizers of a script have made the steps that are watched."""
    with _lock:
        return all(one._steps >= _WATCHED_STEPS for one in _choices if one._script is script)
