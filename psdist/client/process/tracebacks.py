"""The exception hook of a script: a short traceback, and, for launchers, an exit status for wrong settings.

Frames of psdist, and of libraries that psdist called, are left out of a traceback: the call in the script and the
message say what is wrong. A line below says how many were left out; with ``PSDIST_FULL_TRACEBACK=1`` all are printed.
An exception that is none of psdist's, and was raised within it, is printed whole, because it may be a defect.

In a script that a launcher started the hook is installed when psdist is imported, since errors may be raised before
``psdist.init()``. The hook that was there before prints the traceback. An error that would come again with every
attempt ends the script with ``exit_codes.CONFIGURATION`` or ``exit_codes.LATE``, at which launchers do not start it
again. In any other script ``psdist.init()`` installs it, where no hook but Python's is there; statuses are Python's.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from types import TracebackType
from typing import Final

from psdist.settings import exit_codes

_FULL: Final = "PSDIST_FULL_TRACEBACK"
#: The standard library, and what is installed, also in a virtual environment.
_LIBRARIES: Final = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def install_alone() -> None:
    """Makes this module's hook that of a process without a launcher, unless it has one."""
    if sys.excepthook is sys.__excepthook__:
        install(chooses_status=False)


def install(*, chooses_status: bool = True) -> None:
    """Makes this module's hook the process's."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.environ.get(_FULL, "0") in ("", "0"):
            shorten(error)
        previous(kind, error, error.__traceback__)
        if chooses_status and (status := status_of(error)):
            # SystemExit is how a hook chooses the status.
            raise SystemExit(status)

    sys.excepthook = hook


def status_of(error: BaseException) -> int:
    """The exit status by which a launcher knows that another attempt would fail in the same way, or, with UNAVAILABLE,
    that the scheduler may only be late; 0 for other errors."""
    from psdist.errors import RUN_ENDING, LateWorkerError, SchedulerUnreachableError

    if isinstance(error, LateWorkerError):
        return exit_codes.LATE
    if isinstance(error, SchedulerUnreachableError):
        return exit_codes.UNAVAILABLE
    for each in _chain(error):  # The script may have raised one of its own from it.
        if isinstance(each, RUN_ENDING):
            # The next attempt finds a run that has resumed from a snapshot.
            return 0 if "snapshot" in each.details else exit_codes.of_ended_run(each)
    return exit_codes.CONFIGURATION if would_recur(error) else 0


def would_recur(error: BaseException) -> bool:
    """Whether another attempt of the script would end with the same error: its settings or arguments are wrong, it
    calls what it has closed, or its device is not there."""
    from psdist import errors

    settings = (
        *(errors.InvalidArgumentError, errors.LayoutMismatchError, errors.SettingsMismatchError),
        *(errors.NoStorageError, errors.ProtocolMismatchError, errors.UnauthenticatedError, errors.WrongRunError),
        *(errors.MutualWaitError, errors.NotMemberError, errors.WorkerLeftError, errors.UnevenInputsError),
        *(errors.ClosedError, errors.DeviceUnavailableError),
    )
    # The next gradient may be finite.
    return isinstance(error, settings) and not isinstance(error, errors.NonFiniteGradientError)


def shorten(error: BaseException) -> None:
    """Removes psdist's frames from the tracebacks of ``error`` and of those that led to it, and notes how many."""
    hidden = 0
    for each in _chain(error):
        frames = list(_frames(each.__traceback__))
        kept = _outside(frames)
        # One that was raised here: only psdist's own errors are understood without the place.
        if kept and (kept[-1] is frames[-1] or _is_understood(each)):
            hidden += len(frames) - len(kept)
            each.__traceback__ = _linked(kept)
    if hidden:
        count = "1 frame" if hidden == 1 else f"{hidden} frames"
        error.add_note(f"({count} of psdist left out; {_FULL}=1 shows all)")


def _is_understood(error: BaseException) -> bool:
    from psdist.errors import InternalError, PsdistError

    return isinstance(error, PsdistError | KeyboardInterrupt) and not isinstance(error, InternalError)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """``error``, and those that are printed before it."""
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
    """The frames that are neither psdist's nor of a library that psdist called."""
    kept, inside = [], False
    for frame in frames:
        code = frame.tb_frame.f_code
        # By its module and not by its file: the methods of a dataclass have none.
        module = frame.tb_frame.f_globals.get("__name__", "")
        inside = module.split(".")[0] == "psdist" or (inside and code.co_filename.startswith(_LIBRARIES))
        if not inside:
            kept.append(frame)
    return kept


def _linked(frames: list[TracebackType]) -> TracebackType | None:
    """A traceback of these frames."""
    trace: TracebackType | None = None
    for frame in reversed(frames):
        trace = TracebackType(trace, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return trace
