"""``ElasticDDP``: data-parallel training that continues when workers die, and takes in new ones.

Gradients are averaged over the workers' own links at the end of each backward pass. No server takes part: each worker
holds the weights, and a new one receives them from another.

Invariant: After a backward pass outside ``no_sync``, all workers of the group hold the same gradient bytes, of the same
workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import ml_dtypes
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from psdist.client.context import Context, init
from psdist.client.process import loop
from psdist.collectives import SILENCE_SECONDS
from psdist.collectives.elastic import ElasticSteps, StepArrays
from psdist.collectives.group import AsyncWorkerGroup
from psdist.errors import DTypeMismatchError, InvalidArgumentError
from psdist.torch.elastic.state import Stateful, TrainingState


class ElasticDDP(nn.Module):
    """Wraps ``module`` so that each backward pass ends with the mean of all workers' gradients.

    module: with dense parameters. All workers start with the values of the lowest rank.
    optimizer: steps the module's parameters; its state is sent to workers that join. None if it has no state.
    others: other objects whose state is sent, such as {"scheduler": scheduler}.
    broadcast_buffers: all workers get the buffers of the lowest rank at the end of each backward pass.
    name: name of the group. Each model of a script has its own.
    size: workers that start the training together; None is the number that the run was started with.
    size_min: with fewer workers than this, training waits for new ones.
    silence: seconds after which a worker that the others wait for is left out if its process is stopped, or its host
        cannot be reached. None leaves that to its lease.
    context: None uses the context of ``psdist.init()``.

    The constructor waits for the others. A worker that joins a training under way receives module, optimizer and
    ``others``, and ``step`` tells how many steps are complete. A worker that was stopped, or whose network was cut,
    joins again by itself. Its next backward pass contributes nothing.

    Raises InvalidArgumentError for modules without parameters to train, LateWorkerError if the training is complete,
    LimitExceededError if the others' state is far larger than this worker's, and the errors of ``Context.join_group``.
    Backward passes raise CollectiveMismatchError if modules differ, and ClosedError.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        others: Mapping[str, Stateful] | None = None,
        broadcast_buffers: bool = True,
        name: str = "elastic",
        size: int | None = None,
        size_min: int = 1,
        silence: float | None = SILENCE_SECONDS,
        context: Context | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self._trained = {name: one for name, one in module.named_parameters() if one.requires_grad}
        if not self._trained:
            raise InvalidArgumentError("the module has no parameters to train: each has requires_grad=False")
        self._broadcasts = broadcast_buffers
        self.require_backward_grad_sync = True
        self._is_waiting_for_end = False
        if optimizer is not None and "optimizer" in (others or {}):
            raise InvalidArgumentError("others has a state 'optimizer', as optimizer= is: use another name")
        stateful = {**({} if optimizer is None else {"optimizer": optimizer}), **(others or {})}
        place = init() if context is None else context

        async def join() -> AsyncWorkerGroup:
            collectives = place.async_collectives()
            return await collectives.join_group(
                name, size=place.world_size if size is None else size, size_min=size_min, silence=silence
            )

        self._steps = ElasticSteps(join, TrainingState(module, stateful))
        loop.shared().call(self._steps.start())
        for one in self._trained.values():
            one.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]  # torch's

    @property
    def step(self) -> int:
        """Number of completed steps, those before this worker joined included."""
        return self._steps.step

    @property
    def rank(self) -> int:
        """This worker's number in the group, which changes with the group. Raises ClosedError after ``close``."""
        return self._steps.group.rank

    @property
    def size(self) -> int:
        """Number of workers in the group. Raises ClosedError after ``close``."""
        return self._steps.group.size

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Run the module and return its result. Takes in new workers first, if some wait."""
        if self.training and torch.is_grad_enabled() and self.require_backward_grad_sync:
            self._is_waiting_for_end = False  # A backward pass that failed had no end.
            loop.shared().call(self._steps.begin_step())
        return self.module(*arguments, **keywords)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context whose backward passes only accumulate gradients.

        The next pass after it averages the sums.
        """
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def close(self) -> None:
        """Wait until all workers have completed their last step, and end the group.

        Raises CollectiveMismatchError if others make more steps.
        """
        loop.shared().call(self._steps.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()

    # --- the end of a backward pass ---

    def _on_gradient(self, _: Tensor) -> None:
        if self.require_backward_grad_sync and not self._is_waiting_for_end:
            self._is_waiting_for_end = True
            # Called at the end of the running backward pass. torch's own classes use the same queue.
            torch.autograd.Variable._execution_engine.queue_callback(self._reduce)

    def _reduce(self) -> None:
        self._is_waiting_for_end = False
        vectors = _Vectors(self._trained, dict(self.module.named_buffers()) if self._broadcasts else {})
        loop.shared().call(self._steps.reduce(vectors.arrays))
        vectors.finish()


class _Vectors:
    """Gradients and buffers of one step: one vector of each dtype, and which parameters have gradients."""

    def __init__(self, trained: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor]) -> None:
        self._trained = trained
        self._buffers = [one for one in buffers.values() if one.numel()]
        self._used = torch.zeros(len(trained))
        self._given: list[Tensor] = [self._used]
        self._places: list[list[nn.Parameter]] = []
        for dtype in dict.fromkeys(one.dtype for one in trained.values()):
            alike = [one for one in trained.values() if one.dtype == dtype]
            self._places.append(alike)
            self._given.append(torch.cat([self._gradient(one) for one in alike]))
        for number, one in enumerate(trained.values()):
            self._used[number] = one.grad is not None
        means = len(self._given)
        self._given += [one.detach().cpu().contiguous().reshape(-1).clone() for one in self._buffers]
        self._out = [torch.empty_like(one) for one in self._given]
        given, out = (list(map(_as_array, vectors)) for vectors in (self._given, self._out))
        self.arrays = StepArrays(given, out, means)

    @staticmethod
    def _gradient(parameter: nn.Parameter) -> Tensor:
        gradient = parameter.grad
        if gradient is None:
            return torch.zeros(parameter.numel(), dtype=parameter.dtype)
        if gradient.layout is not torch.strided:
            raise DTypeMismatchError(f"a gradient has the layout {gradient.layout}: use sparse=False")
        return gradient.detach().cpu().reshape(-1)

    @torch.no_grad()
    def finish(self) -> None:
        """Put the results into the gradients and the buffers."""
        used, *means = self._out[: self.arrays.means]
        is_used = {id(one): bool(flag) for one, flag in zip(self._trained.values(), used, strict=True)}
        for vector, parameters in zip(means, self._places, strict=True):
            parts = torch.split(vector, [one.numel() for one in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                if not is_used[id(parameter)]:
                    parameter.grad = None  # This worker may have one of a state that was replaced.
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(part.view_as(parameter))
        for buffer, result in zip(self._buffers, self._out[self.arrays.means :], strict=True):
            buffer.copy_(result.view_as(buffer))


def _as_array(vector: Tensor) -> NDArray[Any]:
    """Return the memory of a contiguous tensor."""
    if vector.dtype == torch.bfloat16:
        return vector.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return vector.numpy()
