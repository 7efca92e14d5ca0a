"""Probes of the port of a silent server: its kernel refuses connections once the process is gone.

``member_losses`` decides when to probe, and handles the result.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress

from psdist.errors import ConfigurationError
from psdist.settings.config import parse_address
from psdist_scheduler.events.cluster_events import Event, Probe, Probed
from psdist_scheduler.events.cluster_state import ProbeResult


class Probes:
    """Probes in progress.

    timeout: time limit of each, in seconds.
    post: receives the results.
    """

    def __init__(self, timeout: float, post: Callable[[Event], None]) -> None:
        self._timeout = timeout
        self._post = post
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, effect: Probe) -> None:
        """Start a probe."""
        task = asyncio.get_running_loop().create_task(self._carry_out(effect))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def stop(self) -> None:
        """Cancel all probes in progress."""
        for task in self._tasks:
            task.cancel()

    async def _carry_out(self, effect: Probe) -> None:
        result = await probe(effect.address, self._timeout)
        self._post(Probed(effect.member_id, effect.incarnation, result))


async def probe(address: str, timeout: float) -> ProbeResult:
    """Connect to ``address``, to each address that its name stands for, within ``timeout`` seconds."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout):
            host, port = parse_address(address)
            places = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            results = [await _connect(str(place[4][0]), port) for place in places]
    except (OSError, ConfigurationError):  # TimeoutError is an OSError.
        return "silent"
    if "accepted" in results:
        return "accepted"
    return "refused" if results and "silent" not in results else "silent"


async def _connect(host: str, port: int) -> ProbeResult:
    """Make one connection, and close it again."""
    try:
        _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return "refused"
    except TimeoutError:
        raise
    except OSError:
        return "silent"
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return "accepted"
