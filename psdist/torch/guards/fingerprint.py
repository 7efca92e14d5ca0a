"""Detection of writes that autograd's version counter does not see: through ``tensor.data``, numpy or raw memory.

A fingerprint is a copy of parts of some tensors, for a later comparison. To compare whole models in every step would
take as long as the step itself. A script that writes in this way usually does so from its first step on, so the first
fingerprints cover everything. Later ones cover a part of each tensor, a different one each time. They find a write to a
whole tensor in the same step. A write to few elements is found only if its part has its turn in that step: the answer
of the step overwrites the others, and nobody sees them. A script that makes such writes asks for all elements
(``detect_writes="all"``); digests then take the place of copies.

Not here: the errors for the writes that were found (``inspection``, ``gradients``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Literal

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from psdist.errors import InvalidArgumentError

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
