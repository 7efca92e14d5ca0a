"""Memory of a server: ``python -m benchmarks.memory``.

One worker and one server: the resident memory before the parameters arrive, and the peak after some steps. The weights
and, with shared memory, the gradients are pages that worker and server share.
``tests/integration/project/test_memory.py`` tests the bound; this module asserts nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.psdist_step import BenchSettings, StepBench
from psdist import Client
from psdist.launcher.embedded import EmbeddedCluster
from psdist.settings.config import TransportName

STEPS = 5
_FIELDS = ("VmHWM", "VmRSS", "RssAnon", "RssShmem")


def sizes(pid: int) -> dict[str, int]:
    """Return the system's sizes of a process, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    split = (line.partition(":") for line in lines)
    return {name: int(rest.split()[0]) * 1024 for name, _, rest in split if name in _FIELDS}


def measure(params: int, transport: TransportName) -> dict[str, int]:
    """Bytes of the server: idle, at its peak, and of the peak's end the private and the shared part."""
    cluster = EmbeddedCluster(servers=1)
    try:
        with Client(cluster.address, cluster.token, transport=transport) as client:
            # So the server has started, and holds everything that a step needs.
            StepBench(client, BenchSettings(params=1)).make(1)
            members = client.status().members
            (pid,) = [member.pid for member in members if member.member_id == "server-0"]
            idle = sizes(pid)["VmRSS"]
            StepBench(client, BenchSettings(params=params)).make(STEPS)
            after = sizes(pid)
    finally:
        cluster.close()
    return {
        "idle_bytes": idle,
        "peak_bytes": after["VmHWM"],
        "private_bytes": after["RssAnon"],
        "shared_bytes": after["RssShmem"],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, prints, and writes the file of ``--json``."""
    line = argparse.ArgumentParser(prog="python -m benchmarks.memory", description="Memory of a server.")
    line.add_argument("--params", type=int, default=25_000_000)
    line.add_argument("--json", type=Path, metavar="FILE")
    options = line.parse_args(arguments)
    transports: tuple[TransportName, ...] = ("shm", "grpc")
    result: dict[str, Any] = {"params": options.params}
    for transport in transports:
        result[transport] = measure(options.params, transport)
        print(transport, {name: f"{value / 1e6:.0f} MB" for name, value in result[transport].items()}, flush=True)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
