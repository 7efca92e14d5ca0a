"""One idiom's script: the lines that psdist changes, and the batches of this worker.

An idiom is written once and runs with torch alone, with ``DistributedOptimizer``, with psdist's DDP face, and with
torch's DDP. Only ``wrap``, ``no_sync`` and ``batches`` differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, distributed, nn

from psdist.client.context import Context
from psdist.torch import DistributedDataParallel, DistributedOptimizer

#: Plain torch, psdist's two faces, torch's DDP over gloo, and plain torch whose optimizer averages gradients over gloo.
TORCH, OPTIMIZER, DDP, GLOO, OWN = "torch", "optimizer", "ddp", "gloo", "own"
#: Samples of a batch, of all workers together.
SAMPLES: Final = 8
#: Size of an input and of a target.
INPUTS, TARGETS = 6, 3


@dataclass
class Script:
    """State of one idiom's script in one worker.

    face: TORCH, OPTIMIZER, DDP, GLOO or OWN.
    context: psdist's context; None for torch alone.
    name: prefix of parameter sets.
    """

    face: str
    context: Context | None
    name: str
    rank: int = 0
    world: int = 1
    _exits: ExitStack = field(default_factory=ExitStack)
    _wrapped: int = 0

    def wrap(self, model: Any, optimizer: Any, scheduler: Any = None, **settings: Any) -> tuple[Any, Any]:
        """Return the model and the optimizer of the loop. settings: arguments of DistributedOptimizer alone."""
        self._wrapped += 1
        name = f"{self.name}-{self.face}-{self._wrapped}"
        if self.face == OPTIMIZER:
            optimizer = DistributedOptimizer(model, optimizer, scheduler, name=name, context=self.context, **settings)
            self._exits.callback(optimizer.close)
        if self.face == OWN:
            optimizer.register_step_pre_hook(_average)
        return self.wrap_model(model, name), optimizer

    def wrap_model(self, model: Any, name: str = "", **settings: Any) -> Any:
        """Return the model as a DDP script wraps it."""
        if self.face == DDP:
            model = DistributedDataParallel(model, name=name or self.name, context=self.context, **settings)
            self._exits.callback(model._stream.close)
        if self.face == GLOO:
            model = nn.parallel.DistributedDataParallel(model, **settings)
        return model

    def no_sync(self, model: Any, optimizer: Any) -> AbstractContextManager[None]:
        """Return the context of a backward pass that only accumulates."""
        if self.face in (TORCH, OWN):
            return nullcontext()
        return optimizer.no_sync() if self.face == OPTIMIZER else model.no_sync()

    def batches(self, count: int, samples: int = SAMPLES) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this worker's parts of batches: inputs float32[n, INPUTS] and targets float32[n, TARGETS]."""
        random = torch.Generator().manual_seed(7)
        for _ in range(count):
            inputs = torch.randn(samples, INPUTS, generator=random)
            targets = inputs[:, :TARGETS].sin() + 0.1 * torch.randn(samples, TARGETS, generator=random)
            yield self.part(inputs), self.part(targets)

    def part(self, tensor: Tensor) -> Tensor:
        """Return this worker's rows."""
        return tensor[self.rank :: self.world]

    def steps(self, optimizer: Any, count: int, samples: int = SAMPLES) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches, each between ``zero_grad()`` and ``step()`` of the optimizer."""
        for batch in self.batches(count, samples):
            optimizer.zero_grad()
            yield batch
            optimizer.step()

    @contextmanager
    def running(self) -> Iterator[Script]:
        """Return a context that closes the wrappers, and restores torch's global settings."""
        dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
        torch.manual_seed(3)
        try:
            with self._exits:
                yield self
        finally:
            torch.set_default_dtype(dtype)
            torch.set_num_threads(threads)
            torch.set_grad_enabled(True)


def _average(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            distributed.all_reduce(parameter.grad)
            parameter.grad /= distributed.get_world_size()


def net() -> nn.Sequential:
    """Return a model for the batches."""
    return nn.Sequential(nn.Linear(INPUTS, 8), nn.Tanh(), nn.Linear(8, TARGETS))


def loss_of(model: Callable[[Tensor], Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean squared error."""
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def sgd(trained: Any, lr: float = 0.1, **settings: Any) -> torch.optim.SGD:
    """Return an optimizer of a model or of parameters whose steps show each difference."""
    parameters = trained.parameters() if isinstance(trained, nn.Module) else trained
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, **settings)


def train(script: Script, model: Any, optimizer: Any, steps: int = 5, scheduler: Any = None) -> Any:
    """Run the plain loop, with a scheduler that follows each step."""
    dtype = next(iter(model.parameters())).dtype
    for inputs, targets in script.batches(steps):
        optimizer.zero_grad()
        loss_of(model, (inputs.to(dtype), targets.to(dtype))).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return model
