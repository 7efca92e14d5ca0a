"""Codecs for weights on their way to workers (``pull_compression``), and their text form in settings. Pure.

Such a codec encodes the difference between a slice's weights and the copy that workers hold. It treats the slice as
one vector, regardless of tensor boundaries, so that servers need not know the tensors.
"""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any, Final

from psdist.compression.specifications import ChunkedTopK, Codec, Compressor, Int2, Int4, Int8, OneBit, RandomK, TopK
from psdist.errors import InvalidArgumentError, LimitExceededError, UnknownCodecError

_CODECS: Final[dict[str, type[Compressor]]] = {
    one.__name__: one for one in (Int8, Int4, Int2, OneBit, TopK, ChunkedTopK, RandomK)
}
_NAMES: Final = ", ".join(_CODECS)
#: Longest accepted text. A codec with all its arguments takes less than half of it.
_TEXT_LENGTH: Final = 256
_CALL: Final = re.compile(r"([A-Za-z0-9]+)\((.*)\)")
_ARGUMENT: Final = re.compile(r"([a-z_]+)=(True|False|[-+0-9.e]+)")


def check_pull_codec(codec: Codec) -> Compressor:
    """Return ``codec`` if it can encode weights.

    Raises UnknownCodecError for another kind of codec, and InvalidArgumentError for an argument that makes no sense
    for weights.
    """
    if type(codec) not in _CODECS.values() or not isinstance(codec, Compressor):
        hint = ": pull_dtype sends weights in 16 bits" if "16" in type(codec).__name__ else ""
        raise UnknownCodecError(f"pull_compression={codec!r:.60} cannot send weights: use one of {_NAMES}{hint}")
    if codec.error_feedback is not None or codec.residual_decay != 1.0:
        raise InvalidArgumentError(
            f"pull_compression={codec!r:.100}: leave out error_feedback and residual_decay. The part of a difference "
            "that is not sent is always in the next one"
        )
    if isinstance(codec, TopK) and (codec.momentum or codec.warm_up):
        raise InvalidArgumentError(f"pull_compression={codec!r:.100}: momentum and warm_up are for gradients only")
    return codec


def pull_codec_to_text(codec: Codec) -> str:
    """Return the text that ``pull_codec_from_text`` parses: the constructor call, with all applicable arguments."""
    given = check_pull_codec(codec)
    values = {field.name: getattr(given, field.name) for field in fields(given)}
    used = [f"{name}={value!r}" for name, value in values.items() if name not in ("error_feedback", "residual_decay")]
    return f"{type(given).__name__}({', '.join(used)})"


def pull_codec_from_text(text: str) -> Compressor:
    """Return the codec that ``text`` describes.

    Raises UnknownCodecError for an unknown codec, InvalidArgumentError for an unknown argument or a bad value, and
    LimitExceededError for a text that is too long.
    """
    if len(text) > _TEXT_LENGTH:
        raise LimitExceededError(
            f"pull_compression {text!r:.60}... has {len(text)} characters (at most {_TEXT_LENGTH}): use one of {_NAMES}"
        )
    call = _CALL.fullmatch(text)
    kind = _CODECS.get(call[1]) if call is not None else None
    if call is None or kind is None:
        raise UnknownCodecError(f"pull_compression {text!r:.60} is unknown: use one of {_NAMES}")
    arguments: dict[str, Any] = {}
    for part in call[2].split(", ") if call[2] else ():
        one = _ARGUMENT.fullmatch(part)
        if one is None or one[1] not in (field.name for field in fields(kind)):
            raise InvalidArgumentError(f"pull_compression {text!r:.100}: {part!r:.60} is not an argument of {call[1]}")
        arguments[one[1]] = _value(one[2])
    return check_pull_codec(kind(**arguments))


def _value(text: str) -> bool | int | float:
    if text in ("True", "False"):
        return text == "True"
    try:
        return float(text) if any(mark in text for mark in ".e") else int(text)
    except ValueError:
        raise InvalidArgumentError(f"{text!r:.60} is not a number") from None
