"""Which tensors a snapshot gives to who reads it without a cluster, and where their values are.

Most are those of its parameter sets. A model of psdist.torch has others, which are in the snapshot as bytes: buffers
and frozen parameters of other dtypes than float32; and it has names of tied weights. A description says what they mean
(``model_description``).

Invariant: of a model that the servers train, bytes of which nothing says what they mean are left out, and named; they
are never given as numbers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from psdist.compression.dtypes import NUMPY_DTYPES
from psdist.optim import SGD, Mean
from psdist.snapshots import reader
from psdist.snapshots.format import Manifest, ParametersState, corrupt, file_path
from psdist.snapshots.model_description import BUFFERS, DESCRIPTION, ModelDescription
from psdist.snapshots.storage import Storage

#: numpy's dtype for each that a tensor may have.
DTYPES: Final[dict[str, np.dtype[Any]]] = {
    **NUMPY_DTYPES,
    **{name: np.dtype(name) for name in ("bool", "complex64", "uint8", "int8")},
    **{f"{kind}{bits}": np.dtype(f"<{kind[0]}{bits // 8}") for kind in ("int", "uint") for bits in (16, 32, 64)},
    **{name: np.dtype(getattr(ml_dtypes, name)) for name in ("float8_e4m3fn", "float8_e5m2")},
}
#: The ends of names of parameter sets by which psdist.torch agrees on something. They are no part of a model.
_AGREEMENTS: Final = ("/join", "/overflows")
#: The end of the name of the parameter set of what is not trained, and its optimizer.
_FIXED: Final = "/fixed"
_NO_TRAINING: Final = SGD(lr=0.0)
_SHOWN: Final = 8


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a snapshot.

    owner: its parameter set. place: the parameter set that has its elements, and its number there; None where ``data``
    are its bytes. is_encoded: each element of ``place`` is one byte of it.
    """

    name: str
    owner: str
    shape: tuple[int, ...]
    dtype: str
    place: tuple[ParametersState, int] | None = None
    is_encoded: bool = False
    data: bytes = b""

    @property
    def elements(self) -> range:
        """Its range of the flat vector in ``place``."""
        if self.place is None:
            return range(0)
        state, number = self.place
        return range(state.layout.offsets[number], state.layout.offsets[number + 1])

    @property
    def is_float(self) -> bool:
        """Whether its elements are floating-point numbers."""
        return is_float(self.dtype)

    def decoded(self, elements: NDArray[np.float32] | None) -> NDArray[Any]:
        """Its values, in its dtype, of what ``place`` has; None where there is none. One dimension."""
        data = self.data if elements is None else elements.astype(np.uint8).tobytes()
        return np.frombuffer(bytearray(data), DTYPES[self.dtype])


@dataclass(frozen=True, slots=True)
class Contents:
    """What is in a snapshot. left_out: a sentence for each kind of what is there and cannot be read."""

    tensors: tuple[StoredTensor, ...]
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Model:
    """What the state of one worker says about a model. owner: the parameter set that the state is of."""

    owner: str
    description: ModelDescription
    buffers: dict[str, bytes]


def is_float(dtype: str) -> bool:
    """Whether the dtype of this name has floating-point numbers."""
    return dtype.startswith(("float", "bfloat"))


