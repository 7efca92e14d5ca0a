"""``psdist.launch``: a run on this machine, started by a Python program.

It is ``psdist run`` in a child process, with the same settings. A function is run as a module that imports it by its
name (``function_calls``). The caller may have any number of threads, a running event loop, and streams that are no
files, as in a notebook. So the launcher does not run in it, and the child's output goes to this program's
``sys.stdout`` and ``sys.stderr``. The child ends the run when its lifeline breaks: a pipe that this process holds, and
no process that it forks.
"""

from __future__ import annotations

import codecs
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final, Self

from psdist.errors import (
    ConfigurationError,
    InvalidArgumentError,
    LaunchFailedError,
    PsdistError,
    WaitTimeoutError,
)
from psdist.launcher.function_calls import WORKER_MODULE, read_values, write_call
from psdist.launcher.local import PROGRAM, LocalSettings
from psdist.launcher.plan import program
from psdist.launcher.process import Lifeline
from psdist.settings import exit_codes, own_process
from psdist.settings.flags import CommandLine, flags_of, read
from psdist.settings.foreign_flags import OF_RUN, as_arguments
from psdist.settings.launcher_reports import RunReport

_DIRECTORY_PREFIX: Final = "psdist-launch-"
_REPORT: Final = "report.json"
#: Flags of ``psdist run`` that ``launch`` uses itself.
_OWN: Final = ("lifeline_fd", "report_file", "debug_worker")
#: Flags for kinds of scripts, which do not apply to a function.
_OF_SCRIPTS: Final = ("module", "no_python")


@dataclass(frozen=True, slots=True)
class LaunchResult:
    """A run that succeeded.

    run_id: name of the run.
    status: exit status of the run, which is 0.
    returned: return values of the function by rank; empty for a script.
    """

    run_id: str
    status: int
    returned: Mapping[int, Any] = field(default_factory=dict)


def launch(
    target: str | os.PathLike[str] | Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    timeout: float | None = None,
    **settings: Any,
) -> LaunchResult:
    """Run a script or a function with its own scheduler, servers and workers on this machine, and return when all have
    ended.

        psdist.launch("train.py", args=["--epochs", 3], nproc_per_node=4, nservers=2)
        result = psdist.launch(work.train, args=[0.1], nproc_per_node=4)
        result.returned[0]

    target: path of a script; or a function that each worker calls, which is defined at the top level of a module and
        found there by its name in a new process.
    args: arguments of the script, or positional arguments of the function. Those of a function are None, numbers, text,
        numpy arrays, and lists, tuples and dicts of them, as are its return values.
    kwargs: keyword arguments of the function.
    timeout: seconds after which the run is ended.
    settings: flags of ``psdist run`` with underscores, such as ``max_restarts=0``; docs/flags.md lists them. Values are
        numbers, text or paths, True for switches, and lists for flags with commas.

    The output of all processes goes to ``sys.stdout`` and ``sys.stderr``. Ctrl-C ends the run in order, and then raises
    KeyboardInterrupt. Nothing keeps running after this call, nor if this process dies.

    Raises ConfigurationError for wrong settings and functions that cannot be imported, InvalidArgumentError for
    arguments that cannot be passed on, before anything is started; LaunchFailedError with the traceback of the worker
    that failed first; WaitTimeoutError.
    """
    _check_outside()
    own_process.require_working_directory()
    if timeout is not None and not timeout > 0:
        raise InvalidArgumentError(f"timeout={timeout!r:.40} is not possible: pass seconds above 0, or None")
    directory = own_process.make_private_directory(_DIRECTORY_PREFIX)
    try:
        flags, command = _command(target, args, kwargs, settings, directory)
        argv = (*program("psdist"), "run", *flags, f"--report-file={directory / _REPORT}")
        with RunProcess(argv, ("--", *command)) as process:
            status = process.run_to_end(timeout)
            report = RunReport.read(directory / _REPORT)
            if status != 0 or report is None:
                raise _failure(status, report, process.last_words, timeout)
        return LaunchResult(report.run_id, status, read_values(directory))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _check_outside() -> None:
    # A script that launches itself, or a module that launches when it is imported, would start runs without end.
    if os.environ.get("PSDIST_CONNECTED_FILE"):
        raise ConfigurationError(
            "psdist.launch() is called in a worker of a run, where it would start another: call it only in the program "
            "that starts the run, under 'if __name__ == \"__main__\":'"
        )


def _command(
    target: str | os.PathLike[str] | Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    settings: Mapping[str, Any],
    directory: Path,
) -> tuple[list[str], tuple[str, ...]]:
    """Return the flags of ``psdist run``, and the script with its arguments. Writes a function's call."""
    if isinstance(target, str | os.PathLike):
        if kwargs:
            raise InvalidArgumentError(f"kwargs= are for a function, and {os.fspath(target)} is a script: use args=")
        command = (os.fspath(target), *map(_argument, args))
    elif callable(target):
        if given := [name for name in _OF_SCRIPTS if settings.get(name)]:
            raise InvalidArgumentError(f"{given[0]}= is for scripts, and the target is a function: leave it out")
        write_call(directory, target, args, kwargs or {})
        command = (WORKER_MODULE, str(directory))
        settings = {**settings, "module": True}
    else:
        raise InvalidArgumentError(
            f"the target {target!r:.80} is neither a path nor a function: pass one, such as train.py"
        )
    return _flags(settings, command), command


