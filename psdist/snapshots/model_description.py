"""Description of a model's tensors by psdist.torch, so that a snapshot can be read as the model's ``state_dict``.

A parameter set holds only float32, so a snapshot stores buffers and frozen parameters of other dtypes as bytes. The
bytes of buffers are in the state that each worker saves, named ``BUFFERS`` and the buffer's name; the description is
there as ``BUFFERS`` and ``DESCRIPTION``. docs/snapshot-format.md is the specification.

Invariant: Parsed values have the declared types. The number of bytes need not match the shapes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from psdist.errors import StorageError

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
