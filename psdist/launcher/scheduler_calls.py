"""Calls of a launcher to its scheduler, made in a separate process: the launcher must not import grpc.

``python -m psdist.launcher.scheduler_calls CALL ...``; the token comes from the environment. The calls are:

* ``watch SCHEDULER RUN_ID`` prints a ``ScaleRequest`` in JSON, one per line: first the current one, then one after
  every change. If the scheduler does not answer, it retries until this process is killed.
* ``rendezvous REQUEST``, a ``RankRequest`` in JSON, asks for a node's ranks. It prints one JSON object per line:
  ``{"waiting_for": ...}`` as often as needed, then the ``Place``, or ``{"error": ..., "code": ...}``. If the scheduler
  does not answer, it retries until the request's time is over. A request with ``gave_up`` prints nothing: it tells the
  scheduler that the agent ends.
* ``save`` asks for a snapshot, and reports its progress, before the launcher stops the servers. Scheduler and
  run come from the environment. Exit status 0 means that the whole training state is in a snapshot, or there was
  nothing to save. 1 means that it is not; the last line says why.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from psdist.launcher.events import Place, RankRequest, ScaleRequest

if TYPE_CHECKING:
    from psdist.security.tls import Credentials
    from psdist.v1 import scheduler_pb2

_RETRY_SECONDS: Final = 0.25
#: Interval of notices while the scheduler does not answer.
_SILENCE_SECONDS: Final = 5.0
#: Time between two lines on the progress of a snapshot.
_SAY_SECONDS: Final = 2.0
#: After this time without progress the run ends without this snapshot.
_STILL_SECONDS: Final = 300.0
#: Longest wait for the scheduler's first answer. On a machine that is overloaded, an attempt to connect may fail.
_ANSWER_SECONDS: Final = 30.0


def _print(values: dict[str, Any]) -> None:
    print(json.dumps(values), flush=True)


# --- watch ------------------------------------------------------------------------------------------------------------


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
                        _print(asdict(wanted))
        await asyncio.sleep(_RETRY_SECONDS)


# --- rendezvous -------------------------------------------------------------------------------------------------------


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
    from psdist.security.tls import raise_cause
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


# --- save -------------------------------------------------------------------------------------------------------------


async def save_snapshot(
    call: Callable[..., Any], run_id: str, reason: str, on_answer: Callable[[scheduler_pb2.SaveSnapshotResponse], None]
) -> scheduler_pb2.SaveSnapshotResponse | None:
    """Request a snapshot and wait until it is committed. Returns the last answer, or None if there was none.

    call: of ``psdist.wire.scheduler_connection``.
    on_answer: called with every answer.

    Raises grpc.aio.AioRpcError.
    """
    from psdist.v1 import scheduler_pb2
    from psdist.wire.scheduler_connection import last_answer

    wanted = scheduler_pb2.SaveSnapshotRequest(run_id=run_id, reason=reason)
    last: scheduler_pb2.SaveSnapshotResponse | None = await last_answer(call("SaveSnapshot", wanted), on_answer)
    return last


def committed_text(answer: scheduler_pb2.SaveSnapshotResponse) -> str:
    """Describe a committed snapshot: its step, its size, and how long it took."""
    saved = answer.committed
    steps = sorted(set(saved.steps.values()))
    where = f"step {steps[0]}" if len(steps) == 1 else "steps " + ", ".join(map(str, steps))
    if answer.unchanged:
        return f"{where} already saved as {saved.directory}: nothing was trained since"
    return f"{where} saved as {saved.directory}: {size(saved.bytes)} in {saved.seconds:.1f} s"


def progress_text(answer: scheduler_pb2.SaveSnapshotResponse) -> str:
    """Describe the progress of a snapshot: the bytes written, or the reason for waiting."""
    text = f"{size(answer.bytes_done)} of {size(answer.bytes)} written" if answer.bytes else "preparing"
    return f"{text}; waiting {answer.waiting_for}" if answer.waiting_for else text


def size(count: int) -> str:
    """Format a number of bytes in binary units."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


class SaveProgress:
    """Progress report of a snapshot, every two seconds. ``moved`` is called whenever it changes; ``last`` is the last
    text."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._clock = clock
        self._next = clock() + _SAY_SECONDS
        self.last = ""
        self.moved: Callable[[], None] = lambda: None

    def __call__(self, answer: scheduler_pb2.SaveSnapshotResponse) -> None:
        """Process an answer."""
        if answer.HasField("committed"):
            return
        if (text := progress_text(answer)) != self.last:
            self.last = text
            self.moved()
        if self._clock() >= self._next:
            self._next = self._clock() + _SAY_SECONDS
            self._say(text)


async def _save(address: str, run_id: str, credentials: Credentials) -> int:
    import grpc

    from psdist.errors import NoStorageError
    from psdist.v1 import scheduler_pb2
    from psdist.wire import status
    from psdist.wire.scheduler_connection import scheduler_at

    progress = SaveProgress(_say)
    try:
        async with scheduler_at(address, credentials) as call:
            known = await call("GetStatus", scheduler_pb2.GetStatusRequest(), _ANSWER_SECONDS, wait_for_ready=True)
            if not known.HasField("snapshots") or all(one.state != "ready" for one in known.parameters):
                return 0
            async with asyncio.timeout(_STILL_SECONDS) as limit:
                progress.moved = lambda: limit.reschedule(asyncio.get_running_loop().time() + _STILL_SECONDS)
                answer = await save_snapshot(call, run_id, "at the end", progress)
    except grpc.aio.AioRpcError as error:
        problem = status.from_call(error, "scheduler")
        if isinstance(problem, NoStorageError):  # The run reported that at its start.
            return 0
        _say(f"no snapshot was taken: {problem.message}")
        return 1
    except TimeoutError:
        _say(f"no snapshot was taken: no progress for {_STILL_SECONDS:g} s: {progress.last}")
        return 1
    if answer is None or not answer.HasField("committed"):
        _say("no snapshot was taken: the scheduler ended the call")
        return 1
    _say(committed_text(answer))
    return 0


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


# --- the program ------------------------------------------------------------------------------------------------------


def _watch_call(credentials: Credentials, scheduler: str, run_id: str) -> int:
    asyncio.run(_watch(scheduler, run_id, credentials))
    return 0


def _rendezvous_call(credentials: Credentials, text: str) -> int:
    from psdist.errors import PsdistError

    request = RankRequest(**json.loads(text))
    if request.gave_up:
        asyncio.run(_give_up(request, credentials))
        return 0
    try:
        _print(asdict(asyncio.run(_ask(request, credentials))))
    except PsdistError as error:
        _print({"error": error.message, "code": error.code})
    return 0


def _save_call(credentials: Credentials) -> int:
    from psdist.settings.config import find_scheduler, read_address

    address = find_scheduler(os.environ) or read_address(Path(os.environ["PSDIST_SCHEDULER_FILE"]))
    run_id = os.environ.get("PSDIST_RUN_ID", "")
    return asyncio.run(_save(address, run_id, credentials)) if address else 0


_CALLS: Final[dict[str, Callable[..., int]]] = {
    "watch": _watch_call,
    "rendezvous": _rendezvous_call,
    "save": _save_call,
}


def main(call: str, *words: str) -> int:
    """Make the call of the command line, and return the exit status."""
    # On the loop, the import of gRPC would take a tenth of a second.
    import psdist.wire.scheduler_connection  # noqa: F401
    from psdist.settings.config import find_credentials

    return _CALLS[call](find_credentials(os.environ), *words)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