def _argument(value: Any) -> str:
    if isinstance(value, str | os.PathLike):
        return os.fspath(value)
    if isinstance(value, int | float):
        return str(value)
    raise InvalidArgumentError(
        f"the argument {value!r:.80} of the script is {type(value).__name__}: pass text, numbers or paths"
    )


def _flags(settings: Mapping[str, Any], command: tuple[str, ...]) -> list[str]:
    """Return the flags of ``psdist run`` for these settings. Raises ConfigurationError if it would refuse them."""
    known = {flag.dest: flag for flag in flags_of(LocalSettings) if flag.dest not in _OWN}
    line = CommandLine("psdist.launch", "", tuple(known.values()), elsewhere=OF_RUN)
    texts = {name: _text(value) for name, value in settings.items() if value is not None and value is not False}
    for flag in known.values():
        if (former := flag.former.lstrip("-")) in texts:
            texts[flag.dest] = texts.pop(former)
    for name in texts:
        if name not in known:
            instead = as_arguments(line.instead(f"--{name.replace('_', '-')}"), known)
            raise ConfigurationError(f"psdist.launch() has no argument {name}{instead}")
    try:
        # Variables of this program hold, too, as for psdist run.
        values = line.values(texts, os.environ)
        read(LocalSettings, Namespace(**values), command=command).check()
    except InvalidArgumentError as error:
        raise ConfigurationError(as_arguments(str(error), known)) from None
    switched = [known[name].name for name in texts if values[name] is True]
    return switched + [f"{known[name].name}={text}" for name, text in texts.items() if known[name].convert is not None]


def _text(value: Any) -> str:
    """Return a value as it is written on a command line."""
    if value is True:
        return "1"
    if isinstance(value, str | os.PathLike):
        return os.fspath(value)
    if isinstance(value, Iterable) and not isinstance(value, Mapping):
        return ",".join(map(_text, value))
    return str(value)


def _failure(status: int | None, report: RunReport | None, last_words: str, timeout: float | None) -> PsdistError:
    if status is None:
        return WaitTimeoutError(f"the run did not end within timeout={timeout:g} s, and was ended")
    names = [flag.dest for flag in flags_of(LocalSettings)]
    if report is None and status == exit_codes.USAGE:  # Such as a run of the same name, or a storage of another run.
        words = last_words.partition(f"{PROGRAM}: error: ")[2].partition("\nTry: ")[0]
        return ConfigurationError(as_arguments(words or last_words, names))
    if report is None:
        return LaunchFailedError(f"psdist run ended with exit status {status}:\n{last_words}", status=status)
    traceback = "\n".join(report.lines)
    said = as_arguments(report.message, names)
    message = "\n".join(filter(None, (said or f"the run ended with exit status {status}", traceback)))
    details: dict[str, object] = {"status": status, "traceback": traceback}
    if report.rank is not None:
        details["rank"] = report.rank
    return LaunchFailedError(message, **details)


_READ_BYTES: Final = 64 << 10
_SHOWN_LINES: Final = 5


class RunProcess:
    """A running ``psdist run``. Leaving its ``with`` block ends it.

    argv, words: parts of the command line; ``--lifeline-fd`` comes between them.
    """

    def __init__(self, argv: Sequence[str], words: Sequence[str]) -> None:
        self._lifeline = Lifeline()
        inherited = self._lifeline.end_of_children
        try:
            self._process = subprocess.Popen(
                [*argv, f"--lifeline-fd={inherited}", *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(inherited,),
                start_new_session=True,  # Ctrl-C of a terminal reaches only the caller, who passes it on.
            )
        except BaseException:
            self._lifeline.close()
            raise
        finally:
            self._lifeline.started()
        self._selector = selectors.DefaultSelector()
        for name in ("stdout", "stderr"):
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            self._selector.register(getattr(self._process, name), selectors.EVENT_READ, (name, decoder))
        self._last: deque[str] = deque(maxlen=_SHOWN_LINES)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._lifeline.close()
        self._selector.close()
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()
        try:
            self._process.wait()
        except BaseException:  # Another Ctrl-C. The launcher's reaper kills the rest.
            self._process.kill()
            self._process.wait()
            raise

    @property
    def last_words(self) -> str:
        """The last lines of standard error, which say why a launcher did not start."""
        return "\n".join(self._last)

    def run_to_end(self, timeout: float | None = None) -> int | None:
        """Show the output until the run has ended; returns its exit status.

        timeout: seconds after which the run is ended in order; then the result is None.

        Raises KeyboardInterrupt once the run has ended after Ctrl-C. Each further one is passed on, too.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        interrupt: KeyboardInterrupt | None = None
        timed_out = False
        while self._selector.get_map():
            try:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                for key, _ in self._selector.select(left):
                    self._pass_on(key)
                if deadline is not None and time.monotonic() >= deadline:
                    deadline, timed_out = None, True
                    self._process.send_signal(signal.SIGTERM)
            except KeyboardInterrupt as error:
                interrupt = error
                self._process.send_signal(signal.SIGINT)
        status = self._process.wait()
        if interrupt is not None:
            raise interrupt
        return None if timed_out else status

    def _pass_on(self, key: selectors.SelectorKey) -> None:
        stream: IO[bytes] = key.fileobj  # type: ignore[assignment]  # registered above
        name, decoder = key.data
        data = os.read(stream.fileno(), _READ_BYTES)
        text = decoder.decode(data, final=not data)
        if not data:
            self._selector.unregister(stream)
        if name == "stderr":
            self._last.extend(line for line in text.splitlines() if line)
        target = sys.stdout if name == "stdout" else sys.stderr
        target.write(text)
        target.flush()
