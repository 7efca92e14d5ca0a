"""Adapter of Accelerate, Transformers and Lightning: the servers run the optimizers of their scripts.

A framework makes models, optimizers and schedulers as usual; ``serve`` wraps an optimizer, and the framework's loop
steps the result. Between two steps frameworks evaluate and write checkpoints by collectives of torch, so they mark
iterations, and take the run's snapshots between them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.optim import lr_scheduler

from psdist.client.context import Context
from psdist.compression import Codec
from psdist.errors import InvalidArgumentError, NoStorageError
from psdist.process_group.group import open_collectives
from psdist.torch.optimizer import DistributedOptimizer, parameters_of

logger = logging.getLogger("psdist")


def serve(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any = None,
    *,
    compression: Codec | str | None,
    max_grad_norm: float | None,
    name: str,
    number: int = 0,
    is_scaled: bool,
) -> DistributedOptimizer:
    """Return an optimizer of a script as one that the servers run.

    scheduler: used if it ``is_stepped``.
    name, number: of the parameter set. Sets after the first of a script have their number in the name.
    is_scaled: a GradScaler may skip the step, which is known only after the backward pass.
    compression, max_grad_norm: as for ``DistributedOptimizer``. Raises as that.
    """
    open_collectives()
    return DistributedOptimizer(
        model,
        optimizer,
        scheduler if is_stepped(scheduler) else None,
        compression=compression,
        max_grad_norm=max_grad_norm,
        name=f"{name}-{number}" if number else name,
        overlap=not is_scaled,
    )


def is_stepped(scheduler: Any) -> TypeGuard[lr_scheduler.LRScheduler]:
    """True if the scheduler advances with each step, so that it can be moved to any step."""
    return isinstance(scheduler, lr_scheduler.LRScheduler) and not isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)


def models_of(optimizer: torch.optim.Optimizer, models: Iterable[nn.Module]) -> list[nn.Module]:
    """Return those models that have all parameters of an optimizer."""
    wanted = set(map(id, parameters_of(optimizer) or ()))
    return [model for model in models if wanted <= set(map(id, model.parameters()))]


@contextmanager
def no_sync(optimizers: Iterable[DistributedOptimizer]) -> Iterator[None]:
    """Return a context in which backward passes only accumulate gradients."""
    with ExitStack() as stack:
        for optimizer in optimizers:
            stack.enter_context(optimizer.no_sync())
        yield


def mark_iteration(context: Context) -> None:
    """Record that this worker is between two iterations: before a step, and after all that follows the one before.

    Collectives between two steps are steps of other parameter sets. They come irregularly, so psdist could not infer
    where an iteration starts.
    """
    with context.iteration():
        pass


def save_run(context: Context, other: str = "") -> bool:
    """Take a snapshot of the run at this step, to go with a checkpoint. All workers call it. Returns False if the run
    has no storage.

    other: remedy for a checkpoint without a snapshot, of which rank 0 logs a warning. Raises as ``Client.snapshot``.
    """
    mark_iteration(context)
    with suppress(NoStorageError):
        context.client.snapshot()
        return True
    if other and context.rank == 0:
        logger.warning(
            "the run has no storage, so checkpoints lack the optimizer's state and cannot be resumed from: start the "
            "script with 'psdist run', or %s",
            other,
        )
    return False


def refuse(found: Any, remedy: str) -> None:
    """Raise InvalidArgumentError with ``remedy`` if ``found`` is set."""
    if found:
        raise InvalidArgumentError(remedy)
