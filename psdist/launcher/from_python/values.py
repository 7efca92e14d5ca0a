"""Bytes of the values that pass between ``psdist.launch`` and the functions that it runs.

A value is None, a bool, int, float or str, a numpy array or scalar, or a list, tuple or dict of values. It comes back
equal and of the same type. Anything else is refused, so no code travels: the bytes are an ``.npz`` file of arrays
without pickle, and JSON that refers to them.

JSON has the plain values and lists as they are. The others are objects of one entry: ``{"tuple": [values]}``,
``{"dict": [[key, value], ...]}``, and ``{"array": n}`` and ``{"scalar": n}`` for array n of the file.
"""

from __future__ import annotations

import io
import json
import zipfile
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from psdist.errors import InvalidArgumentError, LimitExceededError
from psdist.wire.limits import LAUNCH_VALUE_BYTES_MAX

_PLAIN: Final = (bool, int, float, str, type(None))
_JSON: Final = "json"
_DEPTH: Final = 100
_ACCEPTED: Final = "pass None, numbers, text, numpy arrays, and lists, tuples and dicts of them"
_REMEDIES: Final = {
    "Tensor": "convert it by tensor.detach().cpu().numpy()",
    "ArrayImpl": "convert it by numpy.asarray()",
    "bytes": "convert it by numpy.frombuffer(data, numpy.uint8)",
    "coroutine": "run it by asyncio.run() in the function",
}


def dump(value: object, what: str) -> bytes:
    """Return the bytes of a value.

    what: name of the value in errors.

    Raises InvalidArgumentError for a value of another type, LimitExceededError.
    """
    arrays: list[NDArray[Any]] = []
    text = json.dumps(_to_json(value, what, arrays, _DEPTH))
    size = len(text) + sum(array.nbytes for array in arrays)
    if size > LAUNCH_VALUE_BYTES_MAX:
        raise LimitExceededError(
            f"{what} has {size} bytes, more than {LAUNCH_VALUE_BYTES_MAX}: write it to a file, and pass its path"
        )
    file = io.BytesIO()
    named: dict[str, Any] = {str(number): array for number, array in enumerate(arrays)}
    named[_JSON] = np.frombuffer(text.encode("ascii"), np.uint8)
    np.savez(file, **named)
    return file.getvalue()


def load(data: bytes) -> Any:
    """Return the value of ``dump``'s bytes. Raises InvalidArgumentError for others."""
    try:
        with np.load(io.BytesIO(data)) as file:
            return _from_json(json.loads(file[_JSON].tobytes()), file)
    except (ValueError, KeyError, TypeError, RecursionError, EOFError, zipfile.BadZipFile) as error:
        raise InvalidArgumentError(f"these {len(data)} bytes are not a value of psdist.launch: {error}") from None


def _to_json(value: object, what: str, arrays: list[NDArray[Any]], depth: int) -> Any:
    if depth == 0:
        raise InvalidArgumentError(f"{what} is nested more than {_DEPTH} deep, or in itself: pass a flatter value")
    if type(value) in _PLAIN:
        return value
    if isinstance(value, np.generic) or type(value) is np.ndarray:
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        arrays.append(_checked(np.asarray(value), what))
        return {kind: len(arrays) - 1}
    if type(value) is list:
        return [_to_json(item, what, arrays, depth - 1) for item in value]
    if type(value) is tuple:
        return {"tuple": [_to_json(item, what, arrays, depth - 1) for item in value]}
    if type(value) is dict:
        return {"dict": [[_to_json(part, what, arrays, depth - 1) for part in item] for item in value.items()]}
    remedy = _REMEDIES.get(type(value).__name__, _ACCEPTED)
    raise InvalidArgumentError(f"{what} contains a {type(value).__name__}, which does not travel: {remedy}")


def _checked(array: NDArray[Any], what: str) -> NDArray[Any]:
    # Files of numpy name a dtype by its ``str``, which dtypes of other packages do not come back from.
    if array.dtype.hasobject or (array.dtype.names is None and np.dtype(array.dtype.str) != array.dtype):
        raise InvalidArgumentError(
            f"{what} contains an array of {array.dtype}, which does not travel: convert it to a dtype of numpy's own, "
            "such as float32"
        )
    return array


def _from_json(value: Any, arrays: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    match kind:
        case "tuple":
            return tuple(_from_json(content, arrays))
        case "dict":
            return {_from_json(key, arrays): _from_json(item, arrays) for key, item in content}
        case "array":
            return arrays[str(content)]
        case "scalar":
            return arrays[str(content)][()]
        case _:
            raise ValueError(f"{kind!r} is unknown")
