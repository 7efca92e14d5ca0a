"""The output of a run: the lines of its processes with a prefix, log files, and the launcher's own messages.

The lines of a process go to the stream that they came from, after a prefix such as ``[worker 0]``, and with a log
directory also to a file of the process. Its last lines are kept. If the process fails and the console did not show
them, they are printed at the end. With ``--log-format json`` every line is a JSON object instead, of this program, too.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Final, TextIO

from psdist.errors import ConfigurationError
from psdist.launcher.events import ProcessKey
from psdist.machine import make_directory
from psdist.settings.flags import torchrun_setting
from psdist.settings.programs import OUTPUT_TITLE

_TAIL_LINES: Final = 200
_SHOWN_LINES: Final = 15
_TRACEBACK_LINES: Final = 60
_TRACEBACK: Final = "Traceback (most recent call last):"
_WORKER_COLOURS: Final = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)
_SERVICE_COLOUR: Final = 90
_ERROR_COLOUR: Final = 31

#: The line by which scheduler and workers log the loss of a member, and the seconds for which they may repeat it.
_LOSS: Final = re.compile(r" WARNING psdist(?:\.scheduler)?: (\S+) is lost: ")
_SAME_LOSS_SECONDS: Final = 30.0
#: An error that a process of psdist logs.
_ERROR: Final = re.compile(r"[0-9:]{8} (?:ERROR|CRITICAL) psdist")

#: Returns to the beginning of the line, and erases it.
_ERASE: Final = "\r\x1b[K"
#: Erases the line above this one.
_ERASE_ABOVE: Final = "\x1b[A\x1b[K"
#: Colours and movements of the cursor, in the text of others.
_ESCAPES: Final = re.compile(r"\x1b\[[0-9;?]*[@-~]")
#: Width of a terminal that does not report one.
_COLUMNS: Final = 80

STDOUT, STDERR = 1, 2
_TITLES: Final = {STDOUT: "standard output", STDERR: "standard error"}
_STREAMS: Final = {STDOUT: "stdout", STDERR: "stderr"}


def _mask(masks: Mapping[int | None, int], local_rank: int) -> int:
    return masks.get(local_rank, masks.get(None, 0))


def parse_streams(value: str) -> dict[int | None, int]:
    """Parse torchrun's ``-r`` and ``-t``: ``3``, or ``0:3,1:2`` by local rank. Raises ConfigurationError."""
    masks: dict[int | None, int] = {}
    for item in value.split(","):
        rank, separator, streams = item.rpartition(":")
        if (
            streams not in ("0", "1", "2", "3")
            or (separator and not rank.isdigit())
            or (not separator and "," in value)
        ):
            raise ConfigurationError(
                f"{value!r} is not understood: write 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or LOCAL_RANK:N,..."
            )
        masks[int(rank) if separator else None] = int(streams)
    return masks


