"""Hosts with links of a given speed, on one machine: network namespaces, each with one shaped link.

A host is a namespace of ``tests.support.chaos.faults.WorkerNetwork`` with a name of its own, and a directory of its own
for ``/dev/shm``, so that processes share memory within a host and not between hosts. ``tc tbf`` limits its link in both
directions: at the host, and at the bridge. This process's own namespace, at ``gateway``, is a host without a limit.

The bucket of a filter is at least the largest packet that TCP hands to an interface (64 KiB, segmented later), which
the filter would otherwise segment. Beyond that it is 3 ms of the rate: the filter is sometimes that late, and would
lose this capacity. The queue matches a switch of that speed: at least 512 KiB, and 5 ms of the rate. TCP's congestion
control is this machine's. Counters are those of the interfaces, whose bytes exclude the headers of packets that are
segmented later.

Needs root, ``ip`` and ``tc``: ``hosts_missing`` tells if a machine lacks one. Leaving the block removes all.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from psdist.errors import ConfigurationError
from tests.support.chaos.faults import INTERFACE, WorkerNetwork, run_command

BURST_BYTES_MIN = 64 << 10
BURST_SECONDS = 3e-3
QUEUE_BYTES_MIN = 512 << 10
QUEUE_SECONDS = 5e-3
#: Mounts a host's directory, takes its name and becomes the command. ``ip netns exec`` has made a mount namespace for
#: it, ``unshare`` one for the name.
_BECOME = 'mount --bind "$0" /dev/shm && echo "host-${0##*/}" > /proc/sys/kernel/hostname && exec "$@"'


def hosts_missing() -> str:
    """Return why this machine cannot have such hosts; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program, package in (("ip", "iproute2"), ("tc", "iproute2"), ("unshare", "util-linux")):
        if shutil.which(program) is None:
            return f"there is no program {program!r} (package {package})"
    try:
        with ShapedHosts(1, 1e9):
            pass
    except ConfigurationError as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class Counters:
    """Bytes that an interface sent and received."""

    sent: int = 0
    received: int = 0

    def __add__(self, other: Counters) -> Counters:
        return Counters(self.sent + other.sent, self.received + other.received)

    def __sub__(self, other: Counters) -> Counters:
        return Counters(self.sent - other.sent, self.received - other.received)


class ShapedHosts(WorkerNetwork):
    """``hosts`` hosts whose links have ``bits_per_second``. Raises ConfigurationError, and then leaves none behind."""

    def __init__(self, hosts: int, bits_per_second: float) -> None:
        self.hosts = hosts
        self._directory = Path(tempfile.mkdtemp(prefix="psdist-hosts-"))
        try:
            super().__init__(hosts)
            for host in range(hosts):
                (self._directory / str(host)).mkdir()
                self.shape(host, bits_per_second)
        except BaseException:  # This includes Ctrl-C: nothing is left behind.
            self.close()
            raise

    def inside(self, host: int) -> tuple[str, ...]:
        """Return the prefix of a command line that runs on a host; the process keeps its id."""
        return (*super().inside(host), "unshare", "--uts", "sh", "-c", _BECOME, str(self._directory / str(host)))

    def shape(self, host: int, bits_per_second: float) -> None:
        """Change the speed of a host's link."""
        self._shape(self.namespace(host), INTERFACE, bits_per_second)
        self._shape(self.switch, self.port(host), bits_per_second)

    def counters(self, host: int) -> Counters:
        """Return the bytes that have passed a host's link."""
        shown = run_command("ip", "-n", self.namespace(host), "-s", "-j", "link", "show", "dev", INTERFACE)
        found = json.loads(shown)[0]["stats64"]
        return Counters(sent=found["tx"]["bytes"], received=found["rx"]["bytes"])

    def close(self) -> None:
        """Remove everything. Closing again does nothing."""
        super().close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _shape(self, namespace: str, interface: str, bits_per_second: float) -> None:
        per_second = bits_per_second / 8
        burst = max(BURST_BYTES_MIN, round(per_second * BURST_SECONDS))
        queue = max(QUEUE_BYTES_MIN, round(per_second * QUEUE_SECONDS))
        run_command(
            "tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root", "tbf",
            "rate", f"{bits_per_second:.0f}bit", "burst", str(burst), "limit", str(burst + queue),
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
