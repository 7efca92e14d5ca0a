"""Report to the launcher about the error that ended a script before its first step, if a restart would repeat it.

The report is a file beside ``PSDIST_CONNECTED_FILE``. It contains ``CERTAIN`` for an error that every attempt raises,
or a digest of the traceback's lines: if the next attempt ends with the same one, a third would, too.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from psdist.settings.exit_codes import CERTAIN

_SUFFIX: Final = ".error"
_DIGEST_CHARACTERS: Final = 32
#: Errors of the program text or of the installation.
_CERTAIN_KINDS: Final = (SyntaxError, ImportError, NameError)

_has_trained = False


def note_step() -> None:
    """Record that this process made a step: from then on its errors may depend on the state of training."""
    global _has_trained
    _has_trained = True


def report(error: BaseException) -> None:
    """Report the error that ends this process."""
    connected_file = os.environ.get("PSDIST_CONNECTED_FILE", "")
    if connected_file and not _has_trained and (text := signature(error)):
        with suppress(OSError):  # The launcher restarts the script then.
            Path(connected_file + _SUFFIX).write_text(text, encoding="ascii")


def signature(error: BaseException) -> str:
    """Return ``CERTAIN``, a digest of the traceback, or an empty string for an error that may pass."""
    import hashlib
    import traceback

    from psdist.errors import PsdistError

    if isinstance(error, _CERTAIN_KINDS):
        return CERTAIN
    # The network, and psdist's own waits, may be better at the third attempt.
    if not isinstance(error, Exception) or isinstance(error, ConnectionError | TimeoutError | PsdistError):
        return ""
    frames = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
    text = "\n".join([type(error).__qualname__, *frames])
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:_DIGEST_CHARACTERS]


def read_report(connected_file: Path) -> str:
    """Return the report of the process that was given this file; empty if there is none."""
    with suppress(OSError), open(str(connected_file) + _SUFFIX, encoding="ascii", errors="replace") as file:
        return file.read(_DIGEST_CHARACTERS)
    return ""
