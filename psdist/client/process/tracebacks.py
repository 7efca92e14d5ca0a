"""Exception hook of a script: a short traceback.

Frames of psdist, and of libraries that psdist called, are removed from a traceback: the script's call and the message
explain the error. A note counts the removed frames; ``PSDIST_FULL_TRACEBACK=1`` prints all. A foreign exception that
was raised within psdist is printed whole, because it may be a defect.

In a launched script the hook is installed when psdist is imported, since errors may be raised before ``psdist.init()``.
The previous hook prints the traceback. In any other script ``psdist.init()`` installs the hook if Python's own is
active. The exit status is chosen by ``exit_status``, since another library may replace or wrap this hook.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from types import TracebackType
from typing import Final

_FULL: Final = "PSDIST_FULL_TRACEBACK"
#: Folders of the standard library and of installed packages, also in a virtual environment.
_LIBRARIES: Final = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def install_alone() -> None:
    """Install the hook in a process without a launcher, unless it has a hook of its own."""
    if sys.excepthook is sys.__excepthook__:
        install()


def install() -> None:
    """Install the hook."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.environ.get(_FULL, "0") in ("", "0"):
            shorten(error)
        previous(kind, error, error.__traceback__)

    sys.excepthook = hook


def shorten(error: BaseException) -> None:
    """Remove psdist's frames from the tracebacks of ``error`` and of its causes, and note their number."""
    hidden = 0
    for each in chain(error):
        frames = list(_frames(each.__traceback__))
        kept = _outside(frames)
        # Of errors raised in psdist, only its own classes are clear without the frame.
        if kept and (kept[-1] is frames[-1] or _is_understood(each)):
            hidden += len(frames) - len(kept)
            each.__traceback__ = _linked(kept)
    if hidden:
        count = "1 frame" if hidden == 1 else f"{hidden} frames"
        error.add_note(f"({count} of psdist left out; {_FULL}=1 shows all)")


def _is_understood(error: BaseException) -> bool:
    from psdist.errors import InternalError, PsdistError

    return isinstance(error, PsdistError | KeyboardInterrupt) and not isinstance(error, InternalError)


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield ``error``, and the errors that are printed before it."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)


def _frames(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _outside(frames: list[TracebackType]) -> list[TracebackType]:
    """Return the frames that belong neither to psdist nor to a library that psdist called."""
    kept, inside = [], False
    for frame in frames:
        code = frame.tb_frame.f_code
        # By module instead of file: the methods of a dataclass have no file.
        module = frame.tb_frame.f_globals.get("__name__", "")
        inside = module.split(".")[0] == "psdist" or (inside and code.co_filename.startswith(_LIBRARIES))
        if not inside:
            kept.append(frame)
    return kept


def _linked(frames: list[TracebackType]) -> TracebackType | None:
    """Return a traceback of these frames."""
    trace: TracebackType | None = None
    for frame in reversed(frames):
        trace = TracebackType(trace, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return trace
