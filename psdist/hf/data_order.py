"""The order of a shuffling loader, as a function of the data epoch.

Samplers of torch draw an order from a random generator, so it depends on all passes before. A run that resumes, or a
worker that restarts, starts with a new generator. ``ReplayedSampler`` makes the passes up to the current data epoch
again, from the generator's first state, so undisturbed runs keep the order of torch.

Invariant: All workers have the same first state; the run's snapshots hold it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler

from psdist.torch.leased_loader import follows_generator


class ReplayedSampler(Sampler[Any]):
    """Yields the indices of ``sampler``, whose ``generator`` follows the number of passes.

    shares_generator: True if the loader draws a number from the same generator before each pass, as torch's does for
        its worker processes.
    """

    def __init__(self, sampler: Any, *, shares_generator: bool) -> None:
        if sampler.generator is None:  # As Accelerate makes it.
            seed = int(torch.empty((), dtype=torch.int64).random_().item())
            sampler.generator = torch.Generator().manual_seed(seed)
        self._sampler = sampler
        self._shares_generator = shares_generator
        #: State of the generator before the first pass. Written in place when it is shared.
        self.first_state: torch.Tensor = sampler.generator.get_state()
        #: Number of a pass that was made, and the state before it.
        self._known: tuple[int, torch.Tensor] = 0, self.first_state
        #: Data epoch of the next pass.
        self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        generator = self._sampler.generator
        number, state = self._known if self._known[0] <= epoch else (0, self.first_state)
        generator.set_state(state)
        while number < epoch:
            self._draw()
            deque(self._sampler, maxlen=0)
            number += 1
        self._known = epoch, generator.get_state()
        self._draw()
        yield from self._sampler
        if self._known[0] == epoch:
            self._known = epoch + 1, generator.get_state()

    def _draw(self) -> None:
        if self._shares_generator:
            torch.empty((), dtype=torch.int64).random_(generator=self._sampler.generator)

    def __len__(self) -> int:
        return len(self._sampler)


def replay(loader: Any) -> ReplayedSampler | None:
    """Replace the sampler of a loader of torch, if it draws the order from a generator. Returns the new sampler."""
    if not isinstance(loader, DataLoader):
        return None
    batches: Any = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    sampler: Any = getattr(batches, "sampler", None)
    if not follows_generator(sampler):
        return None
    shares = sampler.generator is not None and sampler.generator is loader.generator
    batches.sampler = order = ReplayedSampler(sampler, shares_generator=shares)
    return order


def follow_epochs(loader: Any, order: ReplayedSampler) -> None:
    """Let ``set_epoch`` of a loader that Accelerate has prepared set the data epoch.

    The loader calls it for each pass, with its own count, which lacks passes that the script ended early.
    """
    set_iteration = loader.set_epoch

    def set_epoch(epoch: int) -> None:
        if epoch != loader.iteration:
            order.epoch = epoch
        set_iteration(epoch)

    loader.set_epoch = set_epoch
