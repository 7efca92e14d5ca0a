"""A call of a function by the workers of a run: its files in a private directory, and the workers' side.

``call.npz`` has the function's import name, its arguments, and the path on which modules are found. Each worker writes
its return value to ``RANK.npz``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from psdist.launcher.from_python import functions, values

#: The module that workers run, with the directory as its argument.
WORKER_MODULE: Final = "psdist.launcher.from_python.worker"
_CALL: Final = "call.npz"


def write_call(
    directory: Path, function: Callable[..., Any], args: Sequence[object], kwargs: Mapping[str, object]
) -> None:
    """Write a call for the workers. Raises ConfigurationError for a function without an import name,
    InvalidArgumentError for arguments that do not travel."""
    name = functions.import_name(function)
    call = {"function": name, "args": list(args), "kwargs": dict(kwargs), "path": list(map(str, sys.path))}
    (directory / _CALL).write_bytes(values.dump(call, f"an argument of {name}"))


def run_call(directory: Path) -> None:
    """Call the function in this worker, and write its return value."""
    call = values.load((directory / _CALL).read_bytes())
    sys.path[:] = call["path"]  # The same program that made the call: a name means the same module.
    returned = functions.load(call["function"])(*call["args"], **call["kwargs"])
    data = values.dump(returned, f"the return value of {call['function']}")
    path = directory / f"{os.environ['RANK']}.npz"
    draft = path.with_suffix(".draft")
    draft.write_bytes(data)
    draft.replace(path)


def read_values(directory: Path) -> dict[int, Any]:
    """Return the return values by rank, in its order."""
    files = {int(path.stem): path for path in directory.glob("*.npz") if path.stem.isdigit()}
    return {rank: values.load(files[rank].read_bytes()) for rank in sorted(files)}
