"""The script's side of this process: short tracebacks, the exit status, warnings on standard error, and SIGTERM.

**Tracebacks.** Frames of psdist, and of libraries that psdist called, are removed from a traceback: the script's call
and the message explain the error. A note counts the removed frames; ``PSDIST_FULL_TRACEBACK=1`` prints all. A foreign
exception that was raised within psdist is printed whole, because it may be a defect. In a launched script the hook is
installed when psdist is imported, since errors may be raised before ``psdist.init()``. The previous hook prints the
traceback. In any other script ``psdist.init()`` installs the hook if Python's own is active.

**Exit status** of a launched script that an error of psdist ended. An error that would recur with every attempt ends
the script with ``exit_codes.CONFIGURATION`` or ``exit_codes.LATE``, after which launchers do not restart it. Scripts
without a launcher end with Python's own statuses. The status is chosen when the interpreter exits, not by an exception
hook. A hook chooses a status by raising SystemExit, which ends the hooks that wrap it: ``torch.distributed`` collects
the text of the inner hooks and would never print it. And a hook that replaces others, as those of rich and IPython do,
never calls one that chooses.

**Log lines** of a script that configures no logging: warnings on standard error, with the time. Python itself prints
such messages without a time (``logging.lastResort``), which makes it hard to see the order of events in a run of many
processes. As soon as the script, or a module that it imports, adds a handler to the root or to the ``psdist`` logger,
only that handler is used. With ``PSDIST_LOG_FORMAT=json`` each line is a JSON object with the fields of the servers'
lines (``psdist.logs``), and the worker's step. ``peer`` names the one member or address that a message is about.

``psdist.init()`` installs the handler in the main thread, unless the script has a handler of its own. The handler
raises nothing, because CPython drops an exception that is raised inside a finalizer or a callback of C code. It sets a
flag and wakes psdist's loop, which coordinates the shutdown of the clients (``WorkerShutdown``). When they may leave,
calls under way are cancelled, and that call or the next one raises SystemExit. If the script makes no call for 10 s,
the signal is sent again, and then the handler raises. So does a second signal from outside, unless it comes together
with the first one: an engine such as Slurm signals all processes of a job, and the launcher passes the signal on.

The loop also reads signals from a pipe that C code writes to, so it sees a signal even while the interpreter is busy in
a long call of the script. This module also decides the reason that a leaving worker reports.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import math
import os
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from types import FrameType, TracebackType
from typing import Final, Protocol

from psdist.errors import ClosedError
from psdist.settings import exit_codes
from psdist.settings.debugging import has_left_debugger, is_debugged
from psdist.settings.launcher_reports import report_error, report_steps

_FULL: Final = "PSDIST_FULL_TRACEBACK"
#: Folders of the standard library and of installed packages, also in a virtual environment.
_LIBRARIES: Final = (
    "<frozen ",
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)


def shorten_tracebacks_alone() -> None:
    """Install the hook in a process without a launcher, unless it has a hook of its own."""
    if sys.excepthook is sys.__excepthook__:
        shorten_tracebacks()
        atexit.register(_Ending(os.getpid()).end_by_signal)


def shorten_tracebacks() -> None:
    """Install the hook."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if is_debugged() and has_left_debugger(error):
            return  # The user knows, and the launcher says that the run ends.
        if os.environ.get(_FULL, "0") in ("", "0"):
            shorten(error)
        with _sigterm_delayed():
            previous(kind, error, error.__traceback__)

    sys.excepthook = hook


