"""Gradient arenas of peers, received over ``fd_passing`` and mapped.

Launchers import ``fd_passing``, which must stay light: mapping an arena needs numpy.
"""

from __future__ import annotations

import asyncio
import socket
from functools import partial

from psdist.link import fd_passing
from psdist.wire.shm import GradientArena


async def take_arena(
    name: str, elements: int, dtype: str, *, prefault: bool = True
) -> tuple[GradientArena, socket.socket]:
    """Connect to the worker's socket, and map the gradient arena that it sends. The caller closes the connection.

    prefault: see ``GradientArena.open``.

    Raises SharingUnavailableError.
    """
    fd, connection = await fd_passing.receive_file(name)
    with fd_passing.closed_on_error(connection):
        # In a thread, because mapping a large file takes longer than the heartbeat interval. Once started it closes
        # ``fd``.
        mapping = partial(GradientArena.open, fd, elements, dtype, prefault=prefault)
        opening = asyncio.get_running_loop().run_in_executor(None, mapping)
        return await asyncio.shield(opening), connection
