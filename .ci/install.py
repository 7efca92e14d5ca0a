"""Run pip install and show its progress: ``python .ci/install.py WHAT ARGUMENT...``, with arguments of pip install.

Prints each large download with its size, and a dot behind the current line whenever two seconds pass without other
output. If pip fails, everything that it printed follows, and its exit status is passed on. Only the standard library
is used: this runs before anything is installed.
"""

from __future__ import annotations

import queue
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import IO

DOT_SECONDS = 2.0
#: A download of a megabyte or more. Smaller ones are no reason to wait, and not shown.
_DOWNLOAD = re.compile(r"\s*Downloading (?P<file>\S+) \((?P<size>[^)]* [MG]B)\)")
#: Metadata is fetched apart from the package.
_METADATA = ".metadata"
_INSTALLING = "Installing collected packages: "


class Display:
    """Formatter that turns lines of pip into lines for people. ``out``: destination."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out
        #: True if the current line may get dots.
        self._is_open = False

    def say(self, text: str) -> None:
        """Start a new line, which stays open for dots."""
        self._out.write(("\n" if self._is_open else "") + text)
        self._out.flush()
        self._is_open = True

    def dot(self) -> None:
        """Show that pip is still running."""
        self._out.write(".")
        self._out.flush()
        self._is_open = True

    def line(self, line: str) -> None:
        """Show a line of pip, if it says something new."""
        if line.startswith(_INSTALLING):
            self.say(f"  unpacking {line.count(',') + 1} packages")
        elif (match := _DOWNLOAD.match(line)) and not match["file"].endswith(_METADATA):
            self.say(f"  {match['file'].rpartition('/')[2].partition('-')[0]} ({match['size']})")

    def end(self, text: str) -> None:
        """Show the last line, and close it."""
        self.say(text + "\n")
        self._is_open = False


def run(command: Sequence[str], display: Display, dot_seconds: float = DOT_SECONDS) -> int:
    """Run pip and show its progress. Returns its exit status."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    # A process that outlives pip must not keep this one alive.
    threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
    printed: list[str] = []
    while True:
        try:
            line = lines.get(timeout=dot_seconds)
        except queue.Empty:
            if process.poll() is not None:
                break
            display.dot()
            continue
        if line is None:
            break
        printed.append(line)
        display.line(line)
    status = process.wait()
    display.end("  done" if status == 0 else "".join(["pip failed:\n", *printed]).rstrip())
    return status


def _read(stream: IO[str] | None, lines: queue.SimpleQueue[str | None]) -> None:
    assert stream is not None
    with stream:
        for line in stream:
            lines.put(line)
    lines.put(None)


def main(arguments: Sequence[str]) -> int:
    """Install. Returns pip's exit status."""
    what, *rest = arguments
    display = Display(sys.stdout)
    display.say(f"installing {what}")
    pip = (sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off")
    return run([*pip, *rest], display)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
