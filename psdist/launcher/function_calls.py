"""Calls of a function by the workers of a run that ``psdist.launch`` started.

``call.npz`` in a private directory has the function's import name, its arguments, and the path on which modules are
found. Each worker (``python -m psdist.launcher.function_calls DIRECTORY``) writes its return value to ``RANK.npz``.

**Names.** Only names pass between the processes, as ``module:qualname``. So the function must be found by its name in a
new process, which imports its module again.

**Values.** A value is None, a bool, int, float or str, a numpy array or scalar, or a list, tuple or dict of values. It
comes back equal and of the same type. Anything else is refused, so no code travels: the bytes are an ``.npz`` file of
arrays without pickle, and JSON that refers to them. JSON has the plain values and lists as they are. The others are
objects of one entry: ``{"tuple": [values]}``, ``{"dict": [[key, value], ...]}``, and ``{"array": n}`` and
``{"scalar": n}`` for array n of the file.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import inspect
import io
import json
import os
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from psdist.errors import ConfigurationError, InvalidArgumentError, LimitExceededError
from psdist.wire.limits import LAUNCH_VALUE_BYTES_MAX

_TO_FILE: Final = (
    "define it with def at the top level of a file, import it from there, and pass that function (in a notebook, a "
    "cell that begins with %%writefile work.py makes the file)"
)


def import_name(function: Callable[..., Any]) -> str:
    """Return ``module:qualname`` of a function. Raises ConfigurationError if no other process could import it."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        raise ConfigurationError(
            f"an object of type {type(function).__name__} has no name to import it by: pass a function, and its "
            "arguments as args= and kwargs="
        )
    if "<" in name:  # <lambda>, <locals>
        raise ConfigurationError(f"{name} cannot be imported by name, since it is made by running code: {_TO_FILE}")
    if _find(sys.modules.get(module), name) != function:
        raise ConfigurationError(f"{module}.{name} is not the function that was passed, but another: {_TO_FILE}")
    return f"{_main_name(name) if module == '__main__' else module}:{name}"


def load_function(name: str) -> Callable[..., Any]:
    """Import the function of ``import_name``. Raises ConfigurationError if its module lacks it."""
    module, _, qualname = name.partition(":")
    function: Callable[..., Any] | None = _find(importlib.import_module(module), qualname)
    if function is None or not callable(function):
        raise ConfigurationError(
            f"there is no function {qualname} in module {module}, as a worker imports it: define it whenever the "
            "module is imported"
        )
    return function


def _find(module: ModuleType | None, name: str) -> Any:
    """Return an object of a module by its qualified name; None if there is none."""
    with suppress(AttributeError):
        return reduce(getattr, name.split("."), module)
    return None


def _main_name(name: str) -> str:
    """Return the name by which the program's main module can be imported. Raises ConfigurationError."""
    main = sys.modules["__main__"]
    if spec := getattr(main, "__spec__", None):  # python -m
        return str(spec.name)
    file = getattr(main, "__file__", None)
    if file is not None:
        stem: str = os.path.splitext(os.path.basename(file))[0]
        spec = importlib.machinery.PathFinder.find_spec(stem)
        if spec is not None and spec.origin is not None and os.path.realpath(spec.origin) == os.path.realpath(file):
            return stem
    raise ConfigurationError(f"{name} is defined in __main__, which other processes cannot import: {_TO_FILE}")


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


def encode_value(value: object, what: str) -> bytes:
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


def decode_value(data: bytes) -> Any:
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


#: The module that workers run, with the directory as its argument.
WORKER_MODULE: Final = "psdist.launcher.function_calls"
_CALL: Final = "call.npz"


def write_call(
    directory: Path, function: Callable[..., Any], args: Sequence[object], kwargs: Mapping[str, object]
) -> None:
    """Write a call for the workers. Raises ConfigurationError for a function without an import name,
    InvalidArgumentError for arguments that it does not take, or that do not travel."""
    name = import_name(function)
    _check_arguments(function, name, args, kwargs)
    call = {"function": name, "args": list(args), "kwargs": dict(kwargs), "path": list(map(str, sys.path))}
    (directory / _CALL).write_bytes(encode_value(call, f"an argument of {name}"))


def _check_arguments(
    function: Callable[..., Any], name: str, args: Sequence[object], kwargs: Mapping[str, object]
) -> None:
    if inspect.iscoroutinefunction(function):
        raise InvalidArgumentError(f"{name} is async: pass a function that calls asyncio.run({function.__name__}(...))")
    try:
        signature = inspect.signature(function)
    except ValueError:  # A function in C may have none.
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise InvalidArgumentError(
            f"{name}{signature} cannot be called so: {error}. Pass its arguments by args=[...] and kwargs={{...}}"
        ) from None


def run_call(directory: Path) -> None:
    """Call the function in this worker, and write its return value."""
    call = decode_value((directory / _CALL).read_bytes())
    sys.path[:] = call["path"]  # The same program that made the call: a name means the same module.
    returned = load_function(call["function"])(*call["args"], **call["kwargs"])
    data = encode_value(returned, f"the return value of {call['function']}")
    path = directory / f"{os.environ['RANK']}.npz"
    draft = path.with_suffix(".draft")
    draft.write_bytes(data)
    draft.replace(path)


def read_values(directory: Path) -> dict[int, Any]:
    """Return the return values by rank, in its order."""
    files = {int(path.stem): path for path in directory.glob("*.npz") if path.stem.isdigit()}
    return {rank: decode_value(files[rank].read_bytes()) for rank in sorted(files)}


if __name__ == "__main__":
    run_call(Path(sys.argv[1]))
