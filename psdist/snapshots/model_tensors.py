"""Tensors that a snapshot offers to readers without a cluster, and the location of their values.

Most are tensors of parameter sets. A model of psdist.torch has others, stored as bytes (buffers, and frozen parameters
of other dtypes than float32), and names of tied weights. A ``ModelDescription`` explains these, so that the snapshot
can be read as the model's ``state_dict``. The bytes of buffers are in the state that each worker saves, named
``BUFFERS`` and the buffer's name; the description is there as ``BUFFERS`` and ``DESCRIPTION``. The specification is
docs/internals/snapshot-format.md.

Invariants: Values of a parsed description have the declared types; the number of bytes need not match the shapes. Bytes
of a model that no description explains are omitted, and named; they are never returned as numbers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from psdist.compression.dtypes import NUMPY_DTYPES
from psdist.errors import StorageError
from psdist.optim import MEANS_SUFFIX, SGD, Mean
from psdist.snapshots import reader
from psdist.snapshots.format import Manifest, ParametersState, corrupt, file_path
from psdist.snapshots.storage import Storage

#: numpy dtype for each dtype that a tensor may have.
DTYPES: Final[dict[str, np.dtype[Any]]] = {
    **NUMPY_DTYPES,
    **{name: np.dtype(name) for name in ("bool", "complex64", "uint8", "int8")},
    **{f"{kind}{bits}": np.dtype(f"<{kind[0]}{bits // 8}") for kind in ("int", "uint") for bits in (16, 32, 64)},
    **{name: np.dtype(getattr(ml_dtypes, name)) for name in ("float8_e4m3fn", "float8_e5m2")},
}
#: Suffixes of parameter sets that psdist.torch uses for agreements. They are not part of a model.
_AGREEMENTS: Final = ("/join", "/overflows", MEANS_SUFFIX)
#: Suffix of the parameter set with untrained tensors, and its optimizer.
_FIXED: Final = "/fixed"
_NO_TRAINING: Final = SGD(lr=0.0)
_SHOWN: Final = 8


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Tensor in a snapshot.

    owner: name of the parameter set that it belongs to.
    place: the parameter set that holds its elements, and the tensor's number in that set's layout; None if ``data``
        holds its bytes.
    is_encoded: True if each element in the parameter set is one byte of the tensor, as a number from 0 to 255.
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
        """Range of the tensor in the flat vector of ``place``."""
        if self.place is None:
            return range(0)
        state, number = self.place
        return range(state.layout.offsets[number], state.layout.offsets[number + 1])

    @property
    def is_float(self) -> bool:
        """True if the elements are floating-point numbers."""
        return is_float(self.dtype)

    def decoded(self, elements: NDArray[np.float32] | None) -> NDArray[Any]:
        """Return the values in the tensor's dtype, one-dimensional.

        elements: the tensor's part of the vector in ``place``; None without ``place``.
        """
        data = self.data if elements is None else elements.astype(np.uint8).tobytes()
        return np.frombuffer(bytearray(data), DTYPES[self.dtype])


@dataclass(frozen=True, slots=True)
class Contents:
    """Tensors in a snapshot.

    left_out: a sentence for each kind of tensor that cannot be read.
    """

    tensors: tuple[StoredTensor, ...]
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Model:
    """Description of a model in one worker's state.

    owner: parameter set of that state.
    """

    owner: str
    description: ModelDescription
    buffers: dict[str, bytes]


def is_float(dtype: str) -> bool:
    """True if the dtype with this name is floating-point."""
    return dtype.startswith(("float", "bfloat"))


async def contents(storage: Storage, manifest: Manifest, parameters: Collection[str] = ()) -> Contents:
    """Return the tensors of a snapshot, in its order.

    parameters: names of the wanted parameter sets; a trained one includes the untrained tensors of its model. Empty
        for all.

    Buffers, which every worker has, are those of the lowest rank, and belong to the trained parameter set.

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
            if is_undescribed and len(tensor.shape) == 1:  # Tensors stored as bytes have one dimension.
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
    """Return the lowest rank's description of the model trained with this parameter set, or None."""
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
        raise corrupt(path, f"its model description is malformed: {error}"[:300]) from None
    return _Model(name, description, found)


