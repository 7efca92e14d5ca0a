"""Files by which a worker tells its launcher something, and a launcher the program that started it.

- The error that ended a script before its first step, if a restart would repeat it. The file holds ``CERTAIN`` for an
  error that every attempt raises, or a digest of the traceback's lines: if the next attempt ends with the same one, a
  third would, too. It holds ``DEBUGGER_LEFT`` if the script ended at a prompt of its debugger, before any step or not.
- The steps that a script which ended well has made, by parameter set in BSP, from which the launcher sees whether
  workers trained together.
- The worker has joined a process group of all workers, which it cannot rejoin. The file's time is that of the newest
  group.
- ``RunReport``: how a run ended, in the file named by ``--report-file``.

A worker's files are beside ``PSDIST_CONNECTED_FILE``.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Final

from psdist.errors import InternalError
from psdist.settings.debugging import has_left_debugger
from psdist.settings.exit_codes import CERTAIN, DEBUGGER_LEFT
from psdist.wire.limits import RUN_REPORT_BYTES_MAX

_ERROR: Final = ".error"
_GROUP: Final = ".group"
_STEPS: Final = ".steps"
_DIGEST_CHARACTERS: Final = 32
#: Errors of the program text or of the installation.
_CERTAIN_KINDS: Final = (SyntaxError, ImportError, NameError)
#: Parts of Python's messages about a call that does not fit the function.
_WRONG_ARGUMENTS: Final = ("unexpected keyword argument", "positional argument")

_has_trained = False
_steps: Final[dict[str, int]] = {}
_has_group = _has_pushed = False


def note_step(name: str, step: int | None, *, abstained: bool = False) -> None:
    """Record that this process made a step: from then on its errors may depend on the state of training.

    step: how many steps the parameter set ``name`` has made, if all workers make the same ones; else None.
    abstained: True if it had no gradient.
    """
    global _has_trained, _has_pushed
    _has_trained = True
    _has_pushed = _has_pushed or not abstained
    if step is not None:
        _steps[name] = step


def note_group() -> None:
    """Record that this process is in a group, which trains without pushes."""
    global _has_group
    _has_group = True


def report_steps() -> None:
    """Report the steps of this process, which ends well. Nothing is reported of one that trains by a group alone."""
    connected_file = os.environ.get("PSDIST_CONNECTED_FILE", "")
    if connected_file and (_steps or not (_has_trained or _has_group)):
        with suppress(OSError):  # The launcher then compares the other workers.
            Path(connected_file + _STEPS).write_text(json.dumps(_steps if _has_pushed else {}), encoding="ascii")


def read_steps(connected_file: Path) -> dict[str, int] | None:
    """Return the reported steps of the process that was given this file; None if it reported none."""
    with suppress(OSError, ValueError), open(str(connected_file) + _STEPS, "rb") as file:
        steps = json.loads(file.read(RUN_REPORT_BYTES_MAX))
        if isinstance(steps, dict) and all(isinstance(step, int) for step in steps.values()):
            return steps
    return None


def report_error(error: BaseException) -> None:
    """Report the error that ends this process."""
    connected_file = os.environ.get("PSDIST_CONNECTED_FILE", "")
    left = has_left_debugger(error)
    if connected_file and (left or not _has_trained) and (text := DEBUGGER_LEFT if left else error_signature(error)):
        with suppress(OSError):  # The launcher restarts the script then.
            Path(connected_file + _ERROR).write_text(text, encoding="ascii")


def error_signature(error: BaseException) -> str:
    """Return ``CERTAIN``, a digest of the traceback, or an empty string for an error that may pass."""
    import hashlib
    import traceback

    from psdist.errors import NonFiniteGradientError, PsdistError

    if isinstance(error, _CERTAIN_KINDS) or _is_typo(error):
        return CERTAIN
    # The network, and psdist's own waits, may be better at the third attempt.
    may_pass = isinstance(error, ConnectionError | TimeoutError | PsdistError)
    if not isinstance(error, Exception) or (may_pass and not isinstance(error, NonFiniteGradientError)):
        return ""
    frames = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
    text = "\n".join([type(error).__qualname__, *frames])
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:_DIGEST_CHARACTERS]


def _is_typo(error: BaseException) -> bool:
    """Return True for a name that a module or class lacks, and for arguments that a function does not take."""
    if isinstance(error, AttributeError):
        return isinstance(error.obj, ModuleType | type)
    return isinstance(error, TypeError) and any(words in str(error) for words in _WRONG_ARGUMENTS)


def read_error(connected_file: Path) -> str:
    """Return the error of the process that was given this file; empty if there is none."""
    with suppress(OSError), open(str(connected_file) + _ERROR, encoding="ascii", errors="replace") as file:
        return file.read(_DIGEST_CHARACTERS)
    return ""


def mark_group() -> None:
    """Record that this process has made a group of all workers."""
    if connected_file := os.environ.get("PSDIST_CONNECTED_FILE", ""):
        with suppress(OSError):  # The launcher then restarts a worker that waits for others in vain.
            Path(connected_file + _GROUP).touch()


def group_age(connected_file: Path) -> float | None:
    """Return the seconds since the process that was given this file made its newest group; None if it made none."""
    with suppress(OSError):
        return max(0.0, time.time() - Path(str(connected_file) + _GROUP).stat().st_mtime)
    return None


@dataclass(frozen=True, slots=True)
class RunReport:
    """End of a run.

    status: exit status of the launcher.
    message: cause of a failure; empty if there is none.
    culprit: the process that caused it, such as ``worker 1``; empty if there is none.
    rank: the culprit's rank; None unless it is a worker.
    lines: the culprit's traceback if it printed one, else its last lines.
    """

    run_id: str
    status: int
    message: str = ""
    culprit: str = ""
    rank: int | None = None
    lines: tuple[str, ...] = ()

    def write(self, path: Path) -> None:
        """Write the report to a file. An unwritable file is ignored: it must not change how the run ends."""
        with suppress(OSError):
            path.write_text(json.dumps(asdict(self)), encoding="ascii")

    @classmethod
    def read(cls, path: Path) -> RunReport | None:
        """Return the report in a file; None if the launcher wrote none. Raises InternalError."""
        try:
            with path.open("rb") as file:
                data = file.read(RUN_REPORT_BYTES_MAX + 1)
        except FileNotFoundError:
            return None
        try:
            values = json.loads(data)
            return cls(**values | {"lines": tuple(values["lines"])})
        except (ValueError, TypeError, KeyError) as error:
            raise InternalError(f"the report on a run in {path} cannot be read: {error}") from None
