"""Writes of a script to the weights of its model: those that count, and those for an evaluation only.

Weights that the script writes between two steps become the servers' values with its next push, as in one process. In
BSP, values equal to those of the servers are left out, so one worker alone may exchange weights and put them back.

Not here: detection of writes (``inspection``), how they travel (``Parameters.assign``).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from psdist.client.sync_client import Parameters
from psdist.consistency import BSP
from psdist.errors import InvalidArgumentError
from psdist.torch.inspection import COMPILED, ModelWatch
from psdist.torch.values import as_real, from_array, initial_values

logger = logging.getLogger("psdist")


class WeightWrites:
    """Writes to ``trained``, the parameters of ``model`` that the servers of ``handle`` hold.

    watch: names the parameters that the script wrote to.
    """

    def __init__(
        self, handle: Parameters, model: nn.Module, trained: Mapping[str, nn.Parameter], watch: ModelWatch
    ) -> None:
        self._handle = handle
        self._model = model
        self._trained = trained
        self.watch = watch
        self._first_step = handle.step
        self._is_swapped = False
        #: Memory that the servers' answers are written to, by parameter, and the parameters that left it.
        self._memory = {name: parameter.data for name, parameter in trained.items()}
        self._moved: set[str] = set()

    def take_back(self) -> None:
        """Copy values that the script put elsewhere, as ``vector_to_parameters`` does, to the parameters' own."""
        for name, memory in self._memory.items():
            now = self._trained[name].data
            is_alike = (now.shape, now.dtype, now.device) == (memory.shape, memory.dtype, memory.device)
            if is_alike and now.data_ptr() != memory.data_ptr():
                self._trained[name].data = memory.copy_(now)
                self._moved.add(name)

    def has_any(self) -> bool:
        """Return True if the script wrote to the weights since the latest step."""
        self.take_back()
        return bool(self._moved or self.watch.written())

    def send(self) -> None:
        """Let the next push assign the weights that the script wrote since the latest step.

        Raises InvalidArgumentError within ``swapped``, for weights that were written before the first step of a resumed
        run, and as ``Parameters.assign``.
        """
        if self._is_swapped:
            raise InvalidArgumentError(
                "a step within swapped() would train the exchanged weights: leave the block before the backward pass"
            )
        written = self._moved.union(self.watch.written())
        if not (names := [name for name in self._trained if name in written]):
            return
        if isinstance(self._handle.spec.consistency, BSP):
            before = self._handle.step
            names = self._different(names)
            if self._handle.step != before:  # This worker rejoined: the others wrote to the weights of other steps.
                logger.warning(
                    "weights that the script wrote before step %d of %r were dropped: this worker continues at step %d",
                    before, self._handle.name, self._handle.step,
                )  # fmt: skip
                names = []
        if names:
            self._assign(names)
        self._moved.clear()
        self.watch.accept()

    def _assign(self, names: Sequence[str]) -> None:
        if self._handle.restored is not None and self._handle.step == self._first_step > 0:
            raise InvalidArgumentError(
                f"the run resumed from {self._handle.restored} at step {self._handle.step}, and the script wrote to "
                f"parameter {names[0]!r} before its first step, which would replace trained weights: load initial "
                "weights before the model is wrapped; the run's own replace them if it resumes"
            )
        self._handle.assign(initial_values({name: self._trained[name] for name in names}))

    def _different(self, names: Sequence[str]) -> list[str]:
        """Return those of ``names`` whose values differ from the servers'."""
        held = self._handle.pull(copy=False)
        return [name for name in names if not torch.equal(self._shown(name), from_array(held[name]))]

    def _shown(self, name: str) -> Tensor:
        return as_real(self._trained[name].detach()).cpu()

    @contextmanager
    def swapped(self, source: nn.Module | Mapping[str, Tensor]) -> Iterator[None]:
        """Exchange the model's tensors by those of ``source`` for a block. See ``DistributedOptimizer.swapped``."""
        mine = _tensors_of(self._model)
        other = _tensors_of(source)
        if missing := next((name for name in self._trained if name not in other), None):
            raise InvalidArgumentError(
                f"swapped() got no tensor for parameter {missing!r}: give a model with the same parameters, such as "
                "torch.optim.swa_utils.AveragedModel(model), or a dict with their names"
            )
        common = [name for name in mine if name in other]
        if name := next((name for name in common if mine[name].shape != other[name].shape), None):
            raise InvalidArgumentError(
                f"swapped() got {name!r} of shape {tuple(other[name].shape)}, but the model's has "
                f"{tuple(mine[name].shape)}: give a model with the same parameters"
            )
        self.send()
        kept = {name: mine[name].detach().clone() for name in common}
        _copy(other, mine, common)
        self._is_swapped = True
        try:
            yield
        finally:
            self._is_swapped = False
            _copy(kept, mine, common)
            self.watch.accept()


def _tensors_of(source: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return parameters and buffers by name."""
    if isinstance(source, Mapping):
        return dict(source)
    module = source.module if isinstance(source, AveragedModel) else source
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name.replace(COMPILED, ""): tensor for name, tensor in named}


def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor], names: Sequence[str]) -> None:
    with torch.no_grad():
        for name in names:
            target[name].copy_(source[name])
