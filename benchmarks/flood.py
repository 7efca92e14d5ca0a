"""Floods of unauthenticated traffic on a run that trains: ``python -m benchmarks.flood``.

Two workers push at a steady pace to two servers, in BSP, so that each push waits for both. Turns of equal length
alternate: *quiet*, *control* and *flood*. In a flood a stranger attacks the first server (or the scheduler, or the
server's port for TCP connections). In a control turn the same stranger attacks the server of another run on this
machine. The difference between quiet and control is therefore the load of the stranger's process and its victim on the
shared cores. The difference between control and flood is the damage to the run itself.

With ``--tls`` the runs use mutual TLS. The stranger has no certificate, and its bytes never reach HTTP/2: floods of
plaintext cost a failed handshake for each connection. "handshakes" and "half-open" are the floods of such a port.

Reported are the acknowledged pushes per second of each kind of turn, their ratio to the quiet turns of the same rounds
(median and lowest), the largest memory of the attacked process, and lost members. It asserts nothing; its exit status
only says whether a member was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

import psutil

from benchmarks.contenders import ROOT
from benchmarks.peers.flooder import KINDS
from psdist.addresses import parse_address
from psdist.v1 import scheduler_pb2
from tests.support.chaos.cluster import ChaosCluster, ChaosClusterSettings
from tests.support.chaos.workload import EventReader, WorkloadSettings

_READY_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.05
#: Delay from the start of a flood to its measured turn, in which connections are opened.
_SETTLE_SECONDS: Final = 2.0
_TURNS: Final = ("quiet", "control", "flood")
#: Kinds that hold many connections open.
_HELD: Final = ("idle", "silent", "slow", "half-open")
PORTS: Final = ("server", "scheduler", "tcp")


@dataclass
class Turn:
    """One turn: pushes per second and, for a flood, the stranger's observations and the attacked process's memory."""

    kind: str
    rate: float
    stranger: dict[str, float] = field(default_factory=dict)
    resident: int = 0


@dataclass
class Case:
    """One kind of flood: ``count`` connections to a port of the run."""

    kind: str
    port: str
    count: int
    turns: list[Turn] = field(default_factory=list)

    @property
    def title(self) -> str:
        return f"{self.kind} x {self.count} at the {self.port}"

    def ratios(self, kind: str) -> list[float]:
        """Return the rates of these turns relative to the quiet turns of the same rounds."""
        quiet = [turn.rate for turn in self.turns if turn.kind == "quiet"]
        rates = [turn.rate for turn in self.turns if turn.kind == kind]
        return [rate / before for rate, before in zip(rates, quiet, strict=False)]

    def as_json(self) -> dict[str, Any]:
        floods = [turn for turn in self.turns if turn.kind == "flood"]
        return {
            "flood": self.title,
            "pushes_per_second": {
                kind: round(median(turn.rate for turn in self.turns if turn.kind == kind), 2) for kind in _TURNS
            },
            "ratio_to_quiet": {
                kind: {"median": round(median(self.ratios(kind)), 3), "lowest": round(min(self.ratios(kind)), 3)}
                for kind in _TURNS[1:]
            },
            "resident_mib": max(turn.resident for turn in floods) >> 20,
            "stranger": [turn.stranger for turn in floods],
        }


class FloodedRun:
    """The run that trains, and another one whose server is attacked in control turns."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.seconds: float = arguments.seconds
        self.nice: int = arguments.nice
        self.directory = Path(tempfile.mkdtemp(prefix="psdist-flood-"))
        self._rng = random.Random(0)
        certificates = self._certificates() if arguments.tls else None
        settings = ChaosClusterSettings(
            2, 2, arguments.replicas, transport=arguments.transport, certificates=certificates
        )
        self.cluster = self._cluster("run", settings)
        self.other = self._cluster("other", ChaosClusterSettings(1, 1, 1, certificates=certificates))
        self.workload = WorkloadSettings(
            directory=str(self.cluster.directory),
            scheduler=self.cluster.address,
            workers=2,
            mode="bsp",
            slots=arguments.slots,
            pace_seconds=arguments.pace,
            transport=arguments.transport,
        )
        self._readers = [EventReader(self.workload.log(rank)) for rank in range(2)]

    def _certificates(self) -> Path:
        """Make the certificates of both runs."""
        place = self.directory / "certs"
        subprocess.run((sys.executable, "-m", "psdist", "certs", "init", str(place)), check=True, capture_output=True)
        return place

    def _cluster(self, name: str, settings: ChaosClusterSettings) -> ChaosCluster:
        directory = self.directory / name
        directory.mkdir()
        return ChaosCluster(settings, directory, self._rng)

    async def start(self) -> None:
        await self.other.start(WorkloadSettings(str(self.other.directory), self.other.address, 1, pace_seconds=1.0))
        await self.cluster.start(self.workload)
        deadline = time.monotonic() + _READY_SECONDS
        while min(len(pushes) for pushes in self._ends()) < 20:
            if time.monotonic() > deadline:
                raise SystemExit(f"the run does not begin:\n{self.cluster.tail('worker-0')}")
            await asyncio.sleep(_POLL_SECONDS)

    async def close(self) -> None:
        await self.cluster.close()
        await self.other.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _ends(self) -> list[list[float]]:
        for reader in self._readers:
            reader.read()
        return [[push.end for push in reader.pushes if push.outcome == "acknowledged"] for reader in self._readers]

    async def turn(self, case: Case, kind: str) -> Turn:
        """Measure one turn."""
        if kind == "quiet":
            return Turn(kind, await self._rate())
        cluster = self.cluster if kind == "flood" else self.other
        address, process = await _target(cluster, case.port)
        command = (sys.executable, "-m", "benchmarks.peers.flooder", case.kind, *address, str(case.count))
        stranger = subprocess.Popen(  # noqa: ASYNC220 - it returns as soon as the process exists
            (("nice", "-n", str(self.nice)) if self.nice else ()) + command,
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            await asyncio.sleep(_SETTLE_SECONDS)
            rate = await self._rate()
            resident = psutil.Process(process).memory_info().rss
        finally:
            told = stranger.communicate()[0]
        return Turn(kind, rate, json.loads(told), resident)

    async def _rate(self) -> float:
        """Return the acknowledged pushes of each worker per second, over the next seconds."""
        begin = time.monotonic()
        await asyncio.sleep(self.seconds)
        end = time.monotonic()
        return sum(begin <= at < end for ends in self._ends() for at in ends) / (end - begin) / len(self._readers)

    async def lost(self) -> list[str]:
        """Return the scheduler's events about lost members."""
        status = await self.cluster.fetch()
        if status is None:
            return ["the scheduler does not answer"]
        return [event.text for event in status.events if " lost" in event.text or "expelled" in event.text]


async def _target(cluster: ChaosCluster, port: str) -> tuple[tuple[str, str], int]:
    """Host and port to attack, and the process that has it."""
    if port == "scheduler":
        host, number = parse_address(cluster.address)
        return (host, str(number)), cluster.processes["scheduler"].pid
    server = await _live_server(cluster)
    host, number = parse_address(server.address)
    process = cluster.processes[server.member_id].pid
    if port == "tcp":
        listening = {c.laddr.port for c in psutil.Process(process).net_connections("tcp") if c.status == "LISTEN"}
        number = next(iter(listening - {number}))
    return (host, str(number)), process


async def _live_server(cluster: ChaosCluster) -> scheduler_pb2.MemberStatus:
    """Wait for a server of the run, which has just been started, and return it."""
    while True:
        status = await cluster.fetch()
        for one in () if status is None else status.members:
            if one.role == scheduler_pb2.ROLE_SERVER and one.state == "live":
                return one
        await asyncio.sleep(_POLL_SECONDS)


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all floods, one after the other, on one run."""
    run = FloodedRun(arguments)
    cases = [
        Case(kind, port, count)
        for kind, port, count in (_parse(text, arguments.connections) for text in arguments.floods)
    ]
    try:
        await run.start()
        for _ in range(arguments.rounds):
            for case in cases:
                for kind in _TURNS:
                    case.turns.append(await run.turn(case, kind))
                print(
                    json.dumps({"case": case.title} | {t.kind: round(t.rate, 1) for t in case.turns[-3:]}), flush=True
                )
        return {"floods": [case.as_json() for case in cases], "lost": await run.lost()}
    finally:
        await run.close()


def _parse(text: str, connections: int) -> tuple[str, str, int]:
    kind, _, port = text.partition("@")
    if kind not in KINDS or (port or "server") not in PORTS:
        raise SystemExit(f"{text!r} is no flood: KIND[@PORT], of {', '.join(KINDS)} and {', '.join(PORTS)}")
    return kind, port or "server", connections if kind in _HELD else 20


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("floods", nargs="*", help="KIND[@PORT]; default: all that the promise is about")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each turn")
    parser.add_argument("--connections", type=int, default=10_000, help="of an idle flood")
    parser.add_argument("--transport", default="tcp", choices=("auto", "shm", "tcp", "grpc"))
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--pace", type=float, default=0.05, help="shortest time between pushes, in seconds")
    parser.add_argument("--slots", type=int, default=4096, help="elements of each of the 12 slices")
    parser.add_argument("--nice", type=int, default=19, help="of the stranger")
    parser.add_argument("--tls", action="store_true", help="both runs use mutual TLS; the stranger has no certificate")
    parser.add_argument("--json", type=Path)
    return parser


DEFAULT_FLOODS: Final = (
    "calls", "ping", "settings", "headers", "continuation", "reset", "idle", "silent", "slow",
    "silent@tcp", "idle@scheduler", "silent@scheduler",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    arguments = command_line().parse_args(argv)
    arguments.floods = arguments.floods or DEFAULT_FLOODS
    result = asyncio.run(measure(arguments))
    for one in result["floods"]:
        print(json.dumps(one))
    print(json.dumps({"lost": result["lost"]}))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))
    return 1 if result["lost"] else 0


if __name__ == "__main__":
    sys.exit(main())
