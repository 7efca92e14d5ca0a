"""Watches how many servers the scheduler wants. A process of its own, because the launcher must not import grpc.

``python -m psdist.launch.scale_watch SCHEDULER RUN_ID``; the token comes from the environment. Prints one JSON object
per line, at once and after every change: a ``ScaleRequest``. A scheduler that does not answer is asked again until this
process is ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import asdict, dataclass
from typing import Any, Final

_RETRY_SECONDS: Final = 0.25


@dataclass(frozen=True, slots=True)
class ScaleRequest:
    """What the scheduler wants.

    servers: how many there shall be. draining: ids of those that everything is moved away from, which do not count.
    stop: ids of those of them that hold nothing any more and shall be stopped. lost: why the run cannot go on; empty
    while it can.
    """

    servers: int
    draining: list[str]
    stop: list[str]
    lost: str

    @classmethod
    def from_line(cls, line: str) -> ScaleRequest | None:
        """What a line of this process says; None for one that says something else."""
        try:
            return cls(**json.loads(line))
        except (ValueError, TypeError):
            return None


async def _follow(scheduler: str, run_id: str, token: str) -> None:
    import grpc

    from psdist.v1 import scheduler_pb2, scheduler_pb2_grpc
    from psdist.wire import auth
    from psdist.wire.channels import open_channel

    said: ScaleRequest | None = None
    async with open_channel(scheduler) as channel:
        stub: Any = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        while True:
            try:
                request = scheduler_pb2.WatchScaleRequest(run_id=run_id)
                async for answer in stub.WatchScale(request, metadata=auth.metadata(token)):
                    wish = ScaleRequest(answer.servers_wanted, list(answer.draining), list(answer.stop), answer.lost)
                    if wish != said:
                        said = wish
                        print(json.dumps(asdict(wish)), flush=True)
            except grpc.aio.AioRpcError:
                pass  # it is being started again
            await asyncio.sleep(_RETRY_SECONDS)


def main() -> None:
    """Follows the scheduler of the command line until it is ended."""
    from psdist.settings.config import find_token

    asyncio.run(_follow(sys.argv[1], sys.argv[2], find_token(os.environ)))


if __name__ == "__main__":
    main()
