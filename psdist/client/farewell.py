"""SIGTERM in a worker's script: the call under way is finished, the worker leaves, and the script ends with 143.

``psdist.init()`` installs the handler where it may: in the main thread, and only if the script has none of its own. A
call that does not end soon is given up, as at a second SIGTERM. What a worker says when it leaves is kept here, too.
"""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Final, NoReturn

#: Whoever asks for the end kills soon after: ``psdist run`` after 5 s.
FINISH_SECONDS: Final = 3.0
EXIT_STATUS: Final = 128 + signal.SIGTERM


class Farewell:
    """What this process knows of its end."""

    def __init__(self) -> None:
        self.asked = False
        self._calls = 0
        self._raised = False

    def install(self) -> None:
        """Has SIGTERM end the script politely, where nobody else has a say in that."""
        mine = threading.current_thread() is threading.main_thread()
        if mine and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._terminate)

    def begin(self) -> bool:
        """A call of the user begins. Returns whether it is one that SIGTERM waits for: one of the main thread."""
        mine = threading.current_thread() is threading.main_thread()
        self._calls += mine
        return mine

    def end(self) -> None:
        """The call that ``begin`` counted has ended; the script may end now if it was asked to."""
        self._calls -= 1
        if self.asked and not self._calls and not self._raised:
            self._exit()

    def reason(self, error: BaseException | None = None) -> str:
        """Why a worker leaves: "stopped" before its work was done, "failed", or "closed"."""
        if self.asked:
            return "stopped"
        # Python notes here what it is about to end for.
        failed = error if error is not None else getattr(sys, "last_value", None)
        return "closed" if failed is None else "failed"

    def _terminate(self, signum: int, frame: FrameType | None) -> None:
        again, self.asked = self.asked, True
        if again or not self._calls:
            self._exit()
        timer = threading.Timer(FINISH_SECONDS, signal.pthread_kill, (threading.main_thread().ident, signum))
        timer.daemon = True
        timer.start()

    def _exit(self) -> NoReturn:
        self._raised = True
        raise SystemExit(EXIT_STATUS)


farewell: Final = Farewell()
