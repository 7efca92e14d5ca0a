"""The example of docs/secure.md: three machines, mutual TLS on every connection. A server is killed, and the CA is
replaced, while the run trains. The weights are those of a run without TLS, byte for byte. All packets between the
machines are captured: none shows a payload, the token, or the name of a tensor.

Machines are network namespaces, which needs root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from psdist.cli.certs import CERTS
from psdist.errors import ConfigurationError
from tests.support.chaos.faults import WorkerNetwork

NODES: Final = ("node-1", "node-2", "node-3")
STEPS: Final = 240
#: Here the script waits for the file "finish", so that the run does not end before the CA is replaced.
HELD: Final = 200
TOKEN: Final = "a-token-that-nobody-else-may-read"
TENSOR: Final = "a-tensor-that-nobody-else-may-read"
VALUE: Final = np.float32(12345.678)
SCRIPT: Final = f"""
import hashlib, os, threading
import numpy as np
import psdist
with psdist.init() as context:
    p = context.client.parameters("p", {{"{TENSOR}": np.zeros(4096, np.float32)}}, psdist.optim.Adam(lr=1e-3))
    pace = threading.Event()
    while p.step < {STEPS}:
        while p.step >= {HELD} and not os.path.exists("finish"):
            pace.wait(0.1)
        gradient = np.random.default_rng(p.step).integers(-8, 9, 4096).astype(np.float32)
        gradient[:256] = {VALUE}
        p.push_pull({{"{TENSOR}": gradient}})
        print("step", p.step, flush=True)
        pace.wait(0.03)
    print("digest", hashlib.sha256(p.pull()["{TENSOR}"].tobytes()).hexdigest(), flush=True)
"""
#: Writes all packets of all interfaces of a namespace to standard output.
CAPTURE: Final = """
import os, socket
packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
packets.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE
while True:
    os.write(1, packets.recv(1 << 16))
