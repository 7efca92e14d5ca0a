"""Signals that end a program, while no event loop of it handles them: when it starts, and when it is ending.

Without handlers Python would print a traceback for Ctrl-C, and a signal would leave files behind, or end the program
with another status than its own. The first process of a container would ignore SIGTERM. So a program calls ``exit_on``
or ``end_on`` first. Its event loop's handlers replace these, and ``ignore`` replaces those.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterable
from types import FrameType
from typing import Final, TypeVar

from psdist.settings.exit_codes import OK, SIGNAL_BASE

T = TypeVar("T")

#: The signals that end the scheduler and the servers.
SERVICE_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def exit_on(signals: Iterable[int]) -> None:
    """Raise SystemExit on these signals, so that ``finally`` blocks run. Signals that are ignored stay so."""
    for number in signals:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _exit)


def end_on(signals: Iterable[int]) -> None:
    """End a service that starts, or waits to lead, on these signals: immediately, and with the status of one that
    serves. Signals that are ignored stay so."""
    for number in signals:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


def handle(handler: Callable[[], object]) -> None:
    """Call ``handler`` on the running loop for the signals that end a service.

    A SIGTERM that was ignored when the program started stays so: engines signal all processes of a job together, but
    servers and scheduler have to outlive the workers. SIGINT is always handled, because shells ignore it for
    commands in the background.
    """
    loop = asyncio.get_running_loop()
    for number in SERVICE_SIGNALS:
        if number != signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, handler)


def ignore(signals: Iterable[int]) -> None:
    """Ignore these signals from now on, because the end of the program is decided. Called on its event loop."""
    loop, signals = asyncio.get_running_loop(), tuple(signals)
    # Block them meanwhile, because removing a handler restores Python's own.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    for number in signals:
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


async def ignored_after(work: Coroutine[None, None, T]) -> T:
    """Return the result of a service's ``work``, and ignore the signals that come after it."""
    try:
        return await work
    finally:
        ignore(SERVICE_SIGNALS)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(SIGNAL_BASE + number)


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(OK)
