"""``psdist run`` as a child process, whose output goes to this program's ``sys.stdout`` and ``sys.stderr``.

The caller may have any number of threads, a running event loop, and streams that are no files, as in a notebook. So the
launcher does not run in it. The child ends the run when its lifeline breaks: a pipe that this process holds, and no
process that it forks.
"""

from __future__ import annotations

import codecs
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import IO, Final, Self

from psdist.launcher.process import Lifeline

_READ_BYTES: Final = 64 << 10
_SHOWN_LINES: Final = 5


class RunProcess:
    """A running ``psdist run``. Leaving its ``with`` block ends it.

    command: the command line without ``--lifeline-fd``, which is inserted at ``position``.
    """

    def __init__(self, command: Sequence[str], position: int) -> None:
        self._lifeline = Lifeline()
        inherited = self._lifeline.end_of_children
        try:
            self._process = subprocess.Popen(
                [*command[:position], f"--lifeline-fd={inherited}", *command[position:]],
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