"""
_PROGRAMS: Final = {
    "scheduler": (sys.executable, "-m", "psdist_scheduler"),
    "server": (sys.executable, "-m", "psdist_server"),
    "worker": (sys.executable, "-c", "import sys; from psdist.cli.main import worker; sys.exit(worker())"),
    "reader": (sys.executable, "-m", "psdist.cli.main", "status"),
}
_SECONDS: Final = 240.0


class Machines:
    """Three machines in a folder, and their processes by name. tls: False uses ``--insecure`` instead."""

    def __init__(self, path: Path, network: WorkerNetwork, *, tls: bool) -> None:
        self.path, self._network, self._tls = path, network, tls
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("PSDIST_")}
        self._environment |= {"PSDIST_TOKEN": TOKEN, "XDG_RUNTIME_DIR": str(path), "TMPDIR": str(path)}
        path.mkdir()
        (path / "names").write_text("127.0.0.1 localhost\n" + "".join(f"{self.address(n)} {n}\n" for n in NODES))
        (path / "train.py").write_text(SCRIPT)
        if not tls:
            self._environment["PSDIST_INSECURE"] = "1"
        else:
            self.make_certificates("certs")
            self.install(["certs"], "certs")

    def address(self, node: str) -> str:
        """Return the address of a machine."""
        return self._network.address(NODES.index(node))

    def make_certificates(self, folder: str) -> None:
        """Make a CA and certificates, in a folder of the operator."""
        hosts = ",".join((*NODES, *map(self.address, NODES)))
        assert CERTS.run(["init", str(self.path / folder), "--host", hosts], {}) == 0

    def install(self, trusted: list[str], own: str) -> None:
        """Copy certificates to all machines. trusted: folders of the CAs. own: folder of certificates and keys."""
        cas = b"".join((self.path / folder / "ca.pem").read_bytes() for folder in trusted)
        for node in NODES:
            place = self.path / node
            place.mkdir(exist_ok=True)
            replace(place / "ca.pem", cas)
            for file in (self.path / own).glob("*.pem"):
                if not file.name.startswith("ca"):
                    replace(place / file.name, file.read_bytes())

    def start(self, name: str, node: str, role: str, *flags: str) -> None:
        """Start a program on a machine, under a name of this test's."""
        place, environment = self.path / node, dict(self._environment)
        if self._tls:
            files = {"CA": "ca", "CERT": role, "KEY": f"{role}-key"}
            environment |= {f"PSDIST_TLS_{kind}": str(place / f"{file}.pem") for kind, file in files.items()}
        else:
            environment |= {"PSDIST_INSECURE": "1"}
        inside = (*self._network.inside(NODES.index(node)), "unshare", "--uts", "sh", "-c")
        become = (
            'echo "$0" > /proc/sys/kernel/hostname && mount --bind "$1" /etc/hosts && mount -t tmpfs own /dev/shm && '
            'shift && exec "$@"'
        )
        with (self.path / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [*inside, become, node, str(self.path / "names"), *_PROGRAMS[role], *flags], env=environment,
                cwd=self.path, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def start_all(self) -> None:
        """Start the processes of the example, and a second server on node-2."""
        self.start(
            "scheduler", "node-1", "scheduler", "--host", "0.0.0.0", "--port", "29600", "--replicas", "2",
            "--min-servers", "3", "--min-workers", "2", "--idle-timeout", "2",
            "--failure-timeout", "20",
        )  # fmt: skip
        for name, node in (("server-a", "node-1"), ("server-b", "node-2"), ("server-c", "node-2")):
            self.start_server(name, node)
        self.start("worker", "node-3", "worker", "--scheduler", "node-1:29600", "--nproc-per-node", "2", "train.py")

    def start_server(self, name: str, node: str) -> None:
        """Start a server on a free port."""
        self.start(name, node, "server", "--scheduler", "node-1:29600", "--host", "0.0.0.0", "--server-id", name)

    def status_of_reader(self, name: str) -> int:
        """Return the exit status of ``psdist status`` on node-3."""
        self.start(name, "node-3", "reader", "--scheduler", "node-1:29600", "--timeout", "60")
        return self.processes.pop(name).wait(_SECONDS)

    @property
    def logs(self) -> str:
        """Return the output of all processes."""
        return "\n".join(f"--- {file.name}\n{file.read_text()[-6000:]}" for file in sorted(self.path.glob("*.log")))

    def step(self) -> int:
        """Return the newest step that a worker printed."""
        lines = (self.path / "worker.log").read_text().splitlines()
        return max((int(line.rpartition("step ")[2]) for line in lines if " step " in f" {line}"), default=0)

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until ``condition`` is true."""
        until = time.monotonic() + _SECONDS
        while not condition():
            assert time.monotonic() < until, f"no {what} in {_SECONDS:g} s\n{self.logs}"
            try:
                self.processes["scheduler"].wait(0.1)
            except subprocess.TimeoutExpired:
                continue

    def train_on(self, steps: int) -> None:
        """Wait for further steps."""
        wanted = self.step() + steps
        assert wanted <= HELD, "the run would wait"
        self.wait_for(lambda: self.step() >= wanted, f"step {wanted}")

    def digest(self) -> str:
        """Wait for the end of the run. Returns the digest of its weights."""
        self.wait_for(lambda: all(process.poll() is not None for process in self.processes.values()), "end")
        statuses = {name: process.returncode for name, process in self.processes.items()}
        assert set(statuses.values()) == {0}, f"{statuses}\n{self.logs}"
        lines = (self.path / "worker.log").read_text().splitlines()
        (found,) = {line.rpartition("digest ")[2] for line in lines if "digest " in line}
        return found

    def stop(self) -> None:
        """End all processes that still run."""
        for process in self.processes.values():
            process.kill()
            process.wait()


def replace(path: Path, content: bytes) -> None:
    """Replace a file whole."""
    draft = path.with_suffix(".draft")
    draft.write_bytes(content)
    draft.replace(path)


@contextmanager
def machines(path: Path, *, tls: bool) -> Iterator[tuple[Machines, Path]]:
    """Yield the machines, and the file into which all packets between them are written meanwhile."""
    with ExitStack() as stack:
        try:
            network = WorkerNetwork(len(NODES))
        except ConfigurationError as error:
            pytest.skip(str(error))
        stack.callback(network.close)
        captured = path.with_suffix(".packets")
        command = ["ip", "netns", "exec", network.switch, sys.executable, "-c", CAPTURE]
        output = stack.enter_context(captured.open("wb"))
        capture = stack.enter_context(subprocess.Popen(command, stdout=output))
        stack.callback(capture.kill)
        built = Machines(path, network, tls=tls)
        stack.callback(built.stop)
        yield built, captured


def shown(captured: Path) -> set[str]:
    """Return the secrets that captured packets show."""
    packets, payload = captured.read_bytes(), np.full(16, VALUE).tobytes()
    secrets = {"token": TOKEN.encode(), "tensor": TENSOR.encode(), "payload": payload}
    assert len(packets) > 1 << 20, "packets were captured"
    return {name for name, secret in secrets.items() if secret in packets}


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_run_of_three_machines_trains_through_a_new_ca(tmp_path: Path) -> None:
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "mount"))):
        pytest.skip("network namespaces need root, ip, unshare and mount")
    with machines(tmp_path / "plain", tls=False) as (plain, captured):
        (plain.path / "finish").touch()
        plain.start_all()
        expected = plain.digest()
        assert shown(captured) == {"token", "tensor", "payload"}, "the capture sees what is not encrypted"
    with machines(tmp_path / "tls", tls=True) as (run, captured):
        run.start_all()
        run.wait_for(lambda: run.step() >= 20, "training")
        run.processes["server-b"].kill()
        run.processes.pop("server-b").wait()
        run.train_on(20)
        run.make_certificates("new-certs")
        for trusted, own in ((["certs", "new-certs"], "certs"), (["certs", "new-certs"], "new-certs")):
            run.install(trusted, own)
            run.train_on(20)
            assert run.status_of_reader("status") == 0, run.logs
        run.install(["new-certs"], "new-certs")
        # A server with a new certificate: the scheduler, the other servers and the workers dial it, or are dialed.
        run.start_server("server-d", "node-2")
        run.wait_for(lambda: "serving" in (run.path / "server-d.log").read_text(), "new server")
        assert run.status_of_reader("status") == 0, run.logs
        (run.path / "finish").touch()
        assert run.digest() == expected
        assert shown(captured) == set()
