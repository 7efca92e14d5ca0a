"""Process that holds many sessions with one scheduler, for ``growth``: real ones of the client, without scripts.

It takes orders from its benchmark (``turns``), one after another, and answers each when it is done, with the time of
the system's monotonic clock, which all processes of a machine share:

* ``{"join": [0, 1, ...]}``: workers of these ranks register concurrently; done when all sessions are accepted.
* ``{"epoch": 7}``: done when all hold that cluster map, or a newer one.
* ``{"leave": true}``: all leave concurrently.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable
from typing import Any

import uvloop

import psdist
from benchmarks import turns
from psdist.client.session.scheduler_calls import SchedulerTarget
from psdist.client.session.worker_session import WorkerSession
from psdist.security.tls import Credentials
from psdist.settings.config import await_address

JOIN_SECONDS = 600.0
START_SECONDS = 60.0


class Holder:
    """The sessions of one process."""

    def __init__(self) -> None:
        self._address = await_address(turns.directory() / "scheduler", START_SECONDS)
        self._sessions: list[WorkerSession] = []

    async def carry_out(self, order: dict[str, Any]) -> dict[str, Any]:
        """Carry out one order. Returns its answer."""
        began = time.monotonic()
        if "join" in order:
            await self._join(order["join"])
        elif "epoch" in order:
            views = [session.membership.view for session in self._sessions]
            await asyncio.gather(*(view.newer_than(order["epoch"] - 1, JOIN_SECONDS) for view in views))
        else:
            await asyncio.gather(*(session.close() for session in self._sessions))
        return {"began": began, "done": time.monotonic()}

    async def _join(self, ranks: Iterable[int]) -> None:
        made = [self._session(rank) for rank in ranks]
        await asyncio.gather(*(session.connect(JOIN_SECONDS) for session in made))
        self._sessions += made

    def _session(self, rank: int) -> WorkerSession:
        target = SchedulerTarget(self._address, "the benchmark", Credentials(), worker_id=f"worker-{rank}", rank=rank)
        return WorkerSession(target, psdist.__version__, random.Random(rank), tuple)


async def _serve() -> None:
    line, holder = turns.connect(), Holder()
    line.send({})
    try:
        while (order := await asyncio.to_thread(line.receive)) is not None:
            line.send(await holder.carry_out(order))
    finally:
        line.close()


if __name__ == "__main__":
    uvloop.run(_serve())