@contextmanager
def _sigterm_delayed() -> Iterator[None]:
    """Delay SIGTERM until a traceback is printed: if several workers fail together, the first one's end stops all."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: arrived.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
        if arrived:
            signal.raise_signal(signal.SIGTERM)


def shorten(error: BaseException) -> None:
    """Remove psdist's frames from the tracebacks of ``error`` and of its causes, and note their number."""
    hidden = 0
    for each in chain(error):
        frames = list(_frames(each.__traceback__))
        kept = _outside(frames)
        # Of errors raised in psdist, only its own classes are clear without the frame.
        if _is_understood(each) or (kept and kept[-1] is frames[-1]):
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
    # The worker of a function that psdist.launch() runs is a module of psdist.
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    name = "" if spec is None else spec.name
    kept, inside = [], name.startswith("psdist.")
    for frame in frames:
        code = frame.tb_frame.f_code
        # By module instead of file: the methods of a dataclass have no file.
        module = frame.tb_frame.f_globals.get("__name__", "")
        module = name if module == "__main__" else module
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


# --- exit status ------------------------------------------------------------------------------------------------------


def choose_exit_status() -> None:
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
        self._is_interrupted = False

    def choose_status(self) -> None:
        if os.getpid() == self._pid:
            error = self._last_error()
            self._status = 0 if error is None else status_of(error)
            if error is not None and not self._status:
                report_error(error)
            if error is None:
                report_steps()

    def end_by_signal(self) -> None:
        # An interactive session has survived its last error.
        if os.getpid() == self._pid and not hasattr(sys, "ps1"):
            self._last_error()

    def _last_error(self) -> BaseException | None:
        """Return the error that ended the script. After Ctrl-C the process is to end by the signal: Python does so
        itself, unless text is compiled meanwhile (``importing``)."""
        error = _uncaught(getattr(sys, "last_value", None), getattr(sys, "last_traceback", None))
        self._is_interrupted = isinstance(error, KeyboardInterrupt)
        return error

    def __del__(self) -> None:
        if self._status or self._is_interrupted:
            for stream in (sys.stdout, sys.stderr):
                with suppress(AttributeError, OSError, ValueError):  # None, a broken pipe, or closed.
                    stream.flush()
            if self._is_interrupted:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                signal.raise_signal(signal.SIGINT)
            os._exit(self._status)


def _uncaught(error: BaseException | None, trace: TracebackType | None) -> BaseException | None:
    """Return the last error that the interpreter printed, if it ended the script.

    Libraries in C also print exceptions of their callbacks in this way, and continue: their traceback begins in a
    function that was called by another.
    """
    # A script that cannot be compiled has no frame.
    is_outermost = isinstance(error, SyntaxError) if trace is None else trace.tb_frame.f_back is None
    # A debugger may raise its own when the outermost frame has just returned.
    return error if is_outermost or (error is not None and has_left_debugger(error)) else None


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


# --- log lines --------------------------------------------------------------------------------------------------------

_logger = logging.getLogger("psdist")


def print_line(text: str) -> None:
    """Print a line on standard error. If that fails, as on a full disk, the line is lost and the program continues.

    Python's own stream would keep the line, try again at the script's end, and change its exit status to 120.
    """
    stream = sys.stderr
    if stream is None:  # ``print`` would take standard output.
        return
    own = sys.__stderr__
    with suppress(Exception):
        if own is None or stream is not own:  # A notebook's, or a test's.
            print(text, file=stream, flush=True)
            return
        own.flush()
        os.write(own.fileno(), f"{text}\n".encode(own.encoding, "backslashreplace"))


#: Returns the fields of this process's open client: run, id, incarnation and step.
_fields: Callable[[], Mapping[str, str | int | None]] = dict


def identify_log(fields: Callable[[], Mapping[str, str | int | None]]) -> None:
    """Set the function that returns the identity of this worker."""
    global _fields
    _fields = fields


