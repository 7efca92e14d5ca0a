"""``Batch``: samples padded to one length, with a mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from psdist.errors import DTypeMismatchError, InvalidArgumentError, ShapeMismatchError

#: A sample: an array whose first axis is its length, or several of them by name, of one length, beside single numbers.
Sample = ArrayLike | Mapping[str, ArrayLike]
_KINDS: Final = "biufc"


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples of one step.

    values: the padded samples, [samples, length, ...], by name if the samples have names; single numbers are [samples].
    mask: bool[samples, length]; False for padding.
    lengths: int64[samples], the lengths without padding.
    indices: int64[samples], the samples' indices in the data.
    """

    values: Any
    mask: NDArray[np.bool_]
    lengths: NDArray[np.int64]
    indices: NDArray[np.int64]

    @property
    def tokens(self) -> int:
        """Elements without padding: the weight of a step whose loss is their mean."""
        return int(self.lengths.sum())

    def __len__(self) -> int:
        return len(self.lengths)


def arrays_of(sample: Sample) -> dict[str, NDArray[Any]]:
    """Return the arrays of a sample; one without a name is "". Raises InvalidArgumentError if they are no numbers."""
    named = sample if isinstance(sample, Mapping) else {"": sample}
    arrays = {name: np.asarray(value) for name, value in named.items()}
    for name, array in arrays.items():
        if array.dtype.kind not in _KINDS:
            raise InvalidArgumentError(
                f"a sample{_named(name)} of type {type(named[name]).__name__} is no array of numbers: pass arrays or "
                "lists of numbers, or a dict of them"
            )
    return arrays


def length_of(arrays: Mapping[str, NDArray[Any]]) -> int:
    """Return the length of a sample. Raises ShapeMismatchError if it has none, or more than one."""
    lengths = {name: len(array) for name, array in arrays.items() if array.ndim}
    if len(set(lengths.values())) != 1:
        found = f"arrays of lengths {lengths}" if lengths else "no array with an axis"
        raise ShapeMismatchError(f"a sample has {found}: its arrays need one common length, the first axis")
    return next(iter(lengths.values()))


def pad(
    samples: Sequence[Mapping[str, NDArray[Any]]],
    indices: Sequence[int],
    width: int,
    value: float | Mapping[str, float],
) -> Batch:
    """Return a batch.

    samples: their arrays, as ``arrays_of`` returns them.
    width: length to pad to.
    value: value of the padding, or values by name.

    Raises InvalidArgumentError, ShapeMismatchError and DTypeMismatchError if the samples differ in more than length.
    """
    lengths = np.array([length_of(sample) for sample in samples], np.int64)
    names = samples[0].keys()
    if any(sample.keys() != names for sample in samples):
        raise InvalidArgumentError(f"samples of one batch have different names than {sorted(names)}: use the same")
    values = value if isinstance(value, Mapping) else dict.fromkeys(names, value)
    padded = {name: _pad(name, [sample[name] for sample in samples], width, values.get(name, 0)) for name in names}
    mask = np.arange(width) < lengths[:, None]
    return Batch(padded[""] if list(names) == [""] else padded, mask, lengths, np.asarray(indices, np.int64))


def _pad(name: str, arrays: Sequence[NDArray[Any]], width: int, value: float) -> NDArray[Any]:
    first = arrays[0]
    for array in arrays:
        if array.dtype != first.dtype:
            raise DTypeMismatchError(
                f"samples{_named(name)} of one batch are {first.dtype} and {array.dtype}: convert them to one dtype"
            )
        if array.shape[1:] != first.shape[1:] or array.ndim != first.ndim:
            raise ShapeMismatchError(
                f"samples{_named(name)} of one batch have the shapes {first.shape} and {array.shape}: they may differ "
                "in the first axis only"
            )
    if not first.ndim:
        return np.array(arrays)
    padded = np.full((len(arrays), width, *first.shape[1:]), _checked(value, first.dtype), first.dtype)
    for row, array in zip(padded, arrays, strict=True):
        row[: len(array)] = array
    return padded


def _checked(value: float, dtype: np.dtype[Any]) -> float:
    """Return ``value`` if the dtype has it, else raise InvalidArgumentError."""
    with np.errstate(all="ignore"):
        is_kept = dtype.kind in "fc" or np.asarray(value).astype(dtype).astype(np.float64) == value
    if not is_kept:
        raise InvalidArgumentError(f"pad_value={value!r} is no value of {dtype}: choose one, or convert the samples")
    return value


def _named(name: str) -> str:
    return f" {name!r:.80}" if name else ""
