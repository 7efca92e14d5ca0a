"""Codecs of weights on their way to workers (``pull_compression``), and their text in the settings of a parameter set.

Such a codec encodes what the weights of a slice have over those that workers hold. A slice is one vector for it,
whatever tensors lie in it, so that servers need not know them. Pure.
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
#: A codec with all its arguments takes less than half of it.
_TEXT_LENGTH: Final = 256
_CALL: Final = re.compile(r"([A-Za-z0-9]+)\((.*)\)")
_ARGUMENT: Final = re.compile(r"([a-z_]+)=(True|False|[-+0-9.e]+)")


def check_pull_codec(codec: Codec) -> Compressor:
    """Returns ``codec`` if weights can be sent by it. Raises UnknownCodecError for another kind, and
    InvalidArgumentError for an argument that has no meaning for weights."""
    if type(codec) not in _CODECS.values() or not isinstance(codec, Compressor):
        hint = ": pull_dtype sends weights in 16 bits" if "16" in type(codec).__name__ else ""
        raise UnknownCodecError(f"pull_compression={codec!r:.60} cannot send weights: use one of {_NAMES}{hint}")
    if codec.error_feedback is not None or codec.residual_decay != 1.0:
        raise InvalidArgumentError(
            f"pull_compression={codec!r:.100}: leave out error_feedback and residual_decay. What is not sent of a "
            "difference is in the next one, always"
        )
    if isinstance(codec, TopK) and (codec.momentum or codec.warm_up):
        raise InvalidArgumentError(f"pull_compression={codec!r:.100}: momentum and warm_up are for gradients alone")
    return codec


def pull_codec_to_text(codec: Codec) -> str:
    """What ``pull_codec_from_text`` reads: the codec as a user would write it, with all arguments that it may have."""
    given = check_pull_codec(codec)
    values = {field.name: getattr(given, field.name) for field in fields(given)}
    used = [f"{name}={value!r}" for name, value in values.items() if name not in ("error_feedback", "residual_decay")]
    return f"{type(given).__name__}({', '.join(used)})"


def pull_codec_from_text(text: str) -> Compressor:
    """The codec that ``text`` names. Raises UnknownCodecError, InvalidArgumentError for arguments that it does not
    have, or of a wrong value, and LimitExceededError for a text that is too long to be one."""
    if len(text) > _TEXT_LENGTH:
        raise LimitExceededError(
            f"pull_compression {text!r:.60}... has {len(text)} characters, and at most {_TEXT_LENGTH}: one of {_NAMES}"
        )
    call = _CALL.fullmatch(text)
    kind = _CODECS.get(call[1]) if call is not None else None
    if call is None or kind is None:
        raise UnknownCodecError(f"pull_compression {text!r:.60} is unknown: use one of {_NAMES}")
    arguments: dict[str, Any] = {}
    for part in call[2].split(", ") if call[2] else ():
        one = _ARGUMENT.fullmatch(part)
        if one is None or one[1] not in (field.name for field in fields(kind)):
            raise InvalidArgumentError(f"pull_compression {text!r:.100}: {part!r:.60} is no argument of {call[1]}")
        arguments[one[1]] = _value(one[2])
    return check_pull_codec(kind(**arguments))


def _value(text: str) -> bool | int | float:
    if text in ("True", "False"):
        return text == "True"
    try:
        return float(text) if any(mark in text for mark in ".e") else int(text)
    except ValueError:
        raise InvalidArgumentError(f"{text!r:.60} is no number") from None