async def contents(storage: Storage, manifest: Manifest, parameters: Collection[str] = ()) -> Contents:
    """The tensors of a snapshot, in its order. parameters: names of the parameter sets that are wanted; with one that
    is trained comes what is not trained of its model. Empty for all. Buffers, which each worker has, are those of the
    lowest rank, and belong to what is trained.

    Raises SnapshotCorruptError, StorageError.
    """
    models = [model for state in manifest.parameters if (model := await _model(storage, manifest, state)) is not None]
    wanted = {*parameters, *(model.description.fixed for model in models if model.owner in parameters)}
    chosen = [state for state in manifest.parameters if _is_wanted(manifest, state, wanted)]
    plain = {model.description.fixed: model.description.plain for model in models}
    tensors, unknown, unreadable = list[StoredTensor](), list[str](), list[str]()
    for state in chosen:
        name = state.spec.name
        is_undescribed = name not in plain and name.endswith(_FIXED) and state.spec.optimizer == _NO_TRAINING
        for number, tensor in enumerate(state.layout.tensors):
            if is_undescribed and len(tensor.shape) == 1:  # As bytes are.
                unknown.append(tensor.name)
            elif name not in plain or tensor.name in plain[name]:
                tensors.append(StoredTensor(tensor.name, name, tensor.shape, tensor.dtype, (state, number)))
    names = {state.spec.name for state in chosen}
    for model in models:
        encoded = [tensor for tensor in _encoded(manifest, model) if tensor.owner in names]
        tensors += filter(_is_readable, encoded)
        unreadable += [f"{tensor.name} ({tensor.dtype})" for tensor in encoded if not _is_readable(tensor)]
        tensors += _aliases(model, tensors)
    return Contents(tuple(tensors), tuple(_sentences(manifest, unknown, unreadable)))


def _is_wanted(manifest: Manifest, state: ParametersState, parameters: Collection[str]) -> bool:
    name = state.spec.name
    if parameters:
        return name in parameters
    is_agreement = isinstance(state.spec.optimizer, Mean) and name.endswith(_AGREEMENTS)
    return not (is_agreement and manifest.state(name.rpartition("/")[0]) is not None)


async def _model(storage: Storage, manifest: Manifest, state: ParametersState) -> _Model | None:
    """What the lowest rank says about the model that is trained with this parameter set, if it says anything."""
    name = state.spec.name
    mine = min((one for one in manifest.states if one.parameters == name), key=lambda one: one.rank, default=None)
    if mine is None:
        return None
    found = await reader.read_state_tensors(storage, manifest, mine, BUFFERS)
    if DESCRIPTION not in found:
        return None
    path = file_path(manifest.directory, mine.file)
    try:
        description = ModelDescription.from_bytes(found.pop(DESCRIPTION), path)
    except (ValueError, TypeError, RecursionError) as error:
        raise corrupt(path, f"its description of a model is none: {error}"[:300]) from None
    return _Model(name, description, found)


def _encoded(manifest: Manifest, model: _Model) -> Iterator[StoredTensor]:
    """The tensors of which there are bytes: of buffers in the worker's state, else in the parameter set."""
    fixed = manifest.state(model.description.fixed)
    tensors = fixed.layout.tensors if fixed is not None else ()
    numbers = {tensor.name: number for number, tensor in enumerate(tensors)}
    for name, (dtype, shape) in model.description.encoded.items():
        if name in numbers and name not in model.buffers and fixed is not None:
            yield StoredTensor(name, fixed.spec.name, shape, dtype, (fixed, numbers[name]), is_encoded=True)
        else:
            yield StoredTensor(name, model.owner, shape, dtype, data=model.buffers.get(name, b""))


def _is_readable(tensor: StoredTensor) -> bool:
    length = len(tensor.elements) if tensor.is_encoded else len(tensor.data)
    return tensor.dtype in DTYPES and length == math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize


def _aliases(model: _Model, tensors: Iterable[StoredTensor]) -> list[StoredTensor]:
    """The other names of ``tensors`` that the model has."""
    sets = {model.owner, model.description.fixed, *model.description.trained}
    known = {tensor.name: tensor for tensor in tensors if tensor.owner in sets}
    pairs = model.description.aliases.items()
    return [replace(known[name], name=alias) for alias, name in pairs if name in known and alias not in known]


def _sentences(manifest: Manifest, unknown: Sequence[str], unreadable: Sequence[str]) -> Iterator[str]:
    if unknown:
        yield (
            f"{_shown(unknown)} left out: snapshot {manifest.directory} does not say which of these are buffers, and "
            "of what dtype and shape. Resume the run with this psdist, and take another snapshot"
        )
    if unreadable:
        yield (
            f"{_shown(unreadable)} left out: their dtypes are not among {', '.join(DTYPES)}, or they were replaced "
            "by others while the snapshot was taken. Take another snapshot, or save them in the script"
        )


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"
