"""Thread that moves the data of a group's calls through memory of the host.

It waits for other ranks without the event loop, because a message costs two loops more than a piece costs the
processor. It never waits long for one change, so that ``stop`` is quick.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from psdist.collectives.core.host_memory import HostMemory, HostMoves
from psdist.link import processes

_PAUSE_MILLISECONDS: Final = 5
#: Looks at a counter before it sleeps. Other processes run in between, and an idle processor needs longer to wake.
_LOOKS: Final = 20
_LOW_BITS: Final = 2**32 - 1

#: Called on the loop, with an error or None, unless the movement was stopped.
Done = Callable[[Exception | None], None]


class Mover:
    """Thread for the calls of one group, which are moved one after another. Used on the loop."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._loop = asyncio.get_running_loop()
        self._moves: queue.SimpleQueue[tuple[HostMoves, Done] | None] = queue.SimpleQueue()
        self._is_stopped = False
        self._is_idle = threading.Event()
        self._is_idle.set()
        # A daemon, because it may wait for a frozen rank when the interpreter exits.
        threading.Thread(target=self._run, name="psdist host memory", daemon=True).start()

    def start(self, moves: HostMoves, done: Done) -> None:
        """Take all steps of ``moves``, and call ``done``."""
        self._is_idle.clear()
        self._moves.put((moves, done))

    def stop(self) -> None:
        """Stop to use the memory of calls, now and for good."""
        if not self._is_stopped:
            self._is_stopped = True
            self._moves.put(None)
            self._is_idle.wait()

    def _run(self) -> None:
        while (given := self._moves.get()) is not None:
            moves, done = given
            error: Exception | None = None
            try:
                self._move(moves)
            except Exception as failure:  # The call ends with it.
                error = failure
            self._is_idle.set()
            if not self._is_stopped:
                with suppress(RuntimeError):  # The loop is closed.
                    self._loop.call_soon_threadsafe(done, error)
            del given, moves, done, error  # They refer to the script's arrays.

    def _move(self, moves: HostMoves) -> None:
        for step in range(moves.first, moves.last):
            for peer in moves.peers:
                self._wait(peer, step)
            if self._is_stopped:
                return
            moves.advance(step)
            processes.wake(self._memory.addresses[self._memory.rank])

    def _wait(self, peer: int, step: int) -> None:
        """Wait until a rank has completed ``step`` steps, or ``stop``."""
        looks = 0
        while (completed := self._memory.completed(peer)) < step and not self._is_stopped:
            looks += 1
            if looks < _LOOKS:
                os.sched_yield()
            else:
                processes.wait(self._memory.addresses[peer], completed & _LOW_BITS, _PAUSE_MILLISECONDS)
