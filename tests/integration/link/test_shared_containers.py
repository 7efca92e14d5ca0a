"""Shared memory between containers: used if they share an IPC namespace, and not attempted if they do not.

Each test has its own network, server and workers, and removes them afterwards.
"""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Iterator

import pytest

from tests.support.containers import BUILD_SECONDS, TRAIN_SECONDS
from tests.support.containers import engine as engine  # the fixture that builds the image

pytestmark = [pytest.mark.docker, pytest.mark.timeout(BUILD_SECONDS + 2 * TRAIN_SECONDS)]

_TRAIN = """
import sys
import numpy as np
import psdist
with psdist.Client("scheduler:29600", "secret", transport=sys.argv[1]) as client:
    weights = client.parameters("p", {"w": np.zeros(1 << 20, np.float32)}, psdist.optim.SGD(lr=1.0))
    try:
        for _ in range(3):
            values = weights.push_pull({"w": np.full(1 << 20, -1.0, np.float32)}, copy=False)
        print("weights", set(values["w"].tolist()))
    except psdist.errors.SharingUnavailableError as error:
        print("refused:", error)
    print(weights.statistics().transports)
"""


class Host:
    """A scheduler and a server in containers on a network of their own."""

    def __init__(self) -> None:
        self.name = f"psdist-test-{uuid.uuid4().hex[:12]}"
        self.started: list[str] = []
        docker("network", "create", "--internal", self.name)
        address = ("--insecure", "--host", "0.0.0.0")
        self.start("scheduler", "psdist-scheduler", "--port", "29600", *address)
        # The name is resolved when the server looks for the scheduler, so there is no wait here.
        self.start("server", "psdist-server", "--scheduler", "scheduler:29600", *address, ipc="shareable")

    def start(self, role: str, *command: str, ipc: str = "private") -> None:
        """Start a container in the background."""
        self.started.append(f"{self.name}-{role}")
        docker("run", "--detach", "--name", self.started[-1], *self._flags(role, ipc), "psdist", *command)

    def train(self, transport: str, ipc: str) -> str:
        """Run a worker in a separate container. Return its output."""
        return docker("run", "--rm", *self._flags("worker", ipc), "psdist", "python", "-c", _TRAIN, transport)

    def _flags(self, role: str, ipc: str) -> list[str]:
        return [
            "--network",
            self.name,
            "--network-alias",
            role,
            "--env",
            "PSDIST_TOKEN=secret",
            "--env",
            "PSDIST_INSECURE=1",
            "--ipc",
            ipc,
        ]

    def close(self) -> None:
        """Remove the containers and the network."""
        for container in self.started:
            docker("rm", "--force", container)
        docker("network", "rm", self.name)

    @property
    def shared(self) -> str:
        """Return the IPC namespace of the server."""
        return f"container:{self.name}-server"

    def sockets(self) -> str:
        """List the server's shared-memory file system."""
        return docker("exec", f"{self.name}-server", "ls", "/dev/shm").strip()


def docker(*words: str) -> str:
    done = subprocess.run(["docker", *words], capture_output=True, text=True, check=False, timeout=TRAIN_SECONDS)
    assert done.returncode == 0, f"docker {' '.join(words)}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture
def host(engine: list[str]) -> Iterator[Host]:
    """A host. Skips the test if there is no container engine."""
    host = Host()
    yield host
    host.close()


def test_containers_that_share_an_ipc_namespace_share_memory(host: Host) -> None:
    for transport in ("auto", "shm"):
        assert "'shm'" in (output := host.train(transport, host.shared)), output
        assert "weights {" in output
    assert host.sockets() == ""


def test_containers_that_do_not_share_it_use_grpc(host: Host) -> None:
    output = host.train("auto", "private")
    assert "weights {3.0}" in output and "do not see the same" in output
    assert "refused" in host.train("shm", "private")
    assert host.sockets() == ""
