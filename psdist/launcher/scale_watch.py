"""Watches how many servers and workers the scheduler wants, in a separate process: the launcher must not import grpc.

``python -m psdist.launcher.scale_watch SCHEDULER RUN_ID``; the token comes from the environment. It prints a
``ScaleRequest`` in JSON, one per line: first the current one, then one after every change. If the scheduler does not
answer, it retries until this process is killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from psdist.security.tls import Credentials

_RETRY_SECONDS: Final = 0.25


@dataclass(frozen=True, slots=True)
class ScaleRequest:
    """The number of servers and workers that the scheduler wants from the launcher.

    servers, workers: their numbers; 0 if none was set.
    draining: ids of servers that are being drained; they are not counted in ``servers``.
    stop: ids of drained servers to be stopped.
    lost: why the run cannot continue; empty while it can.
    next_rank: the rank of the next worker that is started.
    """

    servers: int
    draining: list[str]
    stop: list[str]
    lost: str
    workers: int = 0
    next_rank: int = 0

    @classmethod
    def from_line(cls, line: str) -> ScaleRequest | None:
        """Parse a line of this process; returns None for any other line."""
        try:
            return cls(**json.loads(line))
        except (ValueError, TypeError):
            return None


async def _watch(scheduler: str, run_id: str, credentials: Credentials) -> None:
    import grpc

    from psdist.v1 import scheduler_pb2
    from psdist.wire.scheduler_connection import scheduler_at

    said: ScaleRequest | None = None
    while True:
        told = 0 if said is None else said.workers
        request = scheduler_pb2.WatchScaleRequest(run_id=run_id, workers_wanted=told)
        with suppress(grpc.aio.AioRpcError):  # The scheduler is being restarted, or another one leads, elsewhere.
            async with scheduler_at(scheduler, credentials) as call:
                async for answer in call("WatchScale", request):
                    wanted = ScaleRequest(
                        answer.servers_wanted, list(answer.draining), list(answer.stop), answer.lost,
                        answer.workers_wanted, answer.next_rank,
                    )  # fmt: skip
                    if wanted != said:
                        said = wanted
                        print(json.dumps(asdict(wanted)), flush=True)
        await asyncio.sleep(_RETRY_SECONDS)


def main() -> None:
    """Watch the scheduler of the command line until this process is killed."""
    from psdist.settings.config import find_credentials

    asyncio.run(_watch(sys.argv[1], sys.argv[2], find_credentials(os.environ)))


if __name__ == "__main__":
    main()