class _JsonFormatter(logging.Formatter):
    """One JSON object per message, with the fields of the servers' lines."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"event": record.getMessage(), "level": record.levelname.lower(), "logger": record.name}
        line["timestamp"] = datetime.fromtimestamp(record.created, UTC).isoformat().replace("+00:00", "Z")
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if peer := getattr(record, "peer", ""):
            line["peer"] = peer
        known = {name: value for name, value in _fields().items() if value not in ("", None)}
        return json.dumps({**line, "role": "worker", **known})


class _DefaultHandler(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        as_json = os.environ.get("PSDIST_LOG_FORMAT") == "json"
        console = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S")
        self.setFormatter(_JsonFormatter() if as_json else console)

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers or _logger.handlers != [self]:
            return
        try:
            print_line(self.format(record))
        except Exception:  # As in all handlers: a message that cannot be formatted must not end a training.
            self.handleError(record)


_handler = _DefaultHandler()


def install_log() -> None:
    """Add the handler to the ``psdist`` logger; a second call changes nothing."""
    _logger.addHandler(_handler)


EXIT_STATUS: Final = 128 + signal.SIGTERM
#: Seconds after which the signal is sent again to a script that should end and makes no call.
AGAIN_SECONDS: Final = 10.0
#: Signals within this time in seconds are one request. A launcher whose worker failed repeats the signal after 0.5 s.
TOGETHER_SECONDS: Final = 0.4
_READ_BYTES: Final = 4096


class StoppableClient(Protocol):
    """The part of an open client that the handler needs."""

    async def request_stop(self) -> None:
        """Return when this worker may leave."""

    def watch_signals(self, is_asked: Callable[[], bool]) -> None:
        """Register a function that the client calls before it reports whether this worker received SIGTERM."""


class SigtermHandler:
    """State of SIGTERM in this process."""

    def __init__(self) -> None:
        #: SIGTERM was received.
        self.asked = False
        #: The script must end: the next call raises SystemExit.
        self.leaving = False
        #: SystemExit was raised.
        self.raised = False
        #: SystemExit was raised by a call, so it reached the script. One that a handler raises may be lost.
        self._raised_by_call = False
        #: psdist's own work at the interpreter's exit is under way.
        self._exiting = False
        self._signals = 0
        self._signalled_at = -math.inf
        self._loop: asyncio.AbstractEventLoop | None = None
        self._clients: Callable[[], Sequence[StoppableClient]] = tuple
        self._give_up: Callable[[], None] = lambda: None
        self._pipe = -1
        #: Signal mask of each thread before it forked.
        self._masks = threading.local()
        self._task: asyncio.Task[None] | None = None

    def install(
        self,
        loop: asyncio.AbstractEventLoop,
        clients: Callable[[], Sequence[StoppableClient]],
        give_up: Callable[[], None],
    ) -> None:
        """Install the handler, unless the script has one of its own or this is not the main thread.

        loop: runs in another thread.
        clients: returns the open clients.
        give_up: cancels all calls under way; called on the loop.
        """
        in_main_thread = threading.current_thread() is threading.main_thread()
        if not in_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        self.attach(loop, clients, give_up)
        signal.signal(signal.SIGTERM, self.on_signal)
        os.register_at_fork(before=self._block, after_in_parent=self._unblock, after_in_child=self._in_fork)
        self._pipe, written = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        others = signal.set_wakeup_fd(written, warn_on_full_buffer=False)
        if others != -1:  # Another reader of signals exists: only the handler remains.
            signal.set_wakeup_fd(others, warn_on_full_buffer=False)
            os.close(written)
            os.close(self._pipe)
            self._pipe = -1
        loop.call_soon_threadsafe(self._watch)

    def attach(
        self,
        loop: asyncio.AbstractEventLoop,
        clients: Callable[[], Sequence[StoppableClient]],
        give_up: Callable[[], None],
    ) -> None:
        """Set the targets of the handler without installing it. Arguments as in ``install``."""
        self._loop, self._clients, self._give_up = loop, clients, give_up

    def _block(self) -> None:
        """Block SIGTERM before a fork. Until ``_in_fork`` runs, the child would write to this process's pipe."""
        self._masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def _unblock(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._masks.before)

    def _in_fork(self) -> None:
        """Restore the default handling of signals in a forked child."""
        self.restore_default()
        self._unblock()

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """Ignore SIGTERM and Ctrl-C during psdist's own work at the interpreter's exit, which takes seconds.

        Python would only print an exception that is raised there, and the work would be left undone.
        """
        interrupt = signal.getsignal(signal.SIGINT)
        in_main_thread = threading.current_thread() is threading.main_thread()
        self._exiting = True
        if in_main_thread and interrupt is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            yield
        finally:
            self._exiting = False
            if in_main_thread and interrupt is signal.default_int_handler:
                signal.signal(signal.SIGINT, interrupt)

    def restore_default(self) -> None:
        """Restore the default handling, so that SIGTERM ends a script whose own callbacks at exit take too long."""
        if self._pipe >= 0:
            signal.set_wakeup_fd(-1)
        if signal.getsignal(signal.SIGTERM) == self.on_signal:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def check(self, *, reading: bool = False) -> None:
        """Raise SystemExit in the main thread, and ClosedError in others, once the script must end.

        Calls that only read are allowed after SystemExit was raised, so that a script can save its results.
        """
        if not self.leaving or (reading and self.raised):
            return
        if threading.current_thread() is threading.main_thread():
            self._raised_by_call = True
            self._exit()
        raise ClosedError("this worker is being stopped: no more calls are possible")

    def reason(self, error: BaseException | None = None) -> str:
        """Return why a worker leaves: "stopped" (before its work was done), "failed" or "closed"."""
        if self.asked:
            return "stopped"
        # Python stores the exception that ends the interpreter here.
        failed = error if error is not None else getattr(sys, "last_value", None)
        # A script that ends by sys.exit() has not failed: its launcher does not restart it.
        done = failed is None or (isinstance(failed, SystemExit) and not failed.code)
        return "closed" if done else "failed"

    # --- in the main thread -------------------------------------------------------------------------------------------

    def on_signal(self, signum: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        if self._exiting:
            return
        self.asked = True
        self._count()
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._begin)
        if self._signals > 1 or not self._clients():
            self._exit()

    def _count(self) -> None:
        """Count a request to end. While the interpreter exits each signal counts, since nothing waits for agreement."""
        now = time.monotonic()
        if now - self._signalled_at >= TOGETHER_SECONDS or not threading.main_thread().is_alive():
            self._signals += 1
            self._signalled_at = now

    def _exit(self) -> None:
        """End the script: by SystemExit, or, if it has ended and other code runs at the interpreter's exit, by the
        signal's default. Python would only print an exception there."""
        if not threading.main_thread().is_alive():
            self.restore_default()
            signal.raise_signal(signal.SIGTERM)
        self.raised = True
        raise SystemExit(EXIT_STATUS)

    # --- on the loop --------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        if self._pipe >= 0 and self._loop is not None:
            self._loop.add_reader(self._pipe, self.read_signals)

    def read_signals(self) -> bool:
        """Return True if SIGTERM has arrived, even if the interpreter has not handled it yet."""
        with suppress(BlockingIOError):
            came = self._pipe >= 0 and signal.SIGTERM in os.read(self._pipe, _READ_BYTES)
            # The script may have replaced the handler.
            if came and signal.getsignal(signal.SIGTERM) == self.on_signal:
                self._begin()
        return self.asked

    def _begin(self) -> None:
        self.asked = True
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._end(), name="psdist SIGTERM")

    async def _end(self) -> None:
        await asyncio.gather(*(client.request_stop() for client in self._clients()), return_exceptions=True)
        self.leaving = True
        self._give_up()
        while True:
            await asyncio.sleep(AGAIN_SECONDS)
            if self._raised_by_call:  # The script is ending, and may take its time.
                return
            self._signal_again()

    async def close(self) -> None:
        """Stop watching the pipe, and no longer send the signal again. Call it before the loop ends."""
        if self._pipe >= 0 and self._loop is not None:
            self._loop.remove_reader(self._pipe)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _signal_again(self) -> None:
        main = threading.main_thread().ident
        if main is not None:
            signal.pthread_kill(main, signal.SIGTERM)


sigterm: Final = SigtermHandler()
