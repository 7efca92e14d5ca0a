"""Writes of a script to the weights of its model: their detection, and those that count.

Weights that the script writes between two steps become the servers' values with its next push, as in one process. In
BSP, values equal to those of the servers are left out, so one worker alone may exchange weights and put them back.

Autograd's version counter sees writes in place, but not those through ``tensor.data``, numpy or raw memory. These are
found by a fingerprint: a copy of parts of some tensors, for a later comparison. To compare whole models in every step
would take as long as the step itself. A script that writes in this way usually does so from its first step on, so the
first fingerprints cover everything. Later ones cover a part of each tensor, a different one each time. They find a
write to a whole tensor in the same step. A write to few elements is found only if its part has its turn in that step:
the answer of the step overwrites the others, and nobody sees them. A script that makes such writes asks for all
elements (``detect_writes="all"``); digests then take the place of copies.

How writes travel is in ``Parameters.assign``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from psdist.client.sync_client import Parameters
from psdist.consistency import BSP
from psdist.errors import InvalidArgumentError
from psdist.torch.inspection import COMPILED, ModelParameters
from psdist.torch.values import as_real, from_array, initial_values

logger = logging.getLogger("psdist")

Detection = Literal["sampled", "all"]

#: Number of first fingerprints, which cover up to ``FIRST_ELEMENTS``.
FIRST: Final = 4
#: Elements of the first fingerprints, 128 MiB of float32.
FIRST_ELEMENTS: Final = 1 << 25
#: Elements of later fingerprints. A copy and a comparison take some tenths of a millisecond.
LATER_ELEMENTS: Final = 1 << 18
#: Minimum number of elements of each tensor in a fingerprint.
_AT_LEAST: Final = 16
#: Integers with the sizes of floating-point elements. Their comparison treats equal NaNs as equal.
_BITS: Final = {2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Rounding errors of a multiplied tensor, in units of the last place of its largest element.
_ROUNDING: Final = 4


def check_detection(value: object) -> None:
    """Raise InvalidArgumentError if this is no value of ``detect_writes``."""
    if value not in ("sampled", "all"):
        raise InvalidArgumentError(f"detect_writes={value!r:.40} is not allowed: use 'sampled' or 'all'")


class Fingerprint:
    """Copy of parts of some tensors, replaced in each step.

    detects: "all" covers each element every time.
    is_enabled: False copies nothing, so that nothing counts as changed.
    """

    def __init__(self, detects: Detection = "sampled", *, is_enabled: bool = True) -> None:
        self._is_enabled = is_enabled
        self._covers_all = detects == "all"
        self._taken = 0
        self._is_complete = False
        #: Number of the covered part, and the number of parts.
        self._place = 0, 1
        #: Name, current content and copied content of each covered part: arrays on the CPU, tensors on other devices.
        #: To cover all, the digest takes the place of an array's copy, which would take the memory of another model.
        self._parts: list[tuple[str, Any, Any]] = []

    def take(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy parts of these tensors, by name. Replaces the previous copy."""
        if not self._is_enabled:
            return
        found = [(name, one) for name, one in tensors if one.numel() and one.layout is torch.strided]
        limit = FIRST_ELEMENTS if self._taken < FIRST or self._is_complete else LATER_ELEMENTS
        parts = 1 if self._covers_all else max(1, -(-sum(one.numel() for _, one in found) // limit))
        self._place = number, parts = self._taken % parts, parts
        self._taken += 1
        self._parts = [(name, part := _part(one, number, parts), self._copied(part)) for name, one in found]

    def factors(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, float] | None:
        """Return the number that each of ``tensors`` is its copy multiplied by, up to rounding.

        tensors: those of ``take`` by name, or others in their places.

        None if the covered part of one of them is anything else, such as clamped, and if a copy has infinite elements.
        """
        copies = {name: then for name, _, then in self._parts}
        found = [(name, one, copies.get(name)) for name, one in tensors]
        if not all(one.layout is torch.strided and then is not None for _, one, then in found):
            return None
        numbers = {name: _factor(one, _part(one, *self._place), then) for name, one, then in found}
        return None if None in numbers.values() else {name: one for name, one in numbers.items() if one is not None}

    def _copied(self, part: Any) -> Any:
        if not isinstance(part, np.ndarray):
            return part.clone()
        return _digest(part) if self._covers_all and part.flags.c_contiguous else part.copy()

    def forget(self) -> None:
        """Discard the copy, so that nothing counts as changed."""
        self._parts = []

    def changed(self) -> list[str]:
        """Return the names of the tensors whose covered part differs from its copy. Once there are any, later
        fingerprints cover as much as the first ones."""
        on_device = [(name, (now != then).any()) for name, now, then in self._parts if isinstance(now, Tensor)]
        flags = torch.stack([flag for _, flag in on_device]).tolist() if on_device else []
        names = [name for (name, _), is_changed in zip(on_device, flags, strict=True) if is_changed]
        names += [name for name, now, then in self._parts if isinstance(now, np.ndarray) and _differs(now, then)]
        self._is_complete = self._is_complete or bool(names)
        return names


def _numbers(tensor: Tensor) -> Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()


def _part(tensor: Tensor, number: int, parts: int) -> Any:
    """Return part ``number`` of a tensor's elements, in the order of its memory, as integers that share it.

    A tensor with gaps in its memory is one part.
    """
    bits = tensor.detach().view(_BITS[tensor.element_size()]) if tensor.element_size() in _BITS else tensor.detach()
    strides = bits.stride()
    dense = bits if bits.is_contiguous() else bits.permute(sorted(range(bits.ndim), key=lambda at: -strides[at]))
    if dense.is_contiguous():
        flat, size = dense.view(-1), dense.numel()
        stop = min(size, max(size * (number + 1) // parts, _AT_LEAST))
        bits = flat[max(0, min(size * number // parts, stop - _AT_LEAST)) : stop]
    return bits.numpy() if bits.device.type == "cpu" else bits


def _differs(now: NDArray[Any], then: NDArray[Any] | bytes) -> bool:
    return _digest(now) != then if isinstance(then, bytes) else bool((now != then).any())


def _digest(part: NDArray[Any]) -> bytes:
    return xxhash.xxh3_128_digest(part.data)


def _factor(tensor: Tensor, part: Any, copied: Any) -> float | None:
    now, then = (_numbers(torch.as_tensor(bits).view(tensor.dtype)) for bits in (part, copied))
    if now.numel() != then.numel() or not bool(then.isfinite().all()):
        return None
    now, then = now.reshape(-1), then.reshape(-1)
    square = then.dot(then)
    factor = float(then.dot(now) / square) if square else 1.0
    error = float((now - factor * then).abs().max())
    allowed = _ROUNDING * torch.finfo(tensor.dtype).eps * float(now.abs().max())
    return factor if error <= allowed else None


class ModelWatch:
    """Detects changes of a wrapped model that would leave its weights stale or untrained without any error.

    wanted: as for ``inspect``.
    detects: writes that autograd does not see, as for ``Fingerprint``.
    """

    def __init__(
        self,
        model: nn.Module,
        trained: Mapping[str, nn.Parameter],
        wanted: Iterable[nn.Parameter] | None = None,
        detects: Detection = "sampled",
    ) -> None:
        self._trained = dict(trained)
        self._parameters = ModelParameters(model, wanted, trained.keys())
        self._known: dict[str, tuple[Any, ...]] = {}
        self._versions: dict[str, int] = {}
        self._values = Fingerprint(detects)
        self.accept()

    def accept(self) -> None:
        """Record the current weights as correct, because psdist wrote them."""
        self._known = {name: _state(parameter) for name, parameter in self._trained.items()}
        self._versions = {name: parameter._version for name, parameter in self._trained.items()}
        self._values.take(self._trained.items())

    def written(self) -> list[str]:
        """Return the names of the parameters that the script wrote to since ``accept``, in the model's order.

        Writes in place are seen by autograd's version counter. Others, such as those through ``parameter.data``, are
        found by comparing values: all of them in the first steps, and later in parts, unless the watch detects all. A
        parameter that was moved in memory or cast is not one of them: ``check`` refuses it.
        """
        found = {name for name, one in self._trained.items() if one._version != self._versions[name]}
        found.update(self._values.changed())
        return [name for name in self._trained if name in found]

    def check(self) -> None:
        """Raise InvalidArgumentError for parameters that changed since ``accept``.

        Detected are parameters that were added, removed, replaced, moved or cast, and unfrozen ones that servers do not
        hold; ``written`` finds writes.
        """
        self._parameters.check()
        for name, parameter in self._trained.items():
            if (state := _state(parameter)) != (known := self._known[name]):
                raise InvalidArgumentError(
                    f"parameter {name!r} was {_difference(known, state)} after the model was wrapped, but the servers "
                    "hold its values: change the model first, then wrap it"
                )

    def check_unwritten(self) -> None:
        """Raise InvalidArgumentError for parameters that the script wrote to since ``accept``, if the gradients of
        their step are under way."""
        if names := self.written():
            more = f" ({len(names)} parameters were)" if len(names) > 1 else ""
            raise InvalidArgumentError(
                f"parameter {names[0]!r} was written to after the backward pass{more}, whose gradients are under way, "
                "and the step would overwrite it: write before the backward pass or after step(), or use overlap=False"
            )


def _state(parameter: nn.Parameter) -> tuple[Any, ...]:
    return parameter.device, parameter.dtype, parameter.data_ptr()


def _difference(known: tuple[Any, ...], state: tuple[Any, ...]) -> str:
    verbs = ("moved to another device", "cast to another dtype", "moved in memory")
    return next(verb for verb, mine, theirs in zip(verbs, known, state, strict=True) if mine != theirs)


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
