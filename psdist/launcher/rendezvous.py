"""Asks the scheduler for this node's ranks, in a separate process, because the agent must not import grpc.

``python -m psdist.launcher.rendezvous REQUEST``, where REQUEST is a ``RankRequest`` in JSON; the token comes from the
environment. It prints one JSON object per line: ``{"waiting_for": ...}`` as often as needed, then the ``Place``, or
``{"error": ..., "code": ...}``. If the scheduler does not answer, it retries until the request's time is over. A
request with ``gave_up`` prints nothing: it tells the scheduler that the agent ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from psdist.security.tls import Credentials

_RETRY_SECONDS: Final = 0.25
#: Interval of notices while the scheduler does not answer.
_SILENCE_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class RankRequest:
    """An agent's request: ``processes`` ranks in a world of ``nodes_min`` to ``nodes_max`` nodes.

    scheduler: its address, host:port; several divided by commas.
    agent_id: name of the agent, unique in the run.
    timeout_seconds: longest search for the scheduler. The wait for other nodes has no limit.
    local_address: this node's address for the other nodes; empty to detect it.
    gave_up: why the agent ends; then the request reports this and asks for no ranks.
    """

    scheduler: str
    run_id: str
    agent_id: str
    processes: int
    nodes_min: int
    nodes_max: int
    host: str
    timeout_seconds: float
    local_address: str = ""
    gave_up: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a node in the world.

    master_address: host:port where the script of rank 0 may listen, for torch.distributed; empty if unknown.
    run_id: of the scheduler's run.
    """

    node_rank: int
    nodes: int
    first_rank: int
    world_size: int
    master_address: str = ""
    run_id: str = ""


def _print(values: dict[str, Any]) -> None:
    print(json.dumps(values), flush=True)


class _Silence:
    """Notice of the reason for this node's wait, printed every few seconds until the scheduler answers."""

    def __init__(self, request: RankRequest) -> None:
        self._text = f"for a scheduler to answer at {request.scheduler}"
        self._limit = f"given up after {request.timeout_seconds:g} s"
        self.reason = ""
        self._next()

    def end(self) -> None:
        """Stop printing: the scheduler answered, or the wait is over."""
        self._timer.cancel()

    def _next(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_SILENCE_SECONDS, self._say)

    def _say(self) -> None:
        last = f"; last: {self.reason}" if self.reason else ""
        _print({"waiting_for": f"{self._text}{last}; {self._limit}"})
        self._next()


async def _ask(request: RankRequest, credentials: Credentials) -> Place:
    from psdist import addresses
    from psdist.errors import SchedulerUnreachableError
    from psdist.security.handshake import raise_cause
    from psdist.wire.scheduler_connection import scheduler_at

    deadline = time.monotonic() + request.timeout_seconds
    silence = _Silence(request)

    def on_failure(reason: str) -> None:
        silence.reason = reason

    def on_answer() -> None:
        nonlocal deadline
        deadline = time.monotonic() + request.timeout_seconds  # The wait for other nodes is no search.
        silence.end()

    try:
        # Resolve the name first: after a failed lookup, gRPC waits up to two minutes before the next one.
        peers = await addresses.await_name(request.scheduler, request.timeout_seconds, on_failure)
        silence.reason = ""
        master = addresses.free_address(peers, request.local_address)
        while True:
            try:
                # Of several places, another one may have the scheduler by the next attempt.
                async with scheduler_at(request.scheduler, credentials) as call:
                    return await _rendezvous(call, request, master, on_answer)
            except SchedulerUnreachableError:
                await raise_cause(request.scheduler, credentials)
                if time.monotonic() >= deadline:
                    raise
            await asyncio.sleep(_RETRY_SECONDS)
    finally:
        silence.end()


async def _rendezvous(
    call: Callable[..., Any], request: RankRequest, master: str, on_answer: Callable[[], None]
) -> Place:
    import grpc

    from psdist.errors import InternalError, SchedulerUnreachableError
    from psdist.v1 import scheduler_pb2
    from psdist.wire import status
    from psdist.wire.scheduler_connection import FIND_SCHEDULER

    names = scheduler_pb2.RendezvousRequest.DESCRIPTOR.fields_by_name
    values = {name: value for name, value in asdict(request).items() if name in names}
    try:
        async for answer in call("Rendezvous", scheduler_pb2.RendezvousRequest(**values, master_address=master)):
            on_answer()
            if answer.formed:
                return Place(**{each.name: getattr(answer, each.name) for each in fields(Place)})
            if answer.waiting_for:
                _print({"waiting_for": answer.waiting_for})
    except grpc.aio.AioRpcError as error:
        if error.code() == grpc.StatusCode.UNAVAILABLE:
            tried = f"no scheduler answers at {request.scheduler} (tried for {request.timeout_seconds:g} s)"
            raise SchedulerUnreachableError(f"{tried}: {error.details()}. {FIND_SCHEDULER}") from None
        raise status.from_call(error, f"scheduler {request.scheduler}") from None
    raise InternalError(f"scheduler {request.scheduler} ended the rendezvous without an answer")


async def _give_up(request: RankRequest, credentials: Credentials) -> None:
    """Tell the scheduler, if it answers in time, that this agent ends."""
    import grpc

    from psdist.v1 import scheduler_pb2
    from psdist.wire.scheduler_connection import scheduler_at

    message = scheduler_pb2.RendezvousRequest(
        run_id=request.run_id,
        host=request.host,
        nodes_min=request.nodes_min,
        nodes_max=request.nodes_max,
        gave_up=request.gave_up,
    )
    async with scheduler_at(request.scheduler, credentials) as call:
        with suppress(grpc.aio.AioRpcError):  # The agent's exit status matters more than this report.
            async for _ in call("Rendezvous", message, request.timeout_seconds):
                return


def main() -> None:
    """Print the answer to the request of the command line."""
    from psdist.errors import PsdistError
    from psdist.settings.config import find_credentials

    request = RankRequest(**json.loads(sys.argv[1]))
    if request.gave_up:
        asyncio.run(_give_up(request, find_credentials(os.environ)))
        return
    try:
        _print(asdict(asyncio.run(_ask(request, find_credentials(os.environ)))))
    except PsdistError as error:
        _print({"error": error.message, "code": error.code})


if __name__ == "__main__":
    main()
