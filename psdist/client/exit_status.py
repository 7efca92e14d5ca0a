"""The exit status of a script that its run refuses: whoever restarts workers need not try again.

Under a launcher an error that no restart can mend, and that nobody catches, ends the script with status 78. It is
printed as any other. Elsewhere nothing is changed.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import Final

from psdist.errors import (
    ConfigurationError,
    LayoutMismatchError,
    ProtocolMismatchError,
    SettingsMismatchError,
    UnauthenticatedError,
    WrongRunError,
)
from psdist.settings import exit_codes

_REFUSALS: Final = (
    ConfigurationError,
    LayoutMismatchError,
    ProtocolMismatchError,
    SettingsMismatchError,
    UnauthenticatedError,
    WrongRunError,
)


def mark_refusals() -> None:
    """From now on this process, if a launcher started it, ends with status 78 where such an error is not caught."""
    if os.environ.get("PSDIST_CONNECTED_FILE") and sys.excepthook is sys.__excepthook__:
        sys.excepthook = _report


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.__excepthook__(kind, error, trace)
    if isinstance(error, _REFUSALS):
        raise SystemExit(exit_codes.REFUSED)
