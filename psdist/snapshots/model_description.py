"""What psdist.torch says about the tensors of a model, so that a snapshot can be read as the model's ``state_dict``.

A parameter set holds float32 alone, so buffers and frozen parameters of other dtypes are in a snapshot as bytes. The
state that each worker keeps has the bytes of its buffers, under ``BUFFERS`` and their names, and under ``DESCRIPTION``
what they mean. docs/snapshot-format.md is the specification.

Invariant: what is parsed has the types that it says. Nothing says that the bytes are as long as their shapes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from psdist.errors import StorageError

#: What psdist.torch keeps in a worker's state has names that begin like this.
BUFFERS: Final = "psdist-buffers."
#: The description, after ``BUFFERS``. No name of a buffer begins with a dot.
DESCRIPTION: Final = ".description"
#: Of a tensor in numpy 1.
_DIMENSIONS: Final = 32
_NAME_LENGTH: Final = 4096
#: The newest version of the description.
_FORMAT: Final = 1


@dataclass(frozen=True)
class ModelDescription:
    """The tensors of a model other than those that are trained.

    trained: the parameter sets of what is trained. fixed: that of what is not. plain: its tensors that are float32
    values; all others are bytes, each a number of 0 to 255. encoded: dtype and shape of the buffers and frozen
    parameters of which there are bytes, as torch calls them. aliases: other names of tensors, as those of tied
    weights, and the name that they are under.
    """

    trained: tuple[str, ...]
    fixed: str
    plain: tuple[str, ...]
    encoded: Mapping[str, tuple[str, tuple[int, ...]]]
    aliases: Mapping[str, str]

    def to_bytes(self) -> bytes:
        """The description as JSON."""
        return json.dumps({"format": _FORMAT} | vars(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes, file: str) -> ModelDescription:
        """Parses what ``to_bytes`` returned. Raises ValueError, and StorageError, which names ``file``, if the format
        is newer."""
        values = _typed(json.loads(data), dict)
        if (found := _typed(values.get("format"), int)) > _FORMAT:
            raise StorageError(
                f"the description of a model in {file} has format {found}, and this psdist reads {_FORMAT}: use the "
                "psdist that wrote it",
                file=file,
            )
        encoded: dict[str, tuple[str, tuple[int, ...]]] = {}
        for name, (dtype, shape) in _typed(values.get("encoded"), dict).items():
            if len(shape) > _DIMENSIONS:
                raise ValueError(f"{name!r:.80} has {len(shape)} dimensions, and numpy has {_DIMENSIONS} at most")
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
        raise ValueError(f"{value!r:.80} is no {kind.__name__}")
    return value


def _name(value: str) -> str:
    """A name of a module's tensor: it has any characters, where no parameter set has the tensor under it."""
    if not 0 < len(value) <= _NAME_LENGTH or not value.isprintable() or ".." in value.split("/"):
        raise ValueError(f"{value!r:.80} is no name of a tensor")
    return value


def _names(values: Any) -> tuple[str, ...]:
    return tuple(_typed(name, str) for name in _typed(values, list))


def _size(value: Any) -> int:
    if (size := _typed(value, int)) < 0:
        raise ValueError(f"{size} is no size of a tensor")
    return int(size)