def parse_ranks(value: str) -> frozenset[int]:
    """Parse local ranks, separated by commas. Raises ConfigurationError."""
    items = [item.strip() for item in value.split(",")]
    if not all(item.isascii() and item.isdigit() for item in items):
        raise ConfigurationError(f"{value!r} is not understood: write local ranks separated by commas, such as 0,2")
    return frozenset(int(item) for item in items)


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Destinations of the workers' output.

    Streams are 1, 2 or 3 (both), by local rank; the key None is for all others. With a directory and neither redirects
    nor tee, everything goes to both. Raises ConfigurationError for redirects without a directory.
    """

    log_dir: Path | None = torchrun_setting(
        "--log-dir",
        "also write each process's lines to DIR/RUN_ID/worker-0.log and so on, and metrics that scripts report to "
        "metrics.jsonl", Path, None, "DIR", group=OUTPUT_TITLE,
    )  # fmt: skip
    redirects: Mapping[int | None, int] = torchrun_setting(
        "--redirects", "streams that go to --log-dir only: 1, 2 or 3 (both), or LOCAL_RANK:N,...", parse_streams, {},
        "N", short="-r", group=OUTPUT_TITLE,
    )  # fmt: skip
    tee: Mapping[int | None, int] = torchrun_setting(
        "--tee", "streams that go to --log-dir and the console, as above", parse_streams, {}, "N", short="-t",
        group=OUTPUT_TITLE,
    )  # fmt: skip
    local_ranks_filter: frozenset[int] | None = torchrun_setting(
        "--local-ranks-filter", "show only these local ranks' lines on the console", parse_ranks, None, "RANKS",
        group=OUTPUT_TITLE,
    )  # fmt: skip

    def __post_init__(self) -> None:
        if self.log_dir is None and any({**self.redirects, **self.tee}.values()):
            raise ConfigurationError("-r/--redirects and -t/--tee write files: say where with --log-dir DIR")

    def to_file(self, local_rank: int | None, stream: int) -> bool:
        """Return True if a stream is written to the file of its process."""
        if self.log_dir is None:
            return False
        if local_rank is None or not (self.redirects or self.tee):
            return True
        return bool((_mask(self.redirects, local_rank) | _mask(self.tee, local_rank)) & stream)

    def to_console(self, local_rank: int | None, stream: int) -> bool:
        """Return True if a stream is shown on the console."""
        if local_rank is None:
            return True
        if self.local_ranks_filter is not None and local_rank not in self.local_ranks_filter:
            return False
        only_file = _mask(self.redirects, local_rank) & ~_mask(self.tee, local_rank)
        return not only_file & stream


class Output:
    """Console and files of one run. Output that cannot be written is lost and reported once; it never ends the
    training.

    local_rank: maps a worker's rank to its place on this node.
    as_json: True to write each line as a JSON object.
    """

    def __init__(
        self,
        routing: Routing,
        local_rank: Callable[[int], int],
        worker_label: str = "worker",
        mute_stopping_services: bool = True,
        as_json: bool = False,
    ) -> None:
        self._as_json = as_json
        self.directory = routing.log_dir
        self._routing = routing
        self._local_rank = local_rank
        self._worker_label = worker_label
        #: Called once the reader of a stream is gone.
        self.on_broken: Callable[[], None] = lambda: None
        self._mute_stopping_services = mute_stopping_services
        #: True once the run ends: from then on servers and scheduler only report that their peers end.
        self.stopping = False
        self._files: dict[ProcessKey, IO[str]] = {}
        self._broken = False
        self._lossy: set[int] = set()
        self._unwritable: set[ProcessKey] = set()
        self._tails: dict[ProcessKey, deque[tuple[int, str]]] = {}
        #: When the console showed the loss of a member, by its id.
        self._losses: dict[str, float] = {}
        #: True to show no line in place.
        self.is_plain = False
        #: The lines shown below all others on a terminal: a progress bar of the first worker's script, and the
        #: launcher's own. ``_drawn``: the number of those that it shows now.
        self._bar = self._progress = ""
        self._drawn = 0
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")
        if routing.log_dir is not None:
            make_directory(routing.log_dir)

    def say(self, message: str, *, is_error: bool = False) -> None:
        """Print a message of the launcher to standard error; an error is red on a terminal."""
        self._write(STDERR, self._said(message, is_error=is_error) + "\n")

    def _said(self, message: str, *, is_error: bool = False) -> str:
        if self._as_json:
            return said_as_json(message, "error" if is_error else "info")
        return _coloured(stamped(message), _ERROR_COLOUR, STDERR) if is_error else stamped(message)

    def note_loss(self, member_id: str) -> bool:
        """Note that the console shows the loss of a member. Returns False if it did so a moment ago."""
        now = time.monotonic()
        is_news = now - self._losses.get(member_id, -math.inf) >= _SAME_LOSS_SECONDS
        if is_news:
            self._losses[member_id] = now
        return is_news

    @property
    def is_terminal(self) -> bool:
        """True if standard error is a terminal on which ``show_progress`` can replace a line."""
        return not (self.is_plain or self._as_json) and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    def show_progress(self, message: str) -> None:
        """Show a message below all other lines of a terminal, replacing the previous one. It is cut off at the
        terminal's width. An empty message removes it."""
        self._progress = stamped(message) if message else ""
        self._write(STDERR, "")

    def show_bar(self, key: ProcessKey, bar: str) -> None:
        """Show the state of a progress bar of a process in place, if it is the first worker of this terminal. That of
        any other is shown as a line when it has ended."""
        if not self.is_terminal or key.role != "worker" or self._local_rank(key.number) != 0:
            return
        shown = f"[{self._worker_label} {key.number}] {_ESCAPES.sub('', bar)}" if bar.strip() else ""
        if shown != self._bar and self._routing.to_console(0, STDERR):
            self._bar = shown
            self._write(STDERR, "")

    def clear_lines(self, key: ProcessKey) -> None:
        """Clear the kept lines of a process that is being started or restarted."""
        self._tails[key] = deque(maxlen=_TAIL_LINES)

    def show_lines(self, key: ProcessKey, stream: int, lines: list[str]) -> None:
        """Show, file and keep lines of a process."""
        self._tails[key].extend((stream, line) for line in lines)
        rank = self._local_rank(key.number) if key.role == "worker" else None
        muted = self.stopping and self._mute_stopping_services and key.role in ("server", "scheduler")
        if self._routing.to_console(rank, stream) and not muted:
            prefix = "" if self._as_json else self._prefix(key, stream)
            news = [line for line in lines if not (loss := _LOSS.search(line)) or self.note_loss(loss[1])]
            shown = [
                line_as_json(key, stream, line) if self._as_json else f"{prefix} {_reddened(line, stream)}"
                for line in news
            ]
            self._write(stream, "".join(f"{line}\n" for line in shown))
        if self._routing.to_file(rank, stream):
            self._append(key, lines)

    def report(self, key: ProcessKey) -> None:
        """Show why a process failed, from lines that the console did not show: its traceback if it printed one, else
        its last lines."""
        rank = self._local_rank(key.number) if key.role == "worker" else None
        hidden = frozenset(stream for stream in (STDOUT, STDERR) if not self._routing.to_console(rank, stream))
        if shown := self.last_words(key, hidden):
            self.say(f"last lines of {key}:")
            lines = [line_as_json(key, STDERR, line) if self._as_json else f"  | {line}" for line in shown]
            self._write(STDERR, "".join(f"{line}\n" for line in lines))

    def last_words(self, key: ProcessKey, streams: Iterable[int] = (STDOUT, STDERR)) -> list[str]:
        """Return the lines that show why a process failed, from what it wrote to ``streams``."""
        return last_words(list(self._tails.get(key, ())), frozenset(streams))

    def close(self) -> None:
        """Close the files, and discard lines that the console did not accept."""
        files, self._files = self._files, {}
        for key, file in files.items():
            try:
                file.close()
            except OSError as error:
                self._warn_of_file(key, error)
        for stream in self._lossy:
            target = _target(stream)
            try:
                target.flush()
            except (OSError, ValueError):
                # Otherwise the same error would recur at interpreter exit and change the exit status.
                discard(target)

    def _append(self, key: ProcessKey, lines: list[str]) -> None:
        if key in self._unwritable:
            return
        try:
            file = self._file(key)
            file.writelines(line + "\n" for line in lines)
            file.flush()
        except OSError as error:
            self._warn_of_file(key, error)

    def _warn_of_file(self, key: ProcessKey, error: OSError) -> None:
        if key not in self._unwritable:
            self._unwritable.add(key)
            self.say(f"the log file of {key} can no longer be written: {error.strerror}")

    def _file(self, key: ProcessKey) -> IO[str]:
        if key not in self._files:
            assert self.directory is not None
            path = self.directory / (str(key).replace(" ", "-") + ".log")
            self._files[key] = path.open("a", encoding="utf-8", errors="backslashreplace")
        return self._files[key]

    def _prefix(self, key: ProcessKey, stream: int) -> str:
        name = str(key) if key.role != "worker" else f"{self._worker_label} {key.number}"
        worker = key.role == "worker"
        colour = _WORKER_COLOURS[key.number % len(_WORKER_COLOURS)] if worker else _SERVICE_COLOUR
        return _coloured(f"[{name}]", colour, stream)

    def _write(self, stream: int, text: str) -> None:
        target = _target(stream)
        below = [line[: _columns() - 1] for line in (self._bar, self._progress) if line]
        if (below or self._drawn) and target.isatty():
            text = _ERASE + _ERASE_ABOVE * max(0, self._drawn - 1) + text + "\n".join(below)
            self._drawn = len(below)
        if not text:
            return
        try:
            target.write(text)
            target.flush()
        except (BrokenPipeError, ValueError):
            # The reader is gone (psdist run ... | head): end the run, as any program would end.
            if not self._broken:
                self._broken = True
                self.on_broken()
        except OSError as error:
            # The disk is full, or the terminal is gone.
            if stream not in self._lossy:
                self._lossy.add(stream)
                message = f"{_TITLES[stream]} cannot be written: {error.strerror}; lines are lost"
                self._write(STDERR if stream == STDOUT else STDOUT, self._said(message) + "\n")


