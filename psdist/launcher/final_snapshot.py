"""Asks a run's scheduler for a snapshot, and reports its progress.

A launcher runs ``python -m psdist.launcher.final_snapshot REASON`` before it stops the servers. It is a separate
program, because the launcher must not import grpc. Scheduler, run and token come from the environment. Exit status 0
means that the whole training state is in a snapshot, or there was nothing to save. 1 means that it is not; the last
line says why.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from psdist.security.tls import Credentials
    from psdist.v1 import scheduler_pb2

#: Time between two lines on the progress.
_SAY_SECONDS: Final = 2.0
#: After this time without progress the run ends without this snapshot.
_STILL_SECONDS: Final = 300.0
#: Longest wait for the scheduler's first answer. On a machine that is overloaded, an attempt to connect may fail.
_ANSWER_SECONDS: Final = 30.0


async def request(
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
        return f"nothing was trained since {saved.directory} was saved, at {where}"
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


async def _save(address: str, run_id: str, credentials: Credentials, reason: str) -> int:
    import asyncio

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
                answer = await request(call, run_id, reason, progress)
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


def main() -> int:
    """Save the run of the environment, and return the exit status."""
    import asyncio

    from psdist.settings.config import find_credentials, find_scheduler, read_address

    address = find_scheduler(os.environ) or read_address(Path(os.environ["PSDIST_SCHEDULER_FILE"]))
    if not address:
        return 0
    run_id = os.environ.get("PSDIST_RUN_ID", "")
    return asyncio.run(_save(address, run_id, find_credentials(os.environ), " ".join(sys.argv[1:]) or "at the end"))


if __name__ == "__main__":
    sys.exit(main())
