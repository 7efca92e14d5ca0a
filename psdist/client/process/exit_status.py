"""Exit status of a launched script that an error of psdist ended.

An error that would recur with every attempt ends the script with ``exit_codes.CONFIGURATION`` or ``exit_codes.LATE``,
after which launchers do not restart it. Scripts without a launcher end with Python's own statuses.

The status is chosen when the interpreter exits, not by an exception hook. A hook chooses a status by raising
SystemExit, which ends the hooks that wrap it: ``torch.distributed`` collects the text of the inner hooks and would
never print it. And a hook that replaces others, as those of rich and IPython do, never calls one that chooses.
"""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from types import TracebackType

from psdist.client.process.tracebacks import chain
from psdist.settings import exit_codes
from psdist.settings.launcher_reports import report_error


def install() -> None:
    """Choose the status of this process when it exits."""
    ending = _Ending(os.getpid())
    atexit.register(ending.choose_status)


class _Ending:
    """End of a process. Its destructor ends the process, if a status was chosen.

    ``atexit`` holds the only reference, and drops it after the last exit function. So all of them run, also those that
    were registered before this one. pid: forked processes end as they would without psdist.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._status = 0

    def choose_status(self) -> None:
        if os.getpid() == self._pid:
            error = _uncaught(getattr(sys, "last_value", None), getattr(sys, "last_traceback", None))
            self._status = 0 if error is None else status_of(error)
            if error is not None and not self._status:
                report_error(error)

    def __del__(self) -> None:
        if self._status:
            for stream in (sys.stdout, sys.stderr):
                with suppress(AttributeError, OSError, ValueError):  # None, a broken pipe, or closed.
                    stream.flush()
            os._exit(self._status)


def _uncaught(error: BaseException | None, trace: TracebackType | None) -> BaseException | None:
    """Return the last error that the interpreter printed, if it ended the script.

    Libraries in C also print exceptions of their callbacks in this way, and continue: their traceback begins in a
    function that was called by another.
    """
    # A script that cannot be compiled has no frame.
    is_outermost = isinstance(error, SyntaxError) if trace is None else trace.tb_frame.f_back is None
    return error if is_outermost else None


def status_of(error: BaseException) -> int:
    """Return the exit status for a launcher; 0 for errors without a special status.

    The status says that another attempt would fail in the same way or, for UNAVAILABLE, that the scheduler may only be
    late.
    """
    from psdist.errors import RUN_ENDING, LateWorkerError, SchedulerUnreachableError

    if isinstance(error, LateWorkerError):
        return exit_codes.LATE
    if isinstance(error, SchedulerUnreachableError):
        return exit_codes.UNAVAILABLE
    for each in chain(error):  # The script may have raised its own error from it.
        if isinstance(each, RUN_ENDING):
            # The next attempt finds a run that resumed from a snapshot.
            return 0 if "snapshot" in each.details else exit_codes.status_of_ended_run(each)
    return exit_codes.CONFIGURATION if would_recur(error) else 0


def would_recur(error: BaseException) -> bool:
    """Return True if another attempt of the script would end with the same error.

    Its settings or arguments are wrong, it uses something that it has closed, or its device is missing.
    """
    from psdist import errors

    settings = (
        *(errors.InvalidArgumentError, errors.LayoutMismatchError, errors.SettingsMismatchError),
        *(errors.NoStorageError, errors.ProtocolMismatchError, errors.UnauthenticatedError, errors.WrongRunError),
        errors.PermissionDeniedError,
        *(errors.MutualWaitError, errors.NotMemberError, errors.WorkerLeftError, errors.UnevenInputsError),
        *(errors.ClosedError, errors.DeviceUnavailableError, errors.WrittenWeightsError),
    )
    # The next gradient may be finite.
    return isinstance(error, settings) and not isinstance(error, errors.NonFiniteGradientError)