def _reddened(line: str, stream: int) -> str:
    return _coloured(line, _ERROR_COLOUR, stream) if _ERROR.match(line) else line


def _coloured(text: str, colour: int, stream: int) -> str:
    if not _target(stream).isatty() or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{colour}m{text}\x1b[0m"


def _target(stream: int) -> TextIO:
    return sys.stdout if stream == STDOUT else sys.stderr


def discard(stream: TextIO) -> None:
    """Redirect a stream, and the data it still buffers, to /dev/null."""
    # Streams of tests and notebooks may have no descriptor.
    with contextlib.suppress(OSError, ValueError):
        target = stream.fileno()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, target)
        os.close(null)


def _columns() -> int:
    """Return the width of the terminal in characters."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or _COLUMNS
    except (OSError, ValueError):
        return _COLUMNS


def stamped(message: str) -> str:
    """Return a launcher message as a line with the time."""
    return f"{time.strftime('%H:%M:%S')} psdist: {message}"


def said_as_json(message: str, level: str = "info") -> str:
    """Return a launcher message as a JSON object, with the fields of the servers' lines."""
    line = {"event": message, "level": level, "logger": "psdist.launcher", "timestamp": _now(), "role": "launcher"}
    return json.dumps(line)


def line_as_json(key: ProcessKey, stream: int, line: str) -> str:
    """Return a line of a process as a JSON object. The fields of a line that already is one stay."""
    fields: dict[str, object] = {"role": key.role}
    if key.role in ("worker", "server"):
        fields[key.role] = f"{key.role}-{key.number}"
    if key.role == "worker":
        fields["rank"] = key.number
    fields["stream"] = _STREAMS[stream]
    with contextlib.suppress(ValueError):
        if line.startswith("{") and isinstance(own := json.loads(line), dict):
            return json.dumps(fields | own)
    return json.dumps({"message": line, "timestamp": _now(), **fields})


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def last_words(tail: list[tuple[int, str]], hidden: frozenset[int]) -> list[str]:
    """Return the lines that show why a process failed, from its last (stream, line) pairs. Only streams that are
    ``hidden`` from the console count."""
    errors = [line for stream, line in tail if stream == STDERR]
    starts = [number for number, line in enumerate(errors) if line.lstrip().startswith(_TRACEBACK)]
    if starts:
        # Start at the first one that is kept: chained tracebacks print the cause first. All later lines belong to it.
        return errors[starts[0] :][-_TRACEBACK_LINES:] if STDERR in hidden else []
    return [line for stream, line in tail if stream in hidden][-_SHOWN_LINES:]
