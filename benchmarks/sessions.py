"""Load of many sessions on the scheduler, for ``growth``, and alone for a store in etcd:

    python -m benchmarks.sessions 1000 --store etcd://127.0.0.1:2379/sessions

Sessions of real clients, held by a few processes, join one scheduler concurrently. It measures the time until all have
joined; the time from the start of another registration until all have the new cluster map; CPU and memory of the idle
scheduler, which only receives heartbeats; the report of ``psdist status``; and the time until all have left. It asserts
nothing. The clients share the machine with the scheduler.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from dataclasses import dataclass
from typing import Any

import psutil

from benchmarks.contenders import DIRECTORY, Contender, Running, module
from psdist.security.tls import Credentials
from psdist.settings.config import await_address
from psdist.v1 import scheduler_pb2 as pb
from psdist.wire.scheduler_connection import scheduler_at

#: Workers that join one after another, to measure how long the others wait for a new map.
NEWCOMERS = 5
_START_SECONDS = 60.0
#: Several of the longest pauses between two heartbeats, 7.5 s: sessions that joined together send theirs together.
_REST_SECONDS = 20.0


@dataclass(frozen=True)
class Sessions:
    """Figures for one number of sessions; seconds, bytes, and shares of one core."""

    sessions: int
    joined_seconds: float
    #: Epochs created by their joining.
    epochs: int
    #: Median of ``NEWCOMERS``.
    told_seconds: float
    told_worst_seconds: float
    joining_cpu_seconds: float
    rest_cpu: float
    resident_bytes: int
    status_seconds: float
    status_bytes: int
    left_seconds: float

    def text(self) -> str:
        """One line of a table."""
        return (
            f"{self.sessions:>8}{self.joined_seconds:>10.2f}{self.epochs:>8}{self.told_seconds:>10.3f}"
            f"{self.told_worst_seconds:>10.3f}{self.joining_cpu_seconds:>10.2f}{self.rest_cpu * 100:>9.1f}%"
            f"{self.resident_bytes / 1e6:>9.0f}{self.status_seconds * 1000:>10.0f}{self.left_seconds:>9.2f}"
        )


HEADING = (
    f"{'sessions':>8}{'joined s':>10}{'epochs':>8}{'told s':>10}{'worst s':>10}{'join CPU':>10}{'at rest':>10}{'MB':>9}"
    f"{'status ms':>10}{'left s':>9}"
)


class Scheduler:
    """Scheduler of one run: its process and its answers."""

    def __init__(self, running: Running) -> None:
        self._process = psutil.Process(running.processes[0].pid)
        self._address = await_address(running.directory / "scheduler", _START_SECONDS)

    def cpu_seconds(self) -> float:
        """CPU time so far."""
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def resident_bytes(self) -> int:
        """Memory now."""
        return int(self._process.memory_info().rss)

    def status(self) -> pb.GetStatusResponse:
        """Return the report of ``psdist status``."""

        async def ask() -> pb.GetStatusResponse:
            async with scheduler_at(self._address, Credentials()) as call:
                answer: pb.GetStatusResponse = await call("GetStatus", pb.GetStatusRequest(), _START_SECONDS)
                return answer

        return asyncio.run(ask())


def contender(sessions: int, holders: int, store: str) -> Contender:
    """Return a scheduler, and processes that hold sessions."""
    scheduler = module(
        "psdist_scheduler", "--address-file", f"{DIRECTORY}/scheduler", "--store", store, "--log-level",
        "warning", "--min-workers", str(sessions),
    )  # fmt: skip
    return Contender("sessions", (scheduler, *[module("benchmarks.holder")] * holders), holders)


def measure(sessions: int, processes: int, rest_seconds: float, store: str = f"{DIRECTORY}/store") -> Sessions:
    """One number of sessions. store: of the scheduler; by default a file, as ``psdist run`` has it. Raises
    ContenderError."""
    with Running(contender(sessions, processes + 1, store)) as running:
        *crowd, newcomer = range(processes + 1)
        scheduler = Scheduler(running)
        before, cpu = scheduler.status().epoch, scheduler.cpu_seconds()
        joined = running.carry_out({one: {"join": list(range(one, sessions, processes))} for one in crowd})
        epoch, joining_cpu = scheduler.status().epoch, scheduler.cpu_seconds() - cpu
        joined_seconds = max(one["done"] for one in joined) - min(one["began"] for one in joined)
        told = []
        for number in range(NEWCOMERS):
            running.carry_out({one: {"epoch": epoch + number} for one in crowd})
            orders: dict[int, Any] = {one: {"epoch": epoch + number + 1} for one in crowd}
            *heard, joins = running.carry_out(orders | {newcomer: {"join": [sessions + number]}})
            told.append(max(one["done"] for one in heard) - joins["began"])
        cpu, began = scheduler.cpu_seconds(), time.monotonic()
        time.sleep(rest_seconds)  # Measures its work during this time.
        rest_cpu = (scheduler.cpu_seconds() - cpu) / (time.monotonic() - began)
        began = time.monotonic()
        status = scheduler.status()
        status_seconds = time.monotonic() - began
        resident = scheduler.resident_bytes()
        left = running.carry_out({one: {"leave": True} for one in (*crowd, newcomer)})
        return Sessions(
            sessions=sessions,
            joined_seconds=joined_seconds,
            epochs=epoch - before,
            told_seconds=statistics.median(told),
            told_worst_seconds=max(told),
            joining_cpu_seconds=joining_cpu,
            rest_cpu=rest_cpu,
            resident_bytes=resident,
            status_seconds=status_seconds,
            status_bytes=status.ByteSize(),
            left_seconds=max(one["done"] for one in left) - min(one["began"] for one in left),
        )


def main() -> None:
    """Print the figures of one number of sessions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sessions", type=int)
    parser.add_argument("--processes", type=int, default=4, help="that hold the sessions")
    parser.add_argument("--store", default=f"{DIRECTORY}/store", help="of the scheduler")
    given = parser.parse_args()
    print(HEADING)
    print(measure(given.sessions, given.processes, _REST_SECONDS, given.store).text())


if __name__ == "__main__":
    main()
