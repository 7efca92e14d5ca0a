"""Uneven inputs: workers that ran out of batches make the remaining steps of the others without a batch.

Each step in such a context starts with a small one, in a parameter set of its own, in which every worker reports
whether it has a batch. All workers get the same answer, so all stop after the same step.

Invariants: All workers make the same number of small steps and of the model's steps. As always in BSP, no one waits for
a worker that died.

The steps themselves are in ``optimizer`` and ``data_parallel``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import torch

from psdist.client.context import Context
from psdist.client.means import ServerMean
from psdist.errors import InvalidArgumentError, UnevenInputsError
from psdist.torch.gradients import GradientStream

_TENSOR: Final = "has_batch"
#: Tensor that reports a scaled loss: the step then starts with another small one, see ``LossScale``.
_SCALED: Final = "is_scaled"
#: Tensor that reports writes to the weights after the model's last step.
_WRITTEN: Final = "has_written"
#: Tolerance of float32 sums over workers.
_ROUNDING: Final = 1e-4


class UnevenBatches:
    """Base of the classes that push a model's gradients: batches of different sizes have weights."""

    _stream: GradientStream
    _join: UnevenInputs | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch gives it no types
    def set_weight(self, weight: float) -> None:
        """Set the weight of this worker's gradient in the mean of the next step.

        weight: for example the number of samples or tokens that the loss is the mean of. Workers with uneven batches
            then make the step of a single process with all batches. 0 contributes nothing.

        Call it before the backward pass that pushes. The weight is 1 again after the step. Raises InvalidArgumentError
        after that pass, for a weight that is out of range, and outside BSP.
        """
        if self._join is not None:
            self._join.check_weight()
        self._stream.set_weight(weight)


class UnevenInputs:
    """One ``with`` block of uneven inputs.

    name: parameter set of the small steps.
    counts_joined: a worker without a batch counts in the mean of a step, with zeros.
    raises_early: raise UnevenInputsError in all workers when the first one runs out of batches.
    """

    def __init__(self, context: Context, name: str, *, counts_joined: bool, raises_early: bool) -> None:
        self.counts_joined = counts_joined
        self._raises_early = raises_early
        self._rank = context.rank
        self._flags = np.zeros(context.world_size, np.float32)
        self._scaled, self._written = np.zeros(1, np.float32), np.zeros(1, np.float32)
        self._values = {_TENSOR: self._flags, _SCALED: self._scaled, _WRITTEN: self._written}
        self._mean = ServerMean(context.client, name)
        self._mean.open(self._values)
        self._is_begun = False
        #: True if workers scale the loss of this step.
        self.is_scaled = False
        #: True if a worker wrote to the weights after the last step of the model.
        self.has_written = False
        #: Ranks that had a batch in the last step of the model.
        self.active: frozenset[int] = frozenset()

    @property
    def is_begun(self) -> bool:
        """True if this worker has started a step that it has a batch for."""
        return self._is_begun

    def begin_step(self, *, is_scaled: bool = False) -> frozenset[int]:
        """Report that this worker has a batch. Returns the ranks that have one; the lowest of them provides its
        buffers.

        Later calls in the same step return the same ranks. Raises UnevenInputsError.
        """
        if not self._is_begun:
            self._is_begun = True
            self._scaled[0] = is_scaled
            self.active, all_have = self._tell(has_batch=True)
            if self._raises_early and not all_have:
                self._raise()
        return self.active

    def end_step(self) -> None:
        """Record that the step of the model is made."""
        self._is_begun = False

    @property
    def last_source(self) -> int | None:
        """Lowest rank that made the last step with a batch. None if all workers did, or none."""
        return min(self.active) if 0 < len(self.active) < len(self._flags) else None

    def finish(
        self, make_step: Callable[[frozenset[int]], None], has_written: Callable[[], bool] = lambda: False
    ) -> None:
        """Make the steps of the others after this worker's last batch, until no worker has one.

        make_step: makes one step; called with the ranks that have a batch.
        has_written: returns True if this worker wrote to the weights after its last step.

        Raises UnevenInputsError.
        """
        self._scaled[0], self._written[0] = False, has_written()
        while active := self._tell(has_batch=False)[0]:
            self.active = active
            if self._raises_early:
                self._raise()
            make_step(active)
            self._written[0] = False  # The others have made these writes, too.

    def _tell(self, *, has_batch: bool) -> tuple[frozenset[int], bool]:
        """Return the ranks that have a batch, and whether they are all workers."""
        self._flags[self._rank % len(self._flags)] = has_batch
        answer = self._mean.exchange(self._values)
        self.has_written = bool(answer[_WRITTEN][0] > 0)
        means, self.is_scaled = answer[_TENSOR], bool(answer[_SCALED][0] > 0)
        # Each worker adds 1 divided by their number.
        return frozenset(np.flatnonzero(means).tolist()), float(means.sum()) > 1.0 - _ROUNDING

    def check_weight(self) -> None:
        """Raise InvalidArgumentError if weights are impossible, because workers without a batch count as 1."""
        if self.counts_joined:
            raise InvalidArgumentError(
                "set_weight() in join() that counts workers without a batch, each as 1: use "
                "join(divide_by_initial_world_size=False), in which they do not count"
            )

    def _raise(self) -> None:
        ranks = f" (of ranks {', '.join(map(str, sorted(self.active)))})" if len(self._flags) > 1 else ""
        raise UnevenInputsError(
            f"a worker has no batch left, while others have some{ranks}, and throw_on_early_termination is set: give "
            "all workers the same number of batches, or leave it out"
        )
