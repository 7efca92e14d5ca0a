"""A real etcd cluster of one or more members on this machine, for tests."""

from __future__ import annotations

import random
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from psdist.security.tls import TlsFiles
from psdist_scheduler.etcd_client import EtcdClient

#: Heartbeats and elections of the members, in milliseconds: etcd's defaults suit a network and a busy disk.
_TIMES = ("--heartbeat-interval", "100", "--election-timeout", "1000")


class Etcd:
    """A running cluster. endpoints: HOST:PORT of its members. tls: files that they use, and ask their clients for."""

    def __init__(self, directory: Path, size: int, tls: TlsFiles | None = None, options: tuple[str, ...] = ()) -> None:
        self._tls = tls
        scheme = "http" if tls is None else "https"
        files = () if tls is None else (
            "--trusted-ca-file", str(tls.ca), "--cert-file", str(tls.cert), "--key-file", str(tls.key),
            "--client-cert-auth",
        )  # fmt: skip
        ports = _free_ports(2 * size)
        self.endpoints = [f"127.0.0.1:{port}" for port in ports[:size]]
        peers = [f"http://127.0.0.1:{port}" for port in ports[size:]]
        self._directory = directory
        members = ",".join(f"m{number}={peer}" for number, peer in enumerate(peers))
        self._commands = [
            (
                "etcd", "--name", f"m{number}", "--data-dir", str(directory / f"m{number}"), "--logger", "zap",
                "--listen-client-urls", f"{scheme}://{client}", "--advertise-client-urls", f"{scheme}://{client}",
                "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", members,
                "--log-level", "error", "--snapshot-count", "5000", *_TIMES, *files, *options,
            )
            for number, (client, peer) in enumerate(zip(self.endpoints, peers, strict=True))
        ]  # fmt: skip
        self.processes: list[subprocess.Popen[bytes]] = [self._start(number) for number in range(size)]

    def url(self, prefix: str) -> str:
        """Return the value of ``--store`` for a prefix."""
        return f"{'etcd' if self._tls is None else 'etcds'}://{','.join(self.endpoints)}/{prefix}"

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        log = (self._directory / f"m{number}.log").open("ab")
        with log:
            return subprocess.Popen(self._commands[number], stdout=log, stderr=log, start_new_session=True)

    def restart(self, number: int) -> None:
        """Start a member again that was killed."""
        self.processes[number].wait(60)
        self.processes[number] = self._start(number)

    def await_ready(self) -> None:
        """Return once all members know the leader of the cluster."""
        for endpoint in self.endpoints:
            client = EtcdClient([endpoint], self._tls)
            client.get(b"ready", 60.0)
            client.close()

    def stop(self) -> None:
        """End all members."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait(60)


def _free_ports(count: int) -> list[int]:
    """Return free ports that the system gives to no outgoing connection: etcd does not choose its own."""
    found: set[int] = set()
    while len(found) < count:
        port = random.randrange(15_000, 30_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.add(port)
    return sorted(found)


@contextmanager
def running(
    directory: Path, size: int = 1, tls: TlsFiles | None = None, options: tuple[str, ...] = ()
) -> Iterator[Etcd]:
    """Run a cluster of ``size`` members with further options. Skips the test without etcd."""
    if shutil.which("etcd") is None:
        pytest.skip("etcd is not installed (Debian: apt install etcd-server)")
    directory.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        etcd = Etcd(directory, size, tls, options)
        stack.callback(etcd.stop)
        etcd.await_ready()
        yield etcd