def _encoded(manifest: Manifest, model: _Model) -> Iterator[StoredTensor]:
    """Iterate over tensors stored as bytes: buffers in the worker's state, the others in the parameter set."""
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
    """Return the model's other names of ``tensors``."""
    sets = {model.owner, model.description.fixed, *model.description.trained}
    known = {tensor.name: tensor for tensor in tensors if tensor.owner in sets}
    pairs = model.description.aliases.items()
    return [replace(known[name], name=alias) for alias, name in pairs if name in known and alias not in known]


def _sentences(manifest: Manifest, unknown: Sequence[str], unreadable: Sequence[str]) -> Iterator[str]:
    if unknown:
        yield (
            f"{_shown(unknown)} left out: snapshot {manifest.directory} does not say which of these are buffers, nor "
            "their dtypes and shapes. Resume the run with this psdist, and take another snapshot"
        )
    if unreadable:
        yield (
            f"{_shown(unreadable)} left out: their dtypes are not among {', '.join(DTYPES)}, or they were replaced "
            "while the snapshot was taken. Take another snapshot, or save them in the script"
        )


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


#: Prefix of psdist.torch's entries in a worker's state.
BUFFERS: Final = "psdist-buffers."
#: Name of the description, after ``BUFFERS``. No buffer's name begins with a dot.
DESCRIPTION: Final = ".description"
#: Limit on a tensor's dimensions in numpy 1.
_DIMENSIONS: Final = 32
_NAME_LENGTH: Final = 4096
#: Newest version of the description.
_FORMAT: Final = 1


@dataclass(frozen=True)
class ModelDescription:
    """Tensors of a model that need more than a parameter set to be read.

    trained: parameter sets of the trained tensors.
    fixed: parameter set of the tensors that are not trained.
    plain: tensors of ``fixed`` that are float32 values. All others are stored as bytes, one per element, 0 to 255.
    encoded: torch's dtype name and the shape of each buffer or frozen parameter stored as bytes.
    aliases: other names of tensors, such as tied weights, and the name under which each is stored.
    """

    trained: tuple[str, ...]
    fixed: str
    plain: tuple[str, ...]
    encoded: Mapping[str, tuple[str, tuple[int, ...]]]
    aliases: Mapping[str, str]

    def to_bytes(self) -> bytes:
        """Return the description as JSON."""
        return json.dumps({"format": _FORMAT} | vars(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes, file: str) -> ModelDescription:
        """Parse the result of ``to_bytes``.

        Raises ValueError, and StorageError naming ``file`` if the format is newer.
        """
        values = _typed(json.loads(data), dict)
        if (found := _typed(values.get("format"), int)) > _FORMAT:
            raise StorageError(
                f"the description of a model in {file} has format {found}, but this psdist reads {_FORMAT}: use the "
                "psdist that wrote it",
                file=file,
            )
        encoded: dict[str, tuple[str, tuple[int, ...]]] = {}
        for name, (dtype, shape) in _typed(values.get("encoded"), dict).items():
            if len(shape) > _DIMENSIONS:
                raise ValueError(f"{name!r:.80} has {len(shape)} dimensions, more than numpy's {_DIMENSIONS}")
            encoded[_name(name)] = _typed(dtype, str), tuple(_size(size) for size in shape)
        return cls(
            trained=_names(values.get("trained")),
            fixed=_typed(values.get("fixed"), str),
            plain=_names(values.get("plain")),
            encoded=encoded,
            aliases={_name(alias): _typed(name, str) for alias, name in _typed(values.get("aliases"), dict).items()},
        )


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{value!r:.80} is not of type {kind.__name__}")
    return value


def _name(value: str) -> str:
    """Check a tensor's name in a module. Its characters are not limited if no parameter set uses the name."""
    if not 0 < len(value) <= _NAME_LENGTH or not value.isprintable() or ".." in value.split("/"):
        raise ValueError(f"{value!r:.80} is not a tensor name")
    return value


def _names(values: Any) -> tuple[str, ...]:
    return tuple(_typed(name, str) for name in _typed(values, list))


def _size(value: Any) -> int:
    if (size := _typed(value, int)) < 0:
        raise ValueError(f"{size} is not a tensor size")
    return int(size)
